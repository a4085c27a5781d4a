"""Experts of models that somebody else wrote: found by their shapes, known by what they compute; and their routers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_dist.nn import Linear
from te_dist.nn.module import QuantizedModule
from te_dist.nn.moe.experts import GroupedMLP
from te_dist.nn.moe.stacked import NAMES, StackedExperts

_MATRICES = 3  # dimensions of a parameter that stacks them
_SMALL = 1 << 18  # values of a parameter that is tried as large as it is
_HIDDEN, _INNER = 48, 80  # columns of the maps that are tried else
_TOKENS, _CHOICES = 8, 2
_TOLERANCE = 1e-3  # relative, of a row in fp32


def holds_experts(module: nn.Module) -> bool:
    """Whether a module looks as if it held matrices of several experts, of whatever kind."""
    kind = type(module)
    if isinstance(module, QuantizedModule) or kind.__module__.split(".")[0] == "torch":
        return False
    stacks = _stacks(module)
    alike = len(stacks) > 1 and len({p.shape[0] for p in stacks}) == 1
    return bool(stacks) and (alike or "expert" in kind.__name__.lower())


def routers(model: nn.Module) -> set[int]:
    """Ids of linear maps whose outputs are the scores of experts.

    These are beside experts, or in a module that is, have an output for each, and none of the maps that they are kept
    with reads as many values, as the second map of a shared expert does that is as wide as there are experts.
    """
    found: set[int] = set()
    for parent in model.modules():
        children = dict(parent.named_children())
        numbers = {name: _num_experts(name, child) for name, child in children.items()}
        beside = [child for name, child in children.items() if not numbers[name]]
        for number in filter(None, set(numbers.values())):
            inside = (list(module.children()) for child in beside for module in child.modules())
            for together in (beside, *inside):
                maps = [module for module in together if isinstance(module, nn.Linear | Linear)]
                scores = [each for each in maps if each.out_features == number]
                if all(each in scores or each.in_features != number for each in maps):
                    found.update(map(id, scores))
    return found


def _num_experts(name: str, module: nn.Module) -> int:
    """How many experts a child of this name holds, quantized or not; 0 where it is none that holds any."""
    if isinstance(module, StackedExperts):
        return module.num_experts
    if isinstance(module, GroupedMLP):
        return module.fc1.num_gemms
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        kinds = {type(each).__name__ for each in module.children()}
        return len(module) if any("expert" in text.lower() for text in (name, *kinds)) else 0
    return _stacks(module)[0].shape[0] if holds_experts(module) else 0


def _stacks(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of a module that stack matrices of several experts."""
    parameters = module.parameters(recurse=False)
    return [p for p in parameters if p.dim() == _MATRICES and p.shape[0] > 1 and p.is_floating_point()]


def named_by(kind: type) -> set[str]:
    """What the code of a class names, and of those that it is derived from but for torch's: its attributes and more."""
    return {
        name
        for base in kind.__mro__
        if base.__module__.split(".")[0] not in ("torch", "builtins")
        for value in vars(base).values()
        for function in _functions(value)
        for name in function.__code__.co_names
    }


def _functions(value: Any) -> Iterator[Callable[..., Any]]:
    """What a member of a class calls: a function, also of a property, and the ones that it wraps."""
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    while function is not None:
        if hasattr(function, "__code__"):
            yield function
        function = getattr(function, "__wrapped__", None)


def why_no_twin(module: nn.Module) -> str | None:
    """Why `StackedExperts` cannot take the place of a module that holds experts; None where it can.

    It is called in training and in evaluation, with a few tokens and small matrices of its own, and has to give what
    `StackedExperts` would, in training with the gradients: names alone do not tell which activation it has, and where
    the gates lie.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if set(shapes) != set(NAMES):
        return f"its parameters are {sorted(shapes)}, wanted {sorted(NAMES)}"
    (num, hidden, inner), down = (shapes[NAMES[1]]), shapes[NAMES[0]]
    if down != (num, 2 * inner, hidden):
        return (
            f"gate_up_proj is {down} beside a down_proj of {shapes[NAMES[1]]}, wanted (experts, 2 F, H) and "
            "(experts, H, F)"
        )
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return _tried(module, num, hidden, inner)
    finally:
        for part, mode in modes.items():
            part.training = mode


def _tried(module: nn.Module, num: int, hidden: int, inner: int) -> str | None:
    """What is different about the results of a trial; None where nothing is."""
    twin = copy.copy(module)
    if num * hidden * inner > _SMALL:
        small_inner = _INNER if inner != hidden else _HIDDEN
        small_hidden = _HIDDEN if hidden != 2 * inner else 2 * small_inner
        small = {2 * inner: 2 * small_inner, hidden: small_hidden, inner: small_inner}
        vars(twin).update(
            {key: small[value] for key, value in vars(twin).items() if type(value) is int and value in small}
        )
        # An attribute of this value may be any of them: as many experts as columns stay so.
        num, hidden, inner = small.get(num, num), small_hidden, small_inner
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    # Rows from small to large: activations differ near zero, and where they are cut off.
    sizes = torch.logspace(-1, 3, _TOKENS, device="cpu")[:, None]
    chosen = torch.rand(_TOKENS, num, generator=generator, device="cpu").argsort(1)[:, :_CHOICES]
    operands = {
        "the tokens": normal(_TOKENS, hidden) * sizes,
        "their weights": normal(_TOKENS, _CHOICES),
        NAMES[0]: normal(num, 2 * inner, hidden) / hidden**0.5,
        NAMES[1]: normal(num, hidden, inner) / inner**0.5,
    }
    upstream = normal(_TOKENS, hidden) / sizes**2  # every row counts in the sums over them
    x, factors, gate_up, down = values = [operand.requires_grad_() for operand in operands.values()]
    want = _defined(x, gate_up, down, chosen, factors)
    given, wanted = (x, chosen, factors), _gradients(want, values, upstream)
    for training in (False, True):
        for part in twin.modules():
            part.training = training
        torch.default_generator.manual_seed(0)  # every rank draws the same
        try:
            with torch.device("cpu"):
                got = torch.func.functional_call(twin, dict(zip(NAMES, (gate_up, down), strict=True)), given)
                found = _gradients(got, values, upstream) if training else wanted
        except Exception as error:  # whatever somebody else's code raises says that it is none of these
            return f"asked for (tokens, chosen experts, their weights), it raised {type(error).__name__}: {error}"
        if not isinstance(got, Tensor) or got.shape != want.shape:
            return f"it gives {getattr(got, 'shape', type(got).__name__)} for tokens of {tuple(want.shape)}"
        errors = {"a row": _off(got, want)}
        for name, gradient, its in zip(operands, found, wanted, strict=True):
            errors[f"the gradient of {name}"] = _off(gradient, its)
        for what, error in errors.items():
            if not error < _TOLERANCE:
                return (
                    f"in {'training' if training else 'evaluation'} it computes something else than "
                    f"weight * down(silu(gate) * up) with the gates first: {what} is off by {error:.1%}"
                )
    return None


def _gradients(result: object, operands: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Of each operand; zeros where the result leads to none."""
    if not isinstance(result, Tensor) or not result.requires_grad or result.shape != upstream.shape:
        return [torch.zeros_like(operand) for operand in operands]
    return list(
        torch.autograd.grad(result, operands, upstream.to(result.dtype), allow_unused=True, materialize_grads=True)
    )


def _off(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row, or of a matrix."""
    error, norm = (each.detach().flatten(1).norm(dim=1) for each in (got - want, want))
    return (error / norm.clamp_min(torch.finfo(norm.dtype).tiny)).max().item()


def _defined(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """What `StackedExperts` computes, by its definition."""
    out = torch.zeros_like(x)
    for choice in range(chosen.shape[1]):
        experts = chosen[:, choice]
        gate, up = torch.einsum("th,tfh->tf", x, gate_up[experts]).chunk(2, dim=-1)
        out += torch.einsum("tf,thf->th", F.silu(gate) * up, down[experts]) * factors[:, choice, None]
    return out
