"""Models that somebody else wrote: their linear modules exchanged by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import recipe
from te_dist.fsdp2 import QuantizedParameter
from te_dist.testing import assert_bitwise

BLOCK = recipe.Float8BlockScaling()


class Block(nn.Module):
    """Two projections around an activation, and attention that owns a linear module of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(12).view(2, 6)


def test_modules_are_exchanged_by_pattern() -> None:
    model = Model()
    before = copy.deepcopy(model)
    made = te.convert(model, {"layers.0.down": None, "layers.*": BLOCK})
    assert sorted(made) == ["layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]
    assert type(model.head) is nn.Linear
    assert type(model.layers[0].down.weight) is nn.Parameter
    assert isinstance(model.layers[1].up.weight, QuantizedParameter)
    assert model.layers[0].up.name == "layers.0.up"
    assert list(model.state_dict()) == list(before.state_dict())
    want = te.Float8BlockQuantizer()(before.layers[1].up.weight.detach())
    assert_bitwise(model.layers[1].up.weight.dequantize(), want.dequantize(), "weight")
    with te.autocast(recipe=BLOCK):
        out = model(TOKENS)
    assert (out - before(TOKENS)).norm() < 0.05 * out.norm()
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("how", [BLOCK, None], ids=["quantized", "plain"])
def test_evaluation_of_torchs_encoders_goes_through_what_was_exchanged(how: recipe.Recipe | None) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    te.convert(encoder, {"layers.1.*": how})
    x, padding = torch.randn(2, 6, 32), torch.arange(6).repeat(2, 1) >= torch.tensor([[6], [4]])
    with te.autocast(recipe=BLOCK):
        want = encoder(x, src_key_padding_mask=padding)  # where gradients are asked for, torch has no fast path
        with torch.no_grad():
            got = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], want[~padding], rtol=1e-5, atol=1e-5)


def test_plain_parameters_stay_the_same_objects() -> None:
    model = Model()
    before = dict(model.named_parameters())
    te.convert(model, {"*": None})
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is param for name, param in before.items())
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("made_by", [torch.optim.AdamW, te.optim.FusedAdam])
def test_an_optimizer_of_weights_that_were_exchanged_refuses_to_step(made_by: type[torch.optim.Optimizer]) -> None:
    model = Model()
    optimizer = made_by(model.parameters(), lr=0.1)
    te.convert(model, {"layers.0.up": None, "layers.*": BLOCK})
    model(TOKENS).sum().backward()
    names = "layers.0.down.weight, layers.1.up.weight, layers.1.down.weight, and would train none"
    with pytest.raises(RuntimeError, match=f"{made_by.__name__} holds 3 weights that .*, {names}"):
        optimizer.step()


def test_an_optimizer_may_hold_exchanged_weights_that_are_frozen_or_another_models() -> None:
    model, other = Model(), Block()
    model.layers[0].up.weight.requires_grad_(False)
    other.up.weight = model.layers[1].up.weight
    optimizer = torch.optim.SGD([model.layers[0].up.weight, *other.up.parameters()], lr=0.1)
    te.convert(model, {"layers.*.up": BLOCK})
    before = other.up.weight.detach().clone()
    other.up(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    assert not torch.equal(other.up.weight, before)


def test_what_is_frozen_or_evaluated_stays_so() -> None:
    model = Model().eval()
    model.layers[0].up.weight.requires_grad_(False)
    te.convert(model, {"layers.*": BLOCK})
    assert not model.layers[0].up.weight.requires_grad
    assert model.layers[1].up.weight.requires_grad
    assert not model.layers[0].up.training


def test_a_model_on_meta_is_converted_there() -> None:
    with torch.device("meta"):
        model = Model()
    te.convert(model, {"layers.*": BLOCK})
    assert model.layers[0].up.weight.is_meta
    assert isinstance(model.layers[0].up.weight, QuantizedParameter)


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"layers.*": BLOCK, "layer.*": None}, r"named \['layer\.\*'\]"),
        ({"head": BLOCK}, "tied, as .*embedding.weight"),
        ({"*": BLOCK}, "tied"),
        ({"layers.*": BLOCK, "layers.0.*": None}, r"\['layers\.0\.\*'\] fit in the plan is taken"),
    ],
    ids=["unused", "tied", "tied-star", "hidden"],
)
def test_a_plan_that_cannot_be_followed_changes_nothing(plan, match) -> None:
    model = Model()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=match):
        te.convert(model, plan)
    assert dict(model.named_modules()) == before


def test_a_model_is_converted_once() -> None:
    model = Model()
    te.convert(model, {"layers.*": BLOCK})
    with pytest.raises(ValueError, match=r"still to be converted.* named \['layers\.\*'\]; names are \['head'\]"):
        te.convert(model, {"layers.*": BLOCK})


def test_features_that_do_not_fit_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 33))
    with pytest.raises(ValueError, match="1: out_features=33"):
        te.convert(model, {"*": recipe.NVFP4BlockScaling()})
    assert all(type(module) is nn.Linear for module in model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_type_that_cannot_be_quantized_is_named_with_its_module(device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="1: a weight of torch.float64 cannot be quantized; convert the model"):
        te.convert(model, {"*": BLOCK})
    assert all(type(module) is nn.Linear for module in model)


def test_modules_show_the_format_of_their_weights() -> None:
    model = Model()
    te.convert(model, {"layers.0.*": BLOCK, "layers.1.up": None})
    assert model.layers[0].up.extra_repr() == "in_features=32, out_features=64, bias=True, format=float8_block_2d"
    assert model.layers[1].up.extra_repr() == "in_features=32, out_features=64, bias=True"


def test_a_linear_without_a_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="no parent"):
        te.convert(nn.Linear(32, 32), {"*": None})


@pytest.mark.parametrize(
    "add",
    [
        lambda module: module.register_forward_hook(print),
        lambda module: module.register_forward_pre_hook(print),
        lambda module: module.register_full_backward_hook(print),
        lambda module: module.register_full_backward_pre_hook(print),
        lambda module: setattr(module, "forward", print),
    ],
    ids=["forward", "forward_pre", "backward", "backward_pre", "replaced"],
)
def test_hooks_are_not_lost(add) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    add(model[1])
    with pytest.raises(ValueError, match="1 has hooks, or a forward that was put in the place of its own"):
        te.convert(model, {"*": None})
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("keeps", [True, False])
def test_an_optimizer_begins_with_the_values_that_were_kept(keeps: bool) -> None:
    model = Model().bfloat16()
    given = {name: param.detach().clone() for name, param in model.named_parameters()}
    te.convert(model, {"layers.*": BLOCK}, preserve_high_precision_init_val=keeps)
    weight = model.layers[1].up.weight
    assert (weight.get_high_precision_init_val() is not None) is keeps
    optimizer = te.optim.FusedAdam(model.parameters(), lr=0.0)
    model(TOKENS).sum().backward()
    optimizer.step()
    begun = given["layers.1.up.weight"].float() if keeps else weight.dequantize(dtype=torch.float32)
    assert_bitwise(optimizer.state[weight]["master_param"], begun, "master")
    assert weight.get_high_precision_init_val() is None


def test_values_on_the_cpu_are_kept_without_a_copy() -> None:
    model = Model()
    given = model.layers[1].up.weight
    te.convert(model, {"layers.*": BLOCK}, preserve_high_precision_init_val=True)
    assert model.layers[1].up.weight.get_high_precision_init_val().data_ptr() == given.data_ptr()


def test_loaded_values_are_kept_by_a_model_converted_on_the_meta_device() -> None:
    given = Model().state_dict()
    with torch.device("meta"):
        model = Model()
    te.convert(model, {"layers.*": BLOCK}, preserve_high_precision_init_val=True)
    model.load_state_dict(given, assign=True)
    assert_bitwise(model.layers[0].up.weight.get_high_precision_init_val(), given["layers.0.up.weight"], "kept")


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (BLOCK, "Float8BlockScaling"),
        ([], r"\[\]"),
        ({"layers.0.*": BLOCK, "layers.1.*": "mxfp8"}, "{'layers.1.*': 'mxfp8'}"),
    ],
    ids=["recipe", "list", "name"],
)
def test_what_is_no_plan_is_refused(plan: object, named: str) -> None:
    with pytest.raises(TypeError, match=rf"plan: got {named}.*wanted patterns of module names"):
        te.convert(Model(), plan)  # type: ignore[arg-type]
