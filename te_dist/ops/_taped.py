"""Ops that are issued again as they were; see [Note: Tapes]."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch

from te_dist import _C
from te_dist.kernels.tape import PLAIN, Tapes
from te_dist.ops.source import Source, flat_source

P = ParamSpec("P")

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
        given = (*args, *keywords.values())
        tensors, values = _C.cuda.apart(given, PLAIN) or _C.cuda.apart(tuple(map(_flat, given)), PLAIN) or ((), ())
        if not tensors:
            return op(*args, **keywords)
        tapes.run((len(args), *keywords, *values), tensors, lambda: (op(*args, **keywords) or (), None))

    return issue


def _flat(value: Any) -> Any:
    """A source as its name and its tensors."""
    return flat_source(value) if isinstance(value, Source) else value
