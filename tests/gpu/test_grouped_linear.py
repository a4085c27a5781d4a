"""GroupedLinear on the GPU: the products of the CPU, never a wait for the device, graphs that replay other sizes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import te_dist as te
from te_dist import recipe
from te_dist.nn import group_table, grouped_products, grouped_site, plan
from te_dist.nn.group_fronts import WEIGHTED_SWIGLU
from te_dist.nn.grouped_products import Given
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.gpu.graphs import warm_up
from tests.gpu.twins import unrecorded
from tests.gpu.waits import never_waiting
from tests.nn.recipes import CASES, relative_error

pytestmark = pytest.mark.gpu

IN, OUT, ROWS = 256, 384, 700
# Ragged with empty ones, one that has everything, many, aligned, none with rows; the rest of the rows is nobody's.
SIZES = {
    "ragged": [5, 0, 300, 1, 64, 200],
    "one": [0, 650, 0],
    "many": [3, 0, 30, 1] * 16,
    "aligned": [128, 256, 256],
    "none": [0, 0],
}
REFUSED = {"block_2d", "nvfp4_row_scaled", "delayed_inputs_only"}
RECIPES: dict[str, Recipe | None] = {"plain": None} | {n: c.recipe for n, c in CASES.items() if n not in REFUSED}
NO_PARAMETER = {"plain", "high_precision_backward"}
every_recipe = pytest.mark.parametrize("name", RECIPES)
KINDS = [(name, False, True) for name in RECIPES] + [
    (name, True, single) for name in RECIPES if name not in NO_PARAMETER for single in (False, True)
]
every_kind = pytest.mark.parametrize(("name", "quantized", "single"), KINDS, ids=str)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def make(num: int, made_by: Recipe | None = None, *, single: bool = True, device: str = "cuda", **options: Any) -> Any:
    """A GroupedLinear of the same values on every device; its weights quantized if there is a recipe."""
    kind = dict(single_grouped_weight=single, single_grouped_bias=single, device=device, params_dtype=torch.bfloat16)
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
        module = te.GroupedLinear(num, IN, OUT, **(kind | options))
    weights = normal(num, OUT, IN, seed=3, dtype=module.params_dtype, device=device) / 16
    biases = normal(num, OUT, seed=4, dtype=module.params_dtype, device=device)
    with torch.no_grad():
        for names, values in ((module.weight_names, weights), (module.bias_names, biases)):
            for name, value in zip(names, [values] if len(names) == 1 else values, strict=True):
                getattr(module, name).copy_(value)
    return module


def inside(made_by: Recipe | None) -> Any:
    """Of autocast by a recipe; of nothing without."""
    return nullcontext() if made_by is None else te.autocast(recipe=made_by)


def step(module: te.GroupedLinear, made_by: Recipe | None, splits: Any, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one pass, by name; those of parameters of all groups as one."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with inside(made_by):
        out = module(x, splits)
    out.backward(normal(*out.shape, seed=2, dtype=out.dtype, device=out.device.type))
    found = {"y": out.detach(), "dx": x.grad}
    for what, names in (("dw", module.weight_names), ("db", module.bias_names)):
        grads = [getattr(module, name).grad for name in names]
        found[what] = grads[0] if len(grads) == 1 else torch.stack(grads)
    return found


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@every_recipe
def test_products_are_those_of_the_cpu(name: str, sizes: list[int]) -> None:
    made_by, num = RECIPES[name], len(sizes)
    want = step(make(num, device="cpu"), made_by, sizes, normal(ROWS, IN, device="cpu"))
    module, splits = make(num), torch.tensor(sizes, device="cuda")
    for _ in range(2):  # recorded, and played
        got = step(make(num) if name.startswith("delayed") else module, made_by, splits, normal(ROWS, IN))
    for key, value in got.items():
        assert value.isfinite().all(), key
        assert relative_error(value.cpu(), want[key]) < 4e-3, key


@every_kind
def test_a_rank_that_no_row_reaches_has_gradients_of_zero(name: str, quantized: bool, single: bool) -> None:
    made_by = RECIPES[name]
    module, splits = (
        make(3, made_by if quantized else None, single=single),
        torch.zeros(3, device="cuda", dtype=torch.int64),
    )
    for x in (normal(0, IN), normal(0, IN), normal(ROWS, IN)[:0]):
        found = step(module, made_by, splits, x)
        assert found["y"].shape == (0, OUT) and found["dx"].shape == (0, IN)
        for key in ("dw", "db"):
            assert found[key].shape[0] == 3 and not found[key].any(), key


@every_kind
def test_later_passes_and_other_kinds_of_parameters_give_the_same_bits(
    name: str, quantized: bool, single: bool
) -> None:
    made_by, sizes = RECIPES[name], SIZES["ragged"]
    splits = torch.tensor(sizes, device="cuda")
    module = make(len(sizes), made_by if quantized else None, single=single)
    for seed in (1, 5, 6):
        if name.startswith("delayed"):
            module = make(len(sizes), made_by if quantized else None, single=single)
        x = normal(ROWS, IN, seed=seed)
        with unrecorded():
            want = step(make(len(sizes)), made_by, splits, x)
        for key, value in step(module, made_by, splits, x).items():
            assert_bitwise(value, want[key], f"{key} of {seed}")


@every_kind
def test_maps_of_a_recipe_play_what_one_of_them_recorded(
    name: str, quantized: bool, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by, splits, rows = RECIPES[name], torch.tensor(SIZES["ragged"], device="cuda"), 640 + 2 * quantized + single
    for made in (plan._shared_tapes, grouped_site._plain_plan):  # by other tests
        made.cache_clear()
    runs: list[str] = []
    for function in ("_forward", "_backward"):
        known = getattr(grouped_products, function)
        counted = lambda *args, its=function, of=known: (runs.append(its), of(*args))[1]  # noqa: E731
        monkeypatch.setattr(grouped_products, function, counted)

    def pass_of(number: int) -> dict[str, Tensor]:
        module = make(6, made_by if quantized else None, single=single)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + number)
        return step(module, made_by, splits, normal(rows, IN, seed=number))

    with unrecorded():
        wanted = [pass_of(number) for number in range(4)]
    runs.clear()
    for number, want in enumerate(wanted):
        for key, value in pass_of(number).items():
            assert_bitwise(value, want[key], f"{key} of map {number}")
    is_shared = made_by is None or type(made_by) in recipe.UNIFORM
    assert runs == ["_forward", "_backward"] * (2 if is_shared else 4)


@every_kind
def test_no_pass_waits_for_the_gpu(name: str, quantized: bool, single: bool) -> None:
    made_by, sizes = RECIPES[name], SIZES["ragged"]
    module, splits = make(len(sizes), made_by if quantized else None, single=single), torch.tensor(sizes).cuda()
    x, grad = normal(ROWS, IN), normal(ROWS, OUT, seed=2)
    for _ in range(2):
        step(module, made_by, splits, x)
    with never_waiting():
        for given in (splits, sizes, group_table(splits, ROWS)):
            with inside(made_by):
                module(x.requires_grad_(), given).backward(grad)


@pytest.mark.parametrize("rest", ["delay", "fuse", "original", "buffers", "microbatches", "flag"])
@pytest.mark.parametrize("name", ["plain", "block", "mxfp8"])
def test_no_option_waits_for_the_gpu(name: str, rest: str) -> None:
    made_by, sizes = RECIPES[name], SIZES["ragged"]
    options = dict(delay_wgrad_compute=rest == "delay", fuse_wgrad_accumulation=rest == "fuse")
    module = make(len(sizes), save_original_input=rest == "original", **options)
    module.weight.main_grad = torch.zeros(module.weight.shape, device="cuda")
    splits, x, grad = torch.tensor(sizes).cuda(), normal(ROWS, IN).requires_grad_(), normal(ROWS, OUT, seed=2)
    buffers = (normal(ROWS, OUT), normal(ROWS, IN)) if rest == "buffers" else (None, None)
    flag = torch.zeros(1, dtype=torch.bool, device="cuda") if rest == "flag" else None
    for number in range(4):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            with inside(made_by):
                is_first = number == 0 if rest == "microbatches" else None
                out = module(x, splits, is_first, *buffers, skip_weight_quantization=flag)
            out.backward(grad)
            module.backward_dw()
        finally:
            torch.cuda.set_sync_debug_mode("default")


GRAPHED = [kind for kind in KINDS if kind[2]]


@pytest.mark.parametrize(("name", "quantized", "single"), GRAPHED, ids=str)
def test_a_captured_pass_replays_with_other_sizes(name: str, quantized: bool, single: bool) -> None:
    made_by, num = RECIPES[name], 6
    of = made_by if quantized else None
    (module, twin), graph = (make(num, of, single=single) for _ in range(2)), torch.cuda.CUDAGraph()
    splits, x, grad = torch.tensor(SIZES["ragged"]).cuda(), normal(ROWS, IN).requires_grad_(), normal(ROWS, OUT, seed=2)
    for each in (module, twin):
        warm_up(lambda each=each: step(each, made_by, splits, x))
    module.zero_grad()
    x.grad = None
    with torch.cuda.graph(graph), inside(made_by):
        out = module(x, splits)
        out.backward(grad)
    captured = {"y": out.detach(), "dx": x.grad, "dw": module.weight.grad, "db": module.bias.grad}
    for seed, sizes in enumerate(([100, 200, 0, 0, 300, 1], [0, 0, 0, 0, 0, 650], SIZES["ragged"], [0] * 6)):
        with torch.no_grad():
            x.copy_(normal(ROWS, IN, seed=seed))
            splits.copy_(torch.tensor(sizes))
        graph.replay()
        with unrecorded():
            want = step(twin, made_by, splits, x)
        for key, value in captured.items():
            assert_bitwise(value, want[key], f"{key} of {sizes}")


FLAGGED = [name for name in RECIPES if name != "plain" and name not in NO_PARAMETER and not name.startswith("delayed")]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", FLAGGED)
def test_a_flag_says_whether_a_captured_pass_quantizes_weights(name: str, single: bool) -> None:
    made_by, graph = RECIPES[name], torch.cuda.CUDAGraph()
    module, splits = make(6, single=single), torch.tensor(SIZES["ragged"]).cuda()
    x, grad, flag = normal(ROWS, IN).requires_grad_(), normal(ROWS, OUT, seed=2), torch.zeros(1, device="cuda")

    def run() -> Tensor:
        with inside(made_by):
            out = module(x, splits, skip_weight_quantization=flag)
        out.backward(grad)
        return out.detach()

    warm_up(run)
    module.zero_grad()
    x.grad = None
    with torch.cuda.graph(graph):
        out = run()
    kept = module.weight_names[0]
    for factor, skips in ((1.0, False), (2.5, True), (0.3, True), (1.0, False), (1.0, True)):
        with torch.no_grad():
            for parameter_name in module.weight_names:
                getattr(module, parameter_name).mul_(factor)
        if not skips:
            twin = make(6, single=single)
            twin.load_state_dict(module.state_dict())
        flag.fill_(skips)
        graph.replay()
        with unrecorded():
            want = step(twin, made_by, splits, x)
        assert_bitwise(out, want["y"], f"y of {factor} {skips}")
        assert_bitwise(x.grad, want["dx"], f"dx of {factor} {skips}")
        got = getattr(module, kept).grad
        assert_bitwise(got, want["dw"] if single else want["dw"][0], f"dw of {factor} {skips}")


def test_a_graph_captures_no_weights_that_were_never_quantized() -> None:
    module, x = make(6), normal(ROWS, IN)
    splits, flag = torch.tensor(SIZES["ragged"]).cuda(), torch.zeros(1, device="cuda")
    with te.autocast(recipe=RECIPES["block"]):
        module(x, splits)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="there are no quantized weights that a graph could keep"),
        torch.cuda.graph(graph),
        te.autocast(recipe=RECIPES["block"]),
    ):
        module(x, splits, skip_weight_quantization=flag)


def test_sizes_on_the_host_are_not_captured() -> None:
    module, x = make(6, None, single=True), normal(ROWS, IN)
    module(x, SIZES["ragged"])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="is on the host, .* pass a tensor on the device"), torch.cuda.graph(graph):
        module(x, SIZES["ragged"])


def weighted_step(device: str, made_by: Recipe | None, rest: float) -> list[Tensor]:
    """Output and gradients of a pass with a front, with `rest` in all rows behind the last group."""
    sizes = SIZES["ragged"]
    module, end = make(len(sizes), device=device), sum(sizes)
    x, grad = normal(ROWS, 2 * IN, device=device), normal(ROWS, OUT, seed=2, device=device)
    p = normal(ROWS, seed=9, dtype=torch.float32, device=device).sigmoid()
    for tensor in (x, p, grad):
        tensor[end:] = rest
    x, p = x.requires_grad_(), p.requires_grad_()
    table = group_table(torch.tensor(sizes, device=device), ROWS).tensor
    given = Given(table, None, front=WEIGHTED_SWIGLU)  # type: ignore[arg-type]
    with inside(made_by):
        out = module.gemm(x, [module.weight], given=given, biases=[module.bias], beside=[p])
    out.backward(grad)
    assert not any(rows[end:].any() for rows in (out, x.grad, p.grad))
    return [out.detach(), x.grad, p.grad, module.weight.grad, module.bias.grad]


@every_recipe
def test_weighted_swiglu_in_front_is_computed_as_on_the_cpu(name: str) -> None:
    wanted = weighted_step("cpu", RECIPES[name], 0.0)
    for number, (want, got) in enumerate(zip(wanted, weighted_step("cuda", RECIPES[name], 0.0), strict=True)):
        assert relative_error(got.cpu(), want) < 2e-2, number


@every_recipe
def test_nan_behind_the_last_group_changes_no_bit(name: str) -> None:
    passes = [weighted_step("cuda", RECIPES[name], rest) for rest in (0.0, float("nan"))]
    for number, (want, got) in enumerate(zip(*passes, strict=True)):
        assert want.isfinite().all(), number
        assert_bitwise(got, want, f"result {number}")


@pytest.mark.parametrize("single", [False, True])
def test_main_gradients_are_added_to_by_the_product(single: bool) -> None:
    made_by, sizes, x = recipe.Float8BlockScaling(), SIZES["ragged"], normal(ROWS, IN)
    want = step(make(len(sizes), params_dtype=torch.float32), made_by, sizes, x)["dw"]
    module = make(len(sizes), single=single, params_dtype=torch.float32, fuse_wgrad_accumulation=True)
    whole = normal(len(sizes), OUT, IN, seed=8, dtype=torch.float32)
    expected = whole + 2 * want
    for name, part in zip(module.weight_names, [whole] if single else whole, strict=True):
        getattr(module, name).main_grad = part
    for _ in range(2):
        with inside(made_by):
            out = module(x.clone().requires_grad_(), sizes)
        out.backward(normal(*out.shape, seed=2))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "quantized"), [("plain", False), ("block", True), ("mxfp8", False), ("nvfp4", True)])
def test_a_compiled_module_is_one_graph(name: str, quantized: bool) -> None:
    torch.compiler.reset()
    made_by, sizes, x = RECIPES[name], SIZES["ragged"], normal(ROWS, IN)
    module, splits = make(len(sizes), made_by if quantized else None), torch.tensor(sizes).cuda()
    want = step(module, made_by, splits, x)
    compiled = torch.compile(module, fullgraph=True)
    asking = x.clone().requires_grad_()
    module.zero_grad()
    with inside(made_by):
        out = compiled(asking, splits)
    out.backward(normal(*out.shape, seed=2))
    got = {"y": out.detach(), "dx": asking.grad, "dw": module.weight.grad, "db": module.bias.grad}
    for key, value in got.items():
        assert_bitwise(value, want[key], key)


@pytest.mark.parametrize(("name", "quantized"), [("plain", False), ("block", True), ("mxfp8", False), ("nvfp4", True)])
def test_a_graph_serves_other_numbers_of_rows(name: str, quantized: bool) -> None:
    torch.compiler.reset()
    made_by, sizes = RECIPES[name], SIZES["ragged"]
    module, counter = make(len(sizes), made_by if quantized else None), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for factor in (1, 2, 3, 5):
        splits = torch.tensor(sizes).cuda() * factor
        x, found = normal(int(splits.sum()), IN, seed=factor), []
        for called in (module, compiled):
            asking = x.clone().requires_grad_()
            module.zero_grad()
            with inside(made_by):
                out = called(asking, splits)
            out.backward(normal(*out.shape, seed=2))
            found.append((out.detach(), asking.grad, module.weight.grad, module.bias.grad))
        for number, (a, b) in enumerate(zip(*found, strict=True)):
            assert_bitwise(a, b, f"result {number} of {factor} times the rows")
    assert counter.frame_count <= 2  # noqa: PLR2004


def test_fp32_is_multiplied_group_by_group() -> None:
    sizes = SIZES["ragged"]
    module = make(len(sizes), params_dtype=torch.float32)
    want = step(
        make(len(sizes), params_dtype=torch.float32, device="cpu"), None, sizes, normal(ROWS, IN, device="cpu").float()
    )
    for key, value in step(module, None, sizes, normal(ROWS, IN).float()).items():
        assert relative_error(value.cpu(), want[key]) < 1e-3, key


def test_groups_of_fp32_are_not_captured() -> None:
    sizes = SIZES["ragged"]
    module, x = make(len(sizes), params_dtype=torch.float32), normal(ROWS, IN).float()
    on_device = torch.tensor(sizes, device="cuda")
    module(x, on_device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="read the sizes of groups on the host"), torch.cuda.graph(graph):
        module(x, on_device)
