"""Linear on the GPU: the products it computes, that it never waits for the GPU, that graphs of it replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import te_dist as te
from te_dist import grouped, recipe
from te_dist.catalog import FORMATS
from te_dist.nn import plan, products
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.gpu.graphs import warm_up
from tests.gpu.twins import unrecorded
from tests.gpu.waits import never_waiting
from tests.nn.recipes import CASES, exact_products, relative_error

pytestmark = pytest.mark.gpu

IN, OUT = 256, 384
every_recipe = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
STATELESS = {name: case for name, case in CASES.items() if not name.startswith("delayed")}
stateless = pytest.mark.parametrize("case", STATELESS.values(), ids=STATELESS.keys())


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def make(made_by: Recipe | None = None, **options: Any) -> te.Linear:
    """A Linear of the same values every time; its weight quantized if there is a recipe."""
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
        module = te.Linear(IN, OUT, **(dict(device="cuda", params_dtype=torch.bfloat16) | options))
    with torch.no_grad():
        module.weight.copy_(normal(OUT, IN, seed=3) / 16)
        module.bias.copy_(normal(OUT, seed=4))
    return module


def step(module: te.Linear, made_by: Recipe, x: Tensor) -> tuple[Tensor, ...]:
    """(output, gradient of the input, of the weight, of the bias) of one pass by the recipe."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=made_by):
        out = module(x)
    out.backward(normal(*out.shape, seed=2, dtype=out.dtype))
    return out.detach(), x.grad, module.weight.grad, module.bias.grad


@pytest.mark.parametrize("rows", [1, 37, 128, 1000])
@every_recipe
def test_products_are_those_of_the_quantized_operands(case: Any, rows: int) -> None:
    module, x = make(), normal(rows, IN)
    out, grad_x, grad_w, grad_b = step(module, case.recipe, x)
    grad = normal(rows, OUT, seed=2)
    cpu = [t.cpu() for t in (x, module.weight.detach(), grad)]
    want_out, want_x, want_w = exact_products(case.recipe, *cpu)
    # Stores round to bf16, and cuBLASLt sums forward products to about 14 bits.
    assert relative_error(out.cpu(), want_out + module.bias.cpu().double()) < 4e-3
    assert relative_error(grad_x.cpu(), want_x) < 4e-3
    assert relative_error(grad_w.cpu(), want_w) < 4e-3
    assert relative_error(grad_b.cpu(), grad.cpu().double().sum(0)) < 4e-3


@pytest.mark.parametrize("rows", [1, 37, 1000])
@pytest.mark.parametrize("name", ["block", "current", "delayed", "nvfp4"])
def test_rows_that_do_not_fit_have_the_bits_of_padded_ones(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by, x = CASES[name].recipe, normal(rows, IN)
    got = step(make(), made_by, x)
    with unrecorded():
        monkeypatch.setattr(plan.Plan, "takes_groups", False)
        want = step(make(), made_by, x)
    for label, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
        if name in ("current", "delayed"):  # cuBLASLt may sum in another order
            assert relative_error(a.cpu(), b.cpu().double()) < 2e-3, label
        else:
            assert_bitwise(a, b, label)


@every_recipe
def test_a_pass_without_rows_gives_zeros(case: Any) -> None:
    module = make()
    for _ in range(2):
        out, grad_x, grad_w, grad_b = step(module, case.recipe, normal(0, IN))
        assert (out.shape, grad_x.shape) == ((0, OUT), (0, IN))
        assert (grad_w == 0).all() and grad_w.shape == (OUT, IN)
        assert (grad_b == 0).all() and grad_b.shape == (OUT,)


@pytest.mark.parametrize("quantized", [False, True])
@stateless
def test_later_passes_are_those_of_a_fresh_module(case: Any, quantized: bool) -> None:
    if quantized and case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    made_by = case.recipe if quantized else None
    module = make(made_by)
    wide = normal(65, IN)
    for seed, x in enumerate((normal(64, IN), normal(64, IN, seed=5), normal(2, 32, IN, seed=6), wide[1:], wide[:64])):
        with unrecorded():
            want = step(make(made_by), case.recipe, x)
        got = step(module, case.recipe, x)
        for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            assert_bitwise(a, b, f"{name} of pass {seed}")


@pytest.mark.parametrize("quantized", [False, True])
@every_recipe
def test_maps_of_a_recipe_play_what_one_of_them_recorded(
    case: Any, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quantized and case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    plan._shared_tapes.cache_clear()  # of other tests
    runs: list[str] = []
    for name in ("_forward", "_backward"):
        known = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *args, its=name, of=known: (runs.append(its), of(*args))[1])

    def pass_of(number: int) -> tuple[Tensor, ...]:
        module = make(case.recipe if quantized else None)
        with torch.no_grad():
            module.weight.mul_(1 + number)
        return step(module, case.recipe, normal(88 + quantized, IN, seed=number))

    with unrecorded():
        wanted = [pass_of(number) for number in range(4)]
    runs.clear()
    for number, want in enumerate(wanted):
        for name, a, b in zip(("y", "dx", "dw", "db"), pass_of(number), want, strict=True):
            assert_bitwise(a, b, f"{name} of map {number}")
    assert runs == ["_forward", "_backward"] * (2 if type(case.recipe) in recipe.UNIFORM else 4)


@pytest.mark.parametrize("name", ["block", "current", "delayed", "mxfp8", "nvfp4"])
def test_maps_of_other_options_do_not_play_each_others_tapes(name: str) -> None:
    made_by, x, grad = CASES[name].recipe, normal(72, IN), normal(72, OUT, seed=2)
    main = torch.zeros(OUT, IN, device="cuda")

    def pass_of(*, bias: bool, quantized: bool, frozen: str = "", **options: Any) -> list[Tensor | None]:
        with te.quantized_model_init(enabled=quantized, recipe=made_by):
            module = te.Linear(IN, OUT, bias=bias, device="cuda", params_dtype=torch.bfloat16, **options)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=3 + number) / 16)
        for parameter_name, parameter in module.named_parameters():
            parameter.requires_grad_(parameter_name != frozen)
        if options:
            module.weight.main_grad = main.zero_()
        asking = x.clone().requires_grad_(frozen != "input")
        with te.autocast(recipe=made_by):
            out = module(asking)
        out.backward(grad)
        return [out.detach(), asking.grad, *(p.grad for p in module.parameters()), main.clone() if options else None]

    kinds: list[dict[str, Any]] = [
        dict(bias=bias, quantized=quantized, frozen=frozen)
        for bias in (False, True)
        for quantized in (False, True)
        for frozen in ("", "weight", "input", "bias")
    ]
    kinds += [dict(bias=False, quantized=value, fuse_wgrad_accumulation=True) for value in (False, True)]
    with unrecorded():
        wanted = [pass_of(**kind) for kind in kinds]
    for turn in range(4):
        for kind, want in zip(kinds, wanted, strict=True):
            for place, (a, b) in enumerate(zip(pass_of(**kind), want, strict=True)):
                assert (a is None) == (b is None), (kind, place)
                if a is not None and b is not None:
                    assert_bitwise(a, b, f"result {place} of {kind}, turn {turn}")


@pytest.mark.parametrize("name", ["block", "current", "mxfp8"])
def test_passes_do_not_depend_on_autocast_of_torch(name: str) -> None:
    made_by, x = STATELESS[name].recipe, normal(64, IN)
    module = make()
    with unrecorded():
        want = step(make(), made_by, x)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            got = step(module, made_by, x)
        for label, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            assert_bitwise(a, b, label)


@every_recipe
def test_quantized_and_plain_weights_give_the_same_bits(case: Any) -> None:
    if case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    x = normal(64, IN)
    plain, quantized = step(make(), case.recipe, x), step(make(case.recipe), case.recipe, x)
    for name, a, b in zip(("y", "dx", "dw", "db"), quantized, plain, strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("name", ["block", "current", "mxfp8"])
def test_main_gradients_are_added_to_by_the_product(name: str) -> None:
    made_by, x = STATELESS[name].recipe, normal(64, IN)
    module = make(fuse_wgrad_accumulation=True, params_dtype=torch.float32)
    want = step(make(params_dtype=torch.float32), made_by, x)[2]
    module.weight.main_grad = there = normal(OUT, IN, seed=8, dtype=torch.float32)
    before = there.clone()
    for count in (1, 2, 3):
        asking = x.clone().requires_grad_()
        with te.autocast(recipe=made_by):
            out = module(asking)
        out.backward(normal(*out.shape, seed=2))
        assert module.weight.grad is None
        torch.testing.assert_close(there, before + count * want, rtol=1e-5, atol=1e-4)


def test_a_model_made_on_meta_multiplies_as_one_made_on_the_gpu() -> None:
    made_by, x = recipe.Float8CurrentScaling(), normal(64, IN)
    with te.quantized_model_init(recipe=made_by), torch.device("meta"):
        module = te.Linear(IN, OUT, params_dtype=torch.bfloat16)
    module.to_empty(device="cuda")
    twin = make(made_by)
    with torch.no_grad():
        module.weight.copy_(normal(OUT, IN, seed=3) / 16)
        module.bias.copy_(normal(OUT, seed=4))
    for name, a, b in zip(("y", "dx", "dw", "db"), step(module, made_by, x), step(twin, made_by, x), strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("quantized", [False, True])
@every_recipe
def test_no_pass_waits_for_the_gpu(case: Any, quantized: bool) -> None:
    if quantized and case is CASES["high_precision_backward"]:
        pytest.skip("its weights cannot be parameters")
    module, x = make(case.recipe if quantized else None), normal(64, IN)
    for _ in range(2):
        step(module, case.recipe, x)
    grad = normal(64, OUT, seed=2)
    with never_waiting(), te.autocast(recipe=case.recipe):
        module(x.requires_grad_()).backward(grad)


class Block(torch.nn.Module):
    """A norm, two maps and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        options = dict(device="cuda", params_dtype=torch.bfloat16)
        torch.manual_seed(0)
        self.first = te.LayerNormLinear(IN, OUT, **options)
        self.second = te.Linear(OUT, IN, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.silu(self.first(x)))


def results(module: Block, made_by: Recipe, x: Tensor) -> list[Tensor]:
    """Output and all gradients of one pass."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=made_by):
        out = module(x)
    out.backward(normal(*out.shape, seed=2))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@stateless
def test_a_captured_pass_replays_with_other_inputs(case: Any) -> None:
    module, x, graph = Block(), normal(64, IN), torch.cuda.CUDAGraph()
    warm_up(lambda: results(module, case.recipe, x))
    grad = normal(64, IN, seed=2)
    asking = x.clone().requires_grad_()
    module.zero_grad()
    with torch.cuda.graph(graph), te.autocast(recipe=case.recipe):
        out = module(asking)
        out.backward(grad)
    captured = [out.detach(), asking.grad, *(p.grad for p in module.parameters())]
    for seed in (1, 7):
        with torch.no_grad():
            asking.copy_(normal(64, IN, seed=seed))
        graph.replay()
        for index, (got, want) in enumerate(zip(captured, results(Block(), case.recipe, asking), strict=True)):
            assert_bitwise(got, want, f"{index} of seed {seed}")


@pytest.mark.parametrize("name", ["block", "current", "mxfp8"])
def test_graphed_callables_train_as_eager_ones(name: str) -> None:
    made_by, module = STATELESS[name].recipe, Block()
    with te.autocast(recipe=made_by):
        graphed = torch.cuda.make_graphed_callables(module, (normal(64, IN).requires_grad_(),))
    for seed in (1, 7):
        x = normal(64, IN, seed=seed).requires_grad_()
        module.zero_grad()
        out = graphed(x)
        out.backward(normal(64, IN, seed=2))
        got = [out, x.grad, *(p.grad for p in module.parameters())]
        for index, (a, b) in enumerate(zip(got, results(Block(), made_by, x), strict=True)):
            assert_bitwise(a.detach(), b, f"{index} of seed {seed}")


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@stateless
def test_a_compiled_block_is_one_graph(case: Any, backend: str) -> None:
    torch.compiler.reset()
    compiled, x = torch.compile(Block(), backend=backend, fullgraph=True), normal(64, IN)
    for got, want in zip(results(compiled, case.recipe, x), results(Block(), case.recipe, x), strict=True):
        if backend == "aot_eager":
            assert_bitwise(got, want, "a result")
        else:  # which rounds what is around the maps in another place
            assert relative_error(got.cpu(), want.cpu().double()) < 2e-2


@stateless
def test_a_graph_serves_other_numbers_of_rows(case: Any) -> None:
    """One for the first; then by whether products take them."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Block(), backend=counter, fullgraph=True)
    for rows in (64, 128, 33, 512, 200, 15, 1024, 300, 96, 77):
        x, passes = normal(rows, IN), []
        for call in (compiled, Block()):
            torch.manual_seed(3)
            passes.append(results(call, case.recipe, x))
        for index, (got, want) in enumerate(zip(*passes, strict=True)):
            assert_bitwise(got, want, f"{index} of {rows} rows")
    assert counter.frame_count <= 3  # noqa: PLR2004


def test_a_member_of_a_group_is_multiplied_by_its_own_scale() -> None:
    values = torch.stack([normal(OUT, IN, seed=n) * n for n in (1, 2, 3)])
    members = grouped.quantize(values, FORMATS["float8_tensorwise_tn"]).unbind()
    module, x = make(recipe.Float8CurrentScaling()), normal(128, IN)
    for member in members:
        outs = []
        for weight in (member, member.clone()):  # the scale of the first is one of three that lie together
            module.weight = torch.nn.Parameter(weight)
            outs.append(step(module, recipe.Float8CurrentScaling(), x)[0])
        assert_bitwise(*outs, "output")


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_histories_move_as_on_the_cpu(algo: Any) -> None:
    made_by = recipe.DelayedScaling(amax_history_len=3, amax_compute_algo=algo)
    modules = [make(made_by, device=device) for device in ("cuda", "cpu")]
    for number, factor in enumerate((1.0, 8.0, 0.0, 0.25, float("inf"), 2.0)):
        x, grad = normal(64, IN, seed=number) * factor, normal(64, OUT, seed=number + 9) / (1 + factor)
        for module in modules:
            with te.autocast(recipe=made_by):
                out = module(x.to(module.weight.device).requires_grad_())
            out.backward(grad.to(out.device))
        ours, want = (module.gemm.scaling.state_dict() for module in modules)
        for name, value in want.items():
            assert_bitwise(ours[name].cpu(), value, f"{name} after step {number}")


@every_recipe
def test_outputs_may_be_changed_in_place_in_every_pass(case: Any) -> None:
    module = make()
    for _ in range(5):  # in the ordinary way, recorded, and played
        with te.autocast(recipe=case.recipe):
            out = module(normal(2, 64, IN).requires_grad_())
        before = out.detach().clone()
        out.add_(1)
        assert_bitwise(out.detach(), before + 1, "changed in place")
        out.sum().backward()


def test_histories_move_in_graphs() -> None:
    made_by, (module, twin), x = CASES["delayed"].recipe, (Block(), Block()), normal(64, IN)
    warm_up(lambda: results(module, made_by, x))
    for _ in range(3):
        results(twin, made_by, x)
    asking, grad, graph = x.clone().requires_grad_(), normal(64, IN, seed=2), torch.cuda.CUDAGraph()
    module.zero_grad()
    with torch.cuda.graph(graph), te.autocast(recipe=made_by):
        out = module(asking)
        out.backward(grad)
    captured = [out.detach(), asking.grad, *(p.grad for p in module.parameters())]
    for seed in (1, 7, 8, 9):
        with torch.no_grad():
            asking.copy_(normal(64, IN, seed=seed) * seed)
        graph.replay()
        for index, (got, want) in enumerate(zip(captured, results(twin, made_by, asking), strict=True)):
            assert_bitwise(got, want, f"{index} of seed {seed}")
        check_same_buffers(module, twin)


def test_histories_move_in_graphed_callables() -> None:
    made_by, module, twin = CASES["delayed"].recipe, Block(), Block()
    results(twin, made_by, normal(64, IN))  # which gives it histories
    with te.autocast(recipe=made_by):
        graphed = torch.cuda.make_graphed_callables(module, (normal(64, IN).requires_grad_(),))
    module.load_state_dict(twin.state_dict())
    for seed in (1, 7, 8, 9):
        x = normal(64, IN, seed=seed).mul_(seed).requires_grad_()
        module.zero_grad()
        out = graphed(x)
        out.backward(normal(64, IN, seed=2))
        got = [out, x.grad, *(p.grad for p in module.parameters())]
        for index, (a, b) in enumerate(zip(got, results(twin, made_by, x), strict=True)):
            assert_bitwise(a.detach(), b, f"{index} of seed {seed}")
        check_same_buffers(module, twin)


def test_what_is_no_buffer_of_histories_moves_with_them() -> None:
    """Not only when it is used, which may be in the capture of a graph."""
    module = make(recipe.DelayedScaling(), device="cpu").cuda()
    held = vars(module.gemm.scaling)
    assert held["_running"].is_cuda and held["_scaled_max"].is_cuda


def check_same_buffers(module: Block, twin: Block) -> None:
    buffers = dict(twin.named_buffers())
    assert buffers
    for name, buffer in module.named_buffers():
        assert_bitwise(buffer, buffers[name], name)
