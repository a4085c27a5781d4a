"""Where groups lie in a matrix of rows: a table on the device, which the host does not wait for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist.kernels.tape import Tapes

_TABLE_ROWS = 4
_tables = Tapes(max_tapes=1024)  # of all group tables


class GroupTable(NamedTuple):
    """Where groups begin in a matrix, and how many rows that has: kernels read as far as a table says.

    Attributes:
        tensor: int32 (4, G + 1), as `ops.group_table` writes it.
        rows: of the matrix.
    """

    tensor: Tensor
    rows: int


def group_table(m_splits: Tensor, rows: int) -> GroupTable:
    """Where groups of these sizes, int (G,), begin in a matrix of `rows`; on their device, which is not waited for."""
    (table,), _ = _tables.run(rows, (m_splits,), lambda: ((_table_of(m_splits, rows),), None))
    return GroupTable(table, rows)


def _table_of(m_splits: Tensor, rows: int) -> Tensor:
    table = torch.empty((_TABLE_ROWS, m_splits.shape[0] + 1), dtype=torch.int32, device=m_splits.device)
    ops.group_table(m_splits, rows=rows, out=table, are_sizes=True)
    return table
