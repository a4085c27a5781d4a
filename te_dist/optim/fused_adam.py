"""Adam over quantized parameters: updates fp32 masters and quantizes them into the parameters.

Masters and moments are fp32 tensors of the shape of each rank's shard (DTensors where the parameter is one), so that
a checkpoint treats them as any tensor. Quantized shards end as the bytes of the whole matrix of masters quantized at
once: the amaxes that shards share are agreed on in one reduction per step and process group.

[Note: One step]
Where the scales of a shard depend on nothing but itself, the kernel that updates its master quantizes it. Elsewhere
that kernel finds the amaxes; the reduction follows, and one more kernel for all shards of a kind. What is launched is
prepared once (`_Plan`) and holds for as long as tensors stay where they are; gradients may be others at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist.formats import Partition
from te_dist.ops.multi_adam import AdamRule, AdamSignals, Adapted, MultiAdam
from te_dist.ops.multi_tensor import Call
from te_dist.scaling.agreement import Part, PartsQuantization, quantize_parts
from te_dist.tensor import QuantizedTensor, placement
from te_dist.tensor.placement import local_tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT_BYTES = 16  # of gradients: kernels are chosen by it
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class FusedAdam(torch.optim.Optimizer):
    """Adam (AdamW by default) with masters, for any mixture of quantized and plain parameters.

    Args:
        params: parameters or groups of them; sharded, replicated or whole.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; lr may be a tensor (f32, one element), which a
            captured CUDA graph reads anew at every replay.
        adam_w_mode: decoupled weight decay; False adds the decay to the gradient.
        master_weights: keep fp32 masters of 16-bit parameters. Quantized parameters always have them: an update is
            smaller than the distance of two codes and would be lost.

    Steps are counted on the device and nothing waits for it: `step` can be captured in a CUDA graph once it has run.
    Under a `torch.amp.GradScaler` gradients are unscaled on the way, and a step with infinite ones is left out.

    Raises:
        ValueError: a value is out of range.
    """

    _step_supports_amp_scaling = True  # GradScaler sets `grad_scale` and `found_inf` for the time of a step

    def __init__(  # noqa: PLR0913  (as torch.optim.AdamW)
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
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
        self.adam_w_mode = adam_w_mode
        self._plans: dict[Any, _Plan] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Collective where shards share scales."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_device: dict[torch.device, list[list[Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    self.initialize_state(param)
                    self._follow(param)
                    together = by_device.setdefault(param.device, [[] for _ in self.param_groups])
                    together[number].append(param)
        for groups in by_device.values():
            self._update(groups)
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
        return super().__getstate__() | {
            "master_weights": self.master_weights,
            "adam_w_mode": self.adam_w_mode,
            "_plans": {},
        }

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

    def _update(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """One step of parameters, by group, that lie on one device."""
        params = [param for group in groups for param in group]
        grads = [_gradient(param) for param in params]
        device = grads[0].device
        addresses = [address for pair in zip(params, grads, strict=True) for address in self._addresses(*pair)]
        plan = self._plans.get(device)
        if plan is None or plan.addresses != addresses:
            plan = self._plans[device] = _Plan(self._entries(groups), grads, addresses)
        signals = [getattr(self, name, None) for name in ("grad_scale", "found_inf")]
        if signals[1] is not None:
            plan.settle()
        rules, own = zip(*(self._rule(group, device) for group in self.param_groups), strict=True)
        signals = [None if signal is None else signal.to(device) for signal in signals]
        plan.run(grads, rules, [AdamSignals(lr, *signals) for lr in own])
        for param in params:
            self._trust_master(param)
            if isinstance(local_tensor(param), QuantizedTensor):
                local_tensor(param).storage.unsettled = None

    def _rule(self, group: dict[str, Any], device: torch.device) -> tuple[AdamRule, Tensor | None]:
        """Of a group: its rule, and lr where that is known on the device only."""
        lr = group["lr"]
        is_on_device = isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32
        rule = AdamRule(
            0.0 if is_on_device else float(lr), *group["betas"], group["eps"], group["weight_decay"], self.adam_w_mode
        )
        return rule, lr if is_on_device else None

    def _addresses(self, param: Tensor, grad: Tensor) -> Iterator[Any]:
        """All that a plan takes for granted of a parameter."""
        local, state = local_tensor(param), self.state[param]
        yield grad.dtype
        yield grad.data_ptr() % _ALIGNMENT_BYTES
        for name in ("step", *_MOMENTS):
            yield local_tensor(state[name]).data_ptr()
        if "master_param" in state:
            yield local_tensor(state["master_param"]).data_ptr()
        if isinstance(local, QuantizedTensor):
            for buffer in local.storage.buffers.values():
                yield buffer.data_ptr()
        else:
            yield local.data_ptr()

    def _entries(self, groups: Sequence[Sequence[Tensor]]) -> list[list[_Entry]]:
        return [[self._entry(param) for param in group] for group in groups]

    def _entry(self, param: Tensor) -> _Entry:
        local, state = local_tensor(param), self.state[param]
        value = self._target(param)
        is_quantized = isinstance(local, QuantizedTensor)
        copy = None if is_quantized or value is local else local
        for tensor in (value, copy):
            if tensor is not None and not (tensor.is_contiguous() and tensor.dtype in _FLOATS):
                raise ValueError(
                    f"a parameter of shape {tuple(tensor.shape)}: got {tensor.dtype} with strides {tensor.stride()}, "
                    "wanted float32, bfloat16 or float16 and contiguous; convert it before the optimizer is made"
                )
        moments = (local_tensor(state[name]) for name in _MOMENTS)
        adapted = Adapted(value.detach(), *moments, state["step"], copy)
        if not is_quantized:
            return _Entry(adapted)
        return _Entry(adapted, (local.storage, value, _partition(param)), _groups(param))


class _Entry(NamedTuple):
    """A parameter: what Adam writes, and of a quantized one what is quantized from what, over which groups."""

    adapted: Adapted
    part: Part | None = None
    groups: tuple[dist.ProcessGroup, ...] = ()


class _Plan:
    """One step of parameters that stay where they are (see [Note: One step]).

    Attributes:
        addresses: by which this is known to hold still.
    """

    def __init__(self, groups: Sequence[Sequence[_Entry]], grads: Sequence[Tensor], addresses: list[Any]) -> None:
        self.addresses = addresses
        noop = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        entries = [entry for group in groups for entry in group]
        parts: dict[Any, list[int]] = {}
        for index, entry in enumerate(entries):
            if entry.part is not None:
                parts.setdefault(entry.groups, []).append(index)
        self._parts = {over: [entries[index].part for index in own] for over, own in parts.items()}
        self._quantizations = [PartsQuantization(own, over, noop=noop) for over, own in self._parts.items()]
        readers: dict[int, Call | None] = {}
        for own, quantization in zip(parts.values(), self._quantizations, strict=True):
            readers |= zip(own, quantization.readers, strict=True)
        numbers = iter(range(len(entries)))
        adapted = [[replace(entry.adapted, reader=readers.get(next(numbers))) for entry in group] for group in groups]
        self._adam = MultiAdam(adapted, grads, noop=noop)

    def settle(self) -> None:
        """Agrees on scales that are still to be agreed on: a step that may be left out may leave them as they are."""
        for over, parts in self._parts.items():
            waiting = [part for part in parts if part[0].unsettled is not None]
            if waiting:
                quantize_parts(waiting, over)

    def run(self, grads: Sequence[Tensor], rules: Sequence[AdamRule], signals: Sequence[AdamSignals]) -> None:
        """One step. Collective where shards share scales."""
        for quantization in self._quantizations:
            quantization.begin()
        self._adam.run(grads, rules, signals)
        for quantization in self._quantizations:
            quantization.finish()


def _gradient(param: Tensor) -> Tensor:
    """The gradient of what this rank holds. Collective where ranks have yet to sum it (sequence parallelism)."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad).contiguous()


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
