"""Weights of which every rank updates a range of the flattened values: together the bytes of the whole, quantized."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_dist as te
from te_dist import fsdp2, grouped, post_all_gather_processing, quantize_master_weights, replace_raw_data
from te_dist.catalog import nvfp4
from te_dist.codecs import NvFp4
from te_dist.flat_shards import raw_data, raw_range
from te_dist.formats import Direction, Format, Region
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import QuantizedTensor, empty, quantize
from te_dist.tensor.traffic import Traffic
from te_dist.testing import assert_bitwise, device, mesh, pool
from tests.distributed.probe import FORMATS, random_matrix, wires
from tests.nn.recipes import CASES

SHAPES = ((328, 160), (64, 96), (16, 32), (48, 288))
ALIGNED_SHAPES = ((192, 160), (64, 96), (16, 32), (48, 288))
ERRORS_WEIGHED = {  # scales that follow from all values of a tile, not from the largest alone
    f"{dims}d_weighed": nvfp4(dims, row=NvFp4(row, four_over_six="mae"), col=NvFp4(col, four_over_six="mae"))
    for dims, row, col in ((1, (1, 16), (16, 1)), (2, (16, 16), (16, 16)))
}
ALL = FORMATS | ERRORS_WEIGHED | {"rowwise_weighed": ERRORS_WEIGHED["1d_weighed"].select(Direction.ROWWISE)}
Range = tuple[int, int]


def shapes_of(format: Format) -> tuple[tuple[int, int], ...]:
    return ALIGNED_SHAPES if format.alignment(0) > 2 else SHAPES


def unit_of(format: Format, cols: int) -> int:
    """Values at multiples of which cuts are tried."""
    codecs = [format[d].codec for d in format.directions]
    rows, values = (math.lcm(*(codec.alignment(dim) for codec in codecs)) for dim in (0, 1))
    return rows * cols if rows > 1 else math.lcm(values, *(field.pack for field in format.fields))


def random_ranges(size: int, unit: int, world: int, seed: int) -> list[Range]:
    """(start, length) by rank, in any order of ranks; some are empty."""
    chosen = random.Random(seed)
    cuts = sorted(chosen.randrange(0, size // unit + 1) * unit for _ in range(world - 1))
    if seed % 3 == 0:
        cuts[0] = 0  # a rank with nothing
    found = [(a, b - a) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    chosen.shuffle(found)
    return found


def blank(format: Format, shape: tuple[int, ...]) -> QuantizedTensor:
    """A weight of other bytes than any that are compared."""
    if len(shape) == 3:
        weight = grouped.empty([shape[1:]] * shape[0], format, dtype=torch.float32, device=device())
    else:
        weight = QuantizedTensor(empty(format, Region.whole(*shape), dtype=torch.float32, device=device()))
    for buffer in weight.storage.buffers.values():
        buffer.view(torch.uint8).fill_(0xA5)
    for field in format.fields:  # but padding stays zero
        if len(shape) == 2 and field.is_padded(Region.whole(*shape)):
            weight.storage.buffers[field.name].zero_()
    return weight


def gather_raw(weight: QuantizedTensor, ranges: Sequence[Range], own: Sequence[Tensor] | None = None) -> None:
    """Every rank sends the bytes of its range, from its shards where it has some."""
    places = [raw_range(weight, *each) for each in ranges]
    rank = dist.get_rank()
    for index, plane in enumerate(raw_data(weight)):
        for source, (first, size) in enumerate(each[index] for each in places):
            sent = plane[first : first + size]
            if own is not None and source == rank and size:
                sent.copy_(own[index])
            if size:
                dist.broadcast(sent, source)


def assert_same(weight: QuantizedTensor, whole: Tensor, name: str) -> None:
    """All buffers, columnwise ones included, are those of the whole, quantized."""
    is_group = whole.dim() == 3
    want = grouped.quantize(whole, weight.format) if is_group else quantize(whole, weight.format)
    pairs = zip(weight.members, want.members, strict=True) if is_group else [(weight, want)]
    for index, (got, wanted) in enumerate(pairs):
        expected = wires(wanted)
        for field, wire in wires(got).items():
            assert_bitwise(wire.cpu(), expected[field].cpu(), f"{name}[{index}].{field}")


def update_ranges(rank: int, world: int, name: str, shapes: tuple[tuple[int, ...], ...], into: str) -> None:
    """Two updates of weights by ranges, each of other values."""
    format = ALL[name]
    weights = [blank(format, shape) for shape in shapes]
    ranges = [
        random_ranges(math.prod(shape), unit_of(format, shape[-1]), world, seed) for seed, shape in enumerate(shapes)
    ]
    own = [each[rank] for each in ranges]
    for step in range(2):
        wholes = [random_matrix(math.prod(s[:-1]), s[-1], 10 * step + i).view(s) for i, s in enumerate(shapes)]
        masters = [
            whole.view(-1)[start : start + length].clone().to(device()) if length else None
            for whole, (start, length) in zip(wholes, own, strict=True)
        ]
        starts = [start if length else None for start, length in own]
        shards = None
        if into == "shards":
            sizes = [raw_range(weight, *each) for weight, each in zip(weights, own, strict=True)]
            shards = [
                [torch.empty(size, dtype=torch.uint8, device=device()) for _, size in each] if length else None
                for each, (_, length) in zip(sizes, own, strict=True)
            ]
        unsharded = [plane.untyped_storage() for weight in weights for plane in raw_data(weight)] if shards else []
        nbytes = [memory.nbytes() for memory in unsharded]
        for memory in unsharded:
            memory.resize_(0)
        quantize_master_weights(weights, masters, starts, None, shards)
        for memory, size in zip(unsharded, nbytes, strict=True):
            memory.resize_(size)
        for index, (weight, each) in enumerate(zip(weights, ranges, strict=True)):
            gather_raw(weight, each, None if shards is None else shards[index])
        post_all_gather_processing(weights)
        for index, (weight, whole) in enumerate(zip(weights, wholes, strict=True)):
            assert set(weight.storage.buffers) == {field.name for field in format.fields}
            assert_same(weight, whole.to(device()), f"{name} step {step} weight {index}")
        assert all(weight.storage.unsettled is None and weight.storage.initial is None for weight in weights)


@pytest.mark.each_value
@pytest.mark.parametrize("into", ["weights", "shards"])
@pytest.mark.parametrize("name", ALL)
def test_ranges_together_are_the_quantized_whole(name: str, into: str, ranks) -> None:
    ranks(3).run(update_ranges, name, shapes_of(ALL[name]), into)


@pytest.mark.parametrize("name", ALL)
def test_ranges_go_through_members_of_groups(name: str, ranks) -> None:
    ranks(2).run(update_ranges, name, ((3, 32, 64), (4, 48, 96)), "weights")


@dataclass
class Flat:
    """All weights of a model in one buffer a plane, cut evenly over the values: what ZeRO-style optimizers do.

    Attributes:
        buffers: of each plane.
        ranges: of each weight by rank.
    """

    weights: list[QuantizedTensor]
    buffers: list[Tensor]
    ranges: list[list[Range]]

    @staticmethod
    def of(weights: list[QuantizedTensor], world: int) -> Flat:
        planes = list(zip(*map(raw_data, weights), strict=True))
        buffers = [torch.cat(parts) for parts in planes]
        split = [buffer.split([part.numel() for part in parts]) for buffer, parts in zip(buffers, planes, strict=True)]
        for index, weight in enumerate(weights):
            replace_raw_data(weight, [parts[index] for parts in split])
        total, at, ranges = sum(weight.numel() for weight in weights), 0, []
        cuts = [total * rank // world // 2 * 2 for rank in range(world + 1)]
        for weight in weights:
            inside = [min(max(cut - at, 0), weight.numel()) for cut in cuts]
            ranges.append([(a, b - a) for a, b in zip(inside, inside[1:], strict=False)])
            at += weight.numel()
        return Flat(weights, buffers, ranges)

    def gather(self) -> None:
        """Each rank sends one run of bytes of every buffer."""
        for index, buffer in enumerate(self.buffers):
            for source in range(len(self.ranges[0])):
                start, runs = 0, []
                for weight, of_ranks in zip(self.weights, self.ranges, strict=True):
                    first, size = raw_range(weight, *of_ranks[source])[index]
                    runs += [(start + first, size)] if size else []
                    start += raw_data(weight)[index].numel()
                assert all(a + n == b for (a, n), (b, _) in zip(runs, runs[1:], strict=False))
                dist.broadcast(buffer[runs[0][0] : runs[-1][0] + runs[-1][1]], source)


def trained(rank: int, world: int, case: str) -> None:
    """Steps by ranges against steps of whole weights: losses and all buffers are the same."""
    made_by, width = CASES[case].recipe, 96
    with te.quantized_model_init(recipe=made_by), torch.device(device()):
        models = [nn.Sequential(te.Linear(width, 2 * width), te.LayerNormMLP(2 * width, width)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    weights = [[p for p in m.parameters() if isinstance(p, QuantizedTensor)] for m in models]
    wholes = [weight.dequantize(dtype=torch.float32) for weight in weights[0]]
    for own in weights:
        for weight, whole in zip(own, wholes, strict=True):
            weight.data.quantize_(whole)
    flat = Flat.of(weights[0], world)
    masters = [
        whole.view(-1)[start : start + length].clone()
        for whole, (start, length) in zip(wholes, (each[rank] for each in flat.ranges), strict=True)
    ]
    starts = [each[rank][0] for each in flat.ranges]
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0)).to(device())
    losses: list[list[Tensor]] = [[], []]
    for _ in range(3):
        for model, found in zip(models, losses, strict=True):
            model.zero_grad()
            with te.autocast(recipe=made_by):
                found.append((model[1](model[0](x)) - 1).square().mean())
            found[-1].backward()
        for index, (part, whole) in enumerate(zip(masters, wholes, strict=True)):
            start, grads = starts[index], [own[index].grad for own in weights]
            part.sub_(grads[0].view(-1)[start : start + part.numel()])
            whole.sub_(grads[1].view(whole.shape))
            weights[1][index].data.quantize_(whole)
        quantize_master_weights(weights[0], masters, starts, dist.group.WORLD)
        flat.gather()
        post_all_gather_processing(weights[0])
    assert losses[0][0] > losses[0][2]
    for got, want in zip(*losses, strict=True):
        assert_bitwise(got.detach(), want.detach(), "loss")
    for index, whole in enumerate(wholes):
        assert weights[0][index].storage.buffers.keys() == weights[1][index].storage.buffers.keys()
        assert_same(weights[0][index], whole, f"weight {index}")


@pytest.mark.parametrize("case", ["current", "block", "mxfp8", "nvfp4", "nvfp4_plain", "hybrid"])
def test_training_goes_on_in_one_buffer_of_all_weights(case: str, ranks) -> None:
    ranks(2).run(trained, case)


def count_collectives(rank: int, world: int, name: str, num_weights: int) -> list[str]:
    weights = [blank(FORMATS[name], (96, 160)) for _ in range(num_weights)]
    ranges = [(0, 5000), (5000, 96 * 160 - 5000)]
    masters = [random_matrix(96, 160, i).view(-1)[ranges[rank][0] :][: ranges[rank][1]] for i in range(num_weights)]
    quantize_master_weights(weights, masters, [ranges[rank][0]] * num_weights, None)
    with Traffic() as traffic:
        quantize_master_weights(weights, masters, [ranges[rank][0]] * num_weights, None)
    return [sent.kind for sent in traffic.sent]


@pytest.mark.parametrize(("name", "count"), [("float8_tensorwise", 3), ("mxfp8_1d", 3), ("high_precision", 1)])
def test_scales_of_all_weights_go_together(name: str, count: int) -> None:
    for num_weights in (1, 5):
        assert pool(2).run(count_collectives, name, num_weights) == [["all_reduce"] * count] * 2


def quantize_over_a_mesh_dimension(rank: int, world: int, name: str) -> None:
    """Weights differ between groups, of which each agrees on its own."""
    grid = mesh((2, 2), ("model", "dp"))
    index, position = rank // 2, rank % 2
    whole, weight = random_matrix(96, 160, index), blank(FORMATS[name], (96, 160))
    cuts = (0, 4002, whole.numel())
    master = whole.view(-1)[cuts[position] : cuts[position + 1]]
    quantize_master_weights([weight], [master], [cuts[position]], grid.get_group("dp"))
    for source in range(2):
        for plane, (first, size) in zip(
            raw_data(weight), raw_range(weight, cuts[source], cuts[source + 1] - cuts[source]), strict=True
        ):
            dist.broadcast(plane[first : first + size], index * 2 + source, group=grid.get_group("dp"))
    post_all_gather_processing([weight])
    assert_same(weight, whole, name)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "nvfp4_1d"])
def test_a_group_agrees_on_its_own_scales(name: str) -> None:
    pool(4).run(quantize_over_a_mesh_dimension, name)


def check_refused_alike(messages: list[str], match: str) -> None:
    """Every rank raised with the same words."""
    assert len(set(messages)) == 1
    assert re.search(match, messages[0]), messages[0]


def refused(rank: int, world: int, what: str) -> str:
    name = {"byte": "nvfp4_2d", "transform": "nvfp4_1d_hadamard"}.get(what, "float8_block_2d")
    shape = (32, 48) if what == "other weights" and rank == 2 else (48, 32)
    weight = blank(FORMATS[name], shape)
    cuts = {"byte": (0, 33, 66, 1536), "transform": (0, 512, 528, 1536)}.get(what, (0, 100, 900, 1536))
    start, length = cuts[rank], cuts[rank + 1] - cuts[rank]
    masters: list[Tensor | None] = [torch.zeros(length)]
    weights: list[Tensor] = [weight]
    starts: list[int | None] = [start]
    if what == "gap" and rank == 1:
        masters = [torch.zeros(length - 1)]
    if what == "plain" and rank == 1:
        weights = [torch.zeros(shape)]
    if what == "master" and rank == 1:
        masters = [torch.zeros(length, dtype=torch.int32)]
    if what == "offset" and rank == 1:
        starts = [None]
    if what == "lists" and rank == 1:
        starts = []
    shards = [torch.zeros(length - (rank == 1), dtype=torch.uint8)] if what == "shards" else None
    if what == "a part":
        layer = nn.Module()
        layer.weight = nn.Parameter(QuantizedParameter(weight.storage))
        fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)))
        weights = [layer.weight]
    before = {key: buffer.clone() for key, buffer in weight.storage.buffers.items()}
    with pytest.raises(ValueError) as error:
        quantize_master_weights(weights, masters, starts, None, shards)
    for key, buffer in weight.storage.buffers.items():
        assert_bitwise(buffer, before[key], "untouched")
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("byte", "every 2 values of a row"),
        ("transform", "multiples of 16"),
        ("gap", "wanted every value on one rank"),
        ("plain", "wanted a quantized tensor"),
        ("master", "torch.int32"),
        ("offset", "without start_offset"),
        ("lists", "one for each weight in all of them"),
        ("shards", "799 elements|of .800. elements"),
        ("other weights", r"ranks \[2\] pass other weights"),
        ("a part", "a part of a weight"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(what: str, match: str) -> None:
    check_refused_alike(pool(3).run(refused, what), match)


def refused_later(rank: int, world: int, what: str) -> str:
    """Rank 1 passes something else than in the call before."""
    weights, whole = [blank(FORMATS["float8_tensorwise"], (64, 32)) for _ in range(2)], random_matrix(64, 32, 0)
    start, length = [(0, 600), (600, 1448)][rank]
    good = whole.view(-1)[start : start + length]
    quantize_master_weights(weights, [good] * 2, [start] * 2, None)
    before = {key: buffer.clone() for key, buffer in weights[1].storage.buffers.items()}
    bad = {
        "ranges": ([good, good[:-1]], weights),
        "dtype": ([good, good.to(torch.int32)], weights),
        "strides": ([good, good.repeat(2)[::2]], weights),
        "plain": ([good, good], [weights[0], torch.zeros(64, 32)]),
        "fewer": ([good], weights[:1]),
        "none": ([], []),
        "not by hand": ([good, good], weights),
    }
    masters, given = bad[what] if rank == 1 else ([good, good], weights)
    by_hand = what != "not by hand" or rank != 1
    with pytest.raises(ValueError) as error:
        quantize_master_weights(given, masters, [start] * len(masters), None, manual_post_all_gather_processing=by_hand)
    for key, buffer in weights[1].storage.buffers.items():
        assert_bitwise(buffer, before[key], "untouched")
    quantize_master_weights(weights, [good] * 2, [start] * 2, None)
    gather_raw(weights[1], [(0, 600), (600, 1448)])
    post_all_gather_processing(weights)
    assert_same(weights[1], whole, "afterwards")
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("ranges", "as in the first call"),
        ("dtype", "torch.int32"),
        ("strides", "contiguous"),
        ("plain", "wanted a quantized tensor"),
        ("fewer", r"ranks \[1\] pass other weights"),
        ("none", r"ranks \[1\] pass other weights"),
        ("not by hand", "got manual_post_all_gather_processing=False"),
    ],
)
def test_later_calls_are_refused_on_every_rank(what: str, match: str) -> None:
    check_refused_alike(pool(2).run(refused_later, what), match)


def other_list(rank: int, world: int) -> None:
    """One rank knows the list of weights, another has a new one."""
    whole = random_matrix(64, 32, 0)
    weight = blank(FORMATS["float8_tensorwise"], (64, 32))
    master, start = whole.view(-1)[rank * 1024 :][:1024], rank * 1024
    quantize_master_weights([weight], [master], [start], None)
    if rank == 1:
        weight = blank(FORMATS["float8_tensorwise"], (64, 32))
    quantize_master_weights([weight], [master], [start], None)
    gather_raw(weight, [(0, 1024), (1024, 1024)])
    post_all_gather_processing([weight])
    assert_same(weight, whole, "new on one rank")


def freed(rank: int, world: int, ranks: tuple[int, ...]) -> str:
    """Some ranks evaluated, and have freed what that reads not."""
    weight, whole = blank(FORMATS["mxfp8_1d"], (64, 96)), random_matrix(64, 96, 0)
    master = whole.view(-1).chunk(world)[rank]
    quantize_master_weights([weight], [master], [rank * master.numel()], None)
    gather_raw(weight, [(0, 3072), (3072, 3072)])
    post_all_gather_processing([weight])
    if rank in ranks:
        weight.update_usage(columnwise_usage=False)
    with pytest.raises(ValueError) as error:
        quantize_master_weights([weight], [master], [rank * master.numel()], None)
    return str(error.value)


@pytest.mark.parametrize("on", [(0,), (0, 1)])
def test_a_weight_that_lacks_a_direction_is_refused_on_every_rank(on: tuple[int, ...]) -> None:
    check_refused_alike(pool(2).run(freed, on), "update_usage freed")


def by_types(rank: int, world: int) -> None:
    """Masters of two types in one place of memory, one after the other."""
    weight, memory = blank(FORMATS["float8_block_2d"], (64, 96)), torch.zeros(3072)
    for dtype in (torch.float32, torch.bfloat16):
        whole = random_matrix(64, 96, 1).to(dtype)
        master = memory.view(dtype)[:3072]
        master.copy_(whole.view(-1).chunk(world)[rank])
        quantize_master_weights([weight], [master], [rank * 3072], None)
        gather_raw(weight, [(0, 3072), (3072, 3072)])
        post_all_gather_processing([weight])
        assert_same(weight, whole, str(dtype))


def test_memory_of_masters_may_hold_another_type() -> None:
    pool(2).run(by_types)


def test_weights_may_be_new_on_one_rank() -> None:
    pool(2).run(other_list)


def read_too_early(rank: int, world: int, name: str) -> None:
    weight, whole = blank(FORMATS[name], (64, 96)), random_matrix(64, 96, 0)
    master = whole.view(-1).chunk(world)[rank]
    quantize_master_weights([weight], [master], [rank * master.numel()], None)
    with pytest.raises(RuntimeError, match="columnwise"):
        weight.dequantize(direction=Direction.COLUMNWISE)
    weight.data.quantize_(random_matrix(64, 96, 1))
    with pytest.raises(RuntimeError, match="call quantize_master_weights again"):
        post_all_gather_processing([weight])
    quantize_master_weights([weight], [master], [rank * master.numel()], None)
    gather_raw(weight, [(0, 3072), (3072, 3072)])
    post_all_gather_processing([weight])
    assert_same(weight, whole, "gathered")
    loaded = random_matrix(64, 96, 2)
    weight.data.quantize_(loaded)
    post_all_gather_processing([weight])
    assert_same(weight, loaded, "loaded")
    for plane in raw_data(weight):
        dist.broadcast(plane, 0)
    post_all_gather_processing([weight])
    assert_same(weight, loaded, "sent")


@pytest.mark.parametrize("name", ["float8_block_1d", "nvfp4_1d"])
def test_what_is_not_gathered_yet_cannot_be_read(name: str) -> None:
    pool(2).run(read_too_early, name)


def test_memory_that_does_not_fit_is_refused() -> None:
    weight = quantize(random_matrix(32, 32, 0), FORMATS["mxfp8_1d"])
    with pytest.raises(ValueError, match="2 planes"):
        replace_raw_data(weight, torch.empty(1024, dtype=torch.uint8))
    with pytest.raises(ValueError, match="wanted 1024 contiguous"):
        replace_raw_data(weight, [torch.empty(1024, dtype=torch.uint8), torch.empty(1023, dtype=torch.uint8)])
    half = quantize(random_matrix(32, 32, 0), FORMATS["high_precision"])
    with pytest.raises(ValueError, match="multiple of 2"):
        replace_raw_data(half, torch.empty(2049, dtype=torch.uint8)[1:])
    with pytest.raises(ValueError, match="of a weight of 1024"):
        raw_range(weight, 1000, 25)
    with pytest.raises(ValueError, match="inside a byte"):
        raw_range(quantize(random_matrix(32, 32, 0), FORMATS["nvfp4_2d"]), 1, 31)
