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

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from te_dist.formats import Partition
from te_dist.kernels.multi_adam import CompactPlace
from te_dist.ops.multi_adam import AdamRule, AdamSignals, Adapted, MultiAdam
from te_dist.optim import masters, moving
from te_dist.optim.loading import first_post_hook, last_pre_hook
from te_dist.optim.masters import MASTER, Held, Ledger, Places
from te_dist.optim.precision import MOMENTS, Precision, as_loaded, check_convertible, check_kernels_take
from te_dist.scaling.agreement import PartsQuantization, settle_parts
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor.parts import before_writing
from te_dist.tensor.placement import local_tensor

_ALIGNMENT_BYTES = 16  # of gradients: kernels are chosen by it
_MAX_PLANS = 8


class FusedAdam(torch.optim.Optimizer):
    """Adam (AdamW by default) with masters, for any mixture of quantized and plain parameters.

    Args:
        params: parameters or groups of them; sharded, replicated or whole.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, but that weights decay only if asked to; lr may be a
            tensor (f32, one element), which a captured CUDA graph reads anew at every replay.
        adam_w_mode: decoupled weight decay; False adds the decay to the gradient.
        bias_correction: whether moments are corrected for their bias toward 0.
        amsgrad: there is none.
        capturable: makes lr of every group such a tensor.
        set_grad_none: what `zero_grad` does where it is not told; None: as torch.
        master_weights: keep masters of 16-bit parameters. Quantized parameters always have them: an update is smaller
            than the distance of two codes and would be lost.
        master_weight_dtype: float32; or bfloat16, rounded by chance, where bf16 parameters are their own masters.
        exp_avg_dtype, exp_avg_sq_dtype: float32; bfloat16; or uint8 (float8_e4m3fn), codes with a scale for each 128
            values of a row, for parameters of two dimensions and more. See [Note: Fewer bits].
        store_param_remainders: a bf16 parameter is the upper half of its fp32 master, only the lower one is kept.
        stochastic_rounding: bf16 parameters without masters are rounded by chance.
        seed: of chances.

    Steps are counted on the device and nothing waits for it: `step` can be captured in a CUDA graph once it has run.
    Under a `torch.amp.GradScaler` gradients are unscaled on the way, and a step with infinite ones is left out.

    Raises:
        ValueError: a value is out of range, or there is no such combination.
    """

    writes_quantized_parameters = True
    _step_supports_amp_scaling = True  # GradScaler sets `grad_scale` and `found_inf` for the time of a step

    def __init__(  # noqa: PLR0913  (as torch.optim.AdamW)
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        amsgrad: bool = False,
        capturable: bool = False,
        set_grad_none: bool | None = None,
        master_weights: bool = True,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "lr, eps and weight_decay are 0 or more and betas in [0, 1); "
                f"got {lr=}, {eps=}, {weight_decay=}, {betas=}"
            )
        if amsgrad:
            raise ValueError("amsgrad: got True, FusedAdam has none; wrap torch.optim.AdamW in optim.MasterWeights")
        master = master_weight_dtype if master_weights else None
        chances = (store_param_remainders, stochastic_rounding, seed)
        self.precision = Precision(master, exp_avg_dtype, exp_avg_sq_dtype, *chances)
        self.adam_w_mode, self.bias_correction = adam_w_mode, bias_correction
        self.capturable, self.set_grad_none = capturable, set_grad_none
        self._plans: dict[Any, _Plan] = {}  # by device and ids of the parameters by group
        self._captured: list[_Plan] = []  # what graphs launch is kept as long as they may
        self._loaded: set[Tensor] = set()  # parameters whose state was loaded since their last step
        self._is_away = False  # state, by `move_state`
        self._ledger = Ledger()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch: a group with its own hyperparameters; one that is refused is not added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                self.precision.check(param)
        except ValueError:
            self.param_groups.pop()
            raise
        if self.capturable:  # from the start: what a checkpoint was saved of is what it is loaded into
            device = next((param.device for param in group["params"] if not param.is_meta), "cpu")
            group["lr"] = _on_device(group["lr"], device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, unless `set_grad_none` says otherwise."""
        super().zero_grad(set_to_none if self.set_grad_none is None else self.set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Collective where shards share scales."""
        if self._is_away:
            self.move_state()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_device: dict[torch.device, list[list[tuple[Tensor, Tensor]]]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = masters.gradient(param)
                if grad is not None:
                    device = grad.device
                    if device not in by_device:
                        by_device[device] = [[] for _ in self.param_groups]
                    by_device[device][number].append((param, _dense(local_tensor(grad), param)))
        if not by_device:
            masters.warn_of_no_gradients(self)
        for device, groups in by_device.items():
            self._update(device, groups)
        return loss

    @torch.no_grad()
    def current_state(self, param: Tensor) -> dict[str, Any]:
        """State of a parameter as the next step would find it: a master that has fallen behind what was written into
        that has these values. What is kept here stays as it is: the weight may be given back its own."""
        state = self.state.get(param, {})
        if MASTER not in state:
            return state
        return state | {MASTER: self._ledger.current(param, state[MASTER], was_loaded=param in self._loaded)}

    def state_dict(self) -> dict[str, Any]:
        """As in torch, of `current_state`."""
        with first_post_hook(self, self.current_state):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *, begin_masters: bool = False) -> None:
        """As in torch, but state keeps the types it has here: torch would round it to the dtype of its parameter.

        Args:
            state_dict: of a `FusedAdam`.
            begin_masters: whether it may be one without masters, as that of `torch.optim.AdamW`: masters then begin
                with what parameters hold.

        Raises:
            ValueError: what is kept of a parameter here is not what is saved of it; nothing is loaded then.
        """
        if self._is_away:
            self.move_state()
        params = [param for group in self.param_groups for param in group["params"]]
        loaded: dict[Tensor, dict[str, Any]] = {}
        begun: set[Tensor] = set()

        def read(_: Any, given: dict[str, Any]) -> None:
            saved = [key for group in given["param_groups"] for key in group["params"]]
            for key, param in zip(saved, params, strict=False):
                state = given["state"].get(key, {})
                if begin_masters and state and MASTER in self.precision.dtypes(param).keys() - state.keys():
                    state = state | {MASTER: self.precision.initial_master(param)}
                    begun.add(param)
                loaded[param] = self._as_loaded(param, state)

        with last_pre_hook(self, read):
            super().load_state_dict(state_dict)
        for param, own in loaded.items():
            if own:
                self.state[param].update(own)
            if param in begun:
                self.take_over(param)
            elif MASTER in own:
                self._ledger.propose(param, self.state[param][MASTER])
                self._loaded.add(param)
            else:
                self._ledger.forget(param)
        self._plans.clear()  # NOTE: they hold what was there before

    @torch.inference_mode(False)  # a later step writes into it
    @torch.no_grad()
    def move_state(self, device: torch.device | str | None = None) -> None:
        """Moves masters and moments to a device, out of the way of what needs the memory between steps, or back.

        Memory where they were is free when this returns. The next step brings them back by itself. An op that changes
        a quantized parameter in place meanwhile changes values that are rounded, which become those of its master.

        Args:
            device: None: that of each parameter. What is copied from a GPU to the CPU is pinned.

        Raises:
            RuntimeError: a step was captured in a CUDA graph.
        """
        moving.check_not_captured(self._captured)
        self._is_away = True
        self._plans.clear()
        moving.move(self.state, device, self._exchange)
        self._is_away = device is not None

    def _exchange(self, param: Tensor, state: dict[str, Any]) -> None:
        """Has a parameter go on with state of the same values."""
        if MASTER in state:
            self._ledger.exchange(param, self.state[param][MASTER], state[MASTER])
        self.state[param].update(state)

    def install_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """Puts state that was loaded with the values of its parameter in place, in the types it has here; tensors of
        these types as they are, so that a captured graph finds them where they were. A master alone is that of before
        the first step."""
        own = self.precision.initial_state(param) | state if state.keys() == {MASTER} else state
        self.check_state(param, _dtypes(own))
        wanted = self.precision.dtypes(param)
        own = {name: v.to(param.device, wanted[name]) if isinstance(v, Tensor) else v for name, v in own.items()}
        self.precision.check_state(param, own)
        self.state[param] = own
        if masters.is_quantized(param):
            self.take_over(param)
        else:
            self._ledger.forget(param)

    def check_state(self, param: Tensor, dtypes: Mapping[str, torch.dtype | None], *, may_begin: bool = False) -> None:
        """Raises ValueError where saved state of a parameter, by the types of its tensors, cannot be its state here.

        `may_begin`: whether it may be a master alone, see `install_state`.
        """
        wanted = self.precision.dtypes(param)
        begins = may_begin and dtypes.keys() == {MASTER} <= wanted.keys()
        if dtypes.keys() != wanted.keys() and not begins:
            lacks_master = wanted.keys() - dtypes.keys() == {MASTER}
            also = ", or pass begin_masters=True, where masters are to begin with what parameters hold"
            raise ValueError(
                f"state of a parameter of shape {tuple(param.shape)}: got {sorted(dtypes)}, wanted {sorted(wanted)}; "
                f"make the optimizer with the options it was saved with{also if lacks_master else ''}"
            )
        for name, dtype in dtypes.items():
            if dtype is not None:
                check_convertible(dtype, wanted[name], param, name=name)

    def _as_loaded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        if not state:
            return {}
        self.check_state(param, _dtypes(state))
        wanted = self.precision.dtypes(param)
        own = {name: as_loaded(value, wanted[name], param, name=name) for name, value in state.items()}
        self.precision.check_state(param, own)
        return own

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled."""
        options = ("precision", "adam_w_mode", "bias_correction", "capturable", "set_grad_none")
        own = {name: getattr(self, name) for name in (*options, "_ledger", "_loaded", "_is_away")}
        return super().__getstate__() | own | {"_plans": {}, "_captured": []}

    def initialize_state(self, param: Tensor) -> None:
        """Creates all state of `param`, unless it is there; the master of one that was cast to 16 bits since."""
        state = self.state[param]
        if not state:
            self.precision.check(param)  # it may have been cut since
            state.update(self.precision.initial_state(param))
            self.take_over(param)
        elif not masters.is_quantized(param) and MASTER in self.precision.dtypes(param).keys() - state.keys():
            state[MASTER] = self.precision.initial_master(param)
            self.take_over(param)

    def take_over(self, param: Tensor) -> None:
        """Notes that the values which `param` has now are those of its master, if it has one."""
        master = self.state.get(param, {}).get(MASTER)
        if master is not None:
            self._ledger.take_over(param, master)

    def _update(self, device: torch.device, groups: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """One step of parameters with their gradients, by group, that lie on one device."""
        pairs = [pair for group in groups for pair in group]
        grads = [grad for _, grad in pairs]
        shape = tuple(tuple(id(param) for param, _ in group) for group in groups)
        kinds = [(grad.dtype, grad.data_ptr() % _ALIGNMENT_BYTES) for grad in grads]
        signals = [getattr(self, name, None) for name in ("grad_scale", "found_inf")]
        unsettled = _unsettled(pairs) if signals[1] is not None else []
        left = frozenset().union(*map(masters.left_alone, self.param_groups))
        plan = self._plans.get((device, shape, left))
        if plan is None or plan.kinds != kinds or not plan.holds(self.state):
            for param, grad in pairs:
                self.initialize_state(param)
                self.precision.check_state(param, self.state[param], grad=grad)
                if MASTER in self.state[param]:
                    self._ledger.follow(param, self.state[param][MASTER], was_loaded=param in self._loaded)
            numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
            self._ledger.keep(p for group in self.param_groups for p in group["params"])
            held = [Held.of(param, self.state[param]) for param, _ in pairs]
            adapted = [_adapted(each, self.precision.place(each, numbers[id(each.param)])) for each in held]
            plan = _Plan(held, adapted, list(map(len, shape)), grads, left)
            self._keep((device, shape, left), plan)
            plan.kinds, plan.states = kinds, [id(state) for state in self.state.values()]
        else:
            for each in plan.mastered:
                self._ledger.follow(each.param, each.state[MASTER], was_loaded=each.param in self._loaded)
        self._loaded.difference_update(param for param, _ in pairs)
        plan.settle(unsettled)
        rules, own = zip(*(self._rule(group, device) for group in self.param_groups), strict=True)
        signals = [None if signal is None else signal.to(device) for signal in signals]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(plan)
        for storage in plan.requantized:
            before_writing(storage)
        plan.run(grads, rules, [AdamSignals(lr, *signals) for lr in own])
        torch.autograd.graph.increment_version(plan.written)  # kernels write memory, which autograd does not see
        for storage in plan.requantized:
            storage.unsettled = None
        for each in plan.mastered:
            if each.param not in left:
                self._ledger.take_over(each.param, each.state[MASTER])

    def _keep(self, key: Any, plan: _Plan) -> None:
        """For later steps of the same parameters, and the last few others: some have no gradient at times."""
        self._plans.pop(key, None)
        if len(self._plans) == _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan

    def _rule(self, group: dict[str, Any], device: torch.device) -> tuple[AdamRule, Tensor | None]:
        """Of a group: its rule, and lr where that is known on the device only."""
        if self.capturable:
            group["lr"] = _on_device(group["lr"], device)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        is_on_device = isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32
        rule = AdamRule(
            0.0 if is_on_device else float(lr),
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            self.adam_w_mode,
            self.bias_correction,
        )
        return rule, lr if is_on_device else None


def _dense(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient as kernels read it."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"gradient of a parameter of shape {tuple(param.shape)}: got {grad.layout}, wanted a dense one; pass "
            "sparse=False to nn.Embedding, or put the parameter into a torch.optim.SparseAdam"
        )
    return grad.contiguous()


def _dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype | None]:
    """Of the tensors among some state; None of plain values."""
    return {name: value.dtype if isinstance(value, Tensor) else None for name, value in state.items()}


def _on_device(lr: float | Tensor, device: torch.device | str) -> Tensor:
    """A rate that captured steps read."""
    return torch.as_tensor(lr, dtype=torch.float32, device=device)


class _Plan:
    """One step of parameters that stay where they are (see [Note: One step]).

    Attributes:
        kinds: type and alignment of every gradient.
        states: ids of the states of all parameters of the optimizer.
        mastered: of the parameters with masters.
        quantized: of the quantized ones.
        requantized: storages of those that are written.
        written: all parameters, and what they hold here.
    """

    kinds: list[tuple[torch.dtype, int]]
    states: list[int]

    def __init__(
        self,
        held: Sequence[Held],
        adapted: list[Adapted],
        counts: Sequence[int],
        grads: Sequence[Tensor],
        left: Set[Tensor],
    ) -> None:
        """Args:
        held, adapted: of all parameters, group by group.
        counts: of the parameters of each group.
        grads: of all parameters.
        left: quantized parameters that keep their bytes.
        """
        self._places = Places(held)
        self.mastered = [each for each in held if MASTER in each.state]
        self.quantized = [each for each in held if each.storage is not None]
        self.requantized = [each.storage for each in held if each.storage is not None and each.param not in left]
        self.written = [tensor for each in held for tensor in {each.param, each.local}]
        noop = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        self._quantizations = []
        for groups, found in masters.by_groups(held).items():
            own = [index for index in found if held[index].param not in left]
            parts = [held[i].parts(adapted[i].value) for i in own]
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
        return [id(state) for state in states.values()] == self.states and self._places.hold()

    def settle(self, storages: Sequence[QuantizedStorage]) -> None:
        """Agrees on the scales of some: a step that may be left out may leave them as they are."""
        waiting: dict[Any, list[tuple[QuantizedStorage, Tensor, Partition | None]]] = {}
        for each in self.quantized:
            own = each.storage
            if own is not None and any(own is storage for storage in storages):
                part = (own, local_tensor(each.state[MASTER]), masters.partition(each.param))
                waiting.setdefault(masters.spread_over(each.param), []).append(part)
        for over, unsettled in waiting.items():
            settle_parts(unsettled, over)

    def run(self, grads: Sequence[Tensor], rules: Sequence[AdamRule], signals: Sequence[AdamSignals]) -> None:
        """One step. Collective where shards share scales."""
        for quantization in self._quantizations:
            quantization.begin()
        self._adam.run(grads, rules, signals)
        for quantization in self._quantizations:
            quantization.finish()


def _adapted(held: Held, place: CompactPlace | None) -> Adapted:
    """What Adam reads and writes."""
    value = local_tensor(held.state.get(MASTER, held.local))
    copy = None if held.storage is not None or value is held.local else held.local
    exp_avg, exp_avg_sq = (local_tensor(held.state[name]) for name in MOMENTS)
    for tensor in (value, copy):
        if tensor is not None:
            check_kernels_take(tensor)
    return Adapted(value.detach(), exp_avg, exp_avg_sq, held.state["step"], copy, place=place)


def _unsettled(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[QuantizedStorage]:
    """Those that were written by their own amaxes since ranks last agreed."""
    tensors = [local_tensor(param) for param, _ in pairs]
    storages = [tensor.storage for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    return [storage for storage in storages if storage.unsettled is not None]
