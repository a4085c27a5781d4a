"""Parts of a sequence gathered as the bytes of the whole, and sharded layers that compute what unsharded ones do."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, testing
from te_dist.catalog import FORMATS
from te_dist.formats import Format, geometry
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from te_dist.tensor import QuantizedStorage, QuantizedTensor, quantize
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Traffic
from te_dist.tensor_parallel import ColumnParallel, GatherInput, RowParallel, SequenceParallel, gather
from te_dist.tensor_parallel.cuts import SequenceCut
from te_dist.tensor_parallel.wires import wire_bytes
from te_dist.testing import assert_bitwise, full_tensor

# Relative, of sums of 512 fp32 products in another order; on a GPU a value in a hundred then has another code.
TOLERANCES = {"cpu": 2e-6, "cuda": 5e-3}


def normal(*shape: int, seed: int) -> Tensor:
    """The same values on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(testing.device())


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal values whose columns differ in scale, so that a wrong tile shows."""
    return normal(*shape, seed=seed) * scale_of(shape)


def scale_of(shape: tuple[int, ...]) -> Tensor:
    return torch.logspace(-3, 3, shape[-1]).to(testing.device())


def assert_canonical(got: QuantizedStorage, want: QuantizedStorage, name: str) -> None:
    assert got.region == want.region
    for field in want.format.canonical.fields:
        wires = [geometry.compact(field, s.buffers[field.name], s.region) for s in (got, want)]
        assert_bitwise(*wires, f"{name}.{field.name}")


def sent_bytes(format: Format, cut: SequenceCut) -> int:
    """What each rank has to send: the canonical fields of the largest part, less what all ranks share."""
    fields = [f for f in format.canonical.fields if not f.is_shared(0)]
    return max(sum(f.compact_bytes(run) for f in fields for run in runs) for runs in cut.runs)


# -- gather --------------------------------------------------------------------------------------------------------

SEQUENCES = {
    "rows": ((96, 160), 0),
    "whole_tiles": ((2, 512, 128), 1),
    "cut_tiles": ((2, 192, 128), 1),
    "inner_dimension": ((2, 64, 3, 128), 1),
    "fewer_than_ranks": ((2, 64), 0),
}
# Over three ranks: two of them share a tile, and the third has one of its own.
SHARED_BY_TWO = {tile: ((tile + tile // 2, tile), 0) for tile in (16, 32, 128)}


def check_gather(rank: int, world: int, shape: tuple[int, ...], dim: int) -> list[str]:
    group = testing.mesh((world,), ("tp",)).get_group()
    cut, x, refused = SequenceCut(shape, dim, world), values(shape, 1), []
    for name, format in FORMATS.items():
        own = cut.extents[rank]
        local = x.narrow(dim, own.start, len(own)).clone().requires_grad_()
        with Traffic() as traffic:
            try:
                got = gather(local, format, group, dim=dim, size=shape[dim])
            except ValueError as error:
                assert "cut at multiples of" in str(error)
                assert not traffic.sent, "refused after a collective"
                refused.append(name)
                continue
        assert_canonical(got.storage, quantize(x, format).storage, name)
        assert got.shape == shape
        assert traffic.nbytes("all_gather") == sent_bytes(format, cut)
        assert len([s for s in traffic.sent if s.kind == "all_gather"]) == 1
        got.backward(values(shape, rank))
        want = sum(values(shape, r) for r in range(world)).narrow(dim, own.start, len(own))
        torch.testing.assert_close(local.grad / scale_of(shape), want / scale_of(shape), rtol=1e-5, atol=1e-5)
    return refused


@pytest.mark.each_value
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_gathered_parts_are_the_quantized_whole(ranks, world, sequence):
    refused = ranks(world).run(check_gather, *SEQUENCES[sequence])
    assert all(each == refused[0] for each in refused), "ranks disagree on what can be gathered"
    assert len(refused[0]) < len(FORMATS) / 2


@pytest.mark.parametrize("tile", SHARED_BY_TWO)
def test_a_rank_has_no_say_in_a_tile_of_others(ranks, tile):
    ranks(3).run(check_gather, *SHARED_BY_TWO[tile])


def gather_without_amaxes(rank: int, world: int) -> list[tuple[str, int]]:
    group = testing.mesh((world,), ("tp",)).get_group()
    kinds = []
    for name, format in FORMATS.items():
        with Traffic() as traffic:
            gather(values((256, 256), 1).chunk(world)[rank], format, group)
        if any(sent.kind == "all_reduce" for sent in traffic.sent):
            kinds.append((name, traffic.nbytes("all_reduce")))
    return kinds


def test_amaxes_are_reduced_only_where_a_scale_is_shared(ranks):
    (got, _) = ranks(2).run(gather_without_amaxes)
    tiles = {name: [tile for d in f.directions for tile in f[d].codec.amax_tiles] for name, f in FORMATS.items()}
    assert {name for name, _ in got} == {name for name, its in tiles.items() if any(tile[0] == 0 for tile in its)}
    assert all(nbytes <= 8 for _, nbytes in got), "a per-tensor amax is four bytes, for each direction"


def wrong_shape(rank: int, world: int) -> str:
    group = testing.mesh((world,), ("tp",)).get_group()
    with pytest.raises(ValueError, match="cut it as torch.chunk does") as error:
        gather(values((3, 64), 1), FORMATS["float8_block_2d"], group, size=20)
    return str(error.value)


def test_a_part_of_another_size_is_refused(ranks):
    first, _ = ranks(2).run(wrong_shape)
    assert "rank 0 has a part of shape (3, 64); of (20, 64)" in first


# -- DTensor -------------------------------------------------------------------------------------------------------


def check_redistribute(rank: int, world: int) -> None:
    over = testing.mesh((world,), ("tp",))
    for name, format in FORMATS.items():
        whole = quantize(values((96, 160), 2), format)
        part = whole.split(96 // world)[rank]
        spread = DTensor.from_local(part, over, [Shard(0)], run_check=False)
        with Traffic() as traffic:
            got = spread.redistribute(over, [Replicate()]).to_local()
        assert isinstance(got, QuantizedTensor)
        assert_canonical(got.storage, whole.storage, name)
        fields = [f for f in format.canonical.fields if not f.is_shared(0)]
        place = 5 * 8  # where a part lies and whether it is settled, which all ranks compare first
        assert traffic.nbytes() == place + sum(f.compact_bytes(part.storage.region) for f in fields)
        assert_canonical(spread.full_tensor().storage, whole.storage, name)


@pytest.mark.parametrize("world", [2, 3])
def test_replicating_a_dtensor_gathers_bytes(ranks, world):
    ranks(world).run(check_redistribute)


# -- styles --------------------------------------------------------------------------------------------------------

K, HIDDEN, BATCH, SEQUENCE = 256, 512, 2, 64


def hybrid(role: QuantizerRole) -> te.quantizers.Quantizer:
    if role.tensor_type == "grad_output":
        return te.MXFP8Quantizer()
    return te.HybridQuantizer(
        rowwise_quantizer=te.Float8CurrentScalingQuantizer(), columnwise_quantizer=te.MXFP8Quantizer()
    )


RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=4),
    "block": Float8BlockScaling(),
    "block_squares": Float8BlockScaling(x_block_scaling_dim=2, use_f32_scales=True),
    "mx": MXFP8BlockScaling(),
    "nv": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nv_runs": NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True, row_scaled_activation=True
    ),
    "hybrid": CustomRecipe(hybrid),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


class Layer(nn.Module):
    """A norm alone, a norm with a linear map behind it, and linear maps with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = te.RMSNorm(K)
        self.gate = te.LayerNormLinear(K, HIDDEN)
        self.up = te.Linear(K, HIDDEN, bias=False)
        self.down = te.Linear(HIDDEN, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(self.norm(x)))


TENSOR = {"gate": ColumnParallel, "up": ColumnParallel, "down": RowParallel}
SEQUENCE_PARALLEL = {
    "norm": SequenceParallel,
    "gate": lambda: ColumnParallel(input_layouts=Shard(1)),
    "up": lambda: ColumnParallel(input_layouts=Shard(1)),
    "down": lambda: RowParallel(output_layouts=Shard(1)),
}
PLANS = {"tensor": TENSOR, "sequence": SEQUENCE_PARALLEL}


def make_layer(recipe: Recipe | None, *, quantized: bool) -> Layer:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized and recipe is not None, recipe=recipe), testing.device():
        layer = Layer()
    for module in (layer.gate, layer.down):
        nn.init.uniform_(module.bias, -1, 1)
    return layer


def autocast(recipe: Recipe | None, group: dist.ProcessGroup):
    return te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)


def run(layer: nn.Module, x: Tensor, grad: Tensor, surrounding) -> tuple[Tensor, Tensor]:
    """(output, gradient of the input); those of the parameters are left in them."""
    x = x.clone().requires_grad_()
    with surrounding:
        y = layer(x)
    (y * grad).sum().backward()
    return y.detach(), x.grad


def assert_near(got: Tensor, want: Tensor, name: str) -> None:
    error = ((got - want).norm() / want.norm()).item()
    assert error < TOLERANCES[got.device.type], f"{name}: relative error {error:.1e}"


def check_layer(rank: int, world: int, recipe_name: str, plan: str) -> None:
    recipe, over = RECIPES[recipe_name], testing.mesh((world,), ("tp",))
    part = (lambda t: t.chunk(world, 1)[rank]) if plan == "sequence" else (lambda t: t)
    for quantized in (True, False):
        want, got = (make_layer(recipe, quantized=quantized) for _ in range(2))
        parallelize_module(got, over, {name: style() for name, style in PLANS[plan].items()})
        for step in range(4):  # delayed scaling has a history in the second, which GPUs record, and play in the third
            x, grad = (normal(BATCH, SEQUENCE, K, seed=i + step) for i in (7, 8))
            wanted = run(want, x, grad, autocast(recipe, over.get_group()))
            gotten = run(got, part(x), part(grad), autocast(recipe, over.get_group()))
            for name, a, b in zip(("output", "input gradient"), gotten, wanted, strict=True):
                assert_near(a, part(b), name)
            for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
                assert_near(full_tensor(a.grad), b.grad, name)
                a.grad = b.grad = None
        with autocast(recipe, over.get_group()):
            outs = []
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    outs.append(got(part(x)))
        assert_bitwise(outs[1], outs[0], "output in inference mode")


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("plan", PLANS)
def test_parallel_layers_compute_what_an_unsharded_layer_does(ranks, plan, recipe):
    ranks(2).run(check_layer, recipe, plan)


def check_weights(rank: int, world: int) -> None:
    over = testing.mesh((world,), ("tp",))
    for name, format in FORMATS.items():
        for dim, style in ((0, ColumnParallel), (1, RowParallel)):
            for device in (testing.device(), torch.device("meta")):
                layer = te.Linear(K, HIDDEN, device=device)
                weight = quantize(values((HIDDEN, K), 3).to(device), format)
                layer.weight = nn.Parameter(fsdp2.QuantizedParameter(weight.storage, (HIDDEN, K)))
                style()._apply(layer, over)
                local = local_tensor(layer.weight)
                assert isinstance(local, fsdp2.QuantizedParameter)
                assert local.device == device
                assert layer.weight.placements == (Shard(dim),)
                size = (HIDDEN, K)[dim] // world
                assert local.storage.region == weight.storage.region.narrow(dim, rank * size, size)
                if device.type != "meta":
                    assert_canonical(local.storage, weight.storage.narrow(dim, rank * size, size), name)


def test_weights_are_cut_with_the_scales_of_the_whole(ranks):
    ranks(2).run(check_weights)


def check_refusals(rank: int, world: int) -> None:
    over = testing.mesh((world,), ("tp",))
    recipe = NVFP4BlockScaling()
    with te.quantized_model_init(recipe=recipe), testing.device():
        odd = te.Linear(64, 64, name="blocks.3.down")
        narrow = te.Linear(6, 64, name="blocks.3.up")
    with Traffic() as traffic:
        with pytest.raises(ValueError, match=r"blocks.3.up.weight: 6 columns over 2 ranks are cut at 0 and 3"):
            RowParallel()._apply(narrow, over)
        ColumnParallel()._apply(odd, over)
        with pytest.raises(ValueError, match="is cut already.*once, and before fully_shard"):
            ColumnParallel()._apply(odd, over)
        with pytest.raises(ValueError, match="got torch's Linear; exchange torch's by te_dist.convert"):
            ColumnParallel()._apply(nn.Linear(4, 4), over)
        for style, keyword in product((ColumnParallel, RowParallel), ("input_layouts", "output_layouts")):
            with pytest.raises(TypeError, match=rf"{keyword}: got 'Shard\(1\)', wanted a placement"):
                style(**{keyword: "Shard(1)"})
        with pytest.raises(ValueError, match="normalizes its input"):
            RowParallel()._apply(te.LayerNormLinear(64, 64), over)
        with pytest.raises(ValueError, match=r"GatherInput\('x'\).*below the Attention, wanted the name of a layer"):
            GatherInput("x")._apply(Attention(), over)
    assert not traffic.sent


def test_what_cannot_be_cut_is_refused_before_any_collective(ranks):
    ranks(2).run(check_refusals)


def check_histories(rank: int, world: int) -> None:
    over = testing.mesh((world,), ("tp",))
    layer = parallelize_module(te.Linear(K, K, device=testing.device()), over, ColumnParallel(input_layouts=Shard(1)))
    with (
        te.autocast(recipe=DelayedScaling()),
        pytest.raises(ValueError, match="give autocast an amax_reduction_group that holds the tensor-parallel ranks"),
    ):
        layer(values((1, 8, K), 1))


def test_parts_scaled_by_separate_histories_are_refused(ranks):
    ranks(2).run(check_histories)


class Attention(nn.Module):
    """Two projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = te.Linear(K, HIDDEN), te.Linear(K, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x)


def check_gathered_input(rank: int, world: int, recipe_name: str, frozen: str) -> None:
    recipe, over = RECIPES[recipe_name], testing.mesh((world,), ("tp",))
    torch.manual_seed(0)
    with testing.device():
        want, got = Attention(), Attention()
    got.load_state_dict(want.state_dict())
    if frozen:
        for attention in (want, got):
            getattr(attention, frozen).weight.requires_grad_(False)
    parallelize_module(got, over, {"query": ColumnParallel(), "key": ColumnParallel()})
    parallelize_module(got, over, GatherInput("query"))
    x, grad = normal(BATCH, SEQUENCE, K, seed=1), normal(BATCH, SEQUENCE, HIDDEN, seed=2)
    wanted = run(want, x, grad, autocast(recipe, over.get_group()))
    with Traffic() as traffic:
        gotten = run(got, x.chunk(world, 1)[rank], grad.chunk(world, 2)[rank], autocast(recipe, over.get_group()))
    assert len([s for s in traffic.sent if s.kind == "all_gather"]) == 1
    assert_near(gotten[0], wanted[0].chunk(world, 2)[rank], "output")
    assert_near(gotten[1], wanted[1].chunk(world, 1)[rank], "input gradient")
    for name, param in got.named_parameters():
        its = want.get_parameter(name)
        assert (param.grad is None) == (its.grad is None) == (name == f"{frozen}.weight")
        if param.grad is not None:
            assert_near(full_tensor(param.grad), its.grad, name)


@pytest.mark.parametrize("frozen", ["", "query", "key"])
@pytest.mark.parametrize("recipe", ["none", "current", "mx", "nv"])
def test_an_input_is_gathered_once_for_all_that_take_it(ranks, recipe, frozen):
    ranks(2).run(check_gathered_input, recipe, frozen)


def check_uneven(rank: int, world: int) -> None:
    """DTensors say how long the whole is."""
    over, recipe = testing.mesh((world,), ("tp",)), RECIPES["mx"]
    torch.manual_seed(0)
    want, got = (te.Linear(K, HIDDEN, bias=False, device=testing.device()) for _ in range(2))
    got.load_state_dict(want.state_dict())
    parallelize_module(got, over, ColumnParallel(input_layouts=Shard(1), output_layouts=Replicate()))
    x = normal(1, 50, K, seed=1)
    local = x.chunk(world, 1)[rank] if rank < len(x.chunk(world, 1)) else x[:, :0]
    spread = DTensor.from_local(local, over, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride())
    with te.autocast(recipe=recipe):
        assert_near(got(spread), want(x), "output")


def test_uneven_sequences_come_as_dtensors(ranks):
    ranks(3).run(check_uneven)


def check_bytes(rank: int, world: int) -> None:
    """Forward gathers both directions of the input once; backward those of the gradient."""
    over = testing.mesh((world,), ("tp",))
    for name in ("block", "mx", "nv", "hybrid"):
        recipe = RECIPES[name]
        layer = make_layer(recipe, quantized=True)
        parallelize_module(layer, over, {n: style() for n, style in SEQUENCE_PARALLEL.items()})
        x = normal(BATCH, SEQUENCE // world, K, seed=1)
        with Traffic() as traffic:
            run(layer, x, torch.ones_like(x), autocast(recipe, over.get_group()))
        roles = [recipe.quantizer(QuantizerRole("linear", role)) for role in ("input", "input", "grad_output")]
        cut = SequenceCut((BATCH, SEQUENCE, K), 1, world)
        want = [wire_bytes(quantizer.declare(torch.float32), cut.runs[rank]) for quantizer in roles]
        assert [s.nbytes for s in traffic.sent if s.kind == "all_gather"] == want
        assert all(s.dtype == torch.uint8 for s in traffic.sent if s.kind == "all_gather")
        assert sum(want) < 0.6 * 3 * cut.region.shape[0] * K * 4 / world, "more than half of what fp32 would send"


def test_sequence_parallelism_sends_the_declared_bytes(ranks):
    ranks(2).run(check_bytes)


def check_recomputation(rank: int, world: int, recipe_name: str) -> None:
    recipe, over = RECIPES[recipe_name], testing.mesh((world,), ("tp",))
    layer = make_layer(recipe, quantized=True)
    parallelize_module(layer, over, {name: style() for name, style in SEQUENCE_PARALLEL.items()})
    x, grad = (normal(BATCH, SEQUENCE // world, K, seed=seed) for seed in (1, 2))
    results = []
    of_torch = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False)
    for run_layer in (layer, lambda x: te.checkpoint(layer, x), of_torch):
        with te.offload.activations(min_bytes=0) if results else contextlib.nullcontext():
            values_of_run = run(run_layer, x, grad, autocast(recipe, over.get_group()))
        results.append([*values_of_run, *(full_tensor(p.grad) for p in layer.parameters())])
        layer.zero_grad()
        if layer.gate.gemm.scaling is not None:
            layer.gate.gemm.scaling = layer.up.gemm.scaling = layer.down.gemm.scaling = None
    for index, (a, *others) in enumerate(zip(*results, strict=True)):
        for other in others:
            assert_bitwise(other, a, f"result {index}")


@every_recipe
def test_recomputed_parallel_layers_change_no_bit(ranks, recipe):
    ranks(2).run(check_recomputation, recipe)
