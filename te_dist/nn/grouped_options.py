"""Keywords of `GroupedLinear`, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from te_dist.nn.options import LinearOptions

ParallelMode = Literal["column", "row"] | None


class GroupedLinearOptions(LinearOptions, total=False):
    """Keywords of `GroupedLinear`: those of `LinearOptions`, and

    single_grouped_weight: one parameter `weight` (G, N, K) instead of `weight0` to `weight{G-1}` (N, K).
    single_grouped_bias: one parameter `bias` (G, N) instead of `bias0` to `bias{G-1}` (N,).
    delay_wgrad_compute: `backward` leaves the gradients of the weights to `backward_dw`. Not for weights that FSDP2 or
        DTensor hold, which see gradients in backward only.
    save_original_input: backward quantizes the input once more instead of forward saving it quantized: the input is
        kept in its own type, which costs nothing where somebody else keeps it too.
    parallel_mode: "column" or "row": this rank has a part of the rows (N) or of the columns (K) of every weight. A rule
        of sizes and placements only: no collective is issued.
    tp_size: ranks that share them; that of `tp_group` where one is given.
    tp_group: those ranks.
    """

    single_grouped_weight: bool
    single_grouped_bias: bool
    delay_wgrad_compute: bool
    save_original_input: bool
    parallel_mode: ParallelMode
    tp_size: int
    tp_group: dist.ProcessGroup | None


def check(options: Mapping[str, Any], num_gemms: int, *, bias: bool) -> None:
    """Raises ValueError for keywords that do not go together, TypeError for a number of groups that is none."""
    if not hasattr(num_gemms, "__index__"):
        raise TypeError(f"GroupedLinear: num_gemms is a whole number, got {num_gemms!r}")
    if num_gemms < 1:
        raise ValueError(f"GroupedLinear: num_gemms is 1 or more, got {num_gemms}")
    if options.get("single_grouped_bias") and not bias:
        raise ValueError("GroupedLinear: single_grouped_bias=True with bias=False; leave one of the two out")
    mode, size = options.get("parallel_mode"), tp_size(options)
    if mode not in (None, "column", "row"):
        raise ValueError(f'GroupedLinear: parallel_mode is None, "column" or "row", got {mode!r}')
    if size > 1 and mode is None:
        raise ValueError(f'GroupedLinear: tp_size={size} without a parallel_mode; pass parallel_mode="column" or "row"')
    if size > 1 and bias:
        raise ValueError(
            f"GroupedLinear: tp_size={size} with a bias, which every rank would add; pass bias=False and add it once"
        )


def tp_size(options: Mapping[str, Any]) -> int:
    """Ranks that share a weight."""
    group = options.get("tp_group")
    return options.get("tp_size", 1) if group is None else dist.get_world_size(group)


def local_sizes(options: Mapping[str, Any], in_features: int, out_features: int) -> tuple[int, int]:
    """(in_features, out_features) of this rank.

    Raises:
        ValueError: the dimension that is cut is no multiple of the number of ranks.
    """
    size, mode = tp_size(options), options.get("parallel_mode")
    name, extent = ("out_features", out_features) if mode == "column" else ("in_features", in_features)
    if mode is None or size == 1:
        return in_features, out_features
    if extent % size:
        raise ValueError(f"GroupedLinear: {name}={extent} is no multiple of tp_size={size}; choose another size")
    return (in_features, out_features // size) if mode == "column" else (in_features // size, out_features)
