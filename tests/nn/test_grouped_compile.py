"""GroupedLinear under torch.compile: one graph, the bits of eager mode; what keeps state in Python stays outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import te_dist as te
from te_dist import recipe
from te_dist.nn.group_fronts import WEIGHTED_SWIGLU
from te_dist.nn.group_tables import group_table
from te_dist.nn.grouped_products import Given
from te_dist.nn.grouped_site import PLAIN
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES
from tests.nn.test_grouped_options import GROUPS, IN, OUT, SIZES, make, normal

ROWS = sum(SIZES) + 2
# (recipe, whether weights are quantized, whether they are one parameter)
KINDS = {
    "plain": (None, False, False),
    "block, each": (recipe.Float8BlockScaling(), True, False),
    "block, one": (recipe.Float8BlockScaling(), True, True),
    "current": (recipe.Float8CurrentScaling(), False, True),
    "mxfp8": (recipe.MXFP8BlockScaling(), True, True),
    "nvfp4": (recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), True, True),
    "hybrid": (CASES["hybrid"].recipe, True, False),
}


class Experts(nn.Module):
    """Two maps with SwiGLU, weighed by probabilities, in front of the second."""

    def __init__(self, made_by: Recipe | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
            self.first = te.GroupedLinear(GROUPS, IN, 2 * OUT, bias=False, single_grouped_weight=True)
            self.second = te.GroupedLinear(GROUPS, OUT, IN, bias=False, single_grouped_weight=True)

    def forward(self, x: Tensor, m_splits: Tensor, probability: Tensor) -> Tensor:
        table = group_table(m_splits, x.shape[0])
        hidden = self.first(x, table)
        given = Given(table.tensor, PLAIN, front=WEIGHTED_SWIGLU)
        return self.second.gemm(hidden, [self.second.weight], given=given, beside=[probability])


def results(module: nn.Module, called: nn.Module, made_by: Recipe | None, *rest: Tensor) -> list[Tensor]:
    """Output and all gradients of one pass."""
    x = normal(ROWS, IN).requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = called(x, torch.tensor(SIZES), *rest)
    out.backward(normal(*out.shape, seed=2))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.every_run(kind=("plain", "block, one", "nvfp4"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_module_is_one_graph_with_the_bits_of_eager_mode(kind: str) -> None:
    made_by, quantized, single = KINDS[kind]
    torch.compiler.reset()
    module = make(made_by if quantized else None, single_grouped_weight=single, single_grouped_bias=single)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    want = results(module, module, made_by)
    for number, (a, b) in enumerate(zip(results(module, compiled, made_by), want, strict=True)):
        assert_bitwise(a, b, f"result {number}")
    with torch.no_grad(), te.autocast(enabled=made_by is not None, recipe=made_by):
        assert_bitwise(compiled(normal(ROWS, IN), torch.tensor(SIZES)), want[0], "without gradients")


@pytest.mark.parametrize("made_by", [None, recipe.Float8BlockScaling()], ids=["plain", "block"])
def test_fronts_are_part_of_the_graph(made_by: Recipe | None) -> None:
    torch.compiler.reset()
    module, found = Experts(made_by), []
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for called in (module, compiled):
        p = normal(ROWS, seed=4).sigmoid().requires_grad_()
        found.append([*results(module, called, made_by, p), p.grad])
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert_bitwise(a, b, f"result {number}")


def sizes_of(rows: int) -> Tensor:
    """Of groups that take all rows, some of them perhaps none."""
    cuts = torch.randint(0, rows + 1, (GROUPS - 1,), generator=torch.Generator().manual_seed(rows)).sort().values
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([rows]))


@pytest.mark.every_run(kind=("plain", "block, one", "nvfp4"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_serves_other_numbers_of_rows(kind: str) -> None:
    made_by, quantized, _ = KINDS[kind]
    torch.compiler.reset()
    module, counter = Experts(made_by if quantized else None), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for rows in (40, 64, 97, 128, 17, 256, 500, 3):
        found = []
        for called in (module, compiled):
            x, p = normal(rows, IN, seed=rows).requires_grad_(), normal(rows, seed=4).sigmoid().requires_grad_()
            module.zero_grad()
            with te.autocast(enabled=made_by is not None, recipe=made_by):
                out = called(x, sizes_of(rows), p)
            out.backward(normal(*out.shape, seed=2))
            found.append([out.detach(), x.grad, p.grad, *(param.grad for param in module.parameters())])
        for number, (a, b) in enumerate(zip(*found, strict=True)):
            assert_bitwise(a, b, f"result {number} of {rows} rows")
    assert counter.frame_count <= 3  # noqa: PLR2004  (a third for fewer rows than groups)


@pytest.mark.parametrize("single", [False, True], ids=["each", "one"])
def test_weights_that_backward_cannot_read_stay_outside_of_graphs(single: bool) -> None:
    made_by = recipe.MXFP8BlockScaling()
    torch.compiler.reset()
    module = make(made_by, single_grouped_weight=single, single_grouped_bias=single)
    compiled, free = (torch.compile(module, backend="aot_eager", fullgraph=whole) for whole in (True, False))
    x, splits = normal(ROWS, IN), torch.tensor(SIZES)
    with te.autocast(recipe=made_by):
        want = compiled(x.requires_grad_(), splits)
    for name in module.weight_names:
        getattr(module, name).update_usage(rowwise_usage=True, columnwise_usage=False)
    with te.autocast(recipe=made_by):
        with pytest.raises(Exception, match="its weights lack what backward multiplies"):
            compiled(x, splits)
        assert_bitwise(free(x, splits).detach(), want.detach(), "output")
        with torch.no_grad():
            assert_bitwise(compiled(x, splits), want.detach(), "without gradients")


def test_a_weight_that_has_more_than_others_is_multiplied_as_they_are() -> None:
    made_by = recipe.Float8BlockScaling()
    torch.compiler.reset()
    module = make(made_by)
    module.weight1.update_usage(columnwise_usage=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for number, (a, b) in enumerate(zip(*(results(module, each, made_by) for each in (compiled, module)), strict=True)):
        assert_bitwise(a, b, f"result {number}")


def test_transforms_of_torch_func_are_refused_in_graphs() -> None:
    """Eager mode refuses them; a graph would have no backward pass of the map."""
    module, linear = make(None), te.Linear(IN, OUT)
    made_by, x = recipe.Float8BlockScaling(), normal(ROWS, IN)
    te.autocast(recipe=made_by)
    for call in (lambda z: module(z, torch.tensor(SIZES)), linear):
        torch.compiler.reset()
        compiled = torch.compile(torch.func.grad(lambda z, f=call: f(z).sum()), backend="aot_eager", fullgraph=True)
        with te.autocast(recipe=made_by), pytest.raises(Exception, match="a transform of torch.func in a graph"):
            compiled(x)


@pytest.mark.parametrize("kind", ["block, one", "plain"])
def test_the_input_is_kept_once(kind: str) -> None:
    """As codes, or as it is; a graph that took both would keep both."""
    made_by, quantized, single = KINDS[kind]
    torch.compiler.reset()
    module = make(made_by if quantized else None, single_grouped_weight=single, single_grouped_bias=single)
    x = normal(ROWS, IN).requires_grad_()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = torch.compile(module, backend="aot_eager", fullgraph=True)(x, torch.tensor(SIZES))
    kept = [each for each in out.grad_fn.saved_tensors if each.data_ptr() == x.data_ptr()]
    assert len(kept) == (made_by is None)


def test_what_keeps_state_in_python_stays_outside_of_graphs() -> None:
    torch.compiler.reset()
    made_by = recipe.DelayedScaling()
    module = make(None)
    want = results(make(None), module, made_by)[0]
    module.gemm.scaling = None
    assert_bitwise(results(module, torch.compile(module, backend="eager"), made_by)[0], want, "y")
    compiled = torch.compile(make(None, delay_wgrad_compute=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="keeps state in Python"):
        compiled(normal(ROWS, IN), torch.tensor(SIZES))


@pytest.mark.each_value
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_torchs_checkpoint_runs_again_does_not_lose_its_recipe(reentrant: bool, before: bool) -> None:
    torch.compiler.reset()
    made_by = recipe.Float8BlockScaling()
    module = make(made_by, single_grouped_weight=True, single_grouped_bias=True)
    compiled = torch.compile(module, backend="aot_eager")
    x = normal(ROWS, IN).requires_grad_()
    if before:
        compiled(x, torch.tensor(SIZES)).sum().backward()  # by a graph that knows no recipe
    with te.autocast(recipe=made_by):
        out = checkpoint(compiled, x, torch.tensor(SIZES), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="run again in backward.*context_fn=te_dist.recompute.context_fn"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_graph_checks_sizes_that_the_host_knows(backend) -> None:
    module = te.GroupedLinear(4, 256, 128)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(64, 256, requires_grad=True)
    out = compiled(x, torch.tensor([16] * 4))
    assert_bitwise(out.detach(), module(x, torch.tensor([16] * 4)).detach(), "the output")
    out.sum().backward()
    for sizes in ([20] * 4, [20, -4, 20, 20]):
        with pytest.raises(ValueError, match=f"add up to {sum(sizes)}, the smallest {min(sizes)}"):
            compiled(x, torch.tensor(sizes))
    with torch.no_grad(), pytest.raises(ValueError, match="add up to 80"):
        compiled(x, torch.tensor([20] * 4))
