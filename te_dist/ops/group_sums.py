"""Sums of the columns of every group, as gradients of its bias are."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.ops._checks import check_output
from te_dist.ops._library import register
from te_dist.ops._taped import taped
from te_dist.ops.group_table import check_table
from te_dist.ops.panel_sums import column_sums, panel_sums
from te_dist.ops.source import sums_shape


@taped
def group_sums(sums: Tensor, *, table: Tensor, out: Tensor) -> None:
    """Sums the panels of every group, which a quantizer of groups has summed on its way.

    The order is that of `column_sums`, of the group alone: 128 panels after each other are summed as `panel_sums` sums
    rows, and their sums again, until one is left.

    Args:
        sums: f32 (tiles, K), those of `Summed`: one row for each tile of 128 rows of the table.
        table: int32 (4, G + 1), see `group_table`.
        out: f32 (G, K); zeros for empty groups.
    """
    check_output("sums", sums, torch.float32, (sums.shape[0], sums.shape[-1]))
    check_output("out", out, torch.float32, (check_table(table), sums.shape[1]))
    torch.ops.te_dist.group_sums(sums, table, out)


def _cpu(sums: Tensor, table: Tensor, out: Tensor) -> None:
    out.zero_()
    tiles = table[1].tolist()
    for number, place in enumerate(zip(tiles, tiles[1:], strict=False)):
        panels = sums[slice(*place)]
        if len(panels) == 0:
            continue
        summed = torch.empty(sums_shape(panels))
        panel_sums(panels, out=summed)
        out[number] = column_sums(summed)


register("group_sums(Tensor sums, Tensor table, Tensor(a!) out) -> ()", _cpu, kernels.group_sums)
