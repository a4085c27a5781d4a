"""Parallel layers in graphs of torch.compile: one graph for a block, with the bits of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import te_dist as te
from te_dist import recipe, testing
from te_dist.nn import graph_plans
from te_dist.recipe import Recipe
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel, GatherInput, RowParallel, SequenceParallel, gather_values
from te_dist.testing import assert_bitwise
from tests.distributed.test_tensor_parallel import assert_near, normal

BATCH, SEQUENCE, WIDTH, HEAD = 2, 32, 128, 16
RECIPES: dict[str, Recipe] = {
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "delayed": recipe.DelayedScaling(),
}
SEQUENCE_PLAN = {
    "norm": SequenceParallel,
    "attention": lambda: GatherInput("query"),
    "attention.query": ColumnParallel,
    "attention.key": SequenceParallel,
    "attention.out": lambda: RowParallel(output_layouts=Shard(1)),
    "up": lambda: ColumnParallel(input_layouts=Shard(1)),
    "down": lambda: RowParallel(output_layouts=Shard(-2)),
}
WHOLE_PLAN = {
    "attention.query": ColumnParallel,
    "attention.out": RowParallel,
    "up": ColumnParallel,
    "down": RowParallel,
}


class Attention(nn.Module):
    """Heads of `query` lie on ranks; every rank has the one `key`, which is also the value, for its own heads."""

    def __init__(self, *, has_key: bool, views: bool) -> None:
        super().__init__()
        self.views = views
        self.query, self.out = te.Linear(WIDTH, WIDTH, bias=False), te.Linear(WIDTH, WIDTH)
        self.key = te.Linear(WIDTH, HEAD) if has_key else None

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x.view(x.shape) if self.views else x).unflatten(-1, (-1, HEAD))
        if self.key is None:
            return self.out(torch.tanh(query).flatten(-2))
        key = self.key(x)[:, None]
        weights = (query.transpose(1, 2) @ key.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ key).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, *, has_key: bool, views: bool, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention(has_key=has_key, views=views)
        self.up = te.LayerNormLinear(WIDTH, width)
        self.down = te.Linear(width, WIDTH, return_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x=self.norm(x))
        out, bias = self.down(nn.functional.gelu(self.up(x)))
        return x + out + bias


class How(NamedTuple):
    """A block: by which recipe, of parts of sequences or whole ones, with quantized weights, with so many features;
    whether it views what was gathered."""

    name: str
    sequence: bool = False
    quantized: bool = False
    width: int = 2 * WIDTH
    views: bool = True

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]

    def make(self, world: int) -> Block:
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=self.quantized, recipe=self.recipe), testing.device():
            made = Block(has_key=self.sequence, views=self.views, width=self.width)
        plan = SEQUENCE_PLAN if self.sequence else WHOLE_PLAN
        parallelize_module(made, testing.mesh((world,), ("tp",)), {module: style() for module, style in plan.items()})
        return made

    def rows(self, rank: int, world: int, length: int) -> Tensor:
        """What this rank has of a batch of sequences of this length."""
        whole = normal(BATCH, length, WIDTH, seed=length)
        return whole.chunk(world, 1)[rank].contiguous() if self.sequence else whole


def passes(module: Callable[[Tensor], Tensor], params: Sequence[nn.Parameter], x: Tensor, how: How) -> list[Tensor]:
    """Output and gradients of a forward and a backward pass of `x`."""
    for param in params:
        param.grad = None
    with te.autocast(recipe=how.recipe):
        out = module(x.requires_grad_())
    out.square().sum().backward()
    return [out.detach(), x.grad, *(local_tensor(param.grad).clone() for param in params)]


def compare(
    rank: int,
    world: int,
    how: How,
    *,
    wrap: Callable[[Block], Any] = lambda module: module,
    lengths: Sequence[int] = (SEQUENCE, SEQUENCE),
    fullgraph: bool = True,
) -> None:
    """The passes of a compiled block and of one in eager mode, of sequences of these lengths.

    Where a graph breaks, gradients of what several graphs read are added in another order.
    """
    torch.compiler.reset()
    counters.clear()
    found = []
    for compiled in (False, True):
        module = how.make(world)
        called = torch.compile(wrap(module), backend="aot_eager", fullgraph=fullgraph) if compiled else module
        torch.manual_seed(1)  # of what is rounded by chance
        params = list(module.parameters())
        found.append([passes(called, params, how.rows(rank, world, length), how) for length in lengths])
    for step, (want, got) in enumerate(zip(*found, strict=True)):
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            check = assert_bitwise if fullgraph or index == 0 else assert_near
            check(a, b, f"{index} of pass {step} of {how}")


def check_block(rank: int, world: int, how: How) -> None:
    compare(rank, world, how)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.every_run(name=("block", "nvfp4"))
@pytest.mark.parametrize("name", ["block", "current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("sequence", "quantized"), [(False, True), (True, False), (True, True)])
def test_a_parallel_block_is_one_graph(ranks, name, sequence, quantized):
    ranks(2).run(check_block, How(name, sequence, quantized))


def check_lengths(rank: int, world: int) -> None:
    compare(rank, world, How("block"), lengths=(SEQUENCE, 48, 16, 80, 64))
    assert counters["stats"]["unique_graphs"] == 2, "one for the first length, one for all others"


def test_graphs_of_whole_sequences_are_for_any_length(ranks):
    ranks(2).run(check_lengths)


def check_lengths_of_parts(rank: int, world: int) -> None:
    how = How("block", sequence=True, quantized=True, views=False)  # which graphs do not give back
    compare(rank, world, how, lengths=(SEQUENCE, 64, 16, 96), fullgraph=False)


def test_parts_of_sequences_of_any_length_are_computed(ranks):
    """Those of the first are in a graph, what gathers others is outside of them."""
    ranks(2).run(check_lengths_of_parts)


def check_outside(rank: int, world: int, how: How) -> None:
    compare(rank, world, how, fullgraph=False)
    assert counters["graph_break"]
    with pytest.raises(Exception, match="fullgraph"):
        compare(rank, world, how)


@pytest.mark.parametrize("how", [How("delayed"), How("block", width=192)], ids=["histories", "cut tiles"])
def test_what_keeps_state_or_is_cut_otherwise_by_rank_stays_outside(ranks, how):
    ranks(2).run(check_outside, how)


def saves_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.te_dist.linear_forward.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def check_recomputed(rank: int, world: int, sequence: bool, selective: bool) -> None:
    context = partial(create_selective_checkpoint_contexts, saves_products)
    wrap = partial(checkpoint_wrapper, context_fn=context) if selective else checkpoint_wrapper
    how = How("block", sequence=sequence, quantized=True)
    # What `SequenceParallel` puts in the place of parameters is put back within the pass.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=sequence):
        compare(rank, world, how, wrap=wrap)
    if sequence:
        compare(rank, world, how, wrap=wrap, fullgraph=False)


@pytest.mark.parametrize(("sequence", "selective"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_inside_of_the_graph_runs_it_again(ranks, sequence, selective):
    ranks(2).run(check_recomputed, sequence, selective)


def check_shared(rank: int, world: int) -> None:
    torch.compiler.reset()
    counters.clear()
    how = How("block", sequence=True, quantized=True)
    blocks = [how.make(world) for _ in range(3)]
    for each in blocks:
        each.compile(backend="aot_eager", fullgraph=True)
    params = [param for each in blocks for param in each.parameters()]
    passes(nn.Sequential(*blocks), params, how.rows(rank, world, SEQUENCE), how)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_that_are_alike_share_a_graph(ranks):
    ranks(2).run(check_shared)


class Sum(nn.Module):
    """Two maps of one input, whose gradients are gathered alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def check_draws(rank: int, world: int) -> None:
    """What is gathered alike twice is rounded by chance twice; and torch's autocast is behind a sum of gradients."""
    for name, style, of_torch in (
        ("nvfp4", partial(RowParallel, output_layouts=Shard(1)), False),
        ("block", ColumnParallel, True),
    ):
        torch.compiler.reset()
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            with testing.device():
                module = Sum()
            parallelize_module(module, testing.mesh((world,), ("tp",)), {"a": style(), "b": style()})
            called = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
            x = normal(BATCH, SEQUENCE, WIDTH if of_torch else WIDTH // world, seed=rank * (not of_torch))
            torch.manual_seed(1)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=of_torch):
                found.append(passes(called, list(module.parameters()), x, How(name)))
        for index, (want, got) in enumerate(zip(*found, strict=True)):
            assert_bitwise(got, want, f"{index} by {name}")


def test_what_is_rounded_by_chance_and_what_torch_converts_have_the_bits_of_eager_mode(ranks):
    ranks(2).run(check_draws)


def check_batches(rank: int, world: int) -> None:
    how = How("block", sequence=True, quantized=True)
    compare(rank, world, how, lengths=(SEQUENCE, 64, SEQUENCE, 16))
    assert counters["stats"]["unique_graphs"] == 3


def test_parts_of_each_length_have_a_graph_where_none_may_break(ranks):
    ranks(2).run(check_batches)


class Breaking(nn.Module):
    """A graph ends between what is gathered and the layer that takes it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.query = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.query(x)


def check_breaks(rank: int, world: int) -> None:
    torch.compiler.reset()
    found, over = [], testing.mesh((world,), ("tp",))
    for compiled in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=RECIPES["block"]), testing.device():
            module = Breaking(te.Linear(WIDTH, WIDTH))
        parallelize_module(module, over, {"": GatherInput("query"), "query": ColumnParallel()})
        called = torch.compile(module, backend="aot_eager") if compiled else module
        x = normal(BATCH, SEQUENCE // world, WIDTH, seed=0)
        found.append(passes(called, list(module.parameters()), x, How("block")))
    for index, (want, got) in enumerate(zip(*found, strict=True)):
        assert_bitwise(got, want, f"{index}")


def test_a_graph_may_end_between_what_is_gathered_and_the_layer_that_takes_it(ranks):
    ranks(2).run(check_breaks)


def check_summed_twice(rank: int, world: int) -> None:
    torch.compiler.reset()
    over = testing.mesh((world,), ("tp",))
    with testing.device():
        layer = te.Linear(WIDTH, WIDTH)
    parallelize_module(layer, over, ColumnParallel())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with te.autocast(recipe=RECIPES["block"]):
        compiled(normal(BATCH, SEQUENCE, WIDTH, seed=0).requires_grad_())
        part = normal(BATCH, SEQUENCE // world, WIDTH, seed=0).requires_grad_()
        with pytest.raises(RuntimeError, match="summed over ranks already"):
            compiled(gather_values(part, over.get_group(), dim=1))


def test_a_graph_that_would_sum_a_gradient_twice_raises(ranks):
    ranks(2).run(check_summed_twice)


def check_made_again(rank: int, world: int) -> None:
    torch.compiler.reset()
    before = set(graph_plans._plans)
    how = How("block", sequence=True)
    module, x = torch.compile(how.make(world), backend="aot_eager", fullgraph=True), how.rows(rank, world, SEQUENCE)
    with te.autocast(recipe=how.recipe):
        want = module(x)
        texts = [text for text in graph_plans._plans if text not in before or "Placement" in text]
        for text in texts:
            del graph_plans._plans[text]  # as in a process that takes the graph from a cache
        assert_bitwise(module(x), want, "output")
    assert any("RowPlacement" in text for text in texts)
    dist.barrier(testing.mesh((world,), ("tp",)).get_group())


def test_the_plan_of_a_part_is_made_again_from_its_text(ranks):
    ranks(2).run(check_made_again)
