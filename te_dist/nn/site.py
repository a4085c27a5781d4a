"""Where a linear map meets the recipe: the plan it computes by, and the histories it keeps for delayed scaling."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, Unpack
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist import _torch_private
from te_dist.context import Autocast, autocast_of_torch, current_autocast, repeated_autocast
from te_dist.formats import Format
from te_dist.fsdp2.check import check_gathered, local_part
from te_dist.kernels.runtime import is_recording, target_of
from te_dist.kernels.tape import Tapes
from te_dist.nn import activations, forgotten, lost_recipes, traced, traced_parallel
from te_dist.nn.answers import LINEAR, Answers, answers_of, check, requests_of, row_multiple
from te_dist.nn.fronts import FRONTS, Fronts
from te_dist.nn.graph_plans import MAKERS, name_for_graphs, plan_named, row_multiple_of
from te_dist.nn.passes import MAX_PLANNED, WITHOUT, WITHOUT_BESIDE, Latest, Moving, Pass, latest_of, note, planned_of
from te_dist.nn.plan import Plan, plan_by
from te_dist.nn.products import linear
from te_dist.ops._checks import HIGH_PRECISION
from te_dist.quantizers import IdentityQuantizer, Quantizer
from te_dist.recipe import Recipe
from te_dist.scaling.delayed import DelayedScalingState
from te_dist.scaling.history import DelayedScalingRequest
from te_dist.tensor import QuantizedStorage, QuantizedTensor, placement
from te_dist.tensor_parallel.cutting import placement_named
from te_dist.tensor_parallel.spread import PlacedQuantizer
from te_dist.tensor_parallel.traced import find_plans_by, is_fixed

_PassKey = tuple[torch.dtype, torch.device, Any, bool, torch.Size]
_numbers = count(1)
_WEIGHT_ONLY = Plan(IdentityQuantizer(), IdentityQuantizer(), IdentityQuantizer())
# Of inputs that were quantized ahead of the maps that take them, where their amax is.
_amaxes: WeakKeyDictionary[QuantizedStorage, Tensor] = WeakKeyDictionary()


class LinearSite(nn.Module):
    """One linear map of a module. Holds no weights: those are the module's own, under the names its users know.

    Attributes:
        name: for messages and for the roles that a `CustomRecipe` sees.
        in_features: K, columns of the weight.
        out_features: N, rows of the whole weight.
        place: these three as text, which compilers take for a constant; numbers that differ between sites they may not.
        graph_place: the same without a name that nobody chose, by which graphs tell maps apart, see `share_graphs`.
        number: higher than those of maps that this process made before; copies have that of the original.
        scaling: histories and scales of delayed scaling; None until a recipe asks for them.
        placed: (role, quantizer) -> the quantizer of a part that this rank holds; set by tensor parallelism.
        around: what ranks send each other around this map, see `tensor_parallel.sites.Around`; set with `placed`.
        takes_gathered: whether inputs are gathered as those of this map, by a module around it.
        fuses_wgrad: whether the gradient of the weight is added to its `main_grad` instead of being returned.
        made_quantized: whether weights of this map were.
    """

    module_type: ClassVar[str] = LINEAR
    num_groups: int = 1  # scales that delayed scaling keeps of a tensor

    scaling: DelayedScalingState | None
    handed: bool  # whether the latest pass handed its rows to the next map, see `fronts.hands_over`
    placed: Callable[[str, Quantizer], Any] | None = None
    around: Any = None
    takes_gathered: bool = False
    fuses_wgrad: bool = False
    made_quantized: bool = False
    number: int = 0  # of what was pickled before there were numbers

    def __init__(self, in_features: int, out_features: int, *, name: str) -> None:
        super().__init__()
        if min(in_features, out_features) < 0:
            raise ValueError(
                f"{name or 'Linear'}: in_features and out_features are 0 or more, got {in_features} and {out_features}"
            )
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.place = self.graph_place = repr((name, in_features, out_features))
        self.number = next(_numbers)
        self.register_module("scaling", None)

    def cut(self, placed: Any, around: Any) -> None:
        """Says which part of this map each rank has, and what these send each other."""
        self.placed, self.around = placed, around
        self.place, self.graph_place = (
            repr((*literal_eval(text), placed.text)) for text in (self.place, self.graph_place)
        )

    def share_graphs(self) -> None:
        """Leaves the name out of graphs by recipes that read none: maps of the same sizes share them then."""
        self.graph_place = repr(("", *literal_eval(self.place)[1:]))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **fronts: Unpack[Fronts]) -> Any:
        """(..., N) in the dtype of `x` (torch.autocast's inside of it).

        Inside of `autocast` all three products are computed by its recipe; a quantized weight is used in its own
        format. Outside, a plain weight gives a plain linear map, and a quantized weight stands for its values, which
        are multiplied with plain inputs and gradients.

        Args:
            x: (..., K), plain or quantized.
            weight: (N, K), plain or quantized, or a DTensor of either, of which the local part is used.
            bias: (N,) or None.
            fronts: see `Fronts`; inside of `autocast` they are computed on the way into quantizers. With `hands_to` the
                second of what is returned is None where the gradient is not found here: outside of `autocast`, and
                where a quantizer reads gradients more than once. What is handed over is none of a graph.

        Raises:
            ValueError: the extents of `x` and `weight` differ, the weight is on the meta device, or the recipe cannot
                compute this map.
            RuntimeError: the weight is a shard that FSDP2 has not gathered, or a DTensor whose gradient nobody sums.
        """
        front = fronts.get("front", "")
        if torch.compiler.is_compiling():
            assert not fronts.get("hands_to") and fronts.get("values") is None, "what is handed over is none of a graph"
            if self.around is not None and (out := self.around.in_graph(self, x, weight, bias)) is not None:
                return out
            if self._keeps_state(x, weight):
                return self._outside_of_graphs(x, weight, bias, front)
        elif self.around is not None and not is_recording():  # a rehearsal sends nothing
            x, weight, bias = given = self.around.before(self, x, weight, bias)
            return self.around.behind(self, given, self._multiplied(x, weight, bias, **fronts))
        return self._multiplied(x, weight, bias, **fronts)

    def among_ranks(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, plan: str, exchange: tuple[Any, ...]
    ) -> Tensor:
        """`forward` in a graph, by a plan of `graph_plan`, and the `traced_parallel.Exchange` around it."""
        x, weight, bias = self._local(x, weight, bias)
        traced.check_differentiable("a linear map", trains=self.training)
        return traced_parallel.linear(x, weight, bias, plan=plan, exchange=exchange)

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None, **fronts: Unpack[Fronts]) -> Any:
        x, weight, bias = self._local(x, weight, bias, front=fronts.get("front", ""))
        if torch.compiler.is_compiling():
            return self._in_graph(x, weight, bias, fronts.get("front", ""))
        return self._at_once(x, weight, bias, **fronts)

    def _local(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, front: str = ""
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What this rank multiplies, checked."""
        if isinstance(weight, DTensor):
            weight = local_part(self.name or "Linear", weight, is_cut=self.placed is not None)
        if isinstance(bias, DTensor):
            bias = local_part(self.name or "Linear", bias, is_cut=self.placed is not None)
        if self.made_quantized and not isinstance(weight, QuantizedTensor):
            check_gathered(weight)
            forgotten.warn_of_plain(self)
        if x.shape[-1] != weight.shape[-1] * (FRONTS[front].widens if front else 1):
            raise ValueError(
                f"{self.name or 'Linear'}: the input of shape {tuple(x.shape)} has {x.shape[-1]} columns, the weight "
                f"takes {weight.shape[-1]}"
            )
        if weight.is_meta and not is_recording():
            raise without_values(self.name or "Linear")
        return autocast_of_torch(x), weight, bias

    def __repr__(self) -> str:
        return super().__repr__() if self.scaling is not None else f"{type(self).__name__}()"

    @property
    def is_hooked(self) -> bool:
        """Whether something else than this map sees its input, tensor parallelism for instance."""
        return self.placed is not None or bool(self._forward_pre_hooks) or bool(self._forward_hooks)

    def _at_once(self, x: Tensor, weight: Tensor, bias: Tensor | None, **fronts: Unpack[Fronts]) -> Any:
        values, front = fronts.get("values"), fronts.get("front", "")
        plan = self.plan(x if values is None else values, weight)
        if plan is not None:
            if plan.fuses_wgrad:
                check_reduced("fuse_wgrad_accumulation", self.name or "Linear")
            if fronts.get("hands_to") and not plan.reads_gradients_once:
                return linear(x, weight, bias, plan=plan, front=front, values=values), None
            return linear(x, weight, bias, plan=plan, **fronts)
        x = activations.find(front)(x) if front else x
        if isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor):
            out = linear(x, weight, bias, plan=_WEIGHT_ONLY)
        else:
            out = _plain(x, weight, bias)
        return (out, None) if fronts.get("hands_to") else out

    def _keeps_state(self, x: Tensor, weight: Tensor) -> bool:
        """Whether this map is none of a graph. Asked of parameters as they are: no graph may give their parts back."""
        return self.placed is not None or self._needs_more(x, weight)

    def _needs_more(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a pass needs more than a graph holds, on whichever ranks the map is."""
        is_symbolic = isinstance(x, QuantizedTensor) and not is_fixed(x)
        return self.fuses_wgrad or is_symbolic or not traced.holds(weight, multiplies=x.requires_grad)

    def _in_graph(self, x: Tensor, weight: Tensor, bias: Tensor | None, front: str) -> Tensor:
        """As `_at_once`, see [Note: Compiled linear maps]."""
        state, is_quantized = current_autocast(), isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor)
        name, trains = state.name, self.training or torch.is_grad_enabled()
        if not name and trains:
            lost_recipes.refuse_again(self.graph_place)
        if not name and front:
            x, front = activations.find(front)(x), ""
        if not name and not is_quantized:
            return _plain(x, weight, bias)
        plan = self._name_of_plan(x, weight)
        if plan is None:
            return self._outside_of_graphs(x, weight, bias, front)
        traced.check_differentiable("a linear map", trains=self.training)
        return traced.linear(x, weight, bias, plan=plan, front=front)

    def _name_of_plan(self, x: Tensor, weight: Tensor) -> str | None:
        state, trains = current_autocast(), self.training or torch.is_grad_enabled()
        places = self.graph_place if state.is_uniform else self.place, self.graph_place
        return name_for_graphs(LINEAR, state.name, places, dtype=x.dtype, device=weight.device, trains=trains)

    def fits_in_graph(self, plan: str, rows: int) -> bool:
        """Whether products take as many rows, by a plan of `graph_plan`."""
        return rows % row_multiple_of(plan) == 0

    def graph_plan(self, x: Tensor, weight: Tensor) -> str:
        """Name of the plan by which a graph that is being traced computes this map, cut over ranks or not.

        "" where it is computed outside of the graph; outside of `autocast` too.
        """
        if not current_autocast().name or traced.is_exporting() or self._needs_more(x, weight):
            return ""
        return self._name_of_plan(autocast_of_torch(x), weight) or ""

    @torch.compiler.disable(
        reason="this map keeps state in Python (delayed scaling, tensor parallelism, main gradients), its input is "
        "quantized and its length a symbol, its weight lacks what backward multiplies (FSDP2 gathers a direction for "
        "each pass), or it is cut over ranks and runs outside of autocast, as torch's checkpoint runs it again unless "
        "context_fn=te_dist.recompute.context_fn. Take Float8CurrentScaling or another recipe without histories, "
        "reshard_after_forward=False, autocast, what docs/tensor_parallel.md has, or no fullgraph=True"
    )
    def _outside_of_graphs(self, x: Tensor, weight: Tensor, bias: Tensor | None, front: str) -> Tensor:
        traced.check_not_exported(self.name or "Linear", current_autocast().recipe)
        out = LinearSite.forward(self, x, weight, bias, front=front)
        lost_recipes.outside_of_graph(self.graph_place, out, trains=self.training)
        return out

    def plan(self, x: Tensor, weight: Tensor, *, notes: bool = True) -> Plan | None:
        """How the products of `x` and `weight` are computed at this moment; None outside of `autocast`.

        A forward pass that torch's own checkpoint runs again, in backward and so outside of the `autocast` of the first
        one, is computed as the latest one was, see [Note: Which pass runs again]. `te_dist.checkpoint` restores the
        very one.

        Args:
            notes: whether this is the pass itself; False where those ask who send its operands.

        Raises:
            RuntimeError: a pass is run again, and there were others behind the first that ran otherwise.
        """
        latest, is_repeated = latest_of.get(self), _torch_private.in_backward()
        state = self._repeated(latest, notes=notes) if is_repeated else current_autocast()
        notes = notes and not is_repeated
        if state.recipe is None:
            if notes:
                forgotten.warn(weight, self)
                # What ran without a recipe before compiled maps ran by one may have run by one since, compiled itself.
                note(self, WITHOUT_BESIDE if lost_recipes.waits(self.graph_place) else WITHOUT, latest)
            return None
        key = (x.dtype, weight.device, self.placed, self.fuses_wgrad, placement.local_tensor(weight).shape[-2:])
        found = None if latest is None else latest.found
        if found is None or found.key != key or (found.state is not state and found.state != state):
            found = self._planned(state, key)
            if isinstance(weight, QuantizedTensor):
                assert found.plan is not None  # by a recipe
                made = found.plan.weight.declare(weight.dtype)
                forgotten.warn_of_another(weight, made, recipe=state.recipe, site=self)
        if notes:
            note(self, found, latest)
        return self._with_histories(found, x, weight) if found.requests else found.plan

    def _repeated(self, latest: Latest | None, *, notes: bool) -> Autocast:
        """What surrounded the pass that is run again in backward."""
        said = repeated_autocast()
        if said is not None:
            return said
        if latest is None or latest.found is WITHOUT:
            lost_recipes.check(self.graph_place)
        if latest is None:
            return current_autocast()
        if latest.overtaken is not None:
            latest.overtaken = None  # the backward pass that others wait for ends here
            raise lost_recipes.lost(self.place, "and passes followed the first that ran otherwise")
        if notes:
            latest.run_again()
        return latest.found.state

    def quantized_ahead(self, x: QuantizedTensor) -> None:
        """Says that `x` was quantized as the input of this map, by a plan of it with histories.

        Maps that take it, and train, have its amax in their histories too, as if they had quantized it.
        """
        if (amax := self._input_amax()) is not None:
            _amaxes[x.storage] = amax

    def _input_amax(self) -> Tensor | None:
        """Where the amax of inputs is recorded; None where no history is kept of them."""
        found = {} if self.scaling is None else self.scaling.quantizers(records=True)
        return found["input"].amax if "input" in found else None

    def prepare(self, recipe: Recipe, device: torch.device) -> Answers:
        """Makes what this map keeps under `recipe` and checks that `device` can compute it; the answers by role."""
        answers = answers_of(recipe, self.name, self.module_type)
        if device.type != "meta":
            self.check(recipe, target_of(device))
        self._histories(requests_of(answers), device)
        return answers

    def check(self, recipe: Recipe, target: str) -> None:
        """Raises where this map cannot be computed by `recipe` on a target, see `target_of`."""
        check(recipe, (self.name, self.in_features, self.out_features), target)

    def row_multiple(self, recipe: Recipe, dtype: torch.dtype, target: str) -> int:
        """See `Plan.row_multiple`."""
        return row_multiple(recipe, self.name, dtype, target=target)

    def weight_format(self, recipe: Recipe, weight: Tensor) -> Format:
        """The format of a parameter with the values of `weight`.

        Raises:
            ValueError: the weight's columnwise direction would have to be requantized from the rowwise one, which
                those who update shards do not do.
        """
        quantizer = self.prepare(recipe, weight.device)["weight"]
        assert isinstance(quantizer, Quantizer)  # weights have no history
        if getattr(quantizer, "columnwise_source", "original") != "original":
            raise ValueError(
                f"{self.name or 'Linear'}: a quantized parameter is updated from its masters, "
                'columnwise_source="original"; '
                "leave its weight plain (quantized_model_init(enabled=False)) to quantize it by rowwise values"
            )
        return quantizer.format(weight.dtype)

    def _planned(self, state: Autocast, key: _PassKey) -> Pass:
        """A pass that was planned before, with its tapes, or a new one: training and evaluation may take turns."""
        passes = planned_of.setdefault(self, [])
        found = next((each for each in passes if each.key == key and each.state == state), None)
        if found is None:
            found = self._plan(state, key)
            passes.append(found)
            del passes[:-MAX_PLANNED]
        return found

    def _plan(self, state: Autocast, key: _PassKey) -> Pass:
        dtype, device, placed, fuses, features = key
        if dtype not in HIGH_PRECISION:
            raise ValueError(
                f"{self.name or 'Linear'}: an input of {dtype} cannot be quantized; convert it to float32, bfloat16 or "
                "float16 first"
            )
        recipe = state.recipe
        assert recipe is not None, "outside of autocast there is nothing to plan"
        answers = self.prepare(recipe, device)
        requests = requests_of(answers)
        quantizers = {kind: None if kind in requests else answer for kind, answer in answers.items()}
        if placed is not None:
            quantizers |= {kind: placed(kind, found) for kind, found in quantizers.items() if found is not None}
        multiple = self.row_multiple(recipe, dtype, target_of(device))
        options = dict[str, Any](features=features, row_multiple=multiple, fuses_wgrad=fuses)
        plan = plan_by(recipe, self.module_type, quantizers, **options)
        # Quantizers of parts that ranks hold know their ranks.
        tapes = plan.tapes if placed is None else Tapes()
        return Pass(state, key, replace(plan, scaled_by=state.amax_reduction_group, tapes=tapes), requests, {})

    def _with_histories(self, current: Pass, x: Tensor, weight: Tensor) -> Plan:
        """The plan of a pass that uses, and in training moves, the histories of this map."""
        kind = "GroupedLinear" if self.num_groups > 1 else "Linear"
        traced.check_not_exported(self.name or kind, current.state.recipe)
        scaling = self._histories(current.requests, weight.device)
        records = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        is_repeated = _torch_private.in_backward()
        if records:
            scaling.take_part(current.state.amax_reduction_group)
            if isinstance(x, QuantizedTensor) and (its := _amaxes.get(x.storage)) is not None:
                self._record(its)
        # NOTE: without gradients too, where a backward pass inside of this one is to run it again once more.
        scaling.move_when_backward_ends() if is_repeated else scaling.begin_pass()
        # What runs again in backward has its histories moved by the end of that backward pass.
        moves = records and not is_repeated
        known, scale, running = current.moving.get((records, moves)), scaling.scale, scaling.running
        addresses = scale.data_ptr(), running.data_ptr()
        if known is None or known.scale is not scale or known.running is not running or known.addresses != addresses:
            assert current.plan is not None  # by a recipe
            plan = self._moving(current.plan, scaling, records=records)
            # NOTE: that of a pass that runs again as well, which selective checkpointing wants to call no other ops.
            for its in {moves, False}:
                its_plan = replace(plan, moves=scaling if its else None)
                current.moving[records, its] = Moving(scale, running, addresses, its_plan)
            known = current.moving[records, moves]
        return known.plan

    def _record(self, given: Tensor) -> None:
        own = self._input_amax()
        if own is not None and own.data_ptr() != given.data_ptr():
            with torch.no_grad():
                torch.maximum(own, given, out=own)

    @torch.inference_mode(False)  # what an evaluation came upon first, a later step writes into
    def _moving(self, plan: Plan, scaling: DelayedScalingState, *, records: bool) -> Plan:
        quantizers: dict[str, Any] = scaling.quantizers(records=records)
        held = tuple(t for found in quantizers.values() for t in (found.scale, found.amax) if t is not None)
        if self.placed is not None:
            quantizers = {kind: self.placed(kind, quantizer) for kind, quantizer in quantizers.items()}
        return replace(plan, **quantizers, tensors=held)

    def _histories(self, requests: Mapping[str, DelayedScalingRequest], device: torch.device) -> Any:
        """The state that keeps what was asked for, made where there is none; None where nothing was."""
        if not requests:
            return None
        if self.scaling is None:
            with torch.inference_mode(False):  # a later step writes into what an evaluation came upon first
                options = {"device": device, "num_groups": self.num_groups, "number": self.number}
                self.scaling = DelayedScalingState(requests, **options)
        if self.scaling.requests != requests:
            raise ValueError(
                f"{self.name or 'Linear'} keeps histories for {self.scaling.requests}, the recipe asks for "
                f"{requests}; use one delayed recipe throughout, or set .scaling to None to start anew"
            )
        return self.scaling


def check_reduced(option: str, label: str) -> None:
    """Raises ValueError inside of a DistributedDataParallel, for an option by which gradients are written by hand."""
    if torch.is_grad_enabled() and _torch_private.in_ddp_forward():
        raise ValueError(
            f"{label}: DistributedDataParallel reduces the gradients that backward returns, and would never see those "
            f"of {option}; leave it out"
        )


def without_values(label: str) -> ValueError:
    """The error of a module that is run on the meta device's weights."""
    return ValueError(
        f"{label}: the weights are on the meta device and have no values; call te_dist.fsdp2.materialize(model, "
        "device=..., seed=...) first"
    )


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _plan_in_graph(recipe: Recipe | None, place: str, dtype: torch.dtype, target: str) -> Plan | None:
    """See `graph_plans.MAKERS`."""
    if recipe is None:
        return _WEIGHT_ONLY
    name, in_features, out_features, *cut = literal_eval(place)
    features = in_features, out_features
    answers = answers_of(recipe, name, LINEAR)
    check(recipe, (name, *features), target)
    if requests_of(answers):
        return None
    multiple = row_multiple(recipe, name, dtype, target=target)
    if not cut:
        return plan_by(recipe, LINEAR, answers, features=features, row_multiple=multiple)
    placed = placement_named(*cut)
    quantizers = {role: placed(role, quantizer) for role, quantizer in answers.items()}
    if not all(each.is_alike(dtype) for each in quantizers.values() if isinstance(each, PlacedQuantizer)):
        return None  # see [Note: Parallel layers in graphs]
    plan = plan_by(recipe, LINEAR, quantizers, features=features, row_multiple=multiple)
    return replace(plan, tapes=Tapes(), cut_over=placed.group)  # whose quantizers know their ranks


MAKERS[LINEAR] = _plan_in_graph
find_plans_by(plan_named)
