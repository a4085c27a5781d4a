"""The matrix that a source stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_output
from te_dist.ops._library import register
from te_dist.ops.source import Source, check_source, flat_source


def evaluate(source: Source, *, out: Tensor) -> None:
    """Writes the values of `source` into `out`, of its shape and dtype."""
    check_source(source)
    check_output("out", out, source.dtype, source.shape)
    torch.ops.te_dist.evaluate(*flat_source(source), out)


def _cpu(x: Tensor, source: str, beside: Sequence[Tensor], out: Tensor) -> None:
    _C.evaluate((x, source, beside), out, torch.get_num_threads())


register("evaluate(Tensor x, str source, Tensor[] beside, Tensor(a!) out) -> ()", _cpu, kernels.evaluate)
