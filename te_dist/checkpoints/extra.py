"""What the user saves beside model and optimizer: a tree of values for JSON, and the tensors in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from te_dist.checkpoints.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS, _COUNTER = _MARKS = "__tensor__", "__tuple__", "__items__", "__counter__"


def split(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """(the tree for JSON, with references in the place of tensors; the tensors by reference).

    Raises:
        CheckpointError: a value is none that JSON knows, and no plain tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _split(tree, "extra", tensors), tensors


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is Tensor:
        key = str(len(tensors))
        tensors[key] = value.detach()
        return {_TENSOR: key, "shape": list(value.shape), "dtype": str(value.dtype)[6:]}
    if isinstance(value, tuple):
        return {_TUPLE: [_split(v, f"{path}[{i}]", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_split(v, f"{path}[{i}]", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, str) or type(k) is int for k in value):
        its = {k: _split(v, f"{path}.{k}", tensors) for k, v in value.items()}
        if isinstance(value, Counter):
            return {_COUNTER: [*map(list, its.items())]}
        has_names = all(isinstance(k, str) and k not in _MARKS for k in its)
        return its if has_names else {_ITEMS: [*map(list, its.items())]}
    if isinstance(value, Tensor):
        raise CheckpointError(
            f"{path}: got {type(value).__name__}, wanted plain tensors: extra is that of rank 0 alone, so that its "
            "part of a sharded tensor would be everybody's; keep sharded and quantized values in a module that is "
            "saved beside the model, or save them by torch.distributed.checkpoint"
        )
    raise CheckpointError(
        f"{path}: got {type(value).__name__}, wanted None, numbers, text, plain tensors, or lists, tuples and "
        "dictionaries (by text or whole numbers) of them; convert it"
    )


def allocate(tree: Any) -> dict[str, Tensor]:
    """By reference, an uninitialised CPU tensor for each one in a tree that `split` made."""
    if isinstance(tree, list):
        return {k: t for v in tree for k, t in allocate(v).items()}
    if not isinstance(tree, dict):
        return {}
    if _TENSOR in tree:
        return {tree[_TENSOR]: torch.empty(tree["shape"], dtype=getattr(torch, tree["dtype"]))}
    return {k: t for v in tree.values() for k, t in allocate(v).items()}


def join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `split`."""
    if isinstance(tree, list):
        return [join(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(join(v, tensors) for v in tree[_TUPLE])
    for mark, kind in ((_ITEMS, dict), (_COUNTER, Counter)):
        if mark in tree:
            return kind({k: join(v, tensors) for k, v in tree[mark]})
    return {k: join(v, tensors) for k, v in tree.items()}
