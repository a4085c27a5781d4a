"""Mixtures under torch.compile: one graph, the bits of eager mode; what keeps state in Python stays outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import te_dist as te
from te_dist.nn.group_fronts import WEIGHTED_SWIGLU
from te_dist.nn.moe import MoE, StackedExperts
from te_dist.testing import assert_bitwise
from tests.nn.moe.test_block import EXPERTS, FFN, HIDDEN, RECIPES, TOKENS, make, run, tokens

STATELESS = [name for name in RECIPES if name != "delayed"]
every_recipe = pytest.mark.parametrize("name", STATELESS)
weights = pytest.mark.parametrize("quantized", [False, True], ids=["plain weights", "quantized weights"])


class Recomputed(nn.Module):
    """A module that runs again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return te.checkpoint(self.module, x)


def mixture(name: str, quantized: bool, shared_ffn: int = 256, **options: Any) -> MoE:
    torch.compiler.reset()
    with te.quantized_model_init(enabled=quantized and RECIPES[name] is not None, recipe=RECIPES[name]):
        return make(shared_ffn, **options)


def check(compiled: Any, module: MoE, name: str, x: Tensor, **kept: Any) -> None:
    """Output and all gradients of one pass of both."""
    want = [each if each is None else each.clone() for each in run(module, name, x, **kept)]
    for number, (a, b) in enumerate(zip(run(compiled, name, x, **kept), want, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None:
            assert_bitwise(a, b, f"result {number} of {tuple(x.shape)}")


@pytest.mark.every_run(name=("block", "nvfp4"))
@weights
@every_recipe
def test_a_mixture_is_one_graph_with_the_bits_of_eager_mode(name: str, quantized: bool) -> None:
    module = mixture(name, quantized)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    check(compiled, module, name, tokens(TOKENS))
    module.eval()
    x = tokens(TOKENS, seed=5)
    with torch.no_grad(), te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        torch.manual_seed(3)
        want = module(x)
        torch.manual_seed(3)
        assert_bitwise(compiled(x), want, "without gradients")


@pytest.mark.every_run(name=("block",))
@every_recipe
def test_a_graph_serves_other_numbers_of_tokens(name: str) -> None:
    module = mixture(name, quantized=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for rows in (40, 64, 7, 129, 200, 512, 300):
        check(compiled, module, name, tokens(rows))
    assert counter.frame_count <= (3 if name == "nvfp4" else 2)  # NVFP4's dense maps take multiples of 16 rows


@every_recipe
def test_a_graph_multiplies_in_the_type_of_torchs_autocast(name: str) -> None:
    """Experts, and what is behind the mixture."""
    module = nn.Sequential(mixture(name, quantized=False).float(), te.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    found = []
    for called in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        module.zero_grad()
        x = tokens(TOKENS).float().requires_grad_()
        with torch.autocast("cpu"), te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            out = called(x)
        out.backward(tokens(TOKENS, seed=2))
        found.append([out.detach(), x.grad, *(param.grad for param in module.parameters())])
    assert found[1][0].dtype is torch.bfloat16
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert_bitwise(a, b, f"result {number}")


@pytest.mark.parametrize("frozen", [("experts.fc1.weight",), ("experts.fc2.weight",), ("router.weight",)], ids=str)
def test_frozen_parts_get_no_gradients(frozen: tuple[str, ...]) -> None:
    module = mixture("block", quantized=False)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    check(torch.compile(module, backend="aot_eager", fullgraph=True), module, "block", tokens(TOKENS))


@pytest.mark.parametrize("saves", [False, True], ids=["quantized", "original"])
def test_a_graph_keeps_gates_and_ups_and_the_codes_of_inputs(saves: bool) -> None:
    """The tokens once, and no copies of rows in their own type but gates and ups."""
    module = mixture("block", quantized=True, shared_ffn=0, save_original_input=saves)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    check(compiled, module, "block", tokens(TOKENS))
    with te.autocast(recipe=RECIPES["block"]):
        out = compiled(tokens(TOKENS).requires_grad_())
    rows = TOKENS * module.router.routing.top_k
    plain = [tuple(each.shape) for each in out.grad_fn.saved_tensors if each.dtype is torch.bfloat16]
    assert (rows, 2 * FFN) in plain
    assert {shape for shape in plain if shape[0] == rows} == {(rows, 2 * FFN)}
    assert plain.count((TOKENS, HIDDEN)) == 1
    codes = [each for each in out.grad_fn.saved_tensors if each.dim() == 1 and each.dtype is torch.uint8]
    assert len(codes) == (0 if saves else 2)


@pytest.mark.parametrize(("name", "hands"), [("block", True), ("mxfp8", True), ("current", False), ("plain", False)])
def test_the_gradient_of_swiglu_is_found_where_eager_mode_finds_it(name: str, hands: bool) -> None:
    seen: list[str] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.args) for node in graph.graph.nodes if "grouped_linear_forward" in str(node.target))
        return graph

    module = mixture(name, quantized=False)
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=forward, bw_compiler=nop), fullgraph=True)
    run(compiled, name, tokens(TOKENS))
    assert len(seen) == 2  # noqa: PLR2004
    assert any(str(WEIGHTED_SWIGLU.handed().name) in text.replace("\\", "") for text in seen) == hands


def test_histories_and_weights_kept_over_microbatches_stay_outside_of_graphs() -> None:
    for name, kept in (("delayed", {}), ("block", {"is_first_microbatch": True})):
        module, twin = mixture(name, quantized=False), make(256)
        want = run(twin, name, tokens(TOKENS), **kept)
        got = run(torch.compile(module, backend="aot_eager"), name, tokens(TOKENS), **kept)
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_bitwise(a, b, f"result {number}")
        torch.compiler.reset()
        with pytest.raises(Exception, match="leave out fullgraph=True"):
            run(torch.compile(module, backend="aot_eager", fullgraph=True), name, tokens(TOKENS), **kept)


def test_experts_that_are_watched_stay_outside_of_graphs() -> None:
    module, seen = mixture("block", quantized=False), []
    module.experts.register_forward_hook(lambda *_: seen.append(1))
    check(torch.compile(module, backend="aot_eager"), module, "block", tokens(TOKENS))
    assert len(seen) == 2  # noqa: PLR2004  (of eager mode, and of what is compiled)


def test_what_runs_again_has_the_bits_of_the_first_pass() -> None:
    module = mixture("block", quantized=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    want = run(module, "block", tokens(TOKENS))
    for number, (a, b) in enumerate(zip(run(Recomputed(compiled), "block", tokens(TOKENS)), want, strict=True)):
        assert_bitwise(a, b, f"result {number}")
    x = tokens(TOKENS).requires_grad_()
    with te.autocast(recipe=RECIPES["block"]):
        out = checkpoint(compiled, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="run again in backward.*context_fn=te_dist.recompute.context_fn"):
        out.sum().backward()


@weights
def test_stacked_experts_are_one_graph(quantized: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=RECIPES["block"]):
        module = StackedExperts(EXPERTS, HIDDEN, FFN, params_dtype=torch.bfloat16)
    found = []
    for called in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        x, weight = tokens(TOKENS).requires_grad_(), torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(0))
        weight.requires_grad_()
        chosen = torch.arange(2 * TOKENS).view(TOKENS, 2) * 5 % EXPERTS
        module.zero_grad()
        with te.autocast(recipe=RECIPES["block"]):
            out = called(x, chosen, weight)
        out.backward(tokens(TOKENS, seed=2))
        found.append([out.detach(), x.grad, weight.grad, *(param.grad for param in module.parameters())])
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert_bitwise(a, b, f"result {number}")
