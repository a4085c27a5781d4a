"""State of optimizers that lies elsewhere between steps, out of the way of what else needs the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist._torch_private import sharded_like
from te_dist.tensor.placement import local_tensor

_COUNT = "step"  # of a few bytes, which torch keeps on the CPU on purpose


def move(
    states: Mapping[Tensor, Mapping[str, Any]],
    device: torch.device | str | None,
    exchange: Callable[[Tensor, dict[str, Any]], None],
) -> None:
    """Calls `exchange` with every parameter and its state on another device, parameter by parameter.

    Args:
        device: None: that of each parameter. What is copied to the CPU is pinned.
    """
    for param, state in tuple(states.items()):
        copies = _Copies(param.device if device is None else torch.device(device))
        exchange(param, {name: value if name == _COUNT else copies.of(value) for name, value in state.items()})
    for source in {param.device for param in states}:
        if source.type == "cuda":  # copies to the CPU are under way
            torch.cuda.current_stream(source).synchronize()


def check_not_captured(captured: object) -> None:
    """Raises RuntimeError where there is anything that graphs launch."""
    if captured:
        raise RuntimeError(
            "move_state: got an optimizer whose step was captured in a CUDA graph, which finds state where it was; "
            "wanted one whose steps are not. Load its state_dict into another one, and capture steps of that once "
            "state is back"
        )


class _Copies:
    """Of tensors on another device, one of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, Tensor] = {}  # by id

    def of(self, value: Any) -> Any:
        """Of all tensors in a value; of one that lies there, itself."""
        if isinstance(value, Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = self._copy(value)
            return self._made[id(value)]
        if isinstance(value, dict):
            return {key: self.of(each) for key, each in value.items()}
        return type(value)(map(self.of, value)) if isinstance(value, list | tuple) else value

    def _copy(self, tensor: Tensor) -> Tensor:
        local = local_tensor(tensor)
        if local.device == self._device:
            return tensor
        pinned = local.is_cuda and self._device.type == "cpu"
        copy = torch.empty_like(local, device=self._device, pin_memory=pinned).copy_(local, non_blocking=True)
        return sharded_like(tensor, copy) if isinstance(tensor, DTensor) else copy
