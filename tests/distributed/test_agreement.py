"""Parts of a matrix, cut by rows and columns through tiles, quantized as the whole is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from te_dist import fsdp2, optim
from te_dist.codecs import HighPrecision
from te_dist.formats import WHOLE, Encoding, Field, Format, Partition, Region, Span
from te_dist.fsdp2 import QuantizedParameter
from te_dist.scaling.agreement import quantize_parts, shares_scales
from te_dist.tensor import QuantizedTensor, empty, find_amaxes
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Traffic
from te_dist.tensor_parallel.cutting import cut_parameter
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, Layer, random_matrix, wires

ROW_CUTS, COL_CUTS = (0, 176, 400), (0, 200, 352)  # through tiles of 128 and of 32, at multiples of 16 and of 8


def quantize_grid(rank: int, world: int, name: str) -> None:
    """Rank (i, j) of a 2 x 2 mesh has the part of row span i and column span j."""
    format = FORMATS[name]
    if 200 % format.alignment(1):
        return
    grid = mesh((2, 2), ("rows", "cols"))
    rows, cols = (tuple(Span(a, b - a) for a, b in zip(c, c[1:], strict=False)) for c in (ROW_CUTS, COL_CUTS))
    region = Region(rows[rank // 2], cols[rank % 2])
    whole = random_matrix(ROW_CUTS[-1], COL_CUTS[-1], 1)
    own = whole[region.rows.start : region.rows.stop, region.cols.start : region.cols.stop].contiguous()
    part = empty(format, region, dtype=torch.float32, device="cpu", fields=format.canonical.fields)
    quantize_parts([(part, own, Partition(rows, cols))], [grid.get_group(0), grid.get_group(1)])
    want = storages.quantize(whole, format).narrow(0, region.rows.start, len(region.rows))
    want = want.narrow(1, region.cols.start, len(region.cols))
    for field, wire in wires(part).items():
        assert_bitwise(wire, wires(want)[field], f"{field} of rank {rank}")


@pytest.mark.parametrize("name", FORMATS)
def test_parts_cut_both_ways_are_the_quantized_whole(name: str) -> None:
    pool(4).run(quantize_grid, name)


def test_nothing_is_shared_where_no_tile_is_cut() -> None:
    aligned = Partition((Span(0, 128), Span(128, 128)), (Span(0, 512),))
    through = Partition((Span(0, 100), Span(100, 156)), (Span(0, 512),))
    assert not shares_scales(FORMATS["float8_block_2d"], aligned)
    assert shares_scales(FORMATS["float8_block_2d"], through)
    assert shares_scales(FORMATS["float8_tensorwise"], aligned)
    assert not shares_scales(FORMATS["nvfp4_row_scaled"], through)
    assert shares_scales(FORMATS["nvfp4_row_scaled"], Partition((Span(0, 256),), (Span(0, 256), Span(256, 256))))


@dataclass(frozen=True)
class Hashed(HighPrecision):
    """A codec whose hash is chosen: that of text, and so the order of a set, differs between processes."""

    value: int = 0

    def __hash__(self) -> int:
        return self.value

    @property
    def amax_tiles(self) -> tuple[tuple[int, int], ...]:
        return ((WHOLE, WHOLE),)


@pytest.mark.parametrize("values", [(0, 1), (1, 0)])
def test_amaxes_are_laid_out_in_the_order_of_directions(values: tuple[int, int]) -> None:
    row, col = (Encoding(Hashed(value=v), (Field(f"data_{v}", torch.bfloat16),)) for v in values)
    found = find_amaxes(random_matrix(4, 4, 0), Format(row, col), Region.whole(4, 4))
    assert [codec.value for codec in found] == list(values)


class Cut(nn.Module):
    """A weight that tensor parallelism cuts by columns."""

    def __init__(self, format: Format, tp: DeviceMesh) -> None:
        super().__init__()
        weight = QuantizedParameter(storages.quantize(random_matrix(336, 320, 0), format))
        self.weight = cut_parameter(nn.Parameter(weight), tp, dim=1, name="weight")

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to_local().dequantize().t()


def cut_and_written(name: str) -> tuple[Cut, Tensor]:
    """A module whose weight two mesh dimensions cut, and the whole of what ranks have written their parts of."""
    grid = mesh((2, 2), ("dp", "tp"))
    module = Cut(FORMATS[name], grid["tp"])
    fsdp2.fully_shard(module, mesh=grid["dp"])
    local = local_tensor(module.weight)
    rows, cols = local.storage.region.rows, local.storage.region.cols
    whole = random_matrix(336, 320, 5)
    local.copy_(whole[rows.start : rows.stop, cols.start : cols.stop])
    return module, whole


def check_part(local: QuantizedTensor, whole: storages.QuantizedStorage, rank: int) -> None:
    """The bytes of a part are those of the whole."""
    rows, cols = local.storage.region.rows, local.storage.region.cols
    want = whole.narrow(0, rows.start, len(rows)).narrow(1, cols.start, len(cols))
    for field, wire in wires(local).items():
        assert_bitwise(wire, wires(want)[field], f"{field} of rank {rank}")


def write_into_cut_weights(rank: int, world: int, name: str) -> None:
    """Values written into shards that two mesh dimensions cut are settled over both, or the gather refuses them."""
    module, whole = cut_and_written(name)
    local = local_tensor(module.weight)
    if local.storage.unsettled is not None:
        with pytest.raises(RuntimeError, match="fsdp2.settle"):
            module(torch.zeros(1, len(local.storage.region.cols)))
    fsdp2.settle(module)
    check_part(local, storages.quantize(whole, FORMATS[name]), rank)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "high_precision"])
def test_values_written_into_weights_cut_both_ways(name: str) -> None:
    pool(4).run(write_into_cut_weights, name)


def leave_out_a_step(rank: int, world: int, name: str) -> None:
    """Values written into cut shards are settled by a step that changes nothing."""
    module, whole = cut_and_written(name)
    local = local_tensor(module.weight)
    optimizer = optim.FusedAdam(module.parameters(), lr=0.1)
    module.weight.grad = torch.zeros_like(module.weight, dtype=module.weight.dtype)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert local.storage.unsettled is None
    check_part(local, storages.quantize(whole, FORMATS[name]), rank)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d"])
def test_a_step_that_is_left_out_settles_what_was_written(name: str) -> None:
    pool(4).run(leave_out_a_step, name)


def load_values_into_several(rank: int, world: int, name: str) -> list[str]:
    """Collectives by which all weights of a model agree on what was loaded into their shards."""
    layers = nn.ModuleList(Layer(FORMATS[name], random_matrix(328, 160, 0)) for _ in range(3))
    for layer in layers:
        fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
    wholes = [random_matrix(328, 160, seed) for seed in (1, 2, 3)]
    for layer, whole in zip(layers, wholes, strict=True):
        layer.load_state_dict({"weight": distribute_tensor(whole, layer.weight.device_mesh, [Shard(0)])})
    with Traffic() as traffic:
        fsdp2.settle(layers)
    for layer, whole in zip(layers, wholes, strict=True):
        check_part(local_tensor(layer.weight), storages.quantize(whole, FORMATS[name]), rank)
    return [sent.kind for sent in traffic.sent]


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d"])
def test_what_is_loaded_is_agreed_on_in_one_reduction(name: str) -> None:
    assert pool(2).run(load_values_into_several, name) == [["all_reduce"]] * 2
