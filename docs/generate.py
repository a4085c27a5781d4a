"""Writes the generated pages of the documentation: `python docs/generate.py`, or `--check` to compare only.

A generated page is a function from nothing to Markdown in `PAGES`. `tests/test_docs.py` fails when one is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from te_dist import env

FOLDER = Path(__file__).parent
HEADER = "<!-- Written by docs/generate.py; change the code it comes from. -->\n\n"


def environment() -> str:
    """The table of environment variables."""
    home = str(Path.home())
    rows = [
        f"| `{variable.name}` | `{str(variable.default).replace(home, '~')}` | {variable.meaning} |"
        for variable in env.variables()
    ]
    return "\n".join(("# Environment variables", "", "| name | default | meaning |", "|---|---|---|", *rows, ""))


PAGES: dict[str, Callable[[], str]] = {"environment.md": environment}


def outdated() -> list[str]:
    """Generated pages that differ from what stands in the folder."""
    return [name for name, text in _texts().items() if not _is_current(FOLDER / name, text)]


def write() -> None:
    """Writes all generated pages."""
    for name, text in _texts().items():
        (FOLDER / name).write_text(text)


def _texts() -> dict[str, str]:
    return {name: HEADER + make() for name, make in PAGES.items()}


def _is_current(page: Path, text: str) -> bool:
    return page.exists() and page.read_text() == text


def main(arguments: list[str]) -> None:
    """Writes the pages, or with `--check` exits with the names of those that are out of date."""
    if arguments == ["--check"]:
        if pages := outdated():
            sys.exit(f"out of date: {', '.join(pages)}; run `make docs`")
    else:
        write()


if __name__ == "__main__":
    main(sys.argv[1:])
