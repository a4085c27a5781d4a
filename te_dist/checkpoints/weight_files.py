"""The safetensors files of a directory: which tensor lies in which.

Files are numbered, with an index, as Hugging Face lays them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from te_dist.checkpoints import folder
from te_dist.checkpoints.errors import CheckpointError, listed

INDEX = "model.safetensors.index.json"

_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


class Stored(NamedTuple):
    """A tensor of the files."""

    path: Path
    shape: list[int]
    dtype: torch.dtype


def name_of(number: int, count: int) -> str:
    """Of the file `number`, from 0 on, among `count`."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a file, which appears once it is whole."""
    partial = folder.temporary(path)
    save_file(tensors, partial, metadata={"format": "pt"})
    folder.sync(partial)
    partial.rename(path)


def finish(where: Path, files: Mapping[str, Sequence[str]], nbytes: int) -> None:
    """Writes the index of files that are there, then removes those of earlier exports, which it does not name.

    Args:
        where: their directory.
        files: by name of each file, the names of its tensors.
        nbytes: of all tensors.
    """
    places = {key: name for name, keys in files.items() for key in keys}
    # NOTE: every file that an index names is there before the index, and as long as it: also after a power cut.
    folder.sync(where)
    partial = folder.temporary(where / INDEX)
    partial.write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": places}, indent=1))
    folder.sync(partial)
    partial.rename(where / INDEX)
    folder.sync(where)
    for path in where.glob("model*.safetensors"):
        if _OURS.fullmatch(path.name) and path.name not in files:
            path.unlink()


def contents(where: Path) -> dict[str, Stored]:
    """Every tensor in the files that the index of a directory names; in all files where there is no index.

    Raises:
        CheckpointError: a file cannot be read, the index has not what is in the files, or, where there is none, two
            files have the same tensor.
    """
    if where.is_file():
        raise CheckpointError(f"cannot import {where}: got a file, wanted its directory; pass {where.parent}")
    index = _index(where)
    paths = where.glob("*.safetensors") if index is None else {where / name for name in index.values()}
    files = {path: _tensors(path) for path in sorted(paths) if index is None or path.is_file()}
    if index is None:
        _check_unique(where, files)
    else:
        _check_index(where, files, index)
    found = {key: stored for tensors in files.values() for key, stored in tensors.items()}
    if not found:
        raise CheckpointError(f"cannot import {where}: there are no .safetensors files; check the path")
    return found


def _index(where: Path) -> dict[str, str] | None:
    """By tensor, the name of its file; None where the directory has no index."""
    path = where / INDEX
    if not path.is_file():
        return None
    try:
        return {key: Path(name).name for key, name in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot import {path}: it is no index of safetensors files ({type(error).__name__}: {error}); "
            "copy it again, or remove it if the files beside it are all that is to be imported"
        ) from error


def _tensors(path: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                shape = part.get_shape()
                found[key] = Stored(path, shape, (part[:0] if shape else file.get_tensor(key)).dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot import {path}: it is no safetensors file ({error}); copy it again") from error
    return found


def _check_unique(where: Path, files: dict[Path, dict[str, Stored]]) -> None:
    first: dict[str, str] = {}
    problems = []
    for path, tensors in files.items():
        problems += [f"{key} is in {first[key]} and in {path.name}" for key in tensors if key in first]
        first |= dict.fromkeys(tensors, path.name)
    if problems:
        raise CheckpointError(
            f"cannot import {where}: {listed(problems)}; wanted each tensor once, as there is no {INDEX} to say which "
            "one counts; remove the files that are not to be imported"
        )


def _check_index(where: Path, files: dict[Path, dict[str, Stored]], index: dict[str, str]) -> None:
    here = {(key, path) for path, tensors in files.items() for key in tensors}
    said = {(key, where / name) for key, name in index.items()}
    problems = [f"{path.name} is not there" for path in sorted({path for _, path in said} - files.keys())]
    problems += [f"{key} is not in {path.name}" for key, path in sorted(said - here) if path in files]
    problems += [f"{key} is in {path.name}, where the index has it not" for key, path in sorted(here - said)]
    if problems:
        raise CheckpointError(
            f"cannot import {where}: {listed(problems)}; wanted what {INDEX} says; copy or export all of it again, or "
            "remove the index if the files beside it are all that is to be imported"
        )
