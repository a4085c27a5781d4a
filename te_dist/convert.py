"""Linear modules and experts of a model that somebody else wrote, exchanged for te_dist's by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from te_dist.context import Scope, quantized_model_init
from te_dist.nn import Linear
from te_dist.nn.module import QuantizedModule, weight_of
from te_dist.nn.moe.foreign import holds_experts, named_by, routers, why_no_twin
from te_dist.nn.moe.stacked import NAMES, StackedExperts
from te_dist.nn.site import LinearSite
from te_dist.ops.gemm_float8_tensor import MULTIPLE
from te_dist.recipe import Recipe
from te_dist.tensor.exchanged import note_exchanged

_IN_PLACE = "these are the modules that it made, by name; the model is changed in place, go on with that"
_OF_LINEAR = frozenset(vars(nn.Linear(1, 1, device="meta")))  # attributes that every one has
_OF_MODULES = frozenset(vars(nn.Module()))


class Exchanged(dict[str, QuantizedModule]):
    """New modules by name. Whoever takes it for the model is told where that is."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"convert: what it returned has no {name!r}: {_IN_PLACE}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"convert: what it returned is called: {_IN_PLACE}")


def convert(
    model: nn.Module, plan: Mapping[str, Recipe | None], *, preserve_high_precision_init_val: bool = False
) -> Exchanged:
    """Exchanges modules of `model`, in place, whose names fit a pattern for te_dist's of the same parameters and names.

        convert(model, {"model.layers.*": recipe.Float8BlockScaling()})

    Each `torch.nn.Linear` for a `te_dist.Linear`, and each module of stacked experts that computes what
    `te_dist.nn.moe.StackedExperts` does (it is tried with small matrices) for one of these. What no pattern fits stays
    as it is, in high precision also inside of `autocast`: a head, for example. So do routers, that is linear maps
    beside experts, or in modules beside them, with an output for each expert, and maps with fewer than 16 outputs, such
    as the gate of a shared expert: wildcards do not fit these, only a pattern that is the whole name. A warning names
    those that stay.

    Parameters that stay plain stay the same objects: optimizers and ties made before hold. Those that become quantized
    are new ones; make the optimizer afterwards: one that was made before refuses to step. Attributes that were added to
    a module, or to a weight, come along; other additions are refused, as they would be lost.

    Args:
        model: on any device, also meta; before it is sharded.
        plan: name patterns (as of a shell; `*` also matches dots) -> the recipe in whose format the weights are
            quantized, or None for plain ones, which products inside of `autocast` quantize each time. The first pattern
            that fits a module counts.
        preserve_high_precision_init_val: keep the values before quantization on the CPU (those of weights that lie
            there without a copy: clone what is changed in place) until the optimizer begins its masters with them, as
            `quantized_model_init` does.

    Returns:
        The new modules by name.

    Raises:
        TypeError: `plan` is no mapping, or holds something else than recipes and None.
        ValueError: a pattern fits no module, or none that patterns before it leave; the model is such a module itself,
            a weight to be quantized is tied to another module (the same parameter, or one that begins at the same place
            in memory) or has hooks, the model is sharded already, or in DistributedDataParallel, features do not fit
            the recipe, a module has hooks, of whatever kind, a `torch.nn.Linear` has parameters, buffers or modules
            beside weight and bias, or attributes under names that te_dist uses, experts have any of these that are not
            of their class, or a recipe is meant for a dtype that cannot be quantized or for experts that compute
            something else. The model is unchanged then.
    """
    kept = _kept(model)
    chosen = _choose(model, plan, kept)
    _warn_of_plain(model, plan)
    _warn_of_kept(kept - chosen.keys(), plan)
    init = partial(quantized_model_init, preserve_high_precision_init_val=preserve_high_precision_init_val)
    made = {
        name: _made_of(model.get_submodule(name), name, None if recipe is None else init(recipe=recipe))
        for name, recipe in chosen.items()
    }
    for name, module in made.items():
        parent, _, leaf = name.rpartition(".")
        if chosen[name] is not None:
            for key, weight in _weights(model.get_submodule(name)).items():
                note_exchanged(weight, f"{name}.{key}", "te_dist.convert")
        setattr(model.get_submodule(parent), leaf, module)
    _leave_fast_paths(model)
    return Exchanged(made)


def _leave_fast_paths(model: nn.Module) -> None:
    """In evaluation torch's encoders would read the weights of what was exchanged themselves, past the modules."""
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and Linear in {type(layer.linear1), type(layer.linear2)}:
            layer.activation_relu_or_gelu = 0
            for encoder in encoders:
                encoder.use_nested_tensor &= all(each is not layer for each in encoder.layers)


def _kept(model: nn.Module) -> set[str]:
    """Names of linear maps that only their whole names choose: scores decide where tokens go, and fewer outputs than
    what products of FP8 take multiples of are none of theirs."""
    scores = routers(model)
    return {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and (module.out_features < MULTIPLE or id(module) in scores)
    }


def _choose(model: nn.Module, plan: Mapping[str, Recipe | None], kept: set[str]) -> dict[str, Recipe | None]:
    """By name of a module, what the first pattern that fits it says; none but its name fits one of `kept`."""

    def fits(name: str, pattern: str) -> bool:
        return name == pattern if name in kept else fnmatchcase(name, pattern)

    wrong: object = plan
    if isinstance(plan, Mapping):
        wrong = {pattern: given for pattern, given in plan.items() if not isinstance(given, Recipe | None)}
    if wrong != {}:
        raise TypeError(
            f"convert: plan: got {wrong!r}, wanted patterns of module names with a recipe or None for each, such as "
            '{"model.layers.*": recipe.Float8BlockScaling()}'
        )
    if _is_exchanged(model):
        raise ValueError(
            f"the model is a {type(model).__name__} itself, with no parent to hold another; make a te_dist.Linear or a "
            "te_dist.nn.moe.StackedExperts"
        )
    names = [name for name, module in model.named_modules(remove_duplicate=False) if _is_exchanged(module)]
    unused = [pattern for pattern in plan if not any(fits(name, pattern) for name in names)]
    for pattern in unused:
        told = sorted(name for name in kept if fnmatchcase(name, pattern))
        if told:
            raise ValueError(
                f"all that {pattern!r} fits and is still to be converted are routers, or maps with fewer than "
                f"{MULTIPLE} outputs: {_some(told)}; they stay as they are without a pattern, and only whole "
                "names choose them"
            )
    if unused:
        raise ValueError(
            f"nothing that is still to be converted, no torch.nn.Linear and no experts, is named {unused}; names are "
            f"{_some(names)}"
        )
    first = {name: next((pattern for pattern in plan if fits(name, pattern)), None) for name in names}
    hidden = [pattern for pattern in plan if pattern not in first.values()]
    if hidden:
        raise ValueError(
            f"all that {hidden} fit in the plan is taken by patterns before them, which count; put them first, or "
            "leave them out"
        )
    chosen = {
        name: plan[pattern]
        for name, pattern in first.items()
        if pattern is not None and _can_be_exchanged(model.get_submodule(name), name, plan[pattern])
    }
    _check(model, chosen)
    return chosen


def _check(model: nn.Module, chosen: Mapping[str, Recipe | None]) -> None:
    """Raises where something would be lost, or come apart."""
    users: dict[tuple[bool, int], list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        users.setdefault(_place(param), []).append(name)
    wrapped = tuple(f"{n}." if n else "" for n, m in model.named_modules() if isinstance(m, DistributedDataParallel))
    bad = next((name for name, recipe in chosen.items() if recipe is not None and name.startswith(wrapped)), None)
    if bad is not None:
        raise ValueError(
            f"{bad} is in DistributedDataParallel already, which would reduce the gradient of a parameter that is no "
            "longer there; convert the model before wrapping it"
        )
    for name, recipe in chosen.items():
        module = model.get_submodule(name)
        if any(isinstance(param, DTensor) for param in module.parameters(recurse=False)):
            raise ValueError(f"{name} is sharded already; convert the model before sharding it")
        added = _additions(module)
        if added:
            raise ValueError(
                f"{name}: got a {type(module).__name__} with {', '.join(added)}, wanted one without, since these would "
                "be lost; add them after te_dist.convert, or choose patterns that do not fit its name"
            )
        for key, weight in _weights(module).items():
            if recipe is None:
                continue
            if len(users[_place(weight)]) > 1:
                raise ValueError(
                    f"{name}.{key} is tied, as {users[_place(weight)]}; leave it out by patterns that do not fit it, "
                    "as a head mostly is, give it None in the plan, or untie it, to quantize it"
                )
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                raise ValueError(
                    f"{name}.{key}: got a parameter with hooks, wanted one without, since these would be lost; add "
                    "them to the quantized weight after te_dist.convert, or give it None in the plan"
                )


def _place(param: Tensor) -> tuple[bool, int]:
    """What parameters that are tied have in common: where their values begin, or, if nothing tells, the object."""
    is_plain = type(param) is nn.Parameter and param.layout is torch.strided
    address = param.data_ptr() if is_plain else 0  # of those on meta, and of empty ones, 0 too
    return address != 0, address or id(param)


def _warn_of_plain(model: nn.Module, plan: Mapping[str, Recipe | None]) -> None:
    """Where patterns with a recipe fit modules of te_dist that were made plain, which are none to be exchanged."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
        and not module.exchanged
        and any(isinstance(site, LinearSite) and not site.made_quantized for site in module.children())
        and next((recipe for pattern, recipe in plan.items() if fnmatchcase(name, pattern)), None) is not None
    ]
    if names:
        warnings.warn(
            f"te_dist.convert leaves modules of te_dist as they are: {_some(names)} were made with plain weights, "
            "which are quantized in each pass; make them inside of quantized_model_init",
            stacklevel=3,
        )


def _warn_of_kept(kept: set[str], plan: Mapping[str, Recipe | None]) -> None:
    """Where patterns look as if they were meant for what only whole names choose."""
    names = sorted(name for name in kept if any(fnmatchcase(name, pattern) for pattern in plan))
    if names:
        warnings.warn(
            f"te_dist.convert leaves routers, and maps with fewer than {MULTIPLE} outputs, as they are: "
            f"{_some(names)} stay in high precision; give a whole name in the plan to exchange one all the same",
            stacklevel=3,
        )


def _some(names: list[str]) -> str:
    return f"{names[:8]}{' ...' if names[8:] else ''}"


def _is_exchanged(module: nn.Module) -> bool:
    """Whether a pattern is meant for this module."""
    # NOTE: subclasses of nn.Linear are left alone: their owners (nn.MultiheadAttention) read the weight themselves.
    return type(module) is nn.Linear or holds_experts(module)


def _can_be_exchanged(module: nn.Module, name: str, recipe: Recipe | None) -> bool:
    """Whether there is something to take its place; raises where a recipe is meant for what would stay as it is."""
    dtype = module.weight.dtype if isinstance(module, nn.Linear) else next(module.parameters()).dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        if recipe is not None:
            raise ValueError(
                f"{name}: got weights of {dtype}, wanted float32, bfloat16 or float16 to quantize; give it None in the "
                "plan, before the pattern that fits it, to leave it as it is"
            )
        return False
    why = None if type(module) is nn.Linear else why_no_twin(module)
    if why is not None and recipe is not None:
        raise ValueError(
            f"{name}: the matrices of {type(module).__name__} would stay in {dtype}, since "
            f"te_dist.nn.moe.StackedExperts cannot take its place: {why}. Give it None in the plan, before the pattern "
            "that fits it, to leave it as it is; or build the model with te_dist.nn.MoE"
        )
    return why is None


def _additions(module: nn.Module) -> list[str]:
    """What somebody has given to a module and would not come along."""
    found = [
        key.strip("_") + (name and f" of {name}")
        for name, part in module.named_modules()
        for key in vars(nn.Module())
        if key.endswith("_hooks") and vars(part).get(key)
    ]
    own = ("forward", "weight", "bias") if isinstance(module, nn.Linear) else ("forward", *NAMES)
    found += [f"a {key} in the place of its own" for key in own if key in vars(module)]
    its: set[str] = set()  # modules such as activations, which its class makes
    if isinstance(module, nn.Linear):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        found += [f"parameter {name}" for name, _ in parameters if name not in ("weight", "bias")]
    else:
        its = named_by(type(module))
    found += [f"buffer {name}" for name, _ in module.named_buffers()]
    return found + [f"module {name}" for name, _ in module.named_children() if name not in its]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """What is quantized of a module that is exchanged."""
    names = ("weight",) if isinstance(module, nn.Linear) else NAMES
    return {name: module.get_parameter(name) for name in names}


def _made_of(old: nn.Module, name: str, quantized: Scope | None) -> QuantizedModule:
    """What takes the place of `old`; its weights are made inside of `quantized`, or stay plain where that is None."""
    new: Linear | StackedExperts
    if isinstance(old, nn.Linear):
        new = Linear(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,
            params_dtype=old.weight.dtype,
            device="meta",
            name=name,
        )
        new.bias = old.bias
        _bring_along({key: value for key, value in vars(old).items() if key not in _OF_LINEAR}, old, new, name)
        sites = {"weight": new.gemm}
    else:
        down = old.get_parameter(NAMES[1])
        new = StackedExperts(*_sizes(down), params_dtype=down.dtype, device="meta", name=name)
        added = {key: value for key, value in vars(old).items() if key not in _OF_MODULES}
        for key in named_by(type(old)) & {key for key, value in added.items() if _stays_behind(value, key, old, new)}:
            del added[key]  # its class has made it for itself
        _bring_along(added, old, new, name)
        sites = dict(zip(NAMES, (new.fc1, new.fc2), strict=True))
    for site in sites.values():
        site.share_graphs()
    for key, weight in _weights(old).items():
        if quantized is None:
            setattr(new, key, weight)
            continue
        with quantized:
            setattr(new, key, weight_of(sites[key], weight.detach()))
        made = new.get_parameter(key).requires_grad_(weight.requires_grad)
        if issubclass(type(weight), nn.Parameter):  # what others hold are parts of the tensor
            _bring_along(vars(weight), weight, made, f"{name}.{key}")
    new.exchanged = (_without_values(old),)
    return new.train(old.training)


def _bring_along(added: Mapping[str, Any], old: object, new: object, name: str) -> None:
    """Gives `new` the attributes that somebody has added to `old`."""
    bad = [key for key, value in added.items() if _stays_behind(value, key, old, new)]
    if bad:
        raise ValueError(
            f"{name}: got attributes {bad}, wanted none that {type(new).__name__} has under the same name, or that are "
            "methods of what it takes the place of; take them away before te_dist.convert, or choose patterns that do "
            "not fit"
        )
    vars(new).update(added)


def _stays_behind(value: object, key: str, old: object, new: object) -> bool:
    """Whether an attribute is of no use to `new`: one that it has itself, or a method of what it replaces."""
    return hasattr(new, key) or getattr(value, "__self__", None) is old


def _without_values(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device."""
    found = copy.copy(module)
    found._parameters = {
        name: None if param is None else nn.Parameter(torch.empty_like(param, device="meta"))
        for name, param in module._parameters.items()
    }
    return found


def _sizes(down: Tensor) -> tuple[int, int, int]:
    """(num_experts, hidden_dim, intermediate_dim)."""
    num, hidden, inner = down.shape
    return num, hidden, inner
