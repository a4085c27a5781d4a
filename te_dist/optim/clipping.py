"""Clipping by the norm of all gradients, on whatever meshes they lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from te_dist.tensor import placement
from te_dist.tensor.placement import local_tensor

_EPSILON = 1e-6  # torch's
Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters that lie on several meshes: FSDP2 x TP, experts, plain ones.

    There is one all-reduce for each set of process groups that parameters are spread over, whether this rank has
    gradients of them or not, and the host waits for nothing but `error_if_nonfinite`. A NaN on any rank is one on all.
    Collective: every rank passes the same parameters in the same order. A gradient that ranks have yet to sum
    (`Partial`) is there on all of them or on none.

    Args:
        parameters: those whose gradients are scaled in place; DTensors of any meshes, and tensors that are the same
            on every rank.
        max_norm: the norm of all gradients together is at most this afterwards.
        norm_type: more than 0, `math.inf` for the largest magnitude.
        error_if_nonfinite: whether to raise, on every rank, where the norm is infinite or NaN.
        foreach: whether to go through all tensors at once; None: where the device can, as in torch.
        pp_group: ranks that hold other parameters each, such as stages of a pipeline: their norms are put together.

    Returns:
        The norm before, of the whole gradients, equal on every rank: a scalar in f32, or f64 where any parameter or
        gradient is.

    Raises:
        ValueError: `norm_type` is no norm.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
    """
    order, limit = float(norm_type), float(max_norm)
    if not order > 0:
        raise ValueError(f"norm_type: got {norm_type}, wanted more than 0 (inf for the largest magnitude)")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = _total_norm(parameters, order, foreach)
    if pp_group is not None:
        total = _reduced(total, order, (pp_group,))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {order:g} of all gradients is {total.item()}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them all the same"
        )
    coefficient = torch.clamp(limit / (total + _EPSILON), max=1.0)
    for same in _alike([local_tensor(grad) for grad in grads]):
        own = coefficient.to(same[0].device)
        if foreach is not False:
            torch._foreach_mul_(same, own)  # pyright: ignore[reportPrivateImportUsage]
        else:
            for grad in same:
                grad.mul_(own)
    return total


def _total_norm(parameters: Sequence[Tensor], order: float, foreach: bool | None) -> Tensor:
    """Of the whole gradients together."""
    wide = any(p.dtype == torch.float64 or p.grad is not None and p.grad.dtype == torch.float64 for p in parameters)
    dtype = torch.float64 if wide else torch.float32
    zero = torch.zeros((), dtype=dtype, device=parameters[0].device if parameters else None)
    # NOTE: a rank without gradients takes part in the reductions all the same, and in their order.
    spread: dict[Groups, list[Tensor]] = {_cutting_groups(parameter): [] for parameter in parameters}
    for whole in (_summed(parameter.grad) for parameter in parameters if parameter.grad is not None):
        spread.setdefault(_cutting_groups(whole), []).append(local_tensor(whole))
    found = []
    for groups, own in spread.items():
        # NOTE: an empty shard has no largest magnitude, but its rank takes part in the reduction.
        alike = _alike([grad for grad in own if grad.numel()])
        norms = [norm for same in alike for norm in _norms(same, order, dtype, foreach)]
        found.append(_reduced(_joined(norms, order, zero), order, groups))
    return _joined(found, order, zero)


def _norms(grads: list[Tensor], order: float, dtype: torch.dtype, foreach: bool | None) -> Sequence[Tensor]:
    """Of each. In `dtype`: 16-bit norms of shards would not add up to the norm of the whole."""
    if foreach is not False:
        return torch._foreach_norm(grads, order, dtype)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.linalg.vector_norm(grad, order, dtype=dtype) for grad in grads]


def _joined(norms: Sequence[Tensor], order: float, zero: Tensor) -> Tensor:
    """The norm of what has these norms; `zero`: that of nothing."""
    return torch.linalg.vector_norm(torch.stack([norm.to(zero.device) for norm in norms]), order) if norms else zero


def _reduced(norm: Tensor, order: float, groups: Groups) -> Tensor:
    """The norm of all that ranks hold parts of."""
    if not groups:
        return norm
    if not math.isinf(order):
        summand = norm**order
        for group in groups:
            dist.all_reduce(summand, dist.ReduceOp.SUM, group=group)
        return summand ** (1.0 / order)
    # NOTE: some backends drop a NaN out of a maximum, depending on the order of ranks: it travels as a flag.
    lost = norm.isnan()
    largest = torch.stack([norm.masked_fill(lost, 0), lost.to(norm.dtype)])
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest[0].masked_fill(largest[1] > 0, math.nan)


def _summed(grad: Tensor) -> Tensor:
    """The gradient, summed where ranks have yet to do so (sequence parallelism)."""
    if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
        return grad
    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])


def _cutting_groups(grad: Tensor) -> Groups:
    """Process groups over which the parts of a gradient are spread."""
    if not isinstance(grad, DTensor):
        return ()
    return tuple(grad.device_mesh.get_group(mesh_dim) for mesh_dim, _ in placement.cuts(grad.placements))


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """By device and dtype: what one kernel can go through."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())
