"""Models that somebody else wrote: their linear modules exchanged by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

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


def test_what_is_returned_is_not_taken_for_the_model() -> None:
    made = te.convert(Model(), {"layers.*": BLOCK})
    with pytest.raises(AttributeError, match="no 'parameters': .* the model is changed in place"):
        made.parameters()
    with pytest.raises(TypeError, match="the model is changed in place"):
        made(TOKENS)
    assert copy.deepcopy(made).keys() == pickle.loads(pickle.dumps(made)).keys() == made.keys()


def test_modules_show_the_format_of_their_weights() -> None:
    model = Model()
    te.convert(model, {"layers.0.*": BLOCK, "layers.1.up": None})
    assert model.layers[0].up.extra_repr() == "in_features=32, out_features=64, bias=True, format=float8_block_2d"
    assert model.layers[1].up.extra_repr() == "in_features=32, out_features=64, bias=True"
    assert "(gemm): LinearSite()" in repr(model)


def test_a_linear_without_a_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="no parent"):
        te.convert(nn.Linear(32, 32), {"*": None})


# By what is told of them.
ADDITIONS = {
    "forward_hooks": lambda module: module.register_forward_hook(print),
    "forward_pre_hooks": lambda module: module.register_forward_pre_hook(print),
    "backward_hooks": lambda module: module.register_full_backward_hook(print),
    "backward_pre_hooks": lambda module: module.register_full_backward_pre_hook(print),
    "state_dict_pre_hooks": lambda module: module.register_state_dict_pre_hook(print),
    "state_dict_hooks": lambda module: module.register_state_dict_post_hook(lambda *_: None),
    "load_state_dict_pre_hooks": lambda module: module.register_load_state_dict_pre_hook(print),
    "load_state_dict_post_hooks": lambda module: module.register_load_state_dict_post_hook(print),
    "a forward in the place of its own": lambda module: setattr(module, "forward", print),
    "buffer mask": lambda module: module.register_buffer("mask", torch.ones(32)),
    "buffer scale": lambda module: module.register_buffer("scale", torch.ones(1), persistent=False),
    "parameter other": lambda module: setattr(module, "other", module.weight),
    "module lora_A": lambda module: module.add_module("lora_A", nn.Linear(32, 4)),
    "forward_pre_hooks, a weight in the place of its own, parameter weight_orig, buffer weight_mask": lambda module: (
        prune.identity(module, "weight")
    ),
}


@pytest.mark.parametrize("how", [BLOCK, None], ids=["quantized", "plain"])
@pytest.mark.parametrize("got", ADDITIONS)
def test_what_was_added_is_not_lost(got: str, how: recipe.Recipe | None) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ADDITIONS[got](model[1])
    before = dict(model.named_modules()), dict(model.named_parameters())
    with pytest.raises(ValueError, match=rf"^1: got a Linear with {got}, wanted one without.*; add them after"):
        te.convert(model, {"*": how})
    assert (dict(model.named_modules()), dict(model.named_parameters())) == before


@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_stay_with_plain_ones_alone(add: str) -> None:
    model, seen = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), []
    getattr(model[1].weight, add)(lambda _: seen.append("weight"))
    getattr(model[1].bias, add)(lambda _: seen.append("bias"))
    with pytest.raises(ValueError, match=r"^1\.weight: got a parameter with hooks, wanted one without.*; add them"):
        te.convert(model, {"*": BLOCK})
    assert type(model[0]) is nn.Linear
    te.convert(model, {"1": None})
    model(torch.ones(2, 32)).sum().backward()
    assert sorted(seen) == ["bias", "weight"]


@pytest.mark.parametrize("how", [BLOCK, None], ids=["quantized", "plain"])
def test_attributes_come_along(how: recipe.Recipe | None) -> None:
    model = Model()
    layer, owner = model.layers[0].up, model.layers[0]
    layer.index, layer.weight.no_decay, layer.bias.no_decay = 3, True, False
    vars(layer)["owner"] = owner  # as those do who want no module of it
    te.convert(model, {"layers.*": how})
    made = model.layers[0].up
    assert (type(made), made.index, made.weight.no_decay, made.bias.no_decay) == (te.Linear, 3, True, False)
    assert made.owner is owner and [name for name, _ in made.named_children()] == ["gemm"]
    assert not hasattr(model.layers[1].up, "index") and not hasattr(model.layers[1].up.weight, "no_decay")


@pytest.mark.parametrize(
    ("add", "got"),
    [
        (lambda module: setattr(module, "name", "mine"), r"1: got attributes \['name'\], .* Linear has"),
        (lambda module: setattr(module, "extra_repr", str), r"1: got attributes \['extra_repr'\], .* Linear has"),
        (lambda module: module.compile(), r"1: got attributes \['_compiled_call_impl'\], .* Linear has"),
        (lambda module: setattr(module, "old", module.forward), r"1: got attributes \['old'\], .* methods of"),
        (lambda module: setattr(module.weight, "storage", 1), r"1.weight: got attributes \['storage'\], .* Quantized"),
    ],
    ids=["name", "repr", "compiled", "method", "weight"],
)
def test_attributes_that_cannot_come_along_are_refused(add, got: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    add(model[1])
    with pytest.raises(ValueError, match=got):
        te.convert(model, {"*": BLOCK})
    assert all(type(module) is nn.Linear for module in model)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t()], ids=["same", "transposed"])
def test_weights_of_the_same_memory_are_tied(view) -> None:
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32, bias=False))
    model[1].weight = nn.Parameter(view(model[0].weight.data))
    with pytest.raises(ValueError, match=r"1\.weight is tied, as \['0.weight', '1.weight'\]"):
        te.convert(model, {"1": BLOCK})
    assert type(model[1]) is nn.Linear
    te.convert(model, {"1": None})
    assert type(model[1]) is te.Linear and model[1].weight.data_ptr() == model[0].weight.data_ptr()


def test_parts_of_one_memory_are_not_tied() -> None:
    model, memory = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(2, 32, 32)
    for layer, part in zip(model, memory, strict=True):
        layer.weight = nn.Parameter(part)
    assert list(te.convert(model, {"*": BLOCK})) == ["0", "1"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_modules_of_other_numbers_are_left_alone_or_named(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = nn.Parameter(torch.ones(32, 32).to(dtype), requires_grad=False)
    before = model[1]
    with pytest.raises(ValueError, match=f"^1: got weights of {dtype}, wanted float32, .*; give it None in the plan"):
        te.convert(model, {"*": BLOCK})
    assert type(model[0]) is nn.Linear
    assert list(te.convert(model, {"1": None, "*": BLOCK})) == ["0"]
    assert model[1] is before and before.weight.dtype is dtype


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
