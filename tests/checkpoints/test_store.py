"""Checkpoints of somebody else: reading them runs no code, and reads nothing that was not checked."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from te_dist import checkpoints
from te_dist.checkpoints.store import WholeReader
from tests.checkpoints.forging import Touch, change_metadata, files_of, rewrite_manifest, rewrite_metadata


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoints.save(tmp_path / "c", model=nn.Linear(2, 2), extra={"values": torch.ones(3)})
    return tmp_path / "c"


def refused(path: Path) -> str:
    """What a load says, that fails and changes nothing; and a reader of whole tensors the same."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.load(path, model=model)
    assert torch.equal(model.weight, before)
    with pytest.raises(checkpoints.CheckpointError) as again:
        WholeReader(path)
    assert str(again.value) == str(error.value)
    return str(error.value)


def whole_pickle(path: Path, marker: Path) -> None:
    rewrite_metadata(path, pickle.dumps(Touch(marker)))


def deep_inside(path: Path, marker: Path) -> None:
    change_metadata(path, lambda metadata: metadata.planner_data.update(more=[(Touch(marker),)]))


def value_that_is_unpickled(path: Path, marker: Path) -> None:
    """A tensor is said to be a pickled value: DCP would load it as such."""
    change_metadata(path, lambda metadata: metadata.state_dict_metadata.update({"extra.0": BytesStorageMetadata()}))


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (whole_pickle, "Path.touch"),
        (deep_inside, "Path.touch"),
        (value_that_is_unpickled, "torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
    ],
)
def test_reading_runs_no_code(saved: Path, tmp_path: Path, forge: Callable[[Path, Path], None], said: str) -> None:
    forge(saved, tmp_path / "marker")
    message = refused(saved)
    assert f"cannot load {saved}: got a .metadata that cannot be read (UnpicklingError: it asks for " in message
    assert f"{said}), wanted" in message
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(7), pickle.dumps(None)], ids=repr)
def test_what_is_no_metadata_is_refused(saved: Path, data: bytes) -> None:
    rewrite_metadata(saved, data)
    assert "got a .metadata that cannot be read (" in refused(saved)


@pytest.mark.parametrize("left_out", [(".metadata",), ("__0_0.distcp",), (".metadata", "__0_0.distcp")], ids=str)
def test_files_without_a_checksum_are_refused(saved: Path, left_out: tuple[str, ...]) -> None:
    rewrite_manifest(saved, files={name: entry for name, entry in files_of(saved).items() if name not in left_out})
    assert f"cannot load {saved}: got no checksum of {'; '.join(left_out)} in manifest.json, wanted" in refused(saved)


def elsewhere(metadata: Metadata) -> None:
    for each in metadata.storage_data.values():
        each.relative_path = "../other/__0_0.distcp"


def test_files_of_other_places_are_refused(saved: Path, tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "other", model=nn.Linear(2, 2), extra={"values": torch.ones(3)})
    change_metadata(saved, elsewhere)
    assert "got no checksum of ../other/__0_0.distcp in manifest.json" in refused(saved)


def test_checkpoints_of_another_python_load(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 says of paths that they are of `pathlib._local`."""
    kind = type("PosixPath", (), {"__module__": "pathlib._local", "__reduce__": lambda self: (kind, ("a", "b"))})
    module = types.ModuleType("pathlib._local")
    module.PosixPath = kind
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "pathlib._local", module)
        change_metadata(saved, lambda metadata: setattr(metadata.storage_meta, "checkpoint_id", kind()))
    assert torch.equal(checkpoints.load(saved, model=nn.Linear(2, 2))["values"], torch.ones(3))
