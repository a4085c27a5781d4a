"""A mixture of experts on one rank against every token computed on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_dist as te
from te_dist import recipe
from te_dist.kernels.runtime import recording
from te_dist.nn.group_fronts import GroupEpilogue
from te_dist.nn.moe import ExpertParallel, MoE, Routing, SwiGluMLP, experts, unpermute
from te_dist.nn.moe.dispatch import Arrived
from te_dist.recipe import Recipe
from te_dist.tensor import QuantizedTensor
from te_dist.testing import assert_bitwise
from tests.nn.recipes import relative_error

HIDDEN, FFN, EXPERTS, TOKENS = 128, 128, 6, 40
ROUTING = Routing(EXPERTS, 2, "sigmoid", scaling_factor=1.5, aux_loss_coefficient=0.01, bias_update_rate=0.01)
RECIPES: dict[str, Recipe | None] = {
    "plain": None,
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
TOLERANCES = {"plain": 1e-2, "nvfp4": 0.35}  # of gradients; by format, of two products in a row
every_recipe = pytest.mark.parametrize("name", RECIPES)
shared = pytest.mark.parametrize("shared_ffn", [0, 256])


def make(shared_ffn: int = 0, **options: Any) -> MoE:
    torch.manual_seed(0)
    module = MoE(HIDDEN, FFN, ROUTING, shared_ffn_hidden_size=shared_ffn, params_dtype=torch.bfloat16, **options)
    torch.nn.init.normal_(module.router.weight, std=0.1)
    return module


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(module: nn.Module, name: str, x: Tensor, **kept: Any) -> list[Tensor]:
    """Output and all gradients of one pass."""
    torch.manual_seed(3)  # of stochastic rounding
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        out = module(x, **kept)
    out.backward(tokens(*out.shape[:-1], seed=2))
    return [out.detach(), x.grad, *(param.grad for param in module.parameters())]


def swiglu(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, up = (x @ first.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ second.T


def expected(module: MoE, x: Tensor) -> list[Tensor]:
    """The same in float64 by definition, with the choices of the module; its balancing loss as well."""
    params = [param.detach().double().requires_grad_() for param in module.parameters()]
    router, first, second, *dense = params
    x = x.detach().double().requires_grad_()
    with torch.no_grad():
        chosen_experts = module.router(x.float()).experts
    scores = (x @ router.T).sigmoid()
    chosen = scores.gather(1, chosen_experts)
    weights = chosen / chosen.sum(1, keepdim=True) * ROUTING.scaling_factor
    spread = torch.zeros_like(scores).scatter(1, chosen_experts, weights)
    out = sum(swiglu(x, first[e], second[e]) * spread[:, e, None] for e in range(EXPERTS))
    out = out + (swiglu(x, *dense) if dense else 0)
    counts = torch.bincount(chosen_experts.flatten(), minlength=EXPERTS) / (TOKENS * ROUTING.top_k)
    balance = 0.01 * EXPERTS * (counts * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    torch.autograd.backward([out, balance], [tokens(TOKENS, seed=2).double(), torch.ones((), dtype=torch.float64)])
    return [out.detach(), x.grad, *(param.grad for param in params)]


@shared
@every_recipe
def test_outputs_and_gradients_are_those_of_the_definition(name: str, shared_ffn: int) -> None:
    module, x = make(shared_ffn), tokens(TOKENS)
    names = ["out", "x", *(key for key, _ in module.named_parameters())]
    for what, got, want in zip(names, run(module, name, x), expected(module, x), strict=True):
        assert relative_error(got, want) < TOLERANCES.get(name, 0.1), what


@every_recipe
def test_sums_behind_the_experts_have_the_bits_of_sums_on_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = run(make(), name, tokens(TOKENS))
    apart: list[Tensor] = []

    def sums(rows: Tensor, *_: Tensor) -> Tensor:
        apart.append(rows)
        return rows

    def multiply(maps: Any, rows: Tensor, arrived: Arrived, *, given: Any) -> Tensor:
        return unpermute(in_one(maps, rows, arrived, given=given), arrived.by_expert)

    in_one = experts.multiply
    monkeypatch.setattr(experts, "SUMMED", GroupEpilogue("none", sums, lambda grad, *_: grad))
    monkeypatch.setattr(experts, "multiply", multiply)
    for what, (a, b) in enumerate(zip(got, run(make(), name, tokens(TOKENS)), strict=True)):
        assert_bitwise(a, b, f"result {what}")
    assert [rows.shape for rows in apart] == [(TOKENS * ROUTING.top_k, HIDDEN)]


@every_recipe
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_tokens_give_no_rows_and_gradients_of_zeros(name: str, shape: tuple[int, ...]) -> None:
    out, of_x, *others = run(make(), name, tokens(*shape))
    assert out.shape == of_x.shape == (*shape, HIDDEN)
    assert not any(grad.any() for grad in others if grad is not None)


@every_recipe
def test_a_pass_that_is_recomputed_gives_the_same_bits(name: str) -> None:
    module, x = make(256), tokens(TOKENS)
    want = run(make(256), name, x)
    asking = x.clone().requires_grad_()
    torch.manual_seed(3)
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        out = te.checkpoint(module, asking)
    out.backward(tokens(TOKENS, seed=2))
    got = [out.detach(), asking.grad, *(param.grad for param in module.parameters())]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, str(index))
    assert float(module.router.tokens_per_expert.sum()) == ROUTING.top_k * TOKENS


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Adds up what autograd saves."""

    def __init__(self) -> None:
        self.num_bytes = 0
        super().__init__(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        parts = tensor.storage.buffers.values() if isinstance(tensor, QuantizedTensor) else (tensor,)
        self.num_bytes += sum(part.nbytes for part in parts)
        return tensor


@pytest.mark.parametrize("name", ["plain", "block", "current", "mxfp8"])
def test_inputs_that_are_quantized_again_give_the_same_bits(name: str) -> None:
    x, found = tokens(TOKENS), []
    for module in (make(256), make(256, save_original_input=True)):
        saved = SavedBytes()
        with saved:
            results = run(module, name, x)
        found.append((results, saved.num_bytes))
    for index, (a, b) in enumerate(zip(*(results for results, _ in found), strict=True)):
        assert_bitwise(b, a, str(index))
    codes = 0 if name == "plain" else TOKENS * ROUTING.top_k * (HIDDEN + FFN)
    assert found[0][1] - found[1][1] >= codes


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_weights_of_experts_are_kept_over_microbatches(name: str) -> None:
    want = run(make(), name, tokens(TOKENS))
    by_host, by_flag, flag = make(), make(), torch.zeros(1)
    for number in range(2):
        flag.fill_(number)
        if number:  # the host would see it, and the flag is obeyed
            with torch.no_grad():
                by_flag.experts.fc2.weight.mul_(2)
        kept = run(by_host, name, tokens(TOKENS), is_first_microbatch=number == 0)
        flagged = run(by_flag, name, tokens(TOKENS), skip_weight_quantization=flag)
        for place, (value, got, also) in enumerate(zip(want, kept, flagged, strict=True)):
            assert_bitwise(got, value, f"{place} of {number}")
            assert_bitwise(also, value, f"{place} of {number}, by a flag")
    flag.zero_()
    out = run(by_flag, name, tokens(TOKENS), skip_weight_quantization=flag)[0]
    assert relative_error(out, want[0]) > 0.1


def test_dimensions_in_front_are_kept() -> None:
    module, x = make(), tokens(4, 10)
    out = module(x)
    assert_bitwise(out.detach().flatten(0, 1), module(x.flatten(0, 1)).detach(), "out")
    assert out._base is None  # FSDP2 warns of modules that return views


def test_experts_multiply_in_the_type_of_torchs_autocast() -> None:
    torch.manual_seed(0)
    module = MoE(HIDDEN, FFN, ROUTING, shared_ffn_hidden_size=FFN)
    x = torch.randn(TOKENS, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, routed = module(x), module.router(x)
        want = module._mix(x.bfloat16(), routed) + module.shared_experts(x)
        arrived = module.dispatcher.dispatch(x, routed)
        assert module.experts(x, arrived).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
    assert_bitwise(out.detach(), want.detach(), "out")
    out.sum().backward()
    assert module.experts.fc1.weight.grad.dtype == torch.float32


def test_an_expert_without_tokens_gets_a_gradient_of_zeros() -> None:
    module, x = make(), tokens(TOKENS)
    module.router.expert_bias[3] = -10.0
    run(module, "block", x)
    for weight in (module.experts.fc1.weight, module.experts.fc2.weight):
        moved = weight.grad.flatten(1).any(1)
        assert moved.tolist() == [expert != 3 for expert in range(EXPERTS)]


def test_evaluation_leaves_no_trace() -> None:
    module, x = make().eval(), tokens(TOKENS)
    with torch.no_grad(), te.autocast(recipe=RECIPES["block"]):
        module(x)
    assert not module.router.tokens_per_expert.any()
    assert module.router.last_aux_loss is None


def test_passes_on_the_meta_device_ask_for_no_value() -> None:
    """What waits for a device has to ask for a value; here there are none."""
    module = make(256).to("meta")
    with recording():
        out = module(tokens(TOKENS).to("meta").requires_grad_())
        out.backward(torch.empty_like(out))
    assert module.experts.fc1.weight.grad.is_meta


def test_the_style_of_experts_is_for_mixtures() -> None:
    with pytest.raises(ValueError, match="ExpertParallel is for te_dist's MoE, got Linear"):
        apply: Any = ExpertParallel()._apply
        apply(torch.nn.Linear(2, 2), None)


def test_weights_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TopKRouter: .* on the meta device .* call te_dist.fsdp2.materialize"):
        make().to("meta")(tokens(TOKENS))


def test_arguments_of_another_kind_are_named() -> None:
    wrong: Any = 8
    with pytest.raises(TypeError, match=r"routing: got 8, wanted a te_dist.nn.Routing"):
        MoE(HIDDEN, FFN, wrong)
    factor: Any = 1.25
    with pytest.raises(TypeError, match=r"capacity: got 1.25, wanted a number of rows"):
        ExpertParallel(capacity=factor)


def test_an_input_of_another_width_is_refused_as_it_was_given() -> None:
    with pytest.raises(ValueError, match=r"MoE: the input is \(\.\.\., 128\), got shape \(2, 5, 64\)"):
        make()(torch.randn(2, 5, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("module", [lambda: make(return_bias=True), lambda: SwiGluMLP(64, 32, return_bias=True)])
def test_a_bias_that_nobody_has_is_not_returned(module: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="return_bias=True is not supported: its maps have no bias"):
        module()
