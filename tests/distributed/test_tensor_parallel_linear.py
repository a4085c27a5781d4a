"""One `Linear` under each style, in the corners: what is frozen, the bias returned, hybrids that requantize rows."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import testing
from te_dist.catalog import FORMATS
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    QuantizerRole,
    Recipe,
)
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.traffic import Traffic
from te_dist.tensor_parallel import (
    ColumnParallel,
    GatherInput,
    RowParallel,
    gather,
    gather_values,
    reduce_scatter,
    replicate,
)
from te_dist.testing import assert_bitwise, full_tensor
from tests.distributed.test_tensor_parallel import assert_near, normal

BATCH, SEQUENCE, WIDTH = 2, 32, 96
STYLES = {
    "column": (ColumnParallel, {}, None, -1),
    "column_sequence": (ColumnParallel, {"input_layouts": Shard(1)}, 1, -1),
    "row": (RowParallel, {}, -1, None),
    "row_sequence": (RowParallel, {"output_layouts": Shard(1)}, -1, 1),
}  # style, its keywords, the dimension along which inputs and outputs are cut


def requantized(role: QuantizerRole) -> te.quantizers.Quantizer:
    """Backward sees the values that forward has multiplied."""
    if role.tensor_type == "grad_output":
        return te.MXFP8Quantizer()
    return te.HybridQuantizer(
        rowwise_quantizer=te.Float8CurrentScalingQuantizer(),
        columnwise_quantizer=te.MXFP8Quantizer(),
        columnwise_source="rowwise_dequantized",
    )


RECIPES: dict[str, Recipe] = {"current": Float8CurrentScaling(), "requantized": CustomRecipe(requantized)}


def part(x: Tensor, dim: int | None, rank: int, world: int) -> Tensor:
    """What a rank holds of `x`."""
    return (x if dim is None else x.chunk(world, dim)[rank]).clone()


def results(linear: nn.Module, x: Tensor, grad: Tensor, made_by: Recipe) -> dict[str, Tensor | None]:
    """Output and gradients of one pass; a bias that is returned is added."""
    with te.autocast(recipe=made_by):
        out = linear(x)
        if linear.return_bias:
            out, bias = out
            out = out + bias
    (out * grad).sum().backward()
    named = {name: param.grad for name, param in linear.named_parameters()}
    return {
        "output": out.detach(),
        "input": x.grad,
        **{name: g if g is None else full_tensor(g) for name, g in named.items()},
    }


def check_linear(rank: int, world: int, style: str, frozen: str) -> None:
    kind, options, cut_in, cut_out = STYLES[style]
    over = testing.mesh((world,), ("tp",))
    x, grad = (normal(BATCH, SEQUENCE, WIDTH, seed=seed) for seed in (1, 2))
    x *= torch.logspace(-2, 2, WIDTH, device=x.device)  # ranks hold values of unlike sizes
    for name, made_by in RECIPES.items():
        for returns in (False, True):
            both = []
            for is_cut in (False, True):
                torch.manual_seed(0)
                linear = te.Linear(WIDTH, WIDTH, return_bias=returns, device=testing.device())
                if is_cut:
                    parallelize_module(linear, over, kind(**options))
                if frozen in ("weight", "bias"):
                    getattr(linear, frozen).requires_grad_(False)
                own_x = part(x, cut_in, rank, world) if is_cut else x.clone()
                own_grad = part(grad, cut_out, rank, world) if is_cut else grad
                both.append(results(linear, own_x.requires_grad_(frozen != "input"), own_grad, made_by))
            want, got = both
            for key, cut in (("output", cut_out), ("input", cut_in)):
                want[key] = None if want[key] is None else part(want[key], cut, rank, world)
            for key, value in want.items():
                assert (value is None) == (got[key] is None) == (key == frozen)
                if value is not None:
                    assert_near(got[key], value, f"{name}, {key}, bias returned: {returns}")


@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "input"])
@pytest.mark.parametrize("style", STYLES)
def test_a_parallel_linear_computes_what_a_whole_one_does(ranks, style, frozen):
    ranks(2).run(check_linear, style, frozen)


def check_returned_bias(rank: int, world: int) -> None:
    """Plain outputs come with as much of the bias as they have columns, whose gradient is that of the whole."""
    over, (x, grad) = testing.mesh((world,), ("tp",)), (normal(BATCH, SEQUENCE, WIDTH, seed=seed) for seed in (1, 2))
    for layout, norm in product((None, Shard(2), Shard(1), Replicate()), (False, True)):
        torch.manual_seed(0)
        options = {"return_bias": True, "device": testing.device()}
        want = te.LayerNormLinear(WIDTH, WIDTH, return_layernorm_output=True, **options) if norm else None
        want = want or te.Linear(WIDTH, WIDTH, **options)
        nn.init.normal_(want.bias)
        got = parallelize_module(copy.deepcopy(want), over, ColumnParallel(output_layouts=layout))
        (out, bias, *_), (its, its_bias, *_) = want(x), got(x)
        assert not isinstance(its_bias, DTensor)
        dim = getattr(layout or Shard(2), "dim", None)
        assert_near((its + its_bias).detach(), part((out + bias).detach(), dim, rank, world), f"{layout}")
        (out + bias).backward(grad)
        (its + its_bias).backward(part(grad, dim, rank, world))
        assert_near(full_tensor(got.bias.grad), want.bias.grad, f"{layout}")


def test_a_returned_bias_fits_the_output_beside_it(ranks) -> None:
    ranks(2).run(check_returned_bias)


def check_refusals(rank: int, world: int) -> None:
    over = testing.mesh((world,), ("tp",))
    made = partial(te.Linear, WIDTH, WIDTH, name="up", device=testing.device())
    x = normal(1, SEQUENCE + 1, WIDTH // world, seed=1)
    with Traffic() as traffic:
        for style, _, _, _ in STYLES.values():
            with pytest.raises(ValueError, match=f"{style.__name__}: got Linear with fuse_wgrad_accumulation"):
                style()._apply(made(fuse_wgrad_accumulation=True), over)
            hooked = made()
            hooked.weight.register_hook(lambda grad: grad)
            with pytest.raises(ValueError, match=f"up.weight: got a parameter with hooks.*after {style.__name__} has"):
                style()._apply(hooked, over)
        uneven = parallelize_module(made(), over, RowParallel(output_layouts=Shard(1)))
        with pytest.raises(ValueError, match="up: got an output of 33 along dimension 1.*use_local_output=False"):
            uneven(x)
        with pytest.raises(ValueError, match="an output of 1 along dimension 0"):
            parallelize_module(made(), over, RowParallel(output_layouts=Shard(0)))(x)
        assert not traffic.sent
    spread = parallelize_module(made(), over, RowParallel(output_layouts=Shard(1), use_local_output=False))(x)
    behind = parallelize_module(made(), over, ColumnParallel(input_layouts=Shard(1)))
    assert behind(spread).shape == (1, SEQUENCE + 1, WIDTH // world)


def test_what_would_be_lost_or_misread_is_refused_before_any_collective(ranks) -> None:
    ranks(2).run(check_refusals)


def check_replicated(rank: int, world: int) -> None:
    over, x = testing.mesh((world,), ("tp",)), normal(BATCH, WIDTH, seed=rank)
    plain = te.Linear(WIDTH, WIDTH, device=testing.device())
    want = plain(x)
    layer = distribute_module(plain, over)
    with torch.no_grad():
        assert_bitwise(layer(x), want.detach(), "without gradients")
    for frozen in ((), ("weight",)):
        for name in frozen:
            getattr(layer, name).requires_grad_(False)
        with pytest.raises(RuntimeError, match="is a DTensor.*which no parallel style.*nothing would sum its gradient"):
            layer(x)


def test_parameters_whose_gradient_nobody_sums_are_refused(ranks) -> None:
    ranks(2).run(check_replicated)


def check_copies(rank: int, world: int) -> None:
    """Of a norm, and maps in either direction, which follow one another; copies know nothing of the original."""
    over = testing.mesh((world,), ("tp",))
    for made_by in (*RECIPES.values(), DelayedScaling()):
        torch.manual_seed(0)
        layers = te.LayerNormLinear(WIDTH, 2 * WIDTH), te.Linear(2 * WIDTH, WIDTH)
        block = nn.Sequential(*layers).to(testing.device())
        plan = {"0": ColumnParallel(input_layouts=Shard(1)), "1": RowParallel(output_layouts=Shard(1))}
        parallelize_module(block, over, plan)
        te.prepare(block, made_by)
        twin, found = copy.deepcopy(block), []
        x, grad = (part(normal(BATCH, SEQUENCE, WIDTH, seed=seed), 1, rank, world) for seed in (1, 2))
        for its in (block, twin):
            asking = x.clone().requires_grad_()
            with te.autocast(recipe=made_by, amax_reduction_group=over.get_group()):
                out = its(asking)
            out.backward(grad)
            params = {name: full_tensor(param.grad) for name, param in its.named_parameters()}
            found.append({"output": out.detach(), "input": asking.grad, **params})
        for key, value in found[0].items():
            assert_bitwise(found[1][key], value, key)
        for (name, mine), other in zip(block.named_buffers(), twin.buffers(), strict=True):
            assert_bitwise(mine, other, name)
        parts = [each.untyped_storage().data_ptr() for its in (block, twin) for each in its.buffers()]
        assert len(set(parts)) == len(parts)


def test_copies_of_a_parallel_block_compute_what_it_does(ranks) -> None:
    ranks(2).run(check_copies)


class Wrapped(nn.Module):
    """A layer in another module, which is in its place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Pair(nn.Module):
    """Two layers that take one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (te.Linear(WIDTH, WIDTH, device=testing.device()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def check_wrapped(rank: int, world: int) -> None:
    torch.manual_seed(0)
    styles = {"": GatherInput("first"), "first": ColumnParallel(), "second": ColumnParallel()}
    pair, x = Pair(), part(normal(BATCH, SEQUENCE, WIDTH, seed=1), 1, rank, world)
    for name, style in styles.items():
        parallelize_module(pair.get_submodule(name), testing.mesh((world,), ("tp",)), style)
    with te.autocast(recipe=RECIPES["current"]):
        want = pair(x)
        pair.first = Wrapped(pair.first)
        assert_bitwise(copy.deepcopy(pair)(x), want, "of a copy of what is wrapped")
        assert_bitwise(pair(x), want, "of what is wrapped")


def test_layers_that_say_how_to_gather_can_be_wrapped_later(ranks) -> None:
    ranks(2).run(check_wrapped)


def check_no_rows(rank: int, world: int, shape: tuple[int, ...]) -> None:
    """A batch that a loader ends with, or a part of a sequence that has no token."""
    over = testing.mesh((world,), ("tp",))
    for name, made_by in {**RECIPES, "block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling()}.items():
        with testing.device():
            block = nn.Sequential(te.Linear(WIDTH, 128), te.Linear(128, WIDTH))
        plan = {"0": ColumnParallel(input_layouts=Shard(1)), "1": RowParallel(output_layouts=Shard(1))}
        parallelize_module(block, over, plan)
        x = torch.zeros(shape, device=testing.device(), requires_grad=True)
        with te.autocast(recipe=made_by):
            out = block(x)
        out.sum().backward()
        assert out.shape == x.grad.shape == shape, name
        assert not any(full_tensor(param.grad).any() for param in block.parameters()), name


@pytest.mark.parametrize("shape", [(0, 8, WIDTH), (2, 0, WIDTH)], ids=["no sequence", "no token"])
def test_a_sequence_without_rows_has_an_empty_output_and_no_gradients(ranks, shape: tuple[int, ...]) -> None:
    ranks(2).run(check_no_rows, shape)


def check_in_place(rank: int, world: int) -> None:
    group = testing.mesh((world,), ("tp",)).get_group()
    for function, shape, dim in product((gather_values, reduce_scatter), ((4, 3, 8), (1, 4, 8), (2, 4, 8)), (0, 1)):
        if shape[dim] % world == 0:
            x = normal(*shape, seed=rank).requires_grad_()
            changed = function(x * 1, group, dim=dim)
            changed += 1
            changed.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, float(world if function is gather_values else 1)))


def test_what_is_gathered_or_summed_may_be_changed_in_place(ranks):
    ranks(2).run(check_in_place)


def check_twice(rank: int, world: int) -> None:
    group = testing.mesh((world,), ("tp",)).get_group()
    for function in (gather_values, reduce_scatter, replicate, partial(gather, format=FORMATS["mxfp8_1d"])):
        x = normal(64, 64, seed=rank).requires_grad_()
        values = function(x, group=group)
        values = values.dequantize() if isinstance(values, QuantizedTensor) else values
        (grad,) = torch.autograd.grad(values.pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def test_gradients_of_what_is_gathered_or_summed_have_no_gradient(ranks):
    ranks(2).run(check_twice)


class _Named(nn.Module):
    """A map behind a module whose input is passed by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.query = te.Linear(WIDTH, WIDTH, device=testing.device())

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.query(hidden_states)


def made(kind: str, over: object) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gathered":
        style = {"": GatherInput("query"), "query": ColumnParallel()}
        return _Named() if over is None else parallelize_module(_Named(), over, style)
    layer = (te.LayerNormLinear if kind == "norm" else te.Linear)(WIDTH, WIDTH, device=testing.device())
    return layer if over is None else parallelize_module(layer, over, ColumnParallel(input_layouts=Shard(1)))


def check_autocast_and_names(rank: int, world: int, kind: str) -> None:
    """torch.autocast converts what is gathered, and inputs may be passed by name."""
    over, name = testing.mesh((world,), ("tp",)), "hidden_states" if kind == "gathered" else "inp"
    x, made_by = normal(BATCH, SEQUENCE, WIDTH, seed=1), Float8BlockScaling()
    outputs = []
    for mesh in (None, over):
        own = x if mesh is None else part(x, 1, rank, world)
        with te.autocast(recipe=made_by), torch.autocast(x.device.type, torch.bfloat16):
            outputs.append(made(kind, mesh)(**{name: own}))
    want, got = part(outputs[0], -1, rank, world), outputs[1]
    assert got.dtype == want.dtype == torch.bfloat16
    if kind == "norm":  # whose sums torch rounds otherwise for fewer rows
        assert_near(got, want, kind)
    else:
        assert_bitwise(got.detach(), want.detach(), kind)


@pytest.mark.parametrize("kind", ["plain", "norm", "gathered"])
def test_what_is_gathered_is_in_the_dtype_of_torchs_autocast(ranks, kind: str) -> None:
    ranks(2).run(check_autocast_and_names, kind)
