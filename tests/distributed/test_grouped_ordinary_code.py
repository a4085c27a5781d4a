"""Code that knows nothing of groups: state dictionaries, whole tensors, `distribute_tensor`, norms of gradients."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from te_dist import checkpoints, fsdp2, grouped, quantized_model_init
from te_dist.fsdp2 import GroupedParameter
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, random_matrix
from tests.distributed.test_grouped_fsdp2 import (
    COLS,
    MEMBERS,
    TOGETHER,
    Experts,
    assert_seen,
    every_cut,
    every_format,
    placed,
    random_group,
    wires,
)


def sharded(name: str, world: int, cut: str = "members", seed: int = 0) -> Experts:
    layer = Experts(FORMATS[name], random_group(seed))
    local_tensor(layer.weight).storage.initial = None
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)), shard_placement_fn=placed(cut))
    return layer


def assert_whole(weight: torch.Tensor, name: str, seed: int = 0) -> None:
    assert isinstance(weight, grouped.GroupedTensor)
    assert weight.shape == random_group(seed).shape
    want = wires(grouped.quantize(random_group(seed), FORMATS[name]).storage)
    got = wires(weight.storage)
    for field in FORMATS[name].canonical.fields:
        assert_bitwise(got[field.name], want[field.name], field.name)


def gather_whole(rank: int, world: int, name: str) -> None:
    layer = sharded(name, world)
    assert_whole(layer.weight.full_tensor(), name)
    state = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert state.keys() == ({"weight"} if rank == 0 else set())
    state = {key: 2 * value.dequantize() for key, value in state.items()}
    set_model_state_dict(layer, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
    assert_seen(layer, 2 * grouped.quantize(random_group(0), FORMATS[name]).dequantize())


@every_format
def test_the_whole_of_uneven_shards_is_gathered(name: str) -> None:
    pool(4).run(gather_whole, name)  # of six members two, two, two and none


def gather_experts(rank: int, world: int, num_experts: int, ep: int) -> None:
    both = mesh((world // ep, ep), ("edp", "ep"))
    whole, cut = (mixture(num_experts) for _ in range(2))
    parallelize_module(cut, both["ep"], ExpertParallel())
    fsdp2.fully_shard(cut.experts, mesh=both["edp"])
    for model in (whole, cut):
        fsdp2.materialize(model, device="cpu", seed=0)
    want, got = (wires(weight.storage) for weight in (whole.experts.fc1.weight, cut.experts.fc1.weight.full_tensor()))
    for field, wanted in want.items():
        assert_bitwise(got[field], wanted, field)
    values = checkpoints.high_precision_state_dict(cut)
    assert bool(values) is (rank == 0)
    if values:
        assert_bitwise(values["experts.fc1.weight"], whole.experts.fc1.weight.dequantize(), "values")


def mixture(num_experts: int) -> MoE:
    with quantized_model_init(recipe=Float8BlockScaling()), torch.device("meta"):
        return MoE(64, 32, Routing(num_experts=num_experts, top_k=1))


@pytest.mark.parametrize(
    ("world", "num_experts", "ep"),
    [(2, 4, 2), (2, 2, 2), (4, 4, 2), (4, 2, 2)],
    ids=["of one rank each", "one on each rank", "on two meshes", "on two meshes, ranks without any"],
)
def test_the_whole_of_experts_over_ranks_is_gathered(world: int, num_experts: int, ep: int) -> None:
    pool(world).run(gather_experts, num_experts, ep)


def gather_rows_of_experts(rank: int, world: int, recipe: Recipe) -> None:
    """Experts over `ep`, rows of each over `edp`: the whole leaves and comes back by its bytes."""
    both = mesh((2, world // 2), ("edp", "ep"))
    whole, cut, other = (one_of(seed, recipe) for seed in (0, 0, 1))
    for model in (cut, other):
        parallelize_module(model, both["ep"], ExpertParallel())
        fsdp2.fully_shard(model.experts, mesh=both["edp"], shard_placement_fn=lambda _: Shard(1))
    assert cut.experts.fc1.weight.placements == (Shard(1), Shard(0))
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(cut.experts, options=options)
    set_model_state_dict(other.experts, dict(state), options=options)
    for name, want in whole.experts.named_parameters():
        wanted, mine = wires(want.storage), local_tensor(other.experts.get_parameter(name))
        for found in (cut.experts.get_parameter(name).full_tensor(), state[name]):
            assert isinstance(found, grouped.GroupedTensor)
            assert found.storage.cut is None
            for field, wire in wires(found.storage).items():
                assert_bitwise(wire, wanted[field], f"{field} of {name}")
        for field, wire in wires(mine.storage).items():
            assert_bitwise(wire, wires(local_tensor(cut.experts.get_parameter(name)).storage)[field], f"loaded {field}")


def one_of(seed: int, recipe: Recipe) -> MoE:
    torch.manual_seed(seed)
    with quantized_model_init(recipe=recipe):
        return MoE(64, 64, Routing(num_experts=8, top_k=2), params_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "recipe",
    [Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_the_whole_of_experts_that_are_cut_along_rows_is_gathered(ranks, recipe: Recipe) -> None:
    ranks(4).run(gather_rows_of_experts, recipe)


def gather_twice(rank: int, world: int, placements: tuple[Shard, Shard]) -> None:
    whole = grouped.quantize(random_group(0), FORMATS["mxfp8_1d"])
    over = mesh((2, world // 2), ("edp", "ep"))
    assert_whole(distribute_tensor(whole, over, placements, src_data_rank=None).full_tensor(), "mxfp8_1d")


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))], ids=str)
def test_the_whole_of_groups_that_are_cut_twice_is_gathered_in_bytes(ranks, placements: tuple[Shard, Shard]) -> None:
    ranks(4).run(gather_twice, placements)


def gather_uneven(rank: int, world: int) -> str:
    own = grouped.quantize(random_group(0)[: 1 + rank], FORMATS["mxfp8_1d"])
    shape = torch.Size((4, *own.shape[1:]))
    whole = DTensor.from_local(own, mesh((world,), ("dp",)), [Shard(0)], shape=shape, stride=own.stride())
    with pytest.raises(ValueError, match="the ranks have") as error:
        whole.full_tensor()
    return str(error.value)


def test_members_that_are_cut_otherwise_are_refused_on_every_rank() -> None:
    first, second = pool(2).run(gather_uneven)
    assert first == second


def log_rows(rank: int, world: int) -> None:
    weight = sharded("mxfp8_1d", world, "rows").weight
    assert weight.std().item() == weight.full_tensor().dequantize().std().item()


def test_rows_that_are_cut_are_logged(ranks) -> None:
    ranks(2).run(log_rows)


def save_and_load(rank: int, world: int, name: str, cut: str) -> None:
    first, second = (sharded(name, world, cut, seed) for seed in (0, 1))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    second(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
    assert_seen(second, random_group(0))


@every_cut
@pytest.mark.parametrize("name", TOGETHER)
def test_state_of_shards_is_pickled(name: str, cut: str) -> None:
    pool(4).run(save_and_load, name, cut)


def distribute(rank: int, world: int, name: str) -> None:
    """The part that `distribute_tensor` leaves on a rank is that of `torch.chunk`; norms are those of the values."""
    whole = GroupedParameter(grouped.quantize(random_group(0), FORMATS[name]).storage)
    weight = nn.Parameter(distribute_tensor(whole, mesh((world,), ("ep",)), [Shard(0)], src_data_rank=None))
    assert isinstance(weight, DTensor)
    mine = range(MEMBERS)[grouped.first_member(weight) :][: local_tensor(weight).shape[0]]
    want = wires(whole.storage)
    for field, wire in wires(local_tensor(weight).storage).items():
        assert_bitwise(wire, want[field][list(mine)], field)
    assert_whole(weight.full_tensor(), name)
    assert_bitwise(local_tensor(weight).norm(), whole.dequantize()[list(mine)].norm(), "norm")


@pytest.mark.parametrize("name", TOGETHER)
def test_distributed_members(name: str) -> None:
    pool(2).run(distribute, name)


def evaluate_first(rank: int, world: int, name: str) -> None:
    layer = sharded(name, world)
    for _ in range(2):
        with torch.inference_mode():
            layer(random_matrix(4, COLS, 1))
        layer(random_matrix(4, COLS, 1).requires_grad_()).sum().backward()
        assert_seen(layer, random_group(0))


@pytest.mark.parametrize("name", TOGETHER)
def test_the_first_pass_may_be_one_in_inference_mode(name: str) -> None:
    pool(4).run(evaluate_first, name)  # members are uneven over four
