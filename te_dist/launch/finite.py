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


@torch.no_grad()
def not_finite(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> str | None:
    """The first parameter that has a value which is not finite, or of which the optimizer keeps one, on any rank.

    Called by every rank, with the same names; all return the same one. None where all are finite.
    """
    largest = [_largest(param, optimizer.state.get(param, {})) for param in weights.values()]
    numbers = torch.arange(len(largest), device=largest[0].device)
    first = torch.where(torch.stack(largest).isfinite(), len(largest), numbers).min()
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return next((name for number, name in enumerate(weights) if number == first), None)


def _largest(param: Tensor, state: Mapping[str, object]) -> Tensor:
    """fp32 scalar, finite where all that this rank holds of a parameter is."""
    found = [torch.zeros((), device=param.device)]
    # No temporary tensor of that size: NaN comes through a maximum.
    found += [torch.linalg.vector_norm(values, math.inf).float() for values in _held(param, state) if values.numel()]
    return torch.stack(found).sum()


def _held(param: Tensor, state: Mapping[str, object]) -> Iterator[Tensor]:
    """This rank's part of a parameter, its master and moments. Codes are those of the master, where there is one."""
    for value in state.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield local_tensor(value)
    if not is_quantized(param):
        yield local_tensor(param).detach()
    elif MASTER not in state:
        local = local_tensor(param)
        assert isinstance(local, QuantizedTensor)
        yield local.dequantize()
