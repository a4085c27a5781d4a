"""A mixture of experts on the GPU: it never waits for the GPU, and one graph of it serves every routing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import recipe, testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing, sort_by_expert
from te_dist.nn.moe.dispatch import by_expert, fill_slots
from te_dist.recipe import Recipe
from te_dist.testing import WorkerPool, assert_bitwise
from tests.gpu.graphs import warm_up
from tests.gpu.twins import unrecorded
from tests.gpu.waits import never_waiting
from tests.nn.distributed.test_moe_tokens import WAYS
from tests.nn.recipes import relative_error

pytestmark = pytest.mark.gpu

HIDDEN, FFN, EXPERTS, TOKENS = 256, 128, 8, 96
ROUTING = Routing(EXPERTS, 2, aux_loss_coefficient=0.01, bias_update_rate=0.01)
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def make(name: str, *, device: torch.device | str = "cuda") -> MoE:
    """A mixture of the same values every time, its weights quantized where there is a recipe."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        return MoE(HIDDEN, FFN, ROUTING, shared_ffn_hidden_size=FFN, params_dtype=torch.bfloat16, device=device)


def tokens(seed: int, device: torch.device | str = "cuda") -> Tensor:
    """Tokens that are routed otherwise for every seed; from seed 2 on all alike, so that most experts have none."""
    few = torch.randn(TOKENS if seed < 2 else 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return few.expand(TOKENS, HIDDEN).bfloat16().to(device)


def run(module: Any, name: str, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Forward and backward; output, all gradients, and what was counted."""
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        out = module(x)
    out.backward(grad)
    gradients = [param.grad for param in module.parameters()]
    counted = [t for t in (module.router.tokens_per_expert, module.dropped) if t is not None]
    return [out.detach(), x.grad, *gradients, *counted]


def fresh(name: str, x: Tensor, grad: Tensor) -> list[Tensor]:
    """What a module of its own makes of `x`."""
    with unrecorded():
        return run(make(name), name, x.detach().clone().requires_grad_(), grad)


@every_recipe
def test_a_rank_without_tokens_has_gradients_of_zeros(name: str) -> None:
    module = make(name)
    for x in (tokens(0)[:0], tokens(1)[:0].clone()):
        module.zero_grad()
        out, *gradients = run(module, name, x.detach().requires_grad_(), torch.empty_like(x))
        assert out.shape == (0, HIDDEN)
        assert all(grad is not None and not grad.any() for grad in gradients)


@every_recipe
def test_no_pass_waits_for_the_gpu(name: str) -> None:
    module, grad = make(name), tokens(9)
    for _ in range(2):
        run(module, name, tokens(0).requires_grad_(), grad)
    x = tokens(1).requires_grad_()
    module.zero_grad()
    torch.cuda.synchronize()
    with never_waiting():
        run(module, name, x, grad)


def test_routing_is_that_of_fp32() -> None:
    router, x = make("bf16").router, tokens(0).requires_grad_()
    down = torch.randn(TOKENS, ROUTING.top_k, generator=torch.Generator().manual_seed(4)).cuda()
    (router(x).probabilities * down).sum().backward()
    got = x.grad, router.weight.grad
    twin = make("bf16", device="cpu").router  # with other weights: every kind of device draws its own
    twin.load_state_dict(router.state_dict())
    asking = tokens(0, "cpu").requires_grad_()
    want = twin(asking)
    (want.probabilities * down.cpu()).sum().backward()
    assert_bitwise(router(x).experts.cpu(), want.experts, "experts")
    torch.testing.assert_close(router(x).probabilities.cpu(), want.probabilities, rtol=1e-5, atol=1e-7)
    for gradient, expected in zip(got, (asking.grad, twin.weight.grad), strict=True):
        assert relative_error(gradient.cpu(), expected.double()) < 4e-3  # of their bf16


def test_routing_takes_matrices_that_lie_otherwise() -> None:
    router, x = make("bf16").router, tokens(0)
    turned = torch.nn.Parameter(router.weight.detach().t().contiguous().t())
    want = router(x)
    got = torch.func.functional_call(router, {"weight": turned}, (x.t().contiguous().t(),))
    assert_bitwise(got.experts, want.experts, "experts")
    assert_bitwise(got.probabilities, want.probabilities, "probabilities")
    got.probabilities[:, 0].sum().backward()
    want.probabilities[:, 0].sum().backward()
    assert_bitwise(turned.grad.contiguous(), router.weight.grad, "gradient")


def test_routing_takes_rows_that_lie_in_one_another() -> None:
    router, x = make("bf16").router, tokens(0)
    alike = router(x[:1].expand(5, -1))
    assert_bitwise(alike.experts, router(x[:1].repeat(5, 1)).experts, "experts")


def test_plans_of_rows_wait_for_nothing_and_are_those_of_the_cpu() -> None:
    experts = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(TOKENS)])
    counts = torch.randint(0, 9, (4, 5))
    number = int(counts.sum())
    here = [sort_by_expert(experts, EXPERTS), fill_slots(experts, 4, 2, capacity=60), by_expert(counts, number)]
    experts, counts = experts.cuda(), counts.cuda()
    with never_waiting():
        there = [sort_by_expert(experts, EXPERTS), fill_slots(experts, 4, 2, capacity=60), by_expert(counts, number)]
    for a, b in zip(there, here, strict=True):
        for field in a._fields:
            assert_bitwise(getattr(a, field).cpu(), getattr(b, field), field)


@every_recipe
def test_a_captured_pass_replays_with_other_routings(name: str) -> None:
    module, grad = make(name), tokens(9)
    check_replays(module, name, grad, lambda x: fresh(name, x, grad))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_a_flag_says_whether_a_captured_pass_quantizes_the_weights_of_experts(name: str) -> None:
    torch.manual_seed(0)
    module, flag = MoE(HIDDEN, FFN, ROUTING, params_dtype=torch.bfloat16, device="cuda"), torch.zeros(1, device="cuda")
    x, grad, graph = tokens(0), tokens(9), torch.cuda.CUDAGraph()

    def forward(block: MoE, **kept: Any) -> Tensor:
        with te.autocast(recipe=RECIPES[name]):
            out = block(x, **kept)
        out.backward(grad)
        return out.detach()

    warm_up(lambda: forward(module, skip_weight_quantization=flag))
    module.zero_grad()
    with torch.cuda.graph(graph):
        out = forward(module, skip_weight_quantization=flag)
    for factor, skips in ((1.0, False), (2.5, True), (1.0, False), (0.3, True)):
        with torch.no_grad():
            module.experts.fc1.weight.mul_(factor)
        if not skips:
            twin = MoE(HIDDEN, FFN, ROUTING, params_dtype=torch.bfloat16, device="cuda")
            twin.load_state_dict(module.state_dict())
        flag.fill_(skips)
        graph.replay()
        twin.zero_grad()
        assert_bitwise(out, forward(twin), f"y of {factor} {skips}")
        got, want = module.experts.fc1.weight.grad, twin.experts.fc1.weight.grad
        assert_bitwise(got, want, f"dw of {factor} {skips}")


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@every_recipe
def test_a_compiled_mixture_is_one_graph_for_all_numbers_of_tokens(name: str, backend: str) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(make(name), backend=counter, fullgraph=True)
    for rows in (96, 64, 33, 1024, 200):
        x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16().cuda()
        grad, found = torch.randn_like(x), []
        for module in (compiled, make(name)):
            module.zero_grad()
            found.append(run(module, name, x.clone().requires_grad_(), grad)[:-1])
        for number, (got, want) in enumerate(zip(*found, strict=True)):
            if backend == "aot_eager":
                assert_bitwise(got, want, f"result {number} of {rows} tokens")
            else:  # which adds what shared experts make by itself
                assert relative_error(got.cpu(), want.cpu().double()) < 2e-2, f"result {number} of {rows} tokens"
    assert counter.frame_count <= 3  # noqa: PLR2004


@every_recipe
def test_a_compiled_mixture_may_be_one_cuda_graph(name: str) -> None:
    """Of torch's own making: routings differ, and nothing waits."""
    torch.compiler.reset()
    module = make(name)
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for seed in (0, 1, 0, 1, 2):
        torch.compiler.cudagraph_mark_step_begin()
        module.zero_grad()
        grad = tokens(9)
        got = [each.clone() for each in run(compiled, name, tokens(seed).clone().requires_grad_(), grad)[:-1]]
        for number, (a, b) in enumerate(zip(got, fresh(name, tokens(seed), grad)[:-1], strict=True)):
            assert relative_error(a.cpu(), b.cpu().double()) < 2e-2, f"result {number} of seed {seed}"


def uncount(module: MoE) -> None:
    """Forgets what was counted."""
    for counted in (module.router.tokens_per_expert, module.dropped):
        if counted is not None:
            counted.zero_()


def check_replays(module: MoE, name: str, grad: Tensor, expected: Any) -> None:
    """Captures forward and backward once, and compares replays with what `expected` gives for the same tokens."""
    warm_up(lambda: run(module, name, tokens(0).requires_grad_(), grad))
    module.zero_grad()
    x, graph = tokens(0).requires_grad_(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        captured = run(module, name, x, grad)
    for seed in (0, 1, 2, 3):
        with torch.no_grad():
            x.copy_(tokens(seed))
        uncount(module)
        graph.replay()
        for index, (got, want) in enumerate(zip(captured, expected(x), strict=True)):
            assert_bitwise(got, want, f"{index} of seed {seed}")


def recorded(rank: int, world: int, way: str) -> None:
    """Passes of several batches, the last ones by tapes, against what plays none; with slots nothing waits then."""
    mesh, style = testing.mesh((world,), ("ep",)), ExpertParallel(**WAYS[way])
    module, twin = (parallelize_module(make("block"), mesh, style) for _ in range(2))
    for seed in range(6):
        x, grad = tokens(seed % 2 + 2 * (seed > 3)).roll(rank + seed, 0), tokens(9 + seed)  # noqa: PLR2004
        for its in (module, twin):
            its.zero_grad()
            uncount(its)
        asking = [x.clone().requires_grad_() for _ in range(2)]
        torch.cuda.synchronize()
        with never_waiting() if seed == 5 and style.capacity else nullcontext():  # noqa: PLR2004
            found = run(module, "block", asking[0], grad)
        with unrecorded():
            wanted = run(twin, "block", asking[1], grad)
        for index, (got, want) in enumerate(zip(found, wanted, strict=True)):
            assert_bitwise(got, want, f"{index} of pass {seed}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_passes_over_ranks_that_are_recorded_have_the_bits_of_others(
    way: str, world: int, gpu_ranks: Callable[[int], WorkerPool]
) -> None:
    gpu_ranks(world).run(recorded, way)


def slots_replayed(rank: int, world: int, name: str, how: dict[str, Any]) -> int:
    """On each rank of experts at a fixed capacity; what a routing drops."""
    mesh, grad = testing.mesh((world,), ("ep",)), tokens(9)
    style = ExpertParallel(capacity=TOKENS * ROUTING.top_k * 3 // (4 * world), **how)
    module, eager = (parallelize_module(make(name), mesh, style) for _ in range(2))

    def expected(x: Tensor) -> list[Tensor]:
        eager.zero_grad()
        uncount(eager)
        with unrecorded():
            return run(eager, name, x.detach().clone().requires_grad_(), grad)

    check_replays(module, name, grad, expected)
    return int(eager.dropped)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("travels", ["copies", "batches"])
@pytest.mark.parametrize(("name", "payload"), [("bf16", "plain"), ("block", "plain"), ("block", "quantized")])
def test_a_captured_pass_with_slots_replays_with_other_routings(
    name: str, payload: str, travels: str, world: int, gpu_ranks: Callable[[int], WorkerPool]
) -> None:
    dropped = gpu_ranks(world).run(slots_replayed, name, {"payload": payload, "travels": travels})
    assert sum(dropped) > 0
