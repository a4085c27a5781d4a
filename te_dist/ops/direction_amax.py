"""Largest magnitude of a tensor, as each direction of a format with one amax needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.formats import WHOLE
from te_dist.ops._checks import check_output
from te_dist.ops._library import register
from te_dist.ops.hadamard import check_rows, transformed_source
from te_dist.ops.source import Source, check_source, flat_source, unsummed


def direction_amax(
    x: Tensor | Source, *, hadamard: int | None = None, row_amax: Tensor | None = None, col_amax: Tensor | None = None
) -> None:
    """Writes the largest magnitude, NaN ignored, in one pass over `x`.

    Args:
        x: (rows, cols), fp32, bf16 or fp16; or a source, whose sums are not found.
        hadamard: sign mask of a Hadamard transform of the rows (see `hadamard`), of which `col_amax` is then; rows are
            a multiple of 16.
        row_amax: f32 (1, 1), of `x`.
        col_amax: f32 (1, 1), of `x` or its transform.
    """
    check_source(x)
    for name, out in (("row_amax", row_amax), ("col_amax", col_amax)):
        if out is not None:
            check_output(name, out, torch.float32, (1, 1))
    if hadamard is not None:
        check_rows(x.shape[0])
    torch.ops.te_dist.direction_amax(*flat_source(unsummed(x))[:3], hadamard, row_amax, col_amax)


def _cpu(x: Tensor, source: str, beside: list[Tensor], *rest: Any) -> None:
    hadamard, row_amax, col_amax = rest
    read = (x, source, beside)
    for out, mask in ((row_amax, None), (col_amax, hadamard)):
        if out is not None:
            matrix = read if mask is None else transformed_source(read, mask)
            _C.tile_amax(matrix, (0, 0), (WHOLE, WHOLE), out, torch.get_num_threads())


register(
    "direction_amax(Tensor x, str source, Tensor[] beside, int? hadamard, "
    "Tensor(a!)? row_amax, Tensor(b!)? col_amax) -> ()",
    _cpu,
    kernels.direction_amax,
)
