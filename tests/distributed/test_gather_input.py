"""What `GatherInput` gathers: one gradient inside and outside of `autocast`, and histories of all that take it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import testing
from te_dist.recipe import DelayedScaling, Float8CurrentScaling
from te_dist.tensor_parallel import ColumnParallel, GatherInput, RowParallel, SequenceParallel, gather_values
from te_dist.testing import assert_bitwise, full_tensor
from tests.distributed.test_tensor_parallel import assert_near, normal

BATCH, SEQUENCE, WIDTH, HEAD = 2, 16, 64, 16
DELAYED = DelayedScaling(amax_history_len=3)


class Attention(nn.Module):
    """Heads of `query` and `value` lie on ranks; every rank has the one `key`, for its own heads."""

    def __init__(self, *, views: bool = False) -> None:
        super().__init__()
        self.views = views
        self.query, self.value, self.out = (te.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.key = te.Linear(WIDTH, HEAD)

    def forward(self, x: Tensor) -> Tensor:
        taken = x.view(x.shape) if self.views else x
        query, value = self.query(taken), self.value(x)
        heads = query.unflatten(-1, (-1, HEAD)) * torch.tanh(self.key(x))[..., None, :]
        return self.out(heads.flatten(-2) + value)


PLAN = {
    "": lambda: GatherInput("query"),
    "query": ColumnParallel,
    "value": ColumnParallel,
    "key": SequenceParallel,
    "out": lambda: RowParallel(output_layouts=Shard(1)),
}


def pair(rank: int, world: int, **options: bool) -> tuple[nn.Module, nn.Module, dist.ProcessGroup]:
    """(a whole module, the same cut over ranks, these)."""
    torch.manual_seed(0)
    with testing.device():
        want = Attention(**options)
    got, over = copy.deepcopy(want), testing.mesh((world,), ("tp",))
    parallelize_module(got, over, {name: style() for name, style in PLAN.items()})
    return want, got, over.get_group()


def check_gradient(rank: int, world: int) -> None:
    x, grad = (normal(BATCH, SEQUENCE, WIDTH, seed=seed) for seed in (1, 2))
    for views in (False, True):
        want, got, group = pair(rank, world, views=views)
        for recipe in (None, Float8CurrentScaling()):
            its = []
            for module, part in ((want, lambda t: t), (got, lambda t: t.chunk(world, 1)[rank])):
                own = part(x).clone().requires_grad_()
                with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
                    out = module(own)
                out.backward(part(grad))
                named = {name: full_tensor(param.grad) for name, param in module.named_parameters()}
                its.append({"output": out.detach(), "input": own.grad, **named})
                module.zero_grad()
            wanted, gotten = its
            for name, value in gotten.items():
                its = wanted[name].chunk(world, 1)[rank] if name in ("output", "input") else wanted[name]
                if recipe is None:
                    assert_near(value, its, name)
                else:  # sums of what was quantized in parts
                    assert (value - its).norm() < 0.1 * its.norm(), name


def test_the_gradient_of_a_gathered_input_is_summed_for_whatever_takes_it(ranks):
    ranks(2).run(check_gradient)


def check_sum(rank: int, world: int) -> None:
    """A layer takes what `gather_values` made, whose gradient is summed once, also where its history was cut off."""
    over = testing.mesh((world,), ("tp",))
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, device=testing.device())
    weight = layer.weight.detach().clone()
    parallelize_module(layer, over, ColumnParallel())
    for gradient, times in (("sum", 1), ("part", 1)):
        x = normal(BATCH, SEQUENCE // world, WIDTH, seed=rank).requires_grad_()
        whole = gather_values(x, over.get_group(), dim=1, gradient=gradient)
        kept = whole.detach().requires_grad_()
        layer(kept).sum().backward()
        whole.backward(kept.grad)
        assert_near(x.grad, times * weight.sum(0).expand_as(x), gradient)


def test_a_gradient_is_summed_where_a_plain_input_was_gathered_or_in_the_layer(ranks):
    ranks(2).run(check_sum)


class Behind(nn.Module):
    """Computes something of its input, alike on all ranks, before a map takes it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if kind == "norm" else nn.Identity()
        self.map = (te.LayerNormLinear if kind == "fused" else te.Linear)(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(self.norm(x))


def check_refused(rank: int, world: int) -> None:
    over, x = testing.mesh((world,), ("tp",)), normal(BATCH, SEQUENCE, WIDTH, seed=rank)
    for kind, message in (
        ("norm", "summed twice; wanted that one as it is"),
        ("fused", "a module with a norm: got an"),
    ):
        module = Behind(kind).to(testing.device())
        parallelize_module(module, over, {"map": ColumnParallel()})
        parallelize_module(module, over, GatherInput("map"))
        with pytest.raises(ValueError, match=message):
            module(x.clone().requires_grad_())
    with torch.no_grad():
        assert Behind("norm").to(x.device)(x).shape == x.shape


def test_what_is_computed_of_a_gathered_input_is_refused(ranks):
    ranks(2).run(check_refused)


def histories(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if name.startswith(("query", "key", "val"))}


def check_histories(rank: int, world: int, kind: str) -> None:
    """Steps of one or two passes, with an evaluation in between whose values are larger; the columns of inputs."""
    want, got, group = pair(rank, world)
    for module in (want, got):
        te.prepare(module, DELAYED)
    for step in range(5):
        for number in range(1 + step % 2):
            x = normal(BATCH, SEQUENCE, WIDTH, seed=10 * step + number) * 2.0**-step
            for module, its in ((want, x), (got, x.chunk(world, 1)[rank])):
                with te.autocast(recipe=DELAYED, amax_reduction_group=group):
                    with torch.no_grad():
                        module(its * 100)
                    own = its.clone().requires_grad_(kind != "frozen input")
                    out = te.checkpoint(module, own) if kind == "recomputed" else module(own)
                out.square().sum().backward()
        wanted, gotten = histories(want), histories(got)
        assert len(wanted) == len(gotten) == 6
        for name, buffer in gotten.items():
            assert_bitwise(buffer[..., 0], wanted[name][..., 0], f"{name} in step {step}")
        assert (gotten["key.gemm.scaling.scale"][0] != 1).all()


@pytest.mark.parametrize("kind", ["plain", "recomputed", "frozen input"])
def test_all_that_take_a_gathered_input_have_its_amax_in_their_histories(ranks, kind: str) -> None:
    ranks(2).run(check_histories, kind)


def check_frozen(rank: int, world: int) -> None:
    _, got, group = pair(rank, world)
    got.query.weight.requires_grad_(False)
    x = normal(BATCH, SEQUENCE // world, WIDTH, seed=1)
    with te.autocast(recipe=DELAYED, amax_reduction_group=group):
        with torch.no_grad():
            got(x)
        got(x.clone().requires_grad_())
        with pytest.raises(ValueError, match=r"GatherInput\('query'\): got a layer whose weight and input are frozen"):
            got(x)


def test_a_frozen_layer_keeps_no_history_for_others(ranks):
    ranks(2).run(check_frozen)
