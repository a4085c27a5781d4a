"""Documentation that can be wrong by itself: generated pages and links between files."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "launch", "benchmarks", "examples", "tests", "te_dist")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_up_to_date() -> None:
    outdated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["outdated"]
    assert outdated() == [], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert not dead, f"{page.relative_to(ROOT)} links to {dead}, which do not exist; correct or remove the links"
