"""Modules of several parts against their composition, and how parameters come to be."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_dist as te
from te_dist import checkpoints, fsdp2, recipe
from te_dist.fsdp2 import QuantizedParameter
from te_dist.nn.activations import ACTIVATIONS
from te_dist.nn.module import weight_of
from te_dist.nn.norms import normalize
from te_dist.nn.site import LinearSite
from te_dist.testing import assert_bitwise
from tests.nn.test_fronts import WrittenSwiGlu

RECIPES = [None, recipe.Float8BlockScaling(), recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)]
every_recipe = pytest.mark.parametrize("made_by", RECIPES, ids=lambda r: type(r).__name__)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@every_recipe
def test_layer_norm_linear_is_a_norm_and_a_linear(made_by, normalization: str, zero_centered: bool) -> None:
    fused = te.LayerNormLinear(
        64, 96, normalization=normalization, zero_centered_gamma=zero_centered, eps=1e-3, return_layernorm_output=True
    )
    norm = getattr(te, normalization)(64, eps=1e-3, zero_centered_gamma=zero_centered)
    linear = te.Linear(64, 96)
    with torch.no_grad():
        fused.layer_norm_weight.add_(normal(64) * 0.1)
        norm.weight.copy_(fused.layer_norm_weight)
        if norm.bias is not None:
            fused.layer_norm_bias.add_(normal(64, seed=2))
            norm.bias.copy_(fused.layer_norm_bias)
        linear.load_state_dict({"weight": fused.weight, "bias": fused.bias})
    a, b = normal(3, 5, 64).requires_grad_(), normal(3, 5, 64).requires_grad_()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out, normalized = fused(a)
        want_normalized = norm(b)
        want = linear(want_normalized)
    out.square().sum().backward()
    want.square().sum().backward()
    pairs = [(out, want), (normalized, want_normalized), (a.grad, b.grad), (fused.weight.grad, linear.weight.grad)]
    pairs.append((fused.layer_norm_weight.grad, norm.weight.grad))
    for got, expected in pairs:
        assert_bitwise(got, expected, "LayerNormLinear")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_recipe
def test_layer_norm_mlp_is_its_composition(made_by, activation: str) -> None:
    fused = te.LayerNormMLP(64, 32, activation=activation)
    width = 64 if ACTIVATIONS[activation].is_gated else 32
    assert fused.fc1_weight.shape == (width, 64)
    first, second = te.Linear(64, width), te.Linear(32, 64)
    first.load_state_dict({"weight": fused.fc1_weight, "bias": fused.fc1_bias})
    second.load_state_dict({"weight": fused.fc2_weight, "bias": fused.fc2_bias})
    x = normal(5, 64)
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = fused(x)
        hidden = first(F.layer_norm(x, (64,), fused.layer_norm_weight, fused.layer_norm_bias))
        is_fused = made_by is not None and activation == "swiglu"  # in fp32, rounded once; torch rounds twice
        want = second(WrittenSwiGlu.apply(hidden) if is_fused else ACTIVATIONS[activation](hidden))
    out.sum().backward()
    want.sum().backward()
    for got, expected in (
        (out, want),
        (fused.fc1_weight.grad, first.weight.grad),
        (fused.fc2_weight.grad, second.weight.grad),
        (fused.fc1_bias.grad, first.bias.grad),
    ):
        assert_bitwise(got, expected, activation)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("gelu", lambda x: F.gelu(x, approximate="tanh")),
        ("qgelu", lambda x: x * torch.sigmoid(1.702 * x)),
        ("relu", F.relu),
        ("srelu", lambda x: F.relu(x) ** 2),
        ("silu", F.silu),
    ],
)
def test_gated_activations_multiply_by_the_second_half(name: str, want) -> None:
    x = normal(4, 32)
    assert_bitwise(ACTIVATIONS[name](x), want(x), name)
    gated = {"gelu": "geglu", "qgelu": "qgeglu", "relu": "reglu", "srelu": "sreglu", "silu": "swiglu"}[name]
    assert_bitwise(ACTIVATIONS[gated](x), want(x[:, :16]) * x[:, 16:], gated)


def test_norms_are_those_of_torch() -> None:
    x, weight, bias = normal(4, 32), normal(32, seed=2), normal(32, seed=3)
    got = normalize(x, "LayerNorm", weight=weight, bias=bias, eps=1e-5)
    assert_bitwise(got, F.layer_norm(x, (32,), weight, bias, 1e-5), "LayerNorm")
    got = normalize(x, "RMSNorm", weight=weight, bias=None, eps=1e-5)
    assert_bitwise(got, F.rms_norm(x, (32,), weight, 1e-5), "RMSNorm")


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
def test_a_zero_centered_weight_is_raised_at_full_precision(kind) -> None:
    norm = kind(64, zero_centered_gamma=True, params_dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(2**-9)  # one more than this is one again in bf16
    x = normal(8, 64).bfloat16()
    plain = getattr(F, {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[kind.kind])(x.float(), (64,), eps=1e-5)
    assert_bitwise(norm(x), (plain * (1 + 2**-9)).bfloat16(), "zero centered")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="activation is one of"):
        te.LayerNormMLP(8, 8, activation="tanh")
    with pytest.raises(ValueError, match="normalization is"):
        te.LayerNormLinear(8, 8, normalization="BatchNorm")


MAKERS = {
    "linear": lambda **o: te.Linear(64, 96, **o),
    "layernorm_linear": lambda **o: te.LayerNormLinear(64, 96, **o),
    "layernorm_mlp": lambda **o: te.LayerNormMLP(64, 96, **o),
}
every_module = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every_module
def test_weights_start_as_those_of_torch_linear(make) -> None:
    module = make()
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            bound = weight.shape[1] ** -0.5
            assert weight.abs().max() <= bound
            assert abs(weight.std() - bound / 3**0.5) < 0.02 * bound, name
    torch.manual_seed(0)
    first = make()
    torch.manual_seed(0)
    assert_bitwise(next(iter(make().parameters())), next(iter(first.parameters())), "the same seed")


@every_module
def test_an_init_method_fills_weights_and_biases_start_at_zero(make) -> None:
    module = make(init_method=nn.init.ones_)
    for name, param in module.named_parameters():
        wanted = 0.0 if "bias" in name else 1.0
        assert (param == wanted).all(), name


@every_module
def test_parameters_on_meta_are_quantized_from_birth(make) -> None:
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()), torch.device("meta"):
        module = make(params_dtype=torch.bfloat16)
    weights = {n: p for n, p in module.named_parameters() if p.dim() == 2}
    assert all(isinstance(p, QuantizedParameter) and p.is_meta for p in weights.values())
    fsdp2.materialize(module, device="cpu", seed=0)
    assert {n: p for n, p in module.named_parameters() if p.dim() == 2}.keys() == weights.keys()
    assert all(torch.isfinite(p).all() and p.norm() > 1 for n, p in module.named_parameters() if "weight" in n)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        module(normal(4, 64).bfloat16()).sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in module.parameters())


@every_module
def test_reset_parameters_initializes_anew(make) -> None:
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        module = make()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    again = copy.deepcopy(module)
    again.reset_parameters()
    for (name, param), other in zip(module.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(param, other), name
        if isinstance(param, QuantizedParameter):
            initial = param.get_high_precision_init_val()
            assert (param.dequantize() - initial).norm() < 0.05 * initial.norm()


def test_values_before_quantization_are_kept_on_demand() -> None:
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        kept = te.Linear(64, 96)
    values = kept.weight.get_high_precision_init_val()
    assert values.device.type == "cpu"
    twin = te.Float8BlockQuantizer()(values)
    assert_bitwise(kept.weight.dequantize(), twin.dequantize(), "the quantized ones")
    kept.weight.clear_high_precision_init_val()
    assert kept.weight.get_high_precision_init_val() is None
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        assert te.Linear(64, 96).weight.get_high_precision_init_val() is None


@pytest.mark.parametrize(
    "initialize",
    [
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        lambda weight: weight.data.normal_(),
        lambda weight: weight.data.mul_(0.125).clamp_(-0.01, 0.01),
        lambda weight: weight.data.mul_(300.0),
        lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=-0.03, b=0.04),
        lambda weight: nn.init.trunc_normal_(weight, std=1.0, a=-0.1, b=0.1),  # of few that are drawn
        lambda weight: weight.data.uniform_(-0.95, 0.9).erfinv_().mul_(0.02).clamp_(-0.03, 0.04),  # torch 2.11's
        lambda weight: torch._foreach_mul_([weight.data], 0.3),
        lambda weight: torch._foreach_copy_([weight.data], [torch.ones(96, 64)]),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["", "loaded"])
def test_what_initializes_in_place_is_kept_as_plain_weights_have_it(initialize, is_loaded: bool) -> None:
    """Once rounded only, however many ops it takes."""
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        weight = te.Linear(64, 96).weight
    plain = nn.Parameter(weight.get_high_precision_init_val().clone())
    if is_loaded:  # of a file in 16 bits
        for each in (weight, plain):
            each.data.copy_(torch.ones(96, 64, dtype=torch.float16) * 300)
    for each in (weight, plain):
        torch.manual_seed(0)
        initialize(each)
    assert_bitwise(weight.get_high_precision_init_val(), plain.detach(), "what was quantized")
    assert_bitwise(weight.detach().dequantize(), te.Float8BlockQuantizer()(plain.detach()).dequantize(), "the weight")


def test_what_fills_a_weight_without_values_is_kept() -> None:
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        module = te.Linear(64, 96, device="meta")
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    nn.init.normal_(module.weight, std=0.02)
    torch.manual_seed(0)
    want = torch.empty(96, 64).normal_(std=0.02)
    assert_bitwise(module.weight.get_high_precision_init_val(), want, "what was quantized")


def test_comparisons_have_the_dtype_of_the_weight() -> None:
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        weight = te.Linear(64, 96).bfloat16().weight  # what is kept is fp32
    plain = weight.dequantize()
    assert torch.where(weight > 0, weight, 0.0).dtype == torch.bfloat16
    assert_bitwise(
        torch.where(weight > 0, weight, 0.0), torch.where(plain > 0, plain, 0.0), "with gradients: what is multiplied"
    )
    with torch.no_grad():
        assert torch.where(weight > 0, weight, 0.0).dtype == torch.bfloat16


@pytest.mark.parametrize("single", [False, True])
def test_truncated_normals_of_experts_are_those_of_plain_weights(single: bool) -> None:
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        module = te.GroupedLinear(3, 64, 96, bias=False, single_grouped_weight=single)
    for name, weight in module.named_parameters():
        both = weight, torch.empty(weight.shape)
        for each in both:
            torch.manual_seed(0)
            nn.init.trunc_normal_(each, std=0.02, a=-0.03, b=0.04)
            each.data.erfinv_()
        assert_bitwise(weight.get_high_precision_init_val(), both[1], name)
        for each in both if single else ():  # matrix by matrix
            torch.manual_seed(1)
            for member in each:
                nn.init.trunc_normal_(member, std=0.02, a=-0.03, b=0.04)
                member.data.erfinv_()  # as some versions of torch do there
        assert_bitwise(weight.get_high_precision_init_val(), both[1], f"members of {name}")


def test_a_parameter_holds_what_cannot_be_derived() -> None:
    for made_by in (recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()):
        with te.quantized_model_init(recipe=made_by):
            weight = te.Linear(64, 96).weight
        assert weight.storage.fields == weight.format.canonical.fields


@pytest.mark.every_run(make=(MAKERS["layernorm_mlp"],))
@every_module
def test_modules_are_copied_and_compiled(make) -> None:
    torch.compiler.reset()
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        module = make()
    x = normal(4, 64)
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        want = module(x)
        assert_bitwise(copy.deepcopy(module)(x), want, "deepcopy")
        compiled = torch.compile(module, backend="aot_eager")(x)
    assert (compiled - want).norm() <= 1e-6 * want.norm()


@every_module
def test_state_dicts_move_between_plain_and_quantized(make) -> None:
    plain = make()
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        quantized = make()
    assert list(plain.state_dict()) == list(quantized.state_dict())
    quantized.load_state_dict(plain.state_dict())
    x = normal(4, 64)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert_bitwise(quantized(x), plain(x), "loaded")


@every_module
def test_states_of_other_formats_are_told_of(make) -> None:
    made = []
    for made_by in (recipe.MXFP8BlockScaling(), recipe.MXFP8BlockScaling(), recipe.Float8BlockScaling()):
        with te.quantized_model_init(recipe=made_by):
            made.append(make())
    target, same, other = made
    with pytest.warns(UserWarning, match="a state of float8_block_2d is loaded into mxfp8_1d: what was rounded once"):
        target.load_state_dict(other.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(same.state_dict())
        target.load_state_dict(make().state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_inputs_that_cannot_be_quantized_are_named_with_their_module(dtype: torch.dtype) -> None:
    cases = (te.Linear(128, 128, name="up"), ()), (te.GroupedLinear(2, 128, 128, name="up"), ([4, 4],))
    for module, splits in cases:
        with (
            te.autocast(recipe=recipe.Float8BlockScaling()),
            pytest.raises(ValueError, match=f"up: an input of {dtype}"),
        ):
            module(torch.ones(8, 128, dtype=dtype), *splits)


def converted(in_place: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model whose weight was quantized, and its state from before, whose tensors may have been changed in place."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    state = model.state_dict()
    te.convert(model, {"*": recipe.Float8BlockScaling()}, preserve_high_precision_init_val=True)
    if in_place:
        state["0.weight"].mul_(2.0)
    return model, state


def first_step(model: nn.Module) -> torch.Tensor:
    optimizer = te.optim.FusedAdam(model.parameters(), lr=0.0)
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        model(normal(16, 64)).sum().backward()
    optimizer.step()
    return optimizer.state[model[0].weight]["master_param"]


TAKEN = {
    "first step": first_step,
    "by name": lambda model: model[0].weight.get_high_precision_init_val(),
    "export": lambda model: checkpoints.high_precision_state_dict(model)["0.weight"],
    "copy": lambda model: copy.deepcopy(model)[0].weight.get_high_precision_init_val(),
    "pickled": lambda model: pickle.loads(pickle.dumps(model[0].weight)).get_high_precision_init_val(),
    "shard": lambda model: model[0].weight.data[:32].storage.initial,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_kept_values_that_were_changed_by_others_are_not_taken(take: Callable[[nn.Module], torch.Tensor]) -> None:
    model, state = converted(in_place=False)
    found = take(model)
    assert_bitwise(found, state["0.weight"][: len(found)], "kept")
    assert type(found) is torch.Tensor
    model, _ = converted(in_place=True)
    with pytest.raises(RuntimeError, match="^0: a weight got other values.*wanted them as they were.*clone"):
        take(model)
    model.load_state_dict({"0.weight": normal(64, 64)})
    assert_bitwise(take(model)[:32], normal(64, 64)[:32], "loaded again")


def test_values_that_are_kept_for_others_are_not_written() -> None:
    given = normal(2 * 32, 64).view(2, 32, 64)
    before = given.clone()
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        weight = weight_of(LinearSite(64, 32, name="site"), given.detach())
    assert weight.get_high_precision_init_val().data_ptr() == given.data_ptr()
    with torch.no_grad():
        weight[0].mul_(0.5)
    assert_bitwise(given, before, "whose memory it is")
    assert_bitwise(weight.get_high_precision_init_val(), torch.stack([before[0] * 0.5, before[1]]), "kept")
    given.zero_()
    assert_bitwise(weight.get_high_precision_init_val()[1], before[1], "kept of its own")


def test_values_that_were_made_in_inference_mode_are_kept_as_they_were() -> None:
    with torch.inference_mode():
        given = normal(32, 64)
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling(), preserve_high_precision_init_val=True):
        weight = weight_of(LinearSite(64, 32, name="site"), given.detach())
    with torch.inference_mode():
        given.zero_()
    assert_bitwise(weight.get_high_precision_init_val(), normal(32, 64), "kept")
