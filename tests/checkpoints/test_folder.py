"""What is replaced, removed and found: checkpoints, and nothing else that lies where they would."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from te_dist import checkpoints
from te_dist.checkpoints import folder, store


def save(path: Path) -> None:
    checkpoints.save(path, model=nn.Linear(2, 2))


def load(path: Path) -> None:
    checkpoints.load(path, model=nn.Linear(2, 2))


def contents(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory."""
    places = directory.rglob("*")
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in places}


# -- what is not replaced ------------------------------------------------------------------------------------------


def foreign_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "an app"}')
    (path / "thesis.tex").write_text("years of work")


def signed_list(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"body": "[]", "crc32": zlib.crc32(b"[]")}))


def notes_beside(path: Path) -> None:
    save(path)
    (path / "thesis.tex").touch()


def checkpoint_inside(path: Path) -> None:
    save(path)
    save(path / "step_1")


def directory_of_its_name(path: Path) -> None:
    save(path)
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").mkdir()
    (path / "__0_0.distcp" / "thesis.tex").touch()


def file_of_its_name(path: Path) -> None:
    path.write_text("years of work")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (foreign_manifest, "it exists and is no checkpoint: got manifest.json; thesis.tex, wanted"),
        (signed_list, "is no checkpoint: got manifest.json, wanted"),
        (notes_beside, "it exists and holds more than a checkpoint: got thesis.tex, wanted"),
        (checkpoint_inside, "holds more than a checkpoint: got step_1, wanted"),
        (directory_of_its_name, "holds more than a checkpoint: got __0_0.distcp, wanted"),
        (file_of_its_name, "is no checkpoint: got c, wanted"),
    ],
)
def test_what_is_no_part_of_a_checkpoint_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / "c")
    before = contents(tmp_path)
    with pytest.raises(checkpoints.CheckpointError) as error:
        save(tmp_path / "c")
    assert f"cannot save {tmp_path / 'c'}: " in str(error.value)
    assert said in str(error.value)
    assert "choose another path" in str(error.value)
    assert contents(tmp_path) == before


def test_what_appears_while_a_save_writes_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, original = tmp_path / "c", store.write
    save(path)
    monkeypatch.setattr(store, "write", lambda *args: (original(*args), (path / "thesis.tex").touch()))
    before = contents(path)
    with pytest.raises(checkpoints.CheckpointError, match=r"holds more than a checkpoint: got thesis\.tex"):
        save(path)
    assert contents(path) == before | {"thesis.tex": b""}


# -- what is replaced ----------------------------------------------------------------------------------------------


def without_a_file(path: Path) -> None:
    save(path)
    (path / "__0_0.distcp").unlink()


def truncated(path: Path) -> None:
    save(path)
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes((path / name).read_bytes()[:9])


def of_another_layout(path: Path) -> None:
    save(path)
    body = json.loads(json.loads((path / "manifest.json").read_text())["body"])
    text = json.dumps({"layout": 99, "files": body["files"], "more": {}})
    (path / "manifest.json").write_text(json.dumps({"body": text, "crc32": zlib.crc32(text.encode())}))


def interrupted(path: Path) -> None:
    where = folder.temporary(path)
    where.mkdir()
    for name in ("__0_0.distcp", ".metadata.tmp", "core"):
        (where / name).write_text("half")


@pytest.mark.parametrize("make", [Path.mkdir, without_a_file, truncated, of_another_layout, interrupted])
def test_checkpoints_are_replaced_however_damaged(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "c")
    save(tmp_path / "c")
    load(tmp_path / "c")
    assert [place.name for place in tmp_path.iterdir()] == ["c"]


# -- a run directory -----------------------------------------------------------------------------------------------


def test_prune_leaves_what_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path / f"step_{step}")
    (tmp_path / "step_1" / "thesis.tex").touch()
    (tmp_path / "step_3").rename(tmp_path / ".step_3")  # hidden by hand
    for name in (".step_2.backup", ".step_2_notes.old", ".step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").touch()
    (tmp_path / ".step_2.tmp").mkdir()  # of an interrupted save
    before = contents(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"prune leaves .*step_1, .* no part of a checkpoint: thesis\.tex; move"):
        removed = checkpoints.prune(tmp_path, keep=1)
    assert removed == [tmp_path / "step_2", tmp_path / "step_4"]
    gone = ("step_2", "step_4", ".step_2.tmp")
    assert contents(tmp_path) == {
        name: data for name, data in before.items() if not any(name == g or name.startswith(f"{g}/") for g in gone)
    }


def test_prune_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_1").symlink_to(tmp_path / "elsewhere")
    save(tmp_path / "run" / "step_2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.prune(tmp_path / "run", keep=1) == [tmp_path / "run" / "step_1"]
    assert [place.name for place in (tmp_path / "run").iterdir()] == ["step_2"]
    load(tmp_path / "elsewhere")


def test_latest_finds_no_checkpoint_that_was_hidden(tmp_path: Path) -> None:
    save(tmp_path / "step_7")
    (tmp_path / "step_7").rename(tmp_path / ".step_7")
    with pytest.warns(RuntimeWarning, match=r"is named step_<number>, got \.step_7"):
        assert checkpoints.latest(tmp_path) is None
    save(tmp_path / "step_5")
    assert checkpoints.latest(tmp_path) == tmp_path / "step_5"


def test_two_checkpoints_of_one_step_are_told(tmp_path: Path) -> None:
    save(tmp_path / "step_100")
    save(tmp_path / "step_000100")
    for call in (lambda: checkpoints.latest(tmp_path), lambda: checkpoints.prune(tmp_path, keep=1)):
        with pytest.raises(checkpoints.CheckpointError, match=r"two checkpoints of step 100, .*; rename one"):
            call()
    assert folder.is_complete(tmp_path / "step_100") and folder.is_complete(tmp_path / "step_000100")


def test_what_no_save_would_replace_is_found_ahead(tmp_path: Path) -> None:
    save(tmp_path / "step_2")
    for step in (1, 3, 5):
        (tmp_path / f"step_{step}").mkdir()
    for step in (1, 5):
        (tmp_path / f"step_{step}" / "x").touch()
    assert folder.in_the_way(tmp_path) == [tmp_path / "step_5"]
