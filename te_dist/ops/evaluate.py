"""The matrix that a source stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import _C, kernels
from te_dist.ops._checks import check_output
from te_dist.ops._library import register
from te_dist.ops.panel_sums import find_sums, panel_sums
from te_dist.ops.source import Source, Summed, check_source, flat_source


def evaluate(source: Source, *, out: Tensor) -> None:
    """Writes the values of `source` into `out`, of its shape and dtype."""
    check_source(source)
    check_output("out", out, source.dtype, source.shape)
    torch.ops.te_dist.evaluate(*flat_source(source), out)


def values(x: Tensor | Source) -> Tensor:
    """The matrix that `x` stands for; itself where it is one."""
    if not isinstance(x, Source):
        return x
    if isinstance(x, Summed) and not isinstance(x.of, Source):
        panel_sums(x.of, out=x.sums)
        return x.of
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    evaluate(x, out=out)
    return out


def _cpu(
    x: Tensor, source: str, beside: list[Tensor], sums: Tensor | None, row_sums: Tensor | None, out: Tensor
) -> None:
    read = (x, source, beside)
    _C.evaluate(read, out, torch.get_num_threads())
    find_sums(read, sums, row_sums)


register(
    "evaluate(Tensor x, str source, Tensor[] beside, Tensor(s!)? panel_sums, Tensor(t!)? row_sums, "
    "Tensor(a!) out) -> ()",
    _cpu,
    kernels.evaluate,
)
