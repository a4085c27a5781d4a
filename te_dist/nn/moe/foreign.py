"""Experts of models that somebody else wrote: found by their shapes, known by what they compute."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_dist.nn.module import QuantizedModule
from te_dist.nn.moe.stacked import NAMES

_MATRICES = 3  # dimensions of a parameter that stacks them
_SMALL = 1 << 18  # values of a parameter that is tried as large as it is
_COLUMNS = (48, 80)  # of the maps that are tried else
_TOKENS, _CHOICES = 8, 2
_TOLERANCE = 1e-3  # relative, of a row in fp32


def holds_experts(module: nn.Module) -> bool:
    """Whether a module looks as if it held matrices of several experts, of whatever kind."""
    kind = type(module)
    if isinstance(module, QuantizedModule) or kind.__module__.split(".")[0] == "torch":
        return False
    parameters = module.parameters(recurse=False)
    stacks = [p for p in parameters if p.dim() == _MATRICES and p.shape[0] > 1 and p.is_floating_point()]
    alike = len(stacks) > 1 and len({p.shape[0] for p in stacks}) == 1
    return bool(stacks) and (alike or "expert" in kind.__name__.lower())


def why_no_twin(module: nn.Module) -> str | None:
    """Why `StackedExperts` cannot take the place of a module that holds experts; None where it can.

    It is called once, with a few tokens and small matrices of its own, and has to give what `StackedExperts` would:
    names alone do not tell which activation it has, and where the gates lie.
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
    return _tried(module, num, hidden, inner)


@torch.no_grad()
def _tried(module: nn.Module, num: int, hidden: int, inner: int) -> str | None:
    """What is different about the results of a trial; None where nothing is."""
    twin = copy.copy(module)
    if num * hidden * inner > _SMALL:
        small = {hidden: _COLUMNS[0], inner: _COLUMNS[int(inner != hidden)]}
        small.setdefault(2 * inner, 2 * small[inner])
        vars(twin).update(
            {key: small[value] for key, value in vars(twin).items() if type(value) is int and value in small}
        )
        hidden, inner = small[hidden], small[inner]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    # Rows from small to large: activations differ near zero, and where they are cut off.
    x = normal(_TOKENS, hidden) * torch.logspace(-1, 3, _TOKENS, device="cpu")[:, None]
    weights = normal(num, 2 * inner, hidden) / hidden**0.5, normal(num, hidden, inner) / inner**0.5
    chosen = torch.rand(_TOKENS, num, generator=generator, device="cpu").argsort(1)[:, :_CHOICES]
    factors = normal(*chosen.shape)
    try:
        with torch.device("cpu"):
            given = dict(zip(NAMES, weights, strict=True))
            got = torch.func.functional_call(twin, given, (x, chosen, factors))
    except Exception as error:  # whatever somebody else's code raises says that it is none of these
        return f"asked for (tokens, chosen experts, their weights), it raised {type(error).__name__}: {error}"
    want = _defined(x, *weights, chosen, factors)
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return f"it gives {getattr(got, 'shape', type(got).__name__)} for tokens of {tuple(want.shape)}"
    error = ((got - want).norm(dim=1) / want.norm(dim=1)).max().item()
    if not error < _TOLERANCE:
        return (
            f"it computes something else than weight * down(silu(gate) * up) with the gates first: a row is off by "
            f"{error:.1%}"
        )
    return None


def _defined(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """What `StackedExperts` computes, by its definition."""
    out = torch.zeros_like(x)
    for choice in range(chosen.shape[1]):
        experts = chosen[:, choice]
        gate, up = torch.einsum("th,tfh->tf", x, gate_up[experts]).chunk(2, dim=-1)
        out += torch.einsum("tf,thf->th", F.silu(gate) * up, down[experts]) * factors[:, choice, None]
    return out
