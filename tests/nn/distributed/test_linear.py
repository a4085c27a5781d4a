"""Linear modules whose weights FSDP2 shards, against the same modules whole; scales that ranks agree on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import te_dist as te
from te_dist import fsdp2, recipe
from te_dist.fsdp2.ahead import kernels_of
from te_dist.testing import WorkerPool, assert_bitwise, device, mesh
from tests.nn.recipes import CASES

Ranks = Callable[[int], WorkerPool]
WIDTH, ROWS = 96, 40
SHARDED = [name for name in CASES if name != "high_precision_backward"]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def model(name: str, *, quantized: bool = True) -> nn.Sequential:
    """Three modules of the case's recipe on meta."""
    with te.quantized_model_init(enabled=quantized, recipe=CASES[name].recipe), torch.device("meta"):
        return nn.Sequential(
            te.Linear(WIDTH, WIDTH), te.LayerNormLinear(WIDTH, WIDTH, bias=False), te.LayerNormMLP(WIDTH, 2 * WIDTH)
        )


def step(module: nn.Module, name: str, *, seed: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """One forward and backward pass."""
    with te.autocast(recipe=CASES[name].recipe, amax_reduction_group=group):
        out = module(normal(ROWS, WIDTH, seed=seed))
    out.square().mean().backward()
    return out.detach()


def sharded_equals_whole(rank: int, world: int, name: str, quantized: bool) -> None:
    """Two passes of equal data on all ranks: outputs and averaged gradients are those of one rank, bit for bit."""
    whole, sharded = model(name, quantized=quantized), model(name, quantized=quantized)
    for module in sharded:
        fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))
    fsdp2.fully_shard(sharded, mesh=mesh((world,), ("dp",)))
    for each in (whole, sharded):
        fsdp2.materialize(each, device=device(), seed=0)
    for seed in (1, 2):
        assert_bitwise(step(sharded, name, seed=seed), step(whole, name, seed=seed), "output")
    for (key, got), want in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert_bitwise(got.grad.full_tensor(), want.grad, key)
    for (key, got), want in zip(sharded.named_buffers(), whole.buffers(), strict=True):
        assert_bitwise(got, want, key)


@pytest.mark.every_run(name=("delayed", "current", "block_2d", "mxfp8", "nvfp4", "hybrid"))
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_modules_compute_what_whole_ones_do(ranks: Ranks, name: str) -> None:
    ranks(2).run(sharded_equals_whole, name, True)


@pytest.mark.parametrize("name", ["delayed", "block", "nvfp4"])
def test_plain_sharded_weights_are_quantized_on_the_fly(ranks: Ranks, name: str) -> None:
    ranks(2).run(sharded_equals_whole, name, False)


def one_reduction(rank: int, world: int, reduce_amax: bool) -> tuple[int, list[Tensor]]:
    """(number of reductions of one pass, all scales after it), each rank with data of its own."""
    made_by = recipe.DelayedScaling(amax_history_len=4, reduce_amax=reduce_amax)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=made_by), torch.device(device()):
        module = nn.Sequential(te.Linear(WIDTH, WIDTH), te.LayerNormMLP(WIDTH, 2 * WIDTH))
    calls = []
    original = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda *a, **k: calls.append(a) or original(*a, **k)):
        for _ in range(2):
            calls.clear()
            with te.autocast(recipe=made_by, amax_reduction_group=dist.group.WORLD):
                out = module(normal(ROWS, WIDTH, seed=rank) * (rank + 1))
            out.sum().backward()
    histories = [buffer.cpu() for name, buffer in module.named_buffers() if name.endswith("amax_history")]
    return len(calls), histories


def test_all_amaxes_are_reduced_at_once(ranks: Ranks) -> None:
    (count, first), (_, second) = ranks(2).run(one_reduction, True)
    assert count == 1
    assert len(first) == 3
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b, "histories of both ranks")


def test_without_reduction_each_rank_keeps_its_own(ranks: Ranks) -> None:
    (count, first), (_, second) = ranks(2).run(one_reduction, False)
    assert count == 0
    assert not torch.equal(first[0], second[0])


def scales_of_two_passes(rank: int, world: int, wraps: bool) -> Tensor:
    """Behind steps of two forward passes each, the larger input on the last rank."""
    made_by = recipe.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=made_by):
        module: nn.Module = te.Linear(WIDTH, WIDTH, device=device())
    state = module.gemm.scaling
    module = DistributedDataParallel(module, init_sync=False) if wraps else module
    for _ in range(2):
        with te.autocast(recipe=made_by, amax_reduction_group=dist.group.WORLD):
            first = module(normal(ROWS, WIDTH, seed=0) * (100 if rank == world - 1 else 1))
            second = module(normal(ROWS, WIDTH, seed=1))
        (first.sum() + second.sum()).backward()
    return state.scale.cpu()


def convert_wrapped(rank: int, world: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device()))
    for its, names in ((model, "module.*"), (nn.Sequential(model), "0.module.*")):
        with pytest.raises(ValueError, match="convert the model before wrapping it"):
            te.convert(its, {names: recipe.Float8BlockScaling()})
    te.convert(model, {"module.*": None})  # parameters are the same
    assert type(model.module[0]) is te.Linear
    beside = nn.ModuleDict({"wrapped": model, "other": nn.Linear(WIDTH, WIDTH)})
    te.convert(beside, {"other": recipe.Float8BlockScaling()})
    assert type(beside["other"]) is te.Linear


def test_what_is_wrapped_already_is_not_converted(ranks: Ranks) -> None:
    ranks(2).run(convert_wrapped)


def wrap_what_keeps_values(rank: int, world: int, kept: bool, init_sync: bool) -> None:
    """Told where masters would begin with other values than those before quantization."""
    torch.manual_seed(0)
    made_by = recipe.MXFP8BlockScaling()
    with te.quantized_model_init(recipe=made_by, preserve_high_precision_init_val=kept):
        module = te.Linear(WIDTH, WIDTH, device=device())
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        DistributedDataParallel(module, init_sync=init_sync)
    found = [each for each in messages if "pass init_sync=False" in str(each.message)]
    assert len(found) == (kept and init_sync)


@pytest.mark.parametrize(("kept", "init_sync"), [(True, True), (True, False), (False, True)])
def test_data_parallel_tells_of_values_that_it_overwrites(ranks: Ranks, kept: bool, init_sync: bool) -> None:
    ranks(2).run(wrap_what_keeps_values, kept, init_sync)


def test_data_parallel_copies_do_not_overwrite_what_a_step_has_seen(ranks: Ranks) -> None:
    (expected, _), wrapped = ranks(2).run(scales_of_two_passes, False), ranks(2).run(scales_of_two_passes, True)
    for scales in wrapped:
        assert_bitwise(scales, expected, "scales")


def a_pass_of_one_rank(rank: int, world: int) -> list[Tensor]:
    """Scales behind two steps of two maps, with one more pass of the first that rank 0 does something else with."""
    made_by = recipe.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=made_by), torch.device(device()):
        head, body = te.Linear(WIDTH, 2 * WIDTH), te.LayerNormMLP(WIDTH, 2 * WIDTH)
    x = normal(ROWS, WIDTH, seed=0)
    for trained in (body, nn.Sequential(body, head)):
        with te.autocast(recipe=made_by, amax_reduction_group=dist.group.WORLD):
            if rank == 0:
                head(x / 2)
            out = trained(x)
        out.sum().backward()
    return [buffer.cpu() for each in (head, body) for buffer in each.buffers()]


def test_passes_that_one_rank_has_beside_a_step_are_in_no_reduction(ranks: Ranks) -> None:
    first, second = ranks(2).run(a_pass_of_one_rank)
    assert len(first) == 6
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b, "scales and histories of both ranks")


def warnings_without_a_group(rank: int, world: int, reduce_amax: bool) -> list[str]:
    """Of two backward passes; rehearsals of them on the meta device have none."""
    made_by = recipe.DelayedScaling(amax_history_len=4, reduce_amax=reduce_amax)
    with te.quantized_model_init(recipe=made_by):
        module = te.Linear(WIDTH, WIDTH, device=device())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        assert len(kernels_of(module)) > 0
        warnings.simplefilter("default")
        for _ in range(2):
            with te.autocast(recipe=made_by):
                out = module(normal(ROWS, WIDTH, seed=rank))
            out.sum().backward()
    return [str(each.message) for each in caught if "amax_reduction_group" in str(each.message)]


def test_scales_that_ranks_do_not_share_are_told_of_once(ranks: Ranks) -> None:
    for (message,) in ranks(2).run(warnings_without_a_group, True):
        assert "DelayedScaling without an amax_reduction_group on 2 ranks" in message
    assert ranks(2).run(warnings_without_a_group, False) == [[], []]


def agreed_scales(rank: int, world: int) -> list[Tensor]:
    """Parts of one matrix quantized by quantizers that agree."""
    x = normal(64, 64, seed=0)
    x[40, 5] = 100.0
    part = x.chunk(world)[rank]
    found = []
    for make in (te.Float8CurrentScalingQuantizer, te.NVFP4Quantizer):
        tensor = make(with_amax_reduction=True)(part)
        whole = make()(x)
        assert_bitwise(tensor.dequantize(), whole.dequantize().chunk(world)[rank], "a part of the whole")
        found += [b.cpu() for n, b in tensor.storage.buffers.items() if n.endswith(("amax", "scale_inv"))]
    return found


def test_quantizers_of_a_group_agree_on_the_amax(ranks: Ranks) -> None:
    first, second = ranks(2).run(agreed_scales)
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b, "scales")


class Branches(nn.Module):
    """Maps of several kinds of data, of which a batch may have any, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: te.Linear(WIDTH, WIDTH, bias=False) for name in ("image", "text", "sound")})

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum(self.maps[name](x).sum() for name, x in batch.items())


# By rank: largest magnitudes of inputs, in the order in which a batch has them.
BATCHES = {
    "order": [{"image": 100.0, "text": 0.5, "sound": 3.0}, {"sound": 2.0, "text": 0.25, "image": 50.0}],
    "others": [{"image": 100.0, "sound": 3.0}, {"text": 0.5}],
    "fewer": [{"image": 100.0, "text": 0.5}, {"text": 0.25}],
}


def scales_of_branches(rank: int, world: int, batches: list[dict[str, float]], prepares: bool) -> list[float]:
    made_by = recipe.DelayedScaling(amax_history_len=4)
    model = Branches().to(device())
    if prepares:
        te.prepare(model, made_by)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        batch = {name: torch.full((ROWS, WIDTH), by, device=device()) for name, by in batches[rank].items()}
        with te.autocast(recipe=made_by, amax_reduction_group=dist.group.WORLD):
            loss = model(batch)
        loss.backward()
    maps = model.module.maps.values()
    return [1.0 if each.gemm.scaling is None else float(each.gemm.scaling.scale[0]) for each in maps]


@pytest.mark.parametrize(("case", "prepares"), [("order", False), *((case, True) for case in BATCHES)])
def test_ranks_may_take_other_maps_in_another_order(ranks: Ranks, case: str, prepares: bool) -> None:
    batches = BATCHES[case]
    largest = [max(batch.get(name, 0.0) for batch in batches) for name in ("image", "text", "sound")]
    wanted = [448.0 / amax if amax else 1.0 for amax in largest]
    for scales in ranks(2).run(scales_of_branches, batches, prepares):
        assert scales == pytest.approx(wanted)


def scales_beside_a_copy(rank: int, world: int) -> list[float]:
    """Of a model of which rank 0 has a copy, which it evaluates."""
    made_by = recipe.DelayedScaling(amax_history_len=4)
    model = Branches().to(device())
    te.prepare(model, made_by)
    average = copy.deepcopy(model) if rank == 0 else None
    batch = {"text": torch.full((ROWS, WIDTH), 2.0 + rank, device=device())}
    for _ in range(2):
        with te.autocast(recipe=made_by, amax_reduction_group=dist.group.WORLD):
            model(batch).backward()
            if average is not None:
                average.eval()(batch)
    return [float(each.gemm.scaling.scale[0]) for each in model.maps.values()]


def test_a_copy_of_a_model_on_one_rank_takes_part_in_no_reduction(ranks: Ranks) -> None:
    for scales in ranks(2).run(scales_beside_a_copy):
        assert scales == pytest.approx([1.0, 448.0 / 3.0, 1.0])


def scales_of_layers(rank: int, world: int, how: str) -> list[float]:
    """Of maps that are copies of one another, dropped after `prepare`, or of which parts are prepared again."""
    made_by, layers = recipe.DelayedScaling(amax_history_len=4), [te.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    model = nn.ModuleList([copy.deepcopy(layers[0]) for _ in range(4)] if how == "copies" else layers).to(device())
    te.prepare(model, made_by)
    kept = model[0] if how == "dropped" and rank == 0 else None
    if how == "dropped":
        model[0] = te.Linear(WIDTH, WIDTH, bias=False, device=device())
        te.prepare(model, made_by)
    elif how == "a part again":
        te.prepare(model[2:], made_by)
    for _ in range(2):
        with te.autocast(recipe=made_by, amax_reduction_group=dist.group.WORLD):
            out = model[2 * rank](torch.full((ROWS, WIDTH), 2.0 + rank, device=device()))
        out.sum().backward()
    del kept
    return [float(each.gemm.scaling.scale[0]) for each in model]


@pytest.mark.parametrize("how", ["copies", "dropped", "a part again"])
def test_each_map_of_a_prepared_model_has_a_place(ranks: Ranks, how: str) -> None:
    for scales in ranks(2).run(scales_of_layers, how):
        assert scales == pytest.approx([448.0 / 2.0, 1.0, 448.0 / 3.0, 1.0])
