"""Sums of the columns of a matrix over panels of 128 rows, in an order that is part of the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_output
from te_dist.ops._library import register
from te_dist.ops.source import Source, Unsummed, check_source, flat_source, sums_shape


def panel_sums(x: Tensor | Source, *, out: Tensor) -> None:
    """Sums every column over each panel of 128 rows.

    A column of a panel is summed in fp32, from row to row over 8 rows; two such sums are added; eight of those are
    added from top to bottom, to +0. Rows that the last panel lacks are +0. NaN is 0x7FFFFFFF.

    Args:
        x: (rows, cols), fp32, bf16 or fp16, or a source.
        out: f32, `sums_shape(x)`.
    """
    check_source(x)
    check_output("out", out, torch.float32, sums_shape(x))
    torch.ops.te_dist.panel_sums(*flat_source(x)[:3], out)


def column_sums(sums: Tensor) -> Tensor:
    """The sums of whole columns, f32 (cols,), from those of panels: these are summed by panels until one is left."""
    if sums.shape[0] < 2:  # noqa: PLR2004
        return sums[0] if sums.shape[0] else sums.new_zeros(sums.shape[1])
    while True:
        shape = sums_shape(sums)
        whole = torch.empty(shape[0] * shape[1], dtype=torch.float32, device=sums.device)  # no view is handed out
        panel_sums(sums, out=whole.view(shape))
        sums = whole.view(shape)
        if shape[0] == 1:
            return whole


def find_sums(read: Unsummed, sums: Tensor | None, row_sums: Tensor | None) -> None:
    """What is wanted of the sums of columns and of rows of a source on the CPU."""
    if sums is not None:
        _C.panel_sums(read, sums, torch.get_num_threads())
    if row_sums is not None:
        _C.row_sums(read, row_sums, torch.get_num_threads())


def _cpu(x: Tensor, source: str, beside: list[Tensor], out: Tensor) -> None:
    find_sums((x, source, beside), out, None)


register("panel_sums(Tensor x, str source, Tensor[] beside, Tensor(a!) out) -> ()", _cpu, kernels.panel_sums)
