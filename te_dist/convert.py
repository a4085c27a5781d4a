"""Linear modules of a model that somebody else wrote, exchanged for te_dist's by name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor

from te_dist.context import quantized_model_init
from te_dist.nn import Linear
from te_dist.nn.module import weight_of
from te_dist.recipe import Recipe


def convert(model: nn.Module, plan: Mapping[str, Recipe | None]) -> dict[str, Linear]:
    """Exchanges each `torch.nn.Linear` whose name fits a pattern for a `te_dist.Linear` of the same parameters.

        convert(model, {"lm_head": None, "model.layers.*": recipe.Float8BlockScaling()})

    Parameters that stay plain stay the same objects: optimizers and ties made before hold. Those that become quantized
    are new ones; make the optimizer afterwards.

    Args:
        model: on any device, also meta; before it is sharded.
        plan: name patterns (as of a shell; `*` also matches dots) -> the recipe in whose format the weight is
            quantized, or None for a plain one. The first pattern that fits a module counts.

    Returns:
        The new modules by name.

    Raises:
        ValueError: a pattern fits no module, the model is a `torch.nn.Linear` itself, a weight to be quantized is tied
            to another module, the model is sharded already, or features do not fit the recipe. The model is unchanged
            then.
    """
    chosen = _choose(model, plan)
    made = {name: _made_of(model.get_submodule(name), name, recipe) for name, recipe in chosen.items()}
    for name, module in made.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    return made


def _choose(model: nn.Module, plan: Mapping[str, Recipe | None]) -> dict[str, Recipe | None]:
    """By name of a module, what the first pattern that fits it says."""
    # NOTE: subclasses of nn.Linear are left alone: their owners (nn.MultiheadAttention) read the weight themselves.
    if type(model) is nn.Linear:
        raise ValueError("the model is a torch.nn.Linear itself, with no parent to hold another; make a te_dist.Linear")
    names = [name for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear]
    unused = [pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise ValueError(f"no torch.nn.Linear is named {unused}; names are {names[:8]}{' ...' if names[8:] else ''}")
    chosen = {}
    for name in names:
        fitting = [recipe for pattern, recipe in plan.items() if fnmatchcase(name, pattern)]
        if fitting:
            chosen[name] = fitting[0]
    users: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(param), []).append(name)
    for name, recipe in chosen.items():
        weight = model.get_submodule(name).weight
        if isinstance(weight, DTensor):
            raise ValueError(f"{name}.weight is sharded already; convert the model before sharding it")
        if recipe is not None and len(users[id(weight)]) > 1:
            raise ValueError(
                f"{name}.weight is tied, as {users[id(weight)]}; give it None in the plan, or untie it, to quantize it"
            )
    return chosen


def _made_of(old: nn.Module, name: str, recipe: Recipe | None) -> Linear:
    assert isinstance(old, nn.Linear)
    new = Linear(
        old.in_features,
        old.out_features,
        bias=old.bias is not None,
        params_dtype=old.weight.dtype,
        device="meta",
        name=name,
    )
    new.bias = old.bias
    if recipe is None:
        new.weight = old.weight
    else:
        with quantized_model_init(recipe=recipe):
            new.weight = weight_of(new.gemm, old.weight.detach())
        new.weight.requires_grad_(old.weight.requires_grad)
    return new.train(old.training)
