"""Adam over quantized parameters: updates fp32 masters, then quantizes them back into the parameters.

Masters and moments are fp32 tensors of the shape of each rank's shard (DTensors where the parameter is one), so that
a checkpoint treats them as any tensor. Quantized shards end as the bytes of the whole matrix of masters quantized at
once: the amaxes that shards share are agreed on in one reduction per step and process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from te_dist.formats import Partition
from te_dist.scaling.agreement import quantize_parts
from te_dist.tensor import QuantizedTensor, placement
from te_dist.tensor.placement import local_tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam (AdamW by default) with masters, for any mixture of quantized and plain parameters.

    Args:
        params: parameters or groups of them; sharded, replicated or whole.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        adam_w_mode: decoupled weight decay; False adds the decay to the gradient.
        master_weights: keep fp32 masters of 16-bit parameters. Quantized parameters always have them: an update is
            smaller than the distance of two codes and would be lost.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(  # noqa: PLR0913  (as torch.optim.AdamW)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "lr, eps and weight_decay are 0 or more and betas in [0, 1); "
                f"got {lr=}, {eps=}, {weight_decay=}, {betas=}"
            )
        self.master_weights = master_weights
        self._update = adamw if adam_w_mode else adam
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Collective where shards share scales."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated: list[Tensor] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                self.initialize_state(param)
                self._follow(param)
            self._adam(params, group)
            updated += params
        self._write_back(updated)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but state stays fp32: torch would round it to the dtype of its parameter."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.to(param.device, torch.float32)
            self._trust_master(param)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled."""
        return super().__getstate__() | {"master_weights": self.master_weights, "_update": self._update}

    def initialize_state(self, param: Tensor) -> None:
        """Creates step, moments and master of `param`, unless they are there."""
        state = self.state[param]
        if state:
            return
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = _shaped_like(param, torch.zeros(_shape(param), dtype=torch.float32, device=param.device))
        if self._has_master(param):
            local = local_tensor(param)
            state["master_param"] = _shaped_like(param, _initial_master(local))
            if isinstance(local, QuantizedTensor):
                local.storage.initial = None  # the master has it now
            self._trust_master(param)

    def _trust_master(self, param: Tensor) -> None:
        """Notes that the values a quantized parameter has now are those of its master."""
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            local.storage.mastered = "master_param" in self.state.get(param, {})

    def _follow(self, param: Tensor) -> None:
        """Takes the master of a quantized parameter anew if other values were written into it: loaded, clamped."""
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor) and not local.storage.mastered:
            self._target(param).copy_(_initial_master(local))
            self._trust_master(param)

    def _has_master(self, param: Tensor) -> bool:
        quantized = isinstance(local_tensor(param), QuantizedTensor)
        return quantized or (self.master_weights and param.dtype != torch.float32)

    def _target(self, param: Tensor) -> Tensor:
        """The local tensor Adam updates: the master where there is one."""
        return local_tensor(self.state[param].get("master_param", param))

    def _adam(self, params: list[Tensor], group: dict[str, Any]) -> None:
        gradients = {p: _gradient(p) for p in params}
        held = [p for p in params if _shape(p).numel()]  # a rank may hold an empty shard
        targets = [self._target(p) for p in held]
        if held:
            self._update(
                targets,
                [gradients[p].to(t.dtype) for p, t in zip(held, targets, strict=True)],
                [local_tensor(self.state[p]["exp_avg"]).view_as(t) for p, t in zip(held, targets, strict=True)],
                [local_tensor(self.state[p]["exp_avg_sq"]).view_as(t) for p, t in zip(held, targets, strict=True)],
                [],
                [self.state[p]["step"] for p in held],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        for param in params:
            if not _shape(param).numel():
                self.state[param]["step"] += 1

    def _write_back(self, params: list[Tensor]) -> None:
        """Masters into parameters; quantized ones together, so that they are agreed on together."""
        waiting: dict[Any, list[Tensor]] = {}
        for param in params:
            local = local_tensor(param)
            if isinstance(local, QuantizedTensor):
                waiting.setdefault(_groups(param), []).append(param)
            elif "master_param" in self.state[param]:
                local.copy_(self._target(param))
        for groups, together in waiting.items():
            parts = [(local_tensor(p).storage, self._target(p), _partition(p)) for p in together]
            quantize_parts(parts, groups)
            for param in together:
                self._trust_master(param)


def _gradient(param: Tensor) -> Tensor:
    """The gradient of what this rank holds. Collective where ranks have yet to sum it (sequence parallelism)."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


def _shape(param: Tensor) -> torch.Size:
    return local_tensor(param).shape


def _shaped_like(param: Tensor, local: Tensor) -> Tensor:
    """`local` as a tensor that is sharded as `param` is."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _initial_master(local: Tensor) -> Tensor:
    """The best values known: those last written in high precision, else those kept at initialization, else decoded."""
    if not isinstance(local, QuantizedTensor):
        return local.to(torch.float32, copy=True)
    for values in (local.storage.unsettled, local.storage.initial):
        if values is not None:
            return values.to(local.device, torch.float32, copy=True).view(local.shape)
    return local.dequantize(dtype=torch.float32)


def _groups(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    return placement.groups(param) if isinstance(param, DTensor) else ()


def _partition(param: Tensor) -> Partition:
    if isinstance(param, DTensor):
        return placement.partition(param)
    return Partition.of([param.storage.region])
