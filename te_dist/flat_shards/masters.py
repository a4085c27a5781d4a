"""Masters quantized into weights of which every rank updates a range."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.flat_shards.cuts import Range, Report, all_ready, digest, exchange, unfit_cut
from te_dist.flat_shards.plan import Plan, Shards, planes_given
from te_dist.flat_shards.planes import num_values, raw_range, whole_storage
from te_dist.tensor import QuantizedStorage

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NOTHING: tuple[list[QuantizedStorage], tuple[Range, ...]] = ([], ())
_NOT_BY_HAND = (
    "got manual_post_all_gather_processing=False, wanted True: nothing but the caller knows when codes were gathered; "
    "call post_all_gather_processing then"
)

# NOTE: a plan holds tensors, but none of the storages, so that it ends with the first of them.
_PLANS: weakref.WeakKeyDictionary[QuantizedStorage, Plan] = weakref.WeakKeyDictionary()


def quantize_master_weights(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None,
    fsdp_shard_model_weights: Shards = None,
    *,
    manual_post_all_gather_processing: bool = True,
) -> None:
    """Quantizes each rank's range of every flattened weight; all ranks together make the bytes of the whole quantized.

    The codes of a range are written into its place in `raw_data`, from which the caller gathers them; scales are
    written whole on every rank. Then `post_all_gather_processing` makes what columnwise products read. Collective: one
    word by which ranks agree that all can go on, which the host waits for, then two reductions for all weights; the
    first time an exchange of the ranges besides. Ranges of a list of weights are fixed by the first call.

    Args:
        model_weights: quantized tensors, whole on every rank: matrices, or groups of equal ones. The same, in the same
            order, on all ranks.
        master_weights: of each, the values of this rank's range: contiguous, fp32, bf16 or fp16, quantized as they are;
            None or empty where it has none. Kept, as are shards, until a call for these weights comes with others: pass
            the same tensors in every step, not copies made for it.
        start_offsets: of each, where the range starts in the flattened weight; None where there is no master.
        group: whose ranks' ranges cover every weight; None is the default group.
        fsdp_shard_model_weights: where the codes go instead: of each weight a flat uint8 tensor (one for each plane) of
            as many bytes as `raw_range` says, or None where there is no master. Memory of `raw_data` is not touched
            then and may have been freed.
        manual_post_all_gather_processing: the caller calls `post_all_gather_processing`; there is no other way.

    Raises:
        ValueError: alike on all ranks, before anything is written. A weight is not quantized, or a part of one, or
            lacks a direction that `update_usage` freed and no other gives; a range is cut inside a byte or inside
            values that are transformed together; ranges leave out or share values; tensors do not fit each other;
            ranges are not those of the first call. Where a CUDA graph is captured, on this rank alone.
    """
    arguments = (model_weights, master_weights, start_offsets, fsdp_shard_model_weights)
    weights, ranges, problem = _checked(*arguments)
    if not manual_post_all_gather_processing:
        problem = problem or _NOT_BY_HAND
    plan = _known_plan(weights, group)
    if plan is not None and ranges != plan.ranges:
        problem = problem or _other_ranges(ranges, plan.ranges)
    obstacle = problem or ("" if plan is not None else "weights are new; make one call before one that is captured")
    if not all_ready(obstacle, weights[0].device if weights else None, group):
        report = Report(ranges, tuple(map(digest, weights)), problem)
        reports = exchange(report, list(map(num_values, weights)), group)
        if not weights:
            return
        plan = _PLANS[weights[0]] = Plan(weights, [each.ranges for each in reports], group)
    assert plan is not None
    plan.run(weights, master_weights, fsdp_shard_model_weights)


def _other_ranges(got: tuple[Range, ...], wanted: tuple[Range, ...]) -> str:
    return (
        f"got the ranges (start, length) {got}, wanted {wanted} as in the first call for these weights: other ranks go "
        "by it; pass copies of the weights to cut them in another way"
    )


def _checked(
    model_weights: Sequence[Tensor], masters: Sequence[Tensor | None], offsets: Sequence[int | None], shards: Shards
) -> tuple[list[QuantizedStorage], tuple[Range, ...], str]:
    """The storages, the ranges (start, length), and what is wrong with the arguments."""
    counts = {len(model_weights), len(masters), len(offsets), len(model_weights if shards is None else shards)}
    if len(counts) > 1:
        return *_NOTHING, f"got lists of {sorted(counts)} entries, wanted one for each weight in all of them"
    try:
        weights = [whole_storage(weight) for weight in model_weights]
    except ValueError as error:
        return *_NOTHING, str(error)
    ranges = tuple(
        (0, 0) if master is None or not master.numel() else (-1 if start is None else start, master.numel())
        for start, master in zip(offsets, masters, strict=True)
    )
    for index, storage in enumerate(weights):
        master, shard = masters[index], None if shards is None else shards[index]
        problem = _unfit_master(master, storage.device)
        if ranges[index][0] < 0:
            problem = problem or "got a master without start_offset; pass where its values start"
        problem = problem or unfit_cut(storage, *ranges[index])
        if not problem and shards is not None and ranges[index][1]:
            problem = _unfit_shard(model_weights[index], ranges[index], shard)
        if not problem and storage.device != weights[0].device:
            problem = f"is on {storage.device}, the first one on {weights[0].device}; make one call for each device"
        if problem:
            return weights, ranges, f"weight {index}: {problem}"
    return weights, ranges, ""


def _unfit_master(master: Tensor | None, device: torch.device) -> str:
    if master is None or (master.dtype in _FLOATS and master.is_contiguous() and master.device == device):
        return ""
    return (
        f"got a master of {master.dtype} with strides {master.stride()} on {master.device}, wanted float32, bfloat16 "
        f"or float16, contiguous, on {device}"
    )


def _unfit_shard(weight: Tensor, own: Range, shard: Tensor | Sequence[Tensor] | None) -> str:
    got, wanted = planes_given(shard), [size for _, size in raw_range(weight, *own)]
    device = whole_storage(weight).device
    fits = all(each.dtype == torch.uint8 and each.is_contiguous() and each.device == device for each in got)
    if fits and [each.numel() for each in got] == wanted:
        return ""
    return (
        f"got shards {[(each.dtype, tuple(each.shape), each.device) for each in got]}, wanted contiguous torch.uint8 "
        f"of {wanted} elements on {device}"
    )


def _known_plan(weights: Sequence[QuantizedStorage], group: dist.ProcessGroup | None) -> Plan | None:
    plan = _PLANS.get(weights[0]) if weights else None
    same = plan is not None and plan.group is group and [ref() for ref in plan.weights] == list(weights)
    return plan if same else None
