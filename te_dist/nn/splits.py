"""Sizes of groups, where the host knows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist.ops._library import LIBRARY, define_writing


def check_sizes(sizes: Sequence[int], rows: int, *, num_groups: int, label: str) -> None:
    """Raises ValueError unless these are sizes of so many groups in so many rows."""
    if len(sizes) != num_groups or min(sizes) < 0 or sum(sizes) > rows:
        raise ValueError(
            f"{label}: m_splits has {num_groups} sizes of 0 or more, which add up to at most the {rows} rows of the "
            f"input; got {len(sizes)} that add up to {sum(sizes)}, the smallest {min(sizes, default=0)}"
        )


def check_in_graph(table: Tensor, sizes: Tensor, rows: int, *, label: str) -> None:
    """`check_sizes` whenever a graph is run that is traced now, before it reads the group table made of these."""
    torch.ops.te_dist.check_splits(table, sizes, rows, label)


def _check(_: Tensor, sizes: Tensor, rows: int, label: str) -> None:
    check_sizes(sizes.tolist(), rows, num_groups=sizes.shape[0], label=label)


# The table is written in name only, so that compilers neither leave this out nor move what reads it in front.
_NAME = define_writing("check_splits(Tensor(a!) table, Tensor sizes, SymInt rows, str label) -> ()")
LIBRARY.impl(_NAME, _check, "CPU")
torch.library.register_fake(f"te_dist::{_NAME}", lambda *_: None, lib=LIBRARY)
