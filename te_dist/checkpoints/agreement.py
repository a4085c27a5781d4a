"""Several saved tensors that fill one of the model: they have to hold the same.

Names that the model has tied may be those of two parameters in a checkpoint, and experts that are one parameter here
have counted their steps apart there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.checkpoints.errors import CheckpointError, listed
from te_dist.checkpoints.packing import Key, Packing

Read = Callable[[str, int | None], Tensor]  # a saved tensor by its key, whole or one of its first dimension


def check(problems: Sequence[str], where: object) -> None:
    """Raises CheckpointError where there are problems."""
    if problems:
        raise CheckpointError(
            f"cannot load {where}: {listed(problems)}, wanted the same, since the model has one tensor for them; build "
            "the model that was saved, or make them alike before saving"
        )


def of_ties(
    keys: Mapping[str, Sequence[Key]], packing: Packing, read: Read, *, dtype: torch.dtype | None
) -> Iterator[str]:
    """What is wrong with tensors that fill the same one.

    Args:
        keys: by name of the model, keys of what is saved of it; of the names of one tensor.
        packing: how names of the checkpoint differ from those of the model.
        dtype: in which their values are compared; None compares their bytes.
    """
    (first, own), *others = keys.items()
    values = [packing.read(first, key, read) for key in own] if others else []
    for name, its in others:
        pairs = zip(values, (packing.read(name, key, read) for key in its), strict=False)
        if len(own) != len(its) or not all(is_same(*pair, dtype=dtype) for pair in pairs):
            yield f"{first} and {name} hold different values"


def of_steps(
    packing: Packing, params: Mapping[str, Any], read_all: Callable[[Sequence[str]], dict[str, Tensor]]
) -> Iterator[str]:
    """What is wrong with numbers of an optimizer that separate experts have saved each, and one is read of.

    Args:
        params: by name of the model, what the manifest says of its state.
        read_all: saved tensors by their keys.
    """
    numbers = {
        f"optimizer.state.{name}.{key}": (key, names[0], name)
        for stem, names in packing.separate.items()
        for key, described in params.get(stem, {}).get("state", {}).items()
        for name in names
        if described.get("shape") == []
    }
    found = read_all(list(numbers))
    for key, (of_state, first, name) in numbers.items():
        if not is_same(found[f"optimizer.state.{first}.{of_state}"], found[key]):
            yield f"{of_state} of {first} and {name} in the saved optimizer differ (optimizer= may be left out)"


def is_same(one: Tensor, other: Tensor, *, dtype: torch.dtype | None = None) -> bool:
    """Whether two plain tensors have the same bytes, or in a dtype the same values."""
    if one.shape != other.shape:
        return False
    if dtype is not None:
        one, other = one.to(dtype), other.to(dtype)
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    if one.dtype != other.dtype:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))
