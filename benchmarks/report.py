"""A benchmark's table: printed line by line as it is measured, written as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment

Columns = Mapping[str, Callable[[Any], str]]


@dataclass(frozen=True)
class Report:
    """A page of results.

    Attributes:
        name: of its files.
        title: its heading.
        note: what the figures are and how they were taken.
        columns: by heading, what of a row stands in them.
    """

    name: str
    title: str
    note: str
    columns: Columns

    def publish(
        self, rows: Iterable[Any], out: Path | None, *, facts: Mapping[str, str] | None = None, end: Sequence[str] = ()
    ) -> None:
        """Prints `rows` (dataclasses) as they come; writes them into the folder `out`, with lines at the `end`."""
        about = environment.describe() | dict(facts or {})
        lines = [f"# {self.title}\n", ", ".join(f"{key} {value}" for key, value in about.items()) + ".\n"]
        lines += [f"{self.note}\n", f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        print("\n".join(lines), flush=True)
        found = []
        for row in rows:
            found.append(asdict(row))
            lines.append("| " + " | ".join(text(row) for text in self.columns.values()) + " |")
            print(lines[-1], flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{self.name}.md").write_text("\n".join([*lines, *end]) + "\n")
            (out / f"{self.name}.json").write_text(json.dumps(about | {"rows": found}, indent=1))


def text(name: str) -> Callable[[Any], str]:
    """A column of an attribute as it is."""
    return lambda row: str(getattr(row, name))


def number(name: str, digits: int = 0) -> Callable[[Any], str]:
    """A column of a number with so many digits; empty for None."""
    return lambda row: "" if getattr(row, name) is None else f"{getattr(row, name):.{digits}f}"
