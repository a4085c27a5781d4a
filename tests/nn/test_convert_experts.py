"""Experts of models that somebody else wrote: exchanged where they compute what te_dist's do, refused elsewhere."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_dist as te
from te_dist import fsdp2, recipe
from te_dist.fsdp2 import GroupedParameter
from te_dist.nn.moe import StackedExperts
from te_dist.nn.moe.foreign import holds_experts, why_no_twin
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise, mesh, pool
from tests.nn.recipes import relative_error

EXPERTS, HIDDEN, INNER, TOKENS, CHOICES = 4, 128, 64, 20, 2
BLOCK = recipe.Float8BlockScaling()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Experts(nn.Module):
    """Stacked experts with a loop over them, as models outside of te_dist have them."""

    def __init__(self, num: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.hidden_dim = hidden
        self.gate_up_proj = nn.Parameter(normal(num, 2 * inner, hidden, seed=2) / hidden**0.5)
        self.down_proj = nn.Parameter(normal(num, hidden, inner, seed=3) / inner**0.5)

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states).view(-1, self.hidden_dim)
        for expert in range(len(self.down_proj)):
            token, choice = torch.where(top_k_index == expert)
            inner = self.activate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            part = F.linear(inner, self.down_proj[expert]) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, part.to(out.dtype))
        return out


class Gelu(Experts):
    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up


class UpFirst(Experts):
    def activate(self, gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class Interleaved(Experts):
    def activate(self, gate_up: Tensor) -> Tensor:
        return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


class Clamped(Experts):
    def activate(self, gate_up: Tensor) -> Tensor:
        return super().activate(gate_up.clamp(-10, 10))


class Unweighted(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, torch.ones_like(top_k_weights))


class SortedRows(Experts):
    def forward(self, rows: Tensor, num_rows: Tensor) -> Tensor:  # type: ignore[override]
        return rows


class Biased(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.down_bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(normal(EXPERTS, HIDDEN, 2 * INNER))
        self.down_proj = nn.Parameter(normal(EXPERTS, INNER, HIDDEN))


class SplitExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(normal(EXPERTS, INNER, HIDDEN)) for _ in range(2))
        self.w2 = nn.Parameter(normal(EXPERTS, HIDDEN, INNER))


class Layer(nn.Module):
    """A projection, a router and experts."""

    def __init__(self, experts: Callable[[], nn.Module] = Experts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Parameter(normal(EXPERTS, HIDDEN, seed=4) / HIDDEN**0.5)
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection(x)
        factors, chosen = F.linear(x, self.gate).softmax(-1).topk(CHOICES)
        return x + self.experts(x, chosen, factors)


def step(layer: nn.Module, made_by: Recipe | None = None) -> dict[str, Tensor]:
    """Output and gradients by name."""
    x = normal(TOKENS, HIDDEN).requires_grad_()
    with nullcontext() if made_by is None else te.autocast(recipe=made_by):
        out = layer(x)
    out.backward(normal(TOKENS, HIDDEN, seed=5))
    return {"y": out.detach(), "dx": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def test_experts_compute_the_same_under_the_same_names() -> None:
    layer = Layer()
    want, keys = step(copy.deepcopy(layer)), list(layer.state_dict())
    parameters = dict(layer.named_parameters())
    made = te.convert(layer, {"*": None})
    assert {name: type(module) for name, module in made.items()} == {"projection": te.Linear, "experts": StackedExperts}
    assert list(layer.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in layer.named_parameters())
    for name, value in step(layer).items():
        assert relative_error(value, want[name]) < 1e-6, name


@pytest.mark.parametrize(
    ("index", "weights"),
    [((9, 2), (9, 4)), ((9, 2), (9, 1)), ((9, 2), (2, 9)), ((9, 2), (5, 2)), ((5, 2), (5, 2)), ((18,), (18,))],
    ids=str,
)
def test_choices_and_weights_of_other_shapes_are_refused(index: tuple[int, ...], weights: tuple[int, ...]) -> None:
    experts, x = StackedExperts(4, HIDDEN, 32), normal(9, HIDDEN)
    with pytest.raises(
        ValueError, match=re.escape(f"choices {index} of torch.int64 and weights {weights} for 9 tokens")
    ):
        experts(x, torch.zeros(index, dtype=torch.int64), torch.ones(weights))
    with pytest.raises(ValueError, match=r"wanted whole numbers"):
        experts(x, torch.zeros(9, 2), torch.ones(9, 2))


@pytest.mark.parametrize(
    "made_by", [BLOCK, recipe.Float8CurrentScaling(), recipe.DelayedScaling()], ids=["block", "current", "delayed"]
)
def test_experts_are_quantized_in_the_format_of_the_recipe(made_by: Recipe) -> None:
    layer, plain = Layer(), Layer()
    before = copy.deepcopy(layer)
    layer.experts.down_proj.requires_grad_(False)
    te.convert(layer.eval(), {"experts": made_by})
    te.convert(plain, {"experts": None})
    experts = layer.experts
    assert isinstance(experts.gate_up_proj, GroupedParameter) and experts.gate_up_proj.requires_grad
    assert not experts.down_proj.requires_grad and not experts.training
    assert relative_error(experts.gate_up_proj.dequantize(), before.experts.gate_up_proj) < 0.04
    got, want = step(layer, made_by), step(plain, made_by)
    assert_bitwise(got["y"], want["y"], "y")
    assert_bitwise(got["dx"], want["dx"], "dx")
    assert 1e-4 < relative_error(got["y"], step(before)["y"]) < 0.1


def test_a_model_on_meta_is_converted_there_and_filled_later() -> None:
    with torch.device("meta"):
        layer = Layer(lambda: Experts(8, 1024, 512))  # larger than what is tried
        te.convert(layer, {"experts": BLOCK})
    assert isinstance(layer.experts.gate_up_proj, GroupedParameter) and layer.experts.gate_up_proj.is_meta
    x, chosen = normal(3, 1024), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="experts: the weights are on the meta device"):
        layer.experts(x, chosen, torch.ones(3, 1))
    experts = fsdp2.materialize(layer.experts, device="cpu", seed=0)
    assert experts is None and layer.experts(x, chosen, torch.ones(3, 1)).isfinite().all()


def test_values_of_experts_are_kept_until_the_first_step() -> None:
    layer = Layer()
    given = {name: param.detach().clone() for name, param in layer.experts.named_parameters()}
    te.convert(layer, {"experts": BLOCK}, preserve_high_precision_init_val=True)
    optimizer = te.optim.FusedAdam(layer.parameters(), lr=0.0)
    step(layer, BLOCK)
    optimizer.step()
    for name, weight in layer.experts.named_parameters():
        assert_bitwise(optimizer.state[weight]["master_param"], given[name], name)
        assert weight.get_high_precision_init_val() is None


def test_numbers_that_are_no_experts_stand_for_nobody() -> None:
    experts = te.convert(Layer(), {"experts": None})["experts"]
    x, chosen, factors = normal(6, HIDDEN), torch.tensor([[0, 3]] * 6), normal(6, 2)
    want = experts(x, chosen[:, :1], factors[:, :1])
    for nobody in (EXPERTS, -1):
        assert_bitwise(experts(x, torch.tensor([[0, nobody]] * 6), factors), want, str(nobody))
    assert_bitwise(experts(x.view(2, 3, HIDDEN), chosen, factors).flatten(0, 1), experts(x, chosen, factors), "y")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Gelu, "it computes something else than"),
        (UpFirst, "it computes something else than"),
        (Interleaved, "it computes something else than"),
        (Clamped, "it computes something else than"),
        (Unweighted, "it computes something else than"),
        (SortedRows, "it raised TypeError: .*forward"),
        (Biased, r"its parameters are \['down_bias', 'down_proj', 'gate_up_proj'\], wanted"),
        (Transposed, r"gate_up_proj is \(4, 128, 128\) beside a down_proj of \(4, 64, 128\), wanted"),
        (SplitExperts, r"its parameters are \['w1', 'w2', 'w3'\], wanted"),
    ],
)
def test_other_experts_are_refused_or_left_alone(kind: type[nn.Module], why: str) -> None:
    layer = Layer(kind)
    before = dict(layer.named_modules())
    with pytest.raises(
        ValueError, match=f"experts: the matrices of {kind.__name__} would stay in torch.float32.*{why}"
    ):
        te.convert(layer, {"*": BLOCK})
    assert dict(layer.named_modules()) == before
    assert list(te.convert(layer, {"experts": None, "*": BLOCK})) == ["projection"]
    assert type(layer.experts) is kind


def test_what_is_tried_is_left_as_it_was() -> None:
    layer = Layer(lambda: Experts(4, 512, 256))
    held, values = dict(layer.experts.named_parameters()), copy.deepcopy(layer.state_dict())
    assert why_no_twin(layer.experts) is None
    assert layer.experts.hidden_dim == 512
    assert all(parameter is held[name] for name, parameter in layer.experts.named_parameters())
    for name, value in layer.state_dict().items():
        assert_bitwise(value, values[name], name)


def test_experts_as_modules_of_their_own_are_exchanged_one_by_one() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(3))
    assert len(te.convert(model, {"experts.*": BLOCK})) == 6


def test_tied_experts_and_experts_without_a_parent_are_refused() -> None:
    layer = Layer()
    layer.twin = Experts()
    layer.twin.down_proj = layer.experts.down_proj
    with pytest.raises(ValueError, match=r"experts.down_proj is tied, as .*twin.down_proj"):
        te.convert(layer, {"experts": BLOCK})
    with pytest.raises(ValueError, match="the model is a Experts itself, with no parent"):
        te.convert(Experts(), {"*": BLOCK})


def test_attributes_of_matrices_come_along_and_hooks_are_refused() -> None:
    layer = Layer()
    layer.experts.down_proj.no_decay = True
    layer.experts.bias = False  # what experts have beside their matrices is their own
    hook = layer.experts.down_proj.register_hook(print)
    with pytest.raises(ValueError, match=r"^experts\.down_proj: got a parameter with hooks"):
        te.convert(layer, {"*": BLOCK})
    hook.remove()
    hook = layer.experts.register_state_dict_pre_hook(print)
    with pytest.raises(ValueError, match="^experts: got a Experts with state_dict_pre_hooks, wanted one without"):
        te.convert(layer, {"*": BLOCK})
    hook.remove()
    te.convert(layer, {"*": BLOCK})
    assert isinstance(layer.experts.down_proj, GroupedParameter) and layer.experts.down_proj.no_decay


def test_what_holds_no_experts_is_not_taken_for_any() -> None:
    position, convolution, single = nn.Module(), nn.Conv1d(4, 4, 3), nn.Module()
    position.table = nn.Parameter(normal(1, 8, 8))
    single.basis = nn.Parameter(normal(4, 8, 8))
    for module in (position, convolution, single, te.GroupedLinear(2, 16, 16, single_grouped_weight=True)):
        assert not holds_experts(module)


def shard(rank: int, world: int) -> dict[str, Any]:
    layer = Layer()
    te.convert(layer, {"*": BLOCK})
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    found = step(layer, BLOCK)
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def test_sharded_experts_give_the_bits_of_whole_ones() -> None:
    layer = Layer()
    te.convert(layer, {"*": BLOCK})
    want = step(layer, BLOCK)
    for found in pool(2).run(shard):
        for name, value in want.items():
            assert_bitwise(found[name], value, name)  # the mean of equal gradients
