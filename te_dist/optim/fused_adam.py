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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist.formats import Partition
from te_dist.ops.multi_adam import AdamRule, AdamSignals, Adapted, MultiAdam
from te_dist.scaling.agreement import PartsQuantization, parts_of, settle_parts
from te_dist.tensor import QuantizedStorage, QuantizedTensor, placement
from te_dist.tensor.placement import local_tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT_BYTES = 16  # of gradients: kernels are chosen by it
_MAX_PLANS = 8
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
        self._plans: dict[Any, _Plan] = {}  # by device and ids of the parameters by group
        self._captured: list[_Plan] = []  # what graphs launch is kept as long as they may
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Collective where shards share scales."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_device: dict[torch.device, list[list[tuple[Tensor, Tensor]]]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    device = grad.device
                    if device not in by_device:
                        by_device[device] = [[] for _ in self.param_groups]
                    by_device[device][number].append((param, _gradient(param, grad)))
        for device, groups in by_device.items():
            self._update(device, groups)
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
            "_captured": [],
        }

    def initialize_state(self, param: Tensor) -> None:
        """Creates step, moments and master of `param`, unless they are there."""
        state = self.state[param]
        if state:
            return
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in _MOMENTS:
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

    def _update(self, device: torch.device, groups: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """One step of parameters with their gradients, by group, that lie on one device."""
        pairs = [pair for group in groups for pair in group]
        grads = [grad for _, grad in pairs]
        shape = tuple(tuple(id(param) for param, _ in group) for group in groups)
        kinds = [(grad.dtype, grad.data_ptr() % _ALIGNMENT_BYTES) for grad in grads]
        signals = [getattr(self, name, None) for name in ("grad_scale", "found_inf")]
        unsettled = _unsettled(pairs) if signals[1] is not None else []
        plan = self._plans.get((device, shape))
        if plan is None or plan.kinds != kinds or not plan.holds(self.state):
            for param, _ in pairs:
                self.initialize_state(param)
                self._follow(param)
            tensors = [_Tensors.of(param, self.state[param]) for param, _ in pairs]
            plan = _Plan(tensors, list(map(len, shape)), grads)
            self._keep((device, shape), plan)
            plan.kinds, plan.states = kinds, [id(state) for state in self.state.values()]
        else:
            for each in plan.quantized:
                if not each.storage.mastered:
                    self._follow(each.param)
        plan.settle(unsettled)
        rules, own = zip(*(self._rule(group, device) for group in self.param_groups), strict=True)
        signals = [None if signal is None else signal.to(device) for signal in signals]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(plan)
        plan.run(grads, rules, [AdamSignals(lr, *signals) for lr in own])
        torch.autograd.graph.increment_version(plan.plain)  # kernels write memory, which autograd does not see
        for each in plan.quantized:
            storage = each.storage
            storage.mastered, storage.unsettled, storage.initial = True, None, None

    def _keep(self, key: Any, plan: _Plan) -> None:
        """For later steps of the same parameters, and the last few others: some have no gradient at times."""
        self._plans.pop(key, None)
        if len(self._plans) == _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan

    def _rule(self, group: dict[str, Any], device: torch.device) -> tuple[AdamRule, Tensor | None]:
        """Of a group: its rule, and lr where that is known on the device only."""
        lr = group["lr"]
        is_on_device = isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32
        rule = AdamRule(
            0.0 if is_on_device else float(lr), *group["betas"], group["eps"], group["weight_decay"], self.adam_w_mode
        )
        return rule, lr if is_on_device else None


class _Tensors(NamedTuple):
    """A parameter and all that a step writes for it, as they are at one moment."""

    param: Tensor
    local: Tensor
    state: dict[str, Tensor]
    storage: QuantizedStorage | None
    buffers: dict[str, Tensor]

    @staticmethod
    def of(param: Tensor, state: dict[str, Tensor]) -> _Tensors:
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            return _Tensors(param, local, state, local.storage, local.storage.buffers)
        return _Tensors(param, local, state, None, {"": local})

    def held(self) -> list[tuple[dict[str, Tensor], str, Tensor]]:
        """Every tensor, and how it is reached."""
        return [(found, name, tensor) for found in (self.state, self.buffers) for name, tensor in found.items()]

    def is_held(self) -> bool:
        """Whether the parameter still holds this."""
        if local_tensor(self.param) is not self.local:
            return False
        return self.storage is None or (self.local.storage is self.storage and self.storage.buffers is self.buffers)

    def adapted(self) -> Adapted:
        """What Adam reads and writes."""
        value = local_tensor(self.state.get("master_param", self.local))
        copy = None if self.storage is not None or value is self.local else self.local
        moments = [local_tensor(self.state[name]) for name in _MOMENTS]
        for tensor in (value, copy, *moments):
            if tensor is not None and not (tensor.is_contiguous() and tensor.dtype in _FLOATS):
                raise ValueError(
                    f"a parameter of shape {tuple(tensor.shape)}: got {tensor.dtype} with strides {tensor.stride()}, "
                    "wanted float32, bfloat16 or float16 and contiguous; convert it before the optimizer is made"
                )
        return Adapted(value.detach(), *moments, self.state["step"], copy)


class _Plan:
    """One step of parameters that stay where they are (see [Note: One step]).

    Attributes:
        kinds: type and alignment of every gradient.
        states: ids of the states of all parameters of the optimizer.
        quantized: of the quantized parameters.
        plain: the other parameters, and what they hold here.
    """

    kinds: list[tuple[torch.dtype, int]]
    states: list[int]

    def __init__(self, tensors: Sequence[_Tensors], counts: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Args:
        tensors: of all parameters, group by group.
        counts: of the parameters of each group.
        grads: of all parameters.
        """
        self._tensors = tensors
        self._held = [held for each in tensors for held in each.held()]
        self._places = [local_tensor(tensor) for _, _, tensor in self._held]
        self._addresses = [tensor.data_ptr() for tensor in self._places]
        self.quantized = [each for each in tensors if each.storage is not None]
        self.plain = [tensor for each in tensors if each.storage is None for tensor in {each.param, each.local}]
        noop = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        adapted = [each.adapted() for each in tensors]
        over: dict[Any, list[int]] = {}
        for index, each in enumerate(tensors):
            if each.storage is not None:
                over.setdefault(_groups(each.param), []).append(index)
        self._quantizations = []
        for groups, own in over.items():
            parts = [parts_of(tensors[i].storage, adapted[i].value, _partition(tensors[i].param)) for i in own]
            quantization = PartsQuantization([part for each in parts for part in each], groups, noop=noop)
            readers = iter(quantization.readers)
            for index, each in zip(own, parts, strict=True):
                of_matrices = [reader for reader in islice(readers, len(each)) if reader is not None]
                adapted[index] = replace(adapted[index], readers=tuple(of_matrices))
            self._quantizations.append(quantization)
        ordered = iter(adapted)
        self._adam = MultiAdam([list(islice(ordered, count)) for count in counts], grads, noop=noop)

    def holds(self, states: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Whether every tensor is still there, and lies where it lay."""
        return (
            [id(state) for state in states.values()] == self.states
            and all(each.is_held() for each in self._tensors)
            and all(found.get(name) is tensor for found, name, tensor in self._held)
            and [tensor.data_ptr() for tensor in self._places] == self._addresses
        )

    def settle(self, storages: Sequence[QuantizedStorage]) -> None:
        """Agrees on the scales of some: a step that may be left out may leave them as they are."""
        waiting: dict[Any, list[tuple[QuantizedStorage, Tensor, Partition | None]]] = {}
        for each in self.quantized:
            if any(each.storage is storage for storage in storages):
                part = (each.storage, each.adapted().value, _partition(each.param))
                waiting.setdefault(_groups(each.param), []).append(part)
        for over, unsettled in waiting.items():
            settle_parts(unsettled, over)

    def run(self, grads: Sequence[Tensor], rules: Sequence[AdamRule], signals: Sequence[AdamSignals]) -> None:
        """One step. Collective where shards share scales."""
        for quantization in self._quantizations:
            quantization.begin()
        self._adam.run(grads, rules, signals)
        for quantization in self._quantizations:
            quantization.finish()


def _gradient(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient of what this rank holds. Collective where ranks have yet to sum it (sequence parallelism)."""
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad).contiguous()


def _unsettled(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[QuantizedStorage]:
    """Those that were written by their own amaxes since ranks last agreed."""
    tensors = [local_tensor(param) for param, _ in pairs]
    storages = [tensor.storage for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    return [storage for storage in storages if storage.unsettled is not None]


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


def _partition(param: Tensor) -> Partition | None:
    return placement.partition(param) if isinstance(param, DTensor) else None
