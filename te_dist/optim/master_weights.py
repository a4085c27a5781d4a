"""Any optimizer of torch over quantized and 16-bit parameters: it updates fp32 masters, which are written back.

[Note: Two optimizers]
Everybody outside sees the parameters of the model: groups, state and hooks of `MasterWeights` are theirs. The wrapped
optimizer has the masters in their place and knows of no quantization. What is outside is the truth: groups,
hyperparameters and state are handed in before a step and the latter two taken out after it, as references, so that
schedulers, checkpoints and state dictionaries need to know one optimizer only, and groups may be edited as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist._torch_private import copy_each
from te_dist.optim import masters, moving
from te_dist.optim.loading import first_post_hook, last_pre_hook
from te_dist.optim.masters import MASTER, Held, Ledger, WriteBack
from te_dist.tensor.placement import is_same_part, local_tensor, spread

_MAX_WRITE_BACKS = 8
_OWN = "own"  # beside its state: the master that is updated, where another one was loaded
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer of torch over fp32 masters of quantized and 16-bit parameters.

        optimizer = optim.MasterWeights(model.parameters(), lambda params: torch.optim.AdamW(params, lr=3e-4))

    For-loop, foreach and fused variants alike. Parameters of other types are updated in place, without a master.
    Masters are DTensors where parameters are; gradients are cast to fp32 for the time of a step. After it all quantized
    parameters are quantized together: one reduction for each process group whose ranks share scales.

    Masters follow whatever is written into parameters (loaded, clamped, averaged). From the first step on they do not
    see what torch does not count as a write into a 16-bit parameter, as by way of `.data`. Frozen parameters have no
    master until they are to be updated.

    Args:
        params: parameters, (name, parameter) pairs or groups of them; sharded, replicated or whole.
        make: called once with what `params` lists (tensors, or groups), masters in the place of parameters; returns
            the optimizer of all of them.

    Attributes:
        wrapped: what `make` returned.

    Raises:
        TypeError: `make` is no function.
        ValueError: the optimizer that `make` returned has other groups than it was given.
    """

    writes_quantized_parameters = True
    wrapped: torch.optim.Optimizer

    def __init__(self, params: Iterable[Any], make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
        if not callable(make):
            raise TypeError(
                f"MasterWeights: make: got {type(make).__name__}, wanted a function that makes the optimizer of what "
                "it is given, as lambda params: torch.optim.AdamW(params, lr=3e-4)"
            )
        given = list(params)
        self._masters: dict[Tensor, Tensor] = {}  # of every parameter; itself where it has none
        self._states: dict[Tensor, dict[str, Tensor]] = {}  # of every parameter with a master: that alone, for `Held`
        self._stepped: set[Tensor] = set()
        self._loaded: set[Tensor] = set()  # parameters whose master was loaded since their last step
        self._without: set[Tensor] = set()  # parameters whose master is made when they are to be updated
        self._ledger = Ledger()
        self._write_backs: dict[Any, WriteBack] = {}
        self._captured: list[WriteBack] = []  # what graphs launch is kept as long as they may
        self._is_away = False  # state, by `move_state`
        super().__init__([dict(each) if isinstance(each, dict) else each for each in given], {})
        inner = [self._inner_group(group) for group in self.param_groups]
        in_groups = bool(given) and isinstance(given[0], dict)
        self.wrapped = make(inner if in_groups else inner[0]["params"])
        self._check_wrapped()
        self.defaults = self.wrapped.defaults
        self._take_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch: a group with its own hyperparameters; one that the wrapped optimizer refuses is not added."""
        super().add_param_group(param_group)
        if not hasattr(self, "wrapped"):
            for param in self.param_groups[-1]["params"]:
                self._make_master(param)
            return
        known = set(self._masters)
        try:
            self._follow_groups()
        except Exception:
            self.param_groups.pop()
            raise
        self._take_out_hyperparameters()
        for param in self.param_groups[-1]["params"]:
            if param not in known:  # NOTE: state of others may have been loaded since the last step
                self._take_out_state(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer. Collective where shards share scales.

        Args:
            closure: as in torch; whenever the wrapped optimizer calls it, parameters have the values of their masters.
        """
        if self._is_away:
            self.move_state()
        evaluated = []
        if closure is not None:
            with torch.enable_grad():
                evaluated.append(closure())
            for param in tuple(self._without):  # what calls it may write into all, by way of one vector (LBFGS)
                self._make_master(param, even_frozen=True)
        self._hand_in()
        updated = self._hand_in_gradients()
        if not updated:
            masters.warn_of_no_gradients(self)

        def evaluate() -> Any:
            if evaluated:
                return evaluated.pop()
            assert closure is not None
            with torch.no_grad():
                self._write_back(updated)
            with torch.enable_grad():
                found = closure()
            updated.update(self._hand_in_gradients())
            return found

        loss = self.wrapped.step() if closure is None else self.wrapped.step(evaluate)
        self._write_back(updated)
        for param, master in updated.items():
            if master is not param:
                master.grad = None
        self._stepped.update(updated)
        self._take_out()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any], *, begin_masters: bool = False) -> None:
        """As in torch, but state keeps its type: torch would round it to the dtype of its parameter.

        Args:
            state_dict: of a `MasterWeights`.
            begin_masters: whether it may be one without masters, as the wrapped optimizer has saved it by itself:
                masters then begin with what parameters hold.

        Raises:
            ValueError: a parameter that needs a master has none in its state.
        """
        if self._is_away:
            self.move_state()
        given: dict[Tensor, dict[str, Any]] = {}
        params = self._params()

        def read(_: Any, found: dict[str, Any]) -> None:
            saved = [key for group in found["param_groups"] for key in group["params"]]
            given.update((param, found["state"].get(key, {})) for key, param in zip(saved, params, strict=False))
            if not begin_masters:
                for param, own in given.items():
                    self._check_has_master(param, own)

        with last_pre_hook(self, read):
            super().load_state_dict(state_dict)
        for param, own in given.items():
            for name, value in own.items():
                if name != "step":
                    self.state[param][name] = _moved(value, param.device)
                elif isinstance(value, Tensor):  # a count that two optimizers shared would be raised twice
                    self.state[param][name] = self.state[param][name].clone()
            if MASTER in self.state.get(param, {}):
                self._ledger.propose(param, self.state[param][MASTER])
                self._loaded.add(param)
            elif _needs_master(param) and (begin_masters or not own):
                self.begin_anew(param)
        self._write_backs.clear()  # NOTE: they hold what was there before

    @torch.no_grad()
    def current_state(self, param: Tensor) -> dict[str, Any]:
        """State of a parameter as the next step would find it: a master that has fallen behind what was written into
        that has these values. What is kept here stays as it is."""
        state = self.state.get(param, {})
        if MASTER not in state:
            return state
        was_loaded = param in self._loaded or state[MASTER] is not self._masters.get(param)
        return state | {MASTER: self._ledger.current(param, state[MASTER], was_loaded=was_loaded)}

    def state_dict(self) -> dict[str, Any]:
        """As in torch, of `current_state`."""
        with first_post_hook(self, self.current_state):
            return super().state_dict()

    @torch.inference_mode(False)  # a later step writes into it
    @torch.no_grad()
    def begin_anew(self, param: Tensor) -> None:
        """Makes the master of a parameter of what that holds: its state is gone, or is of before the first step."""
        self._make_master(param)
        self._stepped.discard(param)

    def take_over(self, param: Tensor) -> None:
        """Notes that the values which `param`, quantized, has now are those of the master in its state."""
        self._ledger.take_over(param, self.state[param][MASTER])

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled."""
        own = ("wrapped", "_ledger", "_masters", "_states", "_stepped", "_loaded", "_without", "_is_away")
        return (
            super().__getstate__() | {name: getattr(self, name) for name in own} | {"_write_backs": {}, "_captured": []}
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def move_state(self, device: torch.device | str | None = None) -> None:
        """Moves masters and the state of the wrapped optimizer, as `FusedAdam.move_state` does."""
        moving.check_not_captured(self._captured)
        self._is_away = True
        self._write_backs.clear()
        self.wrapped.state.clear()
        own = {param: {_OWN: state[MASTER]} for param, state in self._states.items() if self._has_master(param)}
        moving.move(
            {param: own.get(param, {}) | self.state.get(param, {}) for param in self._masters}, device, self._exchange
        )
        self._follow_groups()
        for param in self._params():
            self._hand_in_state(param)
        self._is_away = device is not None

    def _exchange(self, param: Tensor, state: dict[str, Any]) -> None:
        """Has a parameter go on with state of the same values."""
        master = state.pop(_OWN, None)
        if master is not None:
            self._ledger.exchange(param, self._masters[param], master)
            self._masters[param] = self._states[param][MASTER] = master
        if state.get(MASTER, master) is not master:  # one that was loaded since the last step
            self._ledger.exchange(param, self.state[param][MASTER], state[MASTER])
        if state:
            self.state[param].update(state)

    # -- masters ------------------------------------------------------------------------------------------------

    def _make_master(self, param: Tensor, *, even_frozen: bool = False) -> Tensor:
        known = self._masters.get(param)
        if known is not None and hasattr(self, "wrapped"):
            self.wrapped.state.pop(known, None)
        self._without.discard(param)
        master = param
        if _needs_master(param) and not even_frozen and self._is_left_alone(param):
            # NOTE: of its shape and type, so that what is wrapped makes the state it would make.
            nothing = torch.zeros((), dtype=torch.float32, device=param.device).expand(local_tensor(param).shape)
            master = masters.shaped_like(param, nothing)
            self._without.add(param)
        elif _needs_master(param):
            master = masters.shaped_like(param, masters.initial_master(param))
            self._states.setdefault(param, {})[MASTER] = master
            self._ledger.begin(param, master)
        self._masters[param] = master
        return master

    def _has_master(self, param: Tensor) -> bool:
        """Whether what is updated instead of a parameter has its values."""
        return self._masters.get(param) is not param and param not in self._without

    def _is_left_alone(self, param: Tensor) -> bool:
        """Whether a parameter is frozen, as it has always been."""
        return not param.requires_grad and param.grad is None and MASTER not in self.state.get(param, {})

    def _current_master(self, param: Tensor) -> Tensor:
        """Of a parameter that may have moved, or have been exchanged since the optimizer was made."""
        master = self._masters.get(param)
        if master is None or (master is param) == _needs_master(param):
            return self._make_master(param)
        if param in self._without and not self._is_left_alone(param):
            return self._make_master(param)
        own, local = local_tensor(master), local_tensor(param)
        fits = own.device == local.device and own.shape == local.shape
        return (
            master if fits and isinstance(master, DTensor) == isinstance(param, DTensor) else self._make_master(param)
        )

    def _refresh(self, param: Tensor, master: Tensor) -> None:
        """Takes over what was written into the state or into the parameter."""
        if not self._has_master(param):
            return
        was_loaded = param in self._loaded
        if not masters.is_quantized(param) and param not in self._stepped:
            self._ledger.forget(param)
        loaded = self.state.get(param, {}).get(MASTER, master)
        if loaded is not master:
            if self._ledger.changed_in_place(param, loaded) is None:
                local_tensor(master).copy_(local_tensor(loaded))
                was_loaded = True
            self.state[param][MASTER] = master
        self._ledger.follow(param, master, was_loaded=was_loaded)
        self._loaded.discard(param)

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same with masters."""
        own = {key: value for key, value in group.items() if key != "param_names"}
        return own | {"params": [self._masters[param] for param in group["params"]]}

    def _check_has_master(self, param: Tensor, own: dict[str, Any]) -> None:
        """Of state that is to be loaded."""
        if own and MASTER not in own and _needs_master(param) and param not in self._without:
            raise ValueError(
                f"state of a parameter of shape {tuple(param.shape)} and dtype {param.dtype}: got {sorted(own)}, "
                f"wanted {MASTER} too: without it training would go on from values that were rounded. Load the state "
                "of a MasterWeights; or pass begin_masters=True, where masters are to begin with what parameters hold"
            )
        shapes = {"whole": param.shape, "own": local_tensor(param).shape}
        if MASTER in own and not is_same_part(own[MASTER], param, **shapes):
            got, wanted = ((tuple(local_tensor(t).shape), spread(t)) for t in (own[MASTER], param))
            raise ValueError(
                f"{MASTER} of a parameter of shape {tuple(param.shape)}: got shape {got[0]} on this rank, cut by "
                f"{got[1]}, wanted {wanted[0]}, cut by {wanted[1]}; load the state of the same model as it is cut here "
                "(te_dist.checkpoints and torch.distributed.checkpoint cut it anew)"
            )

    def _check_wrapped(self) -> None:
        got = [list(map(id, group["params"])) for group in self.wrapped.param_groups]
        want = [[id(self._masters[param]) for param in group["params"]] for group in self.param_groups]
        if got != want:
            raise ValueError(
                f"make returned an optimizer with {[len(own) for own in got]} parameters in its groups, wanted those "
                f"it was given, in their order: {[len(own) for own in want]}; put parameters into groups before they "
                "are passed to MasterWeights"
            )

    # -- between the two: see [Note: Two optimizers] -----------------------------------------------------------

    def _hand_in(self) -> None:
        """Groups, hyperparameters and state, to the wrapped optimizer."""
        params = self._params()
        for param in params:
            self._refresh(param, self._current_master(param))
        self._follow_groups()
        for param in params:
            self._hand_in_state(param)
        # NOTE: one whose state is still there keeps its master, since it may come back into a group.
        for stale in self._masters.keys() - set(params) - self.state.keys():
            self.wrapped.state.pop(self._masters.pop(stale), None)
            self._states.pop(stale, None)
            self._without.discard(stale)
            self._ledger.forget(stale)
            self._write_backs.clear()

    def _params(self) -> list[Tensor]:
        """Of all groups, in their order."""
        return [param for group in self.param_groups for param in group["params"]]

    def _follow_groups(self) -> None:
        """Has groups of the wrapped optimizer be those outside, whatever was done to these, with masters.

        A parameter that was in none before gets its master.
        """
        for param in self._params():
            if param not in self._masters:
                self._make_master(param)
        inner = self.wrapped.param_groups
        del inner[len(self.param_groups) :]
        for group, its in zip(self.param_groups, inner, strict=False):
            own = self._inner_group(group)
            its["params"][:] = own.pop("params")  # NOTE: some optimizers keep the list
            for key in its.keys() - own.keys() - self.wrapped.defaults.keys() - {"params"}:
                del its[key]
            its.update(own)
        for group in self.param_groups[len(inner) :]:
            self.wrapped.add_param_group(self._inner_group(group))

    def _hand_in_state(self, param: Tensor) -> None:
        own = {key: value for key, value in self.state.get(param, {}).items() if key != MASTER}
        if own:
            self.wrapped.state[self._masters[param]] = own
        else:
            self.wrapped.state.pop(self._masters[param], None)

    def _hand_in_gradients(self) -> dict[Tensor, Tensor]:
        """To masters. Returns those that have one, by parameter."""
        found: dict[Tensor, Tensor] = {}
        casts: list[tuple[Tensor, Tensor]] = []
        for param in self._params():
            grad = masters.gradient(param)
            if grad is None:
                continue
            master = self._masters[param]
            if grad is not param.grad or master is not param:
                own = local_tensor(grad)
                if master is not param and own.dtype != torch.float32:
                    casts.append((torch.empty_like(own, dtype=torch.float32), own))
                    grad = masters.shaped_like(param, casts[-1][0])
                master.grad = grad
            found[param] = master
        _copy_by_types(casts)
        return found

    def _write_back(self, updated: dict[Tensor, Tensor]) -> None:
        """Of these parameters with their masters, from masters into parameters."""
        by_device: dict[torch.device, list[Tensor]] = {}
        moves_anyway = isinstance(self.wrapped, torch.optim.Rprop)  # whose rate is that of the first step alone
        left = set() if moves_anyway else set().union(*map(masters.left_alone, self.param_groups))
        for param, master in updated.items():
            if master is not param and param not in left:
                by_device.setdefault(master.device, []).append(param)
        for device, params in by_device.items():
            key = (device, tuple(map(id, params)))
            prepared = self._write_backs.pop(key, None)
            if prepared is None or not prepared.holds():
                prepared = WriteBack([Held.of(param, self._states[param]) for param in params])
            while len(self._write_backs) >= _MAX_WRITE_BACKS:
                del self._write_backs[next(iter(self._write_backs))]
            self._write_backs[key] = prepared
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._captured.append(prepared)
            prepared.run(self._ledger)

    def _take_out(self) -> None:
        """Hyperparameters and state, of the wrapped optimizer."""
        self._take_out_hyperparameters()
        for param in self._params():
            self._take_out_state(param)

    def _take_out_hyperparameters(self) -> None:
        for group, inner in zip(self.param_groups, self.wrapped.param_groups, strict=True):
            group |= {key: value for key, value in inner.items() if key != "params"}

    def _take_out_state(self, param: Tensor) -> None:
        master = self._masters[param]
        found = self.wrapped.state.get(master, {})
        if found or param in self._stepped:
            self.state[param] = {MASTER: master, **found} if self._has_master(param) else dict(found)


def _needs_master(param: Tensor) -> bool:
    return masters.is_quantized(param) or param.dtype in _SIXTEEN_BITS


def _moved(value: Any, device: torch.device) -> Any:
    """State on another device, of the types it has."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return type(value)(_moved(each, device) for each in value) if isinstance(value, list | tuple) else value


def _copy_by_types(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Into each from each, those of one type in one go."""
    types: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in copies:
        types.setdefault((source.device, source.dtype), []).append((target, source))
    for alike in types.values():
        copy_each(*zip(*alike, strict=True))
