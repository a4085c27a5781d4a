"""Folders that many ways of links lead to."""

import os
from pathlib import Path

import pytest

from te_dist.launch import text
from te_dist.launch.config import DataConfig

DEPTH = 40


@pytest.fixture
def diamonds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: folders with two links to the next one each, so that 2^40 ways lead to the last."""
    for index in range(DEPTH):
        folder = tmp_path / "stack" / str(index)
        folder.mkdir(parents=True)
        (folder / "1.txt").write_text(str(index))
        for name in ("left", "right"):
            (folder / name).symlink_to(f"../{index + 1}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read of folders from now on; ends a test that reads too many."""
    seen, original = [], os.scandir

    def scan(folder: str):
        seen.append(folder)
        assert len(seen) < 100 * DEPTH, "folders are read by all ways"
        return original(folder)

    monkeypatch.setattr(os, "scandir", scan)
    return seen


@pytest.mark.parametrize("top", ["stack/0", "stack"])
def test_links_are_followed_once(diamonds: Path, monkeypatch: pytest.MonkeyPatch, top: str) -> None:
    seen = scanned(monkeypatch)
    found = {os.path.realpath(path) for path in text.find(DataConfig(files=(f"{top}/**/*.txt",), exclude=()))}
    assert found == {str(diamonds / "stack" / str(index) / "1.txt") for index in range(DEPTH)}
    assert len(seen) < 10 * DEPTH


def test_names_without_links_come_first(diamonds: Path) -> None:
    names = {str(path) for path in text.find(DataConfig(files=("stack/**/*.txt",), exclude=()))}
    assert names >= {f"stack/{index}/1.txt" for index in range(DEPTH)}


def test_a_folder_that_is_left_out_by_one_name_is_read_by_another(diamonds: Path) -> None:
    (diamonds / "stack/0/beside").symlink_to("../7")
    found = text.find(DataConfig(files=("stack/0/**/*.txt",), exclude=("*/left/*", "*/right/*")))
    assert sorted(map(str, found)) == ["stack/0/1.txt", "stack/0/beside/1.txt"]
