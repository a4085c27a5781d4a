"""Ops that are issued again as they were; see [Note: Tapes]."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from te_dist.kernels.tape import Tapes
from te_dist.ops.source import Source, flat_source

P = ParamSpec("P")

_CONSTANTS = frozenset((bool, int, float, str, type(None)))
_MAX_TAPES = 1024  # of an op, which serves all that is computed in a process


def taped(op: Callable[P, None]) -> Callable[P, None]:
    """Decorates an op. On a GPU, one that is called with tensors like those of an earlier call launches what that did.

    Arguments are checked, and kernels are chosen, when they are of other types, shapes, strides or alignments, or what
    is no tensor has another value.
    """
    tapes = Tapes(_MAX_TAPES)

    @wraps(op)
    def issue(*args: P.args, **keywords: P.kwargs) -> None:
        if torch.compiler.is_compiling():
            return op(*args, **keywords)
        tensors: list[Tensor] = []
        values = _apart((*args, *keywords.values()), tensors)
        tapes.run((len(args), *keywords, *values), tuple(tensors), lambda: (op(*args, **keywords) or (), None))

    return issue


def _apart(values: Iterable[Any], tensors: list[Tensor]) -> list[Hashable]:
    """What is to be known of arguments besides their tensors, which are added to `tensors`."""
    known: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind in _CONSTANTS or (kind is tuple and _CONSTANTS.issuperset(map(type, value))):
            known.append(value)
        elif isinstance(value, Tensor):
            tensors.append(value)
            known.append(Tensor)
        elif isinstance(value, Source | tuple | list):
            known.append(tuple(_apart(flat_source(value) if isinstance(value, Source) else value, tensors)))
        else:
            known.append(value)
    return known
