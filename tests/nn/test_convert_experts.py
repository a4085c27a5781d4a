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
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
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


class Detached(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights.detach())


class Frozen(Experts):
    @torch.no_grad()
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights)


class DroppedOut(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def activate(self, gate_up: Tensor) -> Tensor:
        return self.dropout(super().activate(gate_up))


class Noisy(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        noise = torch.randn_like(hidden_states) if self.training else 0
        return super().forward(hidden_states + noise, top_k_index, top_k_weights)


class Counted(Experts):
    """As those that keep their sizes, an activation and how they compute, and count the tokens of each expert."""

    def __init__(self, num: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__(num, hidden, inner)
        self.num_experts, self.intermediate_dim = num, inner
        self.name, self.config = "its own", {"act": "silu"}
        self.act_fn, self.method = nn.SiLU(), self.activate

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.split(self.intermediate_dim, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        counts = F.one_hot(top_k_index.flatten(), self.num_experts).sum(0)
        parts = zip(self.gate_up_proj, self.down_proj, counts.tolist(), strict=True)
        assert sum(count for _, _, count in parts) == top_k_index.numel()
        return super().forward(hidden_states, top_k_index, top_k_weights)


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
        (Detached, r"in training it computes something else than .*: the gradient of their weights is off by 100.0%"),
        (Frozen, r"in training it computes something else than .*: the gradient of the tokens is off by 100.0%"),
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


@pytest.mark.parametrize("kind", [DroppedOut, Noisy])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_experts_are_tried_in_training_and_in_evaluation(kind: type[nn.Module], training: bool) -> None:
    layer, mixed = Layer(kind).train(training), Layer(DroppedOut).train(training)
    mixed.experts.dropout.train(not training)
    drawn = torch.random.get_rng_state()
    for each in (layer, mixed):
        modes = [module.training for module in each.modules()]
        with torch.inference_mode(), pytest.raises(ValueError, match="in training it computes something else than"):
            te.convert(each, {"experts": BLOCK})
        assert [module.training for module in each.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("num", "hidden", "inner"),
    [(512, 2048, 512), (512, 512, 128), (256, 1024, 128), (256, 256, 256), (8, 512, 256), (64, 64, 32)],
    ids=["inner", "hidden", "gates-and-ups", "all", "hidden-as-gates-and-ups", "small"],
)
def test_experts_as_many_as_columns_are_exchanged(num: int, hidden: int, inner: int) -> None:
    with torch.device("meta"):
        layer = Layer(lambda: Counted(num, hidden, inner))
    assert why_no_twin(layer.experts) is None
    assert (layer.experts.num_experts, layer.experts.hidden_dim, layer.experts.intermediate_dim) == (num, hidden, inner)
    te.convert(layer, {"experts": BLOCK})
    assert layer.experts.gate_up_proj.shape == (num, 2 * inner, hidden)


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


@pytest.mark.parametrize("how", [BLOCK, None], ids=["quantized", "plain"])
def test_attributes_of_experts_come_along(how: Recipe | None) -> None:
    layer = Layer(Counted)
    config = layer.experts.config
    layer.experts.layer_index = 5
    te.convert(layer, {"experts": how})
    experts = layer.experts
    assert isinstance(experts, StackedExperts) and experts.layer_index == 5
    assert experts.config is config and experts.name == "experts"
    assert not hasattr(experts, "method") and not hasattr(experts, "act_fn")
    assert (experts.num_experts, experts.hidden_dim, experts.intermediate_dim) == (EXPERTS, HIDDEN, INNER)


# By what is told of them.
ADDITIONS = {
    "got a Counted with buffer mask,": lambda experts: experts.register_buffer("mask", torch.ones(EXPERTS)),
    "got a Counted with buffer act_fn.scale,": lambda experts: experts.act_fn.register_buffer("scale", torch.ones(1)),
    "got a Counted with module dropout,": lambda experts: experts.add_module("dropout", nn.Dropout()),
    "got a Counted with forward_hooks of act_fn,": lambda experts: experts.act_fn.register_forward_hook(
        lambda *_: None
    ),
    r"got attributes \['params_dtype'\],": lambda experts: setattr(experts, "params_dtype", torch.float32),
    r"got attributes \['old'\],": lambda experts: setattr(experts, "old", experts.forward),
}


@pytest.mark.parametrize("how", [BLOCK, None], ids=["quantized", "plain"])
@pytest.mark.parametrize("got", ADDITIONS)
def test_what_was_added_to_experts_is_not_lost(got: str, how: Recipe | None) -> None:
    layer = Layer(Counted)
    ADDITIONS[got](layer.experts)
    before = dict(layer.named_modules())
    with pytest.raises(ValueError, match=f"^experts: {got}"):
        te.convert(layer, {"*": how})
    assert dict(layer.named_modules()) == before


class Mixture(nn.Module):
    """A router that is a module with a linear map, a shared expert as wide as there are experts, and its gate."""

    def __init__(self, experts: Callable[[], nn.Module], num: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"scores": nn.Linear(hidden, num), "noise": nn.Linear(hidden, num)})
        self.gate = nn.Linear(hidden, num)
        self.up, self.mixed = nn.Linear(hidden, 2 * num), nn.Linear(2 * num, hidden)
        self.shared = nn.ModuleDict({"up": nn.Linear(hidden, num), "down": nn.Linear(num, hidden)})
        self.shared_gate = nn.Linear(hidden, 1)
        self.experts = experts()


def one_by_one() -> nn.Module:
    return nn.ModuleList(nn.Linear(32, 32) for _ in range(16))


@pytest.mark.parametrize(
    "experts",
    [
        lambda: Experts(16, 32, 16),
        one_by_one,
        lambda: StackedExperts(16, 32, 16),
        lambda: te.nn.moe.GroupedMLP(16, 32, 16),
    ],
    ids=["stacked", "one-by-one", "converted", "grouped"],
)
@pytest.mark.parametrize("how", [BLOCK, None], ids=["quantized", "plain"])
def test_routers_stay_as_they_are(experts: Callable[[], nn.Module], how: Recipe | None) -> None:
    model = nn.ModuleDict({"block": Mixture(experts), "head": nn.Linear(32, 16)})
    left = ["block.gate", "block.router.noise", "block.router.scores", "block.shared_gate"]
    with pytest.warns(
        UserWarning, match=re.escape(f"fewer than 16 outputs, as they are: {left} stay in high precision")
    ):
        made = te.convert(model, {"*": how})
    assert [name for name in made if ".experts" not in name] == [
        "block.up",
        "block.mixed",
        "block.shared.up",
        "block.shared.down",
        "head",
    ]
    assert all(type(model.get_submodule(name)) is nn.Linear for name in left)


def test_whole_names_choose_routers() -> None:
    model = nn.ModuleDict({"block": Mixture(lambda: Experts(16, 32, 16))})
    with pytest.raises(ValueError, match=r"all that '\*gate' fits .* \['block.gate', 'block.shared_gate'\]; they stay"):
        te.convert(model, {"*gate": BLOCK, "*": BLOCK})
    with pytest.warns(UserWarning, match=r"\['block.router.noise', 'block.router.scores'\] stay"):
        made = te.convert(model, {"*": BLOCK, "block.gate": BLOCK, "block.shared_gate": None})
    assert {"block.gate", "block.shared_gate"} <= made.keys()
    assert isinstance(model["block"].gate.weight, QuantizedParameter)
    assert type(model["block"].shared_gate.weight) is nn.Parameter


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
