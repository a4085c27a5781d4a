"""Whether what a checkpoint would hold consists of finite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.optim.masters import MASTER, is_quantized
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor

_RECORDED = "amax_history"  # scales follow from what is finite of it


@torch.no_grad()
def not_finite(
    weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, buffers: Mapping[str, Tensor]
) -> str | None:
    """The first parameter or buffer that has a value which is not finite, or of which the optimizer keeps one.

    On any rank. Called by every rank, with the same names; all return the same one. None where all are finite.
    """
    held = {name: _held(param, optimizer.state.get(param, {})) for name, param in weights.items()}
    held |= {name: iter((buffer,)) for name, buffer in buffers.items() if _counts(name, buffer)}
    device = next(iter(weights.values())).device
    largest = [_largest(values, device) for values in held.values()]
    numbers = torch.arange(len(largest), device=device)
    first = torch.where(torch.stack(largest).isfinite(), len(largest), numbers).min()
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return next((name for number, name in enumerate(held) if number == first), None)


def _counts(name: str, buffer: Tensor) -> bool:
    return buffer.is_floating_point() and name.rpartition(".")[2] != _RECORDED


def _largest(held: Iterator[Tensor], device: torch.device) -> Tensor:
    """fp32 scalar, finite where all values are."""
    found = [torch.zeros((), device=device)]
    # No temporary tensor of that size: NaN comes through a maximum.
    found += [torch.linalg.vector_norm(values, math.inf).float() for values in held if values.numel()]
    return torch.stack(found).sum()


def _held(param: Tensor, state: Mapping[str, object]) -> Iterator[Tensor]:
    """This rank's part of a parameter, its master and moments. Codes are those of the master, where there is one."""
    for value in state.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield local_tensor(value)
    local = local_tensor(param)
    if not is_quantized(param):
        yield local.detach()
        return
    assert isinstance(local, QuantizedTensor)
    yield from (buffer for buffer in local.storage.buffers.values() if buffer.is_floating_point())  # scales
    if MASTER not in state:
        yield local.dequantize()
