"""torch.compile of blocks with linear maps: one graph, the bits of eager mode, and nothing that breaks in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import te_dist as te
from te_dist import recipe
from te_dist.nn import lost_recipes, traced
from te_dist.quantizers import Quantizer
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES

WIDTH, HIDDEN = 64, 96
STATELESS = {name: case for name, case in CASES.items() if not name.startswith("delayed")}
QUANTIZED = ("current", "block", "mxfp8_2d", "nvfp4", "hybrid")
block_scaling = recipe.Float8BlockScaling()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph is there, and no pass waits for its backward, which tests may have left out."""
    torch.compiler.reset()
    for records in (lost_recipes._recorded, lost_recipes._unrecorded, lost_recipes._plain, lost_recipes._ended):
        records.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """A norm, two maps with an activation between them, and a residual."""

    def __init__(self, quantized_by: Recipe | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=quantized_by is not None, recipe=quantized_by):
            self.up = te.LayerNormLinear(WIDTH, HIDDEN)
            self.down = te.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def results(call: Callable[[Tensor], Tensor], module: nn.Module, made_by: Recipe | None, x: Tensor) -> list[Tensor]:
    """Output and all gradients of one pass."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = call(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def check(backend: str, module: nn.Module, made_by: Recipe | None, **options: Any) -> None:
    """Asserts that three compiled passes are those of eager mode."""
    compiled = torch.compile(module, backend=backend, **{"fullgraph": True} | options)
    for seed in range(3):
        x = torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(seed))
        want = results(module, module, made_by, x)
        for index, (got, expected) in enumerate(zip(results(compiled, module, made_by, x), want, strict=True)):
            assert_bitwise(got, expected, f"{index} of pass {seed}")


@pytest.mark.every_run(name=("current", "block", "nvfp4", "hybrid"))
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "quantized"),
    [*product(STATELESS, (False,)), *product(QUANTIZED, (True,))],
)
def test_a_block_is_one_graph_with_the_bits_of_eager(name: str, quantized: bool) -> None:
    made_by = STATELESS[name].recipe
    check("aot_eager", Block(made_by if quantized else None), made_by)


class Gated(nn.Module):
    """A norm, and two maps with a gated activation computed on the way into the second one."""

    def __init__(self, quantized_by: Recipe | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=quantized_by is not None, recipe=quantized_by):
            self.mlp = te.LayerNormMLP(WIDTH, HIDDEN, activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


@pytest.mark.every_run(name=("block", "nvfp4"))
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "quantized"),
    [*product(STATELESS, (False,)), *product(QUANTIZED, (True,))],
)
def test_a_graph_serves_other_numbers_of_rows(name: str, quantized: bool) -> None:
    """One for the first and one for others; or one for those that products take, and one for all that they do not."""
    made_by = STATELESS[name].recipe
    for kind in (Block, Gated):
        module = kind(made_by if quantized else None)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, backend=counter, fullgraph=True)
        for rows in (24, 48, 31, 64, 17, 200, 500, 15):
            x = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows))
            passes = []
            for call in (compiled, module):
                torch.manual_seed(3)
                passes.append(results(call, module, made_by, x))
            for index, (got, want) in enumerate(zip(*passes, strict=True)):
                assert_bitwise(got, want, f"{index} of {rows} rows")
        assert counter.frame_count <= (3 if name.startswith("nvfp4") else 2)
        torch.compiler.reset()


def test_what_graphs_save_is_known_no_longer_than_it_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_MAX_SAVED", 2)
    traced._saved.clear()
    module = te.Linear(WIDTH, HIDDEN)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for rows in range(24, 48, 4):
        x = torch.randn(rows, WIDTH)
        for got, want in zip(*(results(call, module, block_scaling, x) for call in (compiled, module)), strict=True):
            assert_bitwise(got, want, f"of {rows} rows")
    assert len(traced._saved) == 2  # noqa: PLR2004


def test_stochastic_rounding_draws_the_numbers_of_eager() -> None:
    made_by, module, x = recipe.NVFP4BlockScaling(), Block(), torch.randn(48, WIDTH)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    passes = []
    for call in (compiled, module, compiled):
        torch.manual_seed(3)
        passes.append(results(call, module, made_by, x))
    for got in passes[:2]:
        for index, (a, b) in enumerate(zip(got, passes[2], strict=True)):
            assert_bitwise(a, b, str(index))


@pytest.mark.every_run(name=("block",))
@pytest.mark.parametrize("name", ["block", "current"])
def test_inductor_leaves_maps_as_they_are(name: str) -> None:
    made_by = STATELESS[name].recipe
    module, x = te.Linear(WIDTH, HIDDEN), torch.randn(40, WIDTH)
    want = results(module, module, made_by, x)
    got = results(torch.compile(module, backend="inductor", fullgraph=True), module, made_by, x)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, str(index))


@pytest.mark.parametrize("quantized", [False, True])
def test_outside_of_autocast_too(quantized: bool) -> None:
    check("aot_eager", Block(block_scaling if quantized else None), None)


def test_autocast_may_be_inside_of_the_graph() -> None:
    module = Block()

    def inside(x: Tensor) -> Tensor:
        with te.autocast(recipe=block_scaling):
            return module(x)

    x = torch.randn(48, WIDTH)
    want = results(module, module, block_scaling, x)
    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    for index, (a, b) in enumerate(zip(results(compiled, module, None, x), want, strict=True)):
        assert_bitwise(a, b, str(index))


def test_a_recipe_that_no_autocast_has_met_is_named_outside_of_graphs() -> None:
    made_by, module, x = recipe.Float8BlockScaling(amax_epsilon=0.0123), te.Linear(WIDTH, HIDDEN), torch.ones(48, WIDTH)

    def inside(x: Tensor) -> Tensor:
        with te.autocast(recipe=made_by):
            return module(x)

    with pytest.raises(
        Exception, match=r"no autocast has met this one: call te_dist.autocast\(recipe=...\) once before"
    ):
        torch.compile(inside, backend="aot_eager", fullgraph=True)(x)
    got = torch.compile(inside, backend="aot_eager")(x)
    assert_bitwise(got.detach(), inside(x).detach(), "output")


def test_another_recipe_is_another_graph_and_an_equal_one_is_not() -> None:
    module, x = te.Linear(WIDTH, HIDDEN), torch.randn(48, WIDTH)
    results(torch.compile(Block(), backend="aot_eager"), module, block_scaling, torch.randn(48, WIDTH))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    recipes = (None, recipe.Float8BlockScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling(), None)
    for count, made_by in zip((1, 2, 2, 3, 3), recipes, strict=True):
        want = results(module, module, made_by, x)
        for a, b in zip(results(compiled, module, made_by, x), want, strict=True):
            assert_bitwise(a, b, str(made_by))
        assert len(graphs) == count


def test_frozen_parts_and_other_shapes() -> None:
    module = Block()
    module.up.weight.requires_grad_(False)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for rows in (48, 37, 1, 80):
        x = torch.randn(rows, WIDTH)
        with te.autocast(recipe=block_scaling):
            got, want = compiled(x), module(x)
            assert_bitwise(got, want, f"{rows} rows")
            got.sum().backward()
            grads = [p.grad for p in module.parameters()]
            module.zero_grad()
            want.sum().backward()
        for a, b in zip(grads, (p.grad for p in module.parameters()), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_bitwise(a, b, f"gradients of {rows} rows")
        module.zero_grad()
        with torch.no_grad(), te.autocast(recipe=block_scaling):
            assert_bitwise(compiled(x), module(x), "without gradients")


def test_histories_stay_outside_of_graphs() -> None:
    made_by, x = recipe.DelayedScaling(amax_history_len=4), torch.randn(48, WIDTH)
    module, twin = Block(), Block()
    compiled = torch.compile(module, backend="aot_eager")
    for seed in range(3):
        x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(seed))
        want = results(twin, twin, made_by, x)
        for a, b in zip(results(compiled, module, made_by, x), want, strict=True):
            assert_bitwise(a, b, f"pass {seed}")
    torch.compiler.reset()
    with pytest.raises(Exception, match="Take Float8CurrentScaling or another recipe without histories"):
        results(torch.compile(Block(), backend="aot_eager", fullgraph=True), module, made_by, x)


def test_functions_of_a_custom_recipe_are_told_apart() -> None:
    def made(amax_epsilon: float) -> Recipe:
        def factory(role: recipe.QuantizerRole) -> Quantizer:
            return te.Float8CurrentScalingQuantizer(amax_epsilon=amax_epsilon)

        return recipe.CustomRecipe(factory)

    module, x = te.Linear(WIDTH, HIDDEN), torch.randn(48, WIDTH)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for made_by in (made(0.0), made(64.0)):
        want = results(module, module, made_by, x)
        for a, b in zip(results(compiled, module, made_by, x), want, strict=True):
            assert_bitwise(a, b, "custom")


def gradients_of_repeated(
    module: nn.Module, call: Callable[[Tensor], Tensor], made_by: Recipe | None, **how: Any
) -> Any:
    """Gradients of a pass that torch's checkpoint runs again in backward, outside of `autocast`."""
    x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = checkpoint(call, x, **how)
    out.square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("before", "reentrant", "quantized", "frozen"),
    [  # every two of them together; in every run each
        ((), False, False, True),
        ((), True, True, False),
        ((None,), False, False, False),
        ((None,), False, True, False),
        ((None,), True, False, True),
        ((block_scaling, None), False, True, True),
        ((block_scaling, None), True, False, False),
    ],
)
def test_what_torchs_checkpoint_runs_again_does_not_lose_its_recipe(
    before: tuple[Recipe | None, ...], reentrant: bool, quantized: bool, frozen: bool
) -> None:
    module = Block(block_scaling if quantized else None).requires_grad_(not frozen)
    compiled = torch.compile(module, backend="aot_eager")
    for made_by in before:
        results(compiled, module, made_by, torch.randn(48, WIDTH))
    with torch.no_grad():
        compiled(torch.randn(24, WIDTH))  # this one of other shapes, traced after that of a step
    with pytest.raises(RuntimeError, match="run again in backward.*context_fn=te_dist.recompute.context_fn"):
        gradients_of_repeated(module, compiled, block_scaling, use_reentrant=reentrant)
    if not reentrant:
        want = gradients_of_repeated(module, module, block_scaling, use_reentrant=False)
        how = dict(use_reentrant=False, context_fn=te.recompute.context_fn)
        for index, pair in enumerate(
            zip(gradients_of_repeated(module, compiled, block_scaling, **how), want, strict=True)
        ):
            assert_bitwise(*pair, str(index))


@pytest.mark.parametrize(
    ("backend", "name"),
    [pytest.param("inductor", "block", marks=pytest.mark.exhaustive), ("aot_eager", "delayed")],
)
def test_steps_without_a_recipe_after_steps_with_one_are_run_again_without_it(backend: str, name: str) -> None:
    module, by_recipe = Block(block_scaling), CASES[name].recipe
    compiled = torch.compile(module, backend=backend, fullgraph=name != "delayed")
    for made_by in (None, by_recipe):
        gradients_of_repeated(module, compiled, made_by, use_reentrant=False, context_fn=te.recompute.context_fn)
    want = gradients_of_repeated(module, module, None, use_reentrant=False)
    got = gradients_of_repeated(module, compiled, None, use_reentrant=False)
    for index, pair in enumerate(zip(got, want, strict=True)):
        if backend == "inductor":
            torch.testing.assert_close(*pair)
        else:
            assert_bitwise(*pair, str(index))


def test_what_has_no_recipe_is_run_again_without_one() -> None:
    first, second = Block(), Block()
    results(torch.compile(first, backend="aot_eager"), first, block_scaling, torch.randn(48, WIDTH))
    compiled = torch.compile(second, backend="aot_eager")
    want = gradients_of_repeated(second, second, None, use_reentrant=False)
    for index, pair in enumerate(
        zip(gradients_of_repeated(second, compiled, None, use_reentrant=False), want, strict=True)
    ):
        assert_bitwise(*pair, str(index))


def test_what_says_that_it_has_no_recipe_is_run_again_beside_maps_that_have_one() -> None:
    first, second = Block(), Block()  # alike, which compilers cannot tell apart
    called = [torch.compile(each, backend="aot_eager") for each in (first, second)]
    gradients = []
    for one, other in ((first, second), called):
        x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        first.zero_grad()
        hidden = te.checkpoint(one, x, use_reentrant=True)
        with te.autocast(recipe=block_scaling):
            out = other(hidden)
        out.square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in first.parameters())])
    for index, pair in enumerate(zip(*gradients, strict=True)):
        assert_bitwise(*pair, str(index))


@pytest.mark.each_value
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_waits_while_others_run_backward_does_not_lose_its_recipe(reentrant: bool, frozen: bool) -> None:
    made, judged = Block().requires_grad_(not frozen), te.Linear(WIDTH, 16)
    x = torch.randn(48, WIDTH, requires_grad=True)
    compiled, judge = torch.compile(made, backend="aot_eager"), torch.compile(judged, backend="aot_eager")
    with te.autocast(recipe=block_scaling):
        out = checkpoint(compiled, x, use_reentrant=reentrant)
        loss = judge(out.detach()).square().sum()
    loss.backward()
    with te.autocast(recipe=block_scaling):
        loss = judge(out).square().sum()
    with pytest.raises(RuntimeError, match="run again in backward.*context_fn=te_dist.recompute.context_fn"):
        loss.backward()


@pytest.mark.each_value
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("around", "words"), [(None, "without a recipe"), ("current", "by another recipe")])
def test_what_surrounds_backward_is_no_recipe_of_what_runs_again(
    around: str | None, words: str, reentrant: bool
) -> None:
    module = Block().requires_grad_(False)
    compiled = torch.compile(module, backend="aot_eager")
    with te.autocast(recipe=block_scaling):
        out = checkpoint(compiled, torch.randn(48, WIDTH, requires_grad=True), use_reentrant=reentrant)
    other = None if around is None else STATELESS[around].recipe
    with te.autocast(enabled=other is not None, recipe=other), pytest.raises(RuntimeError, match=words):
        out.sum().backward()


def test_graphs_that_a_compiler_makes_no_more_lose_no_recipe() -> None:
    blocks = nn.ModuleList(te.Linear(WIDTH, WIDTH, name=f"block {index}") for index in range(3)).requires_grad_(False)
    x = torch.randn(48, WIDTH, requires_grad=True)
    with torch._dynamo.config.patch(recompile_limit=3), te.autocast(recipe=block_scaling):
        y = x
        for block in blocks:
            y = checkpoint(torch.compile(torch.nn.Module.__call__, backend="aot_eager"), block, y, use_reentrant=True)
        with pytest.raises(RuntimeError, match="run again in backward"), te.autocast(enabled=False):
            y.square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_evaluations_by_a_recipe_leave_training_without_one_alone(reentrant: bool) -> None:
    module = Block()
    compiled = torch.compile(module, backend="aot_eager")
    want = gradients_of_repeated(module, module, None, use_reentrant=reentrant)
    for _ in range(2):
        module.eval()
        with torch.no_grad(), te.autocast(recipe=block_scaling):
            compiled(torch.randn(48, WIDTH))
        module.train()
        got = gradients_of_repeated(module, compiled, None, use_reentrant=reentrant)
        for index, pair in enumerate(zip(got, want, strict=True)):
            assert_bitwise(*pair, str(index))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("around", "plain_first", "named"),  # every two of them together; in every run each
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_maps_with_and_without_a_recipe_in_a_row_run_again_as_they_ran_or_not_at_all(
    around: bool, plain_first: bool, named: bool
) -> None:
    """By torch's reentrant checkpoint, with backward inside of the `autocast`, or outside."""
    maps = [te.Linear(WIDTH, WIDTH, name=str(index) if named else "") for index in range(2)]
    compiled = [torch.compile(each, backend="aot_eager") for each in maps]
    recipes = (None, block_scaling) if plain_first else (block_scaling, None)
    results(compiled[0], maps[0], block_scaling, torch.randn(48, WIDTH))  # from here on there is something to lose
    gradients: list[list[Tensor]] = []
    for called, reentrant in ((maps, False), (compiled, True)):
        nn.ModuleList(maps).zero_grad()
        x = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x
        for each, made_by in zip(called, recipes, strict=True):
            with te.autocast(enabled=made_by is not None, recipe=made_by):
                y = checkpoint(each, y, use_reentrant=True) if reentrant else each(y)
            y = torch.relu(y)
        try:
            with te.autocast(enabled=around, recipe=block_scaling):
                y.square().sum().backward()
        except RuntimeError as error:
            assert reentrant and "run again in backward" in str(error)
            return
        gradients.append([x.grad, *(p.grad.clone() for each in maps for p in each.parameters())])
    for index, pair in enumerate(zip(*gradients, strict=True)):
        assert_bitwise(*pair, str(index))


def test_maps_outside_of_graphs_are_not_refused_for_what_compiled_ones_of_their_place_did() -> None:
    compiled, other = torch.compile(te.Linear(WIDTH, WIDTH), backend="aot_eager"), te.Linear(WIDTH, WIDTH)
    x = torch.randn(48, WIDTH, requires_grad=True)
    with te.autocast(recipe=block_scaling):
        compiled(x)  # never run backward
    checkpoint(other, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("made_by", [block_scaling, recipe.DelayedScaling()], ids=["block", "delayed"])
def test_maps_of_unlike_sizes_behind_graph_breaks_are_traced_by_one_code(made_by: Recipe) -> None:
    """Compilers take extents for symbols where the same code is traced for another weight."""
    with te.quantized_model_init(recipe=made_by):
        module = nn.Sequential(te.Linear(WIDTH, HIDDEN), te.Linear(HIDDEN, WIDTH), te.Linear(WIDTH, WIDTH))
    for each in module.modules():
        each.register_full_backward_hook(lambda *_: None)
    other, x = copy.deepcopy(module), torch.randn(32, WIDTH)
    compiled = torch.compile(module, backend="aot_eager")
    for way in (made_by, None):
        for got, want in zip(results(compiled, module, way, x), results(other, other, way, x), strict=True):
            assert_bitwise(got, want, str(way))


def test_converted_layers_share_graphs_whatever_their_names() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(10)))
    te.convert(layers, {"*": block_scaling})
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers:
        for each in layer:
            each.compile(backend=counter, fullgraph=True)
    with te.autocast(recipe=block_scaling):
        layers(torch.randn(32, WIDTH, requires_grad=True)).sum().backward()
    assert counter.frame_count == 2  # noqa: PLR2004  (one of each size)


def test_names_that_a_recipe_reads_stay_in_graphs() -> None:
    by_name = recipe.CustomRecipe(lambda role: te.MXFP8Quantizer() if role.name == "0" else te.Float8BlockQuantizer())
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    te.convert(module, {"*": by_name})
    compiled, x = torch.compile(module, backend="aot_eager", fullgraph=True), torch.randn(32, WIDTH)
    for got, want in zip(results(compiled, module, by_name, x), results(module, module, by_name, x), strict=True):
        assert_bitwise(got, want, "by name")


@pytest.mark.parametrize("forward", ["custom", "delayed"])
def test_converted_maps_run_again_by_no_other_recipe(forward: str) -> None:
    """Graphs by recipes that read names, and maps outside of graphs, are known by the place that others share."""
    custom = recipe.CustomRecipe(lambda role: te.Float8BlockQuantizer())
    first = {"custom": custom, "delayed": recipe.DelayedScaling()}[forward]
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    te.convert(module, {"*": None})
    compiled, x = torch.compile(module[0], backend="aot_eager"), torch.randn(32, WIDTH, requires_grad=True)
    with te.autocast(recipe=first):
        out = checkpoint(compiled, x, use_reentrant=True)
    with te.autocast(recipe=block_scaling), pytest.raises(RuntimeError, match="run again in backward"):
        out.sum().backward()
