"""Weights of experts on meshes: initialization, agreement on scales, expert parallelism, replicas, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import DTensor, Shard

from te_dist import fsdp2, grouped, optim
from te_dist.formats import Format, Group, Region
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.tensor import empty
from te_dist.tensor.placement import local_tensor
from te_dist.tensor.traffic import Traffic
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, Layer, random_matrix
from tests.distributed.probe import assert_seen as assert_matrix
from tests.distributed.test_grouped_fsdp2 import (
    COLS,
    MEMBERS,
    ROWS,
    TOGETHER,
    Experts,
    _Products,
    assert_seen,
    every_cut,
    every_format,
    placed,
    random_group,
    wires,
)


class Born(nn.Module):
    """Weights on meta, which know how to fill whole ones."""

    def __init__(self, format: Format, keep_initial: bool = False) -> None:
        super().__init__()
        weight = GroupedParameter(grouped.empty(Group.whole(MEMBERS, ROWS, COLS), format, device="meta").storage)
        weight.keep_initial = keep_initial
        self.weight = nn.Parameter(weight)

    def init_parameter(self, name: str, tensor: Tensor) -> None:
        assert tensor.shape == (MEMBERS, ROWS, COLS)
        nn.init.normal_(tensor, std=0.02)


def over_experts(module: nn.Module, ep: torch.distributed.DeviceMesh) -> None:
    """Keeps the members of this rank."""
    whole = module.weight.data
    rank, mine = ep.get_local_rank(), MEMBERS // ep.size()
    local = whole[rank * mine : (rank + 1) * mine]
    module.weight = nn.Parameter(
        DTensor.from_local(local, ep, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    )


def shard(module: nn.Module, shape: tuple[int, ...], cut: str) -> None:
    """Over ("dp",), or ("dp", "ep"): experts first."""
    over = mesh(shape, ("dp", "ep")[: len(shape)])
    if len(shape) > 1:
        over_experts(module, over["ep"])
    fsdp2.fully_shard(module, mesh=over["dp"], reshard_after_forward=True, shard_placement_fn=placed(cut))


def unsharded(module: nn.Module) -> dict[int, dict[str, Tensor]]:
    """By number of each member this rank has when gathered, its unpadded fields."""
    module.unshard()
    local = local_tensor(module.weight)
    first = grouped.first_member(module.weight)
    found = wires(local.storage)
    module.reshard()
    return {first + i: {name: wire[i] for name, wire in found.items()} for i in range(local.shape[0])}


def materialize(rank: int, world: int, name: str, shape: tuple[int, ...], cut: str) -> dict[int, dict[str, Tensor]]:
    module = Born(FORMATS[name], keep_initial=True)
    shard(module, shape, cut)
    fsdp2.materialize(module, device="cpu", seed=7)
    local = local_tensor(module.weight)
    assert local.storage.unsettled is None
    assert local.get_high_precision_init_val().shape == local.shape
    return unsharded(module)


@pytest.mark.parametrize(
    ("name", "shape", "cut"),
    [*product(FORMATS, ((2,),), ("rows",)), *product(TOGETHER, ((4,), (2, 2)), ("members",))],
)
def test_initial_weights_do_not_depend_on_the_mesh(name: str, shape: tuple[int, ...], cut: str) -> None:
    alone = Born(FORMATS[name])
    fsdp2.materialize(alone, device="cpu", seed=7)
    want = wires(alone.weight.storage)
    seen = set()
    for found in pool(torch.Size(shape).numel()).run(materialize, name, shape, cut):
        seen |= set(found)
        for member, fields in found.items():
            for field, wire in fields.items():
                assert_bitwise(wire, want[field][member], f"{field} of member {member}")
    assert seen == set(range(MEMBERS))
    codes = next(iter(want.values()))
    assert not any(torch.equal(codes[0], other) for other in codes[1:])


class LocalExperts(Experts):
    """Experts of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return _Products.apply(x, weight.to_local() if isinstance(weight, DTensor) else weight, self)


def train_experts(rank: int, world: int, name: str, how: str, cut: str) -> None:
    """Two ranks hold half of the experts each, twice; every gathered weight is that of the masters, quantized."""
    over = mesh((2, 2), ("dp", "ep"))
    ep, half = over["ep"].get_local_rank(), MEMBERS // 2
    master = random_group(3)
    if how == "dtensor":
        layer = LocalExperts(FORMATS[name], master)
        over_experts(layer, over["ep"])
    else:
        layer = LocalExperts(FORMATS[name], master[ep * half : (ep + 1) * half])
    fsdp2.fully_shard(layer, mesh=over["dp"], reshard_after_forward=True, shard_placement_fn=placed(cut))
    optimizer = optim.FusedAdam(layer.parameters(), lr=0.05)
    own = master[ep * half : (ep + 1) * half]
    for step in range(2):
        layer(random_matrix(8, COLS, 10 * step + rank).requires_grad_()).square().mean().backward()
        assert_seen(layer, own)
        optimizer.step()
        optimizer.zero_grad()
        whole = optimizer.state[layer.weight]["master_param"].full_tensor().clone()
        assert whole.shape[0] == (MEMBERS if how == "dtensor" else half)
        before, own = own, whole[ep * half : (ep + 1) * half] if how == "dtensor" else whole
        assert (own != before).flatten(1).any(1).all()
    layer(random_matrix(8, COLS, rank).requires_grad_()).sum().backward()
    assert_seen(layer, own)


@pytest.mark.each_value
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(
    ("how", "cut"), [("dtensor", "members"), ("dtensor", "rows"), ("local", "members"), ("local", "rows")]
)
def test_experts_on_a_mesh_dimension_of_their_own(how: str, cut: str, name: str) -> None:
    pool(4).run(train_experts, name, how, cut)


class Block(nn.Module):
    """A weight of its own beside experts."""

    def __init__(self, format: Format, master: Tensor, experts: Tensor) -> None:
        super().__init__()
        self.proj = Layer(format, master)
        self.experts = LocalExperts(format, experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).sum() + self.experts(x).sum()


def wrap_together(rank: int, world: int, name: str, cut: str) -> None:
    """One unit whose experts are sharded over another mesh than the rest."""
    over = mesh((2, 2), ("edp", "ep"))
    half, ep = MEMBERS // 2, over["ep"].get_local_rank()
    master, experts = random_matrix(128, COLS, 1), random_group(3)[ep * half : (ep + 1) * half]
    block = Block(FORMATS[name], master, experts)
    info = fsdp_common.FSDPMeshInfo(mesh=over["edp"], shard_mesh_dim=0)
    of_experts = fsdp_common.ShardPlacementResult(Shard(1 if cut == "rows" else 0), info)
    fsdp2.fully_shard(
        block,
        mesh=mesh((world,), ("dp",)),
        reshard_after_forward=True,
        shard_placement_fn=lambda p: of_experts if isinstance(p, GroupedParameter) else None,
    )
    assert local_tensor(block.experts.weight).numel() == experts.numel() // 2 or cut == "members"
    block(random_matrix(4, COLS, rank).requires_grad_()).backward()
    assert_seen(block.experts, experts)
    assert_matrix(block.proj, master, backward=True)


@every_cut
@pytest.mark.skipif(not hasattr(fsdp_common, "ShardPlacementResult"), reason="one mesh a unit in this torch")
def test_experts_and_the_rest_in_one_unit(cut: str) -> None:
    for name in ("float8_block_2d", "mxfp8_1d"):
        pool(4).run(wrap_together, name, cut)


def replicate(rank: int, world: int, name: str, cut: str) -> None:
    master = random_group(5)
    layer = Experts(FORMATS[name], master)
    fsdp2.fully_shard(layer, mesh=mesh((2, 2), ("replicate", "shard")), shard_placement_fn=placed(cut))
    layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
    assert_seen(layer, master)


@pytest.mark.each_value
@every_cut
@pytest.mark.parametrize("name", TOGETHER)
def test_replicas_of_shards(cut: str, name: str) -> None:
    pool(4).run(replicate, name, cut)


def write_and_compare(rank: int, world: int, name: str, cut: str, settle: bool) -> None:
    """High-precision values written shard by shard end as the quantized whole."""
    layer = Experts(FORMATS[name], random_group(0))
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)), shard_placement_fn=placed(cut))
    whole = random_group(5)
    local = local_tensor(layer.weight)
    local.copy_(whole.chunk(world, 1 if cut == "rows" else 0)[rank])
    assert local.storage.unsettled is None or cut == "rows"
    if settle:
        fsdp2.settle(layer)
        assert local.storage.unsettled is None
    layer(random_matrix(4, COLS, rank).requires_grad_()).sum().backward()
    assert local.storage.unsettled is None
    assert_seen(layer, whole)


@pytest.mark.parametrize(
    ("name", "cut", "settle"),
    [*product(FORMATS, ("rows",), (True,)), *product(TOGETHER, ("rows", "members"), (False,))],
)
def test_values_written_into_shards_agree_on_their_scales(name: str, cut: str, settle: bool) -> None:
    pool(2).run(write_and_compare, name, cut, settle)


def count_bytes(rank: int, world: int, name: str, cut: str) -> tuple[list[int], list[int]]:
    """Bytes each rank sends in forward and in backward: as seen, and as planned."""
    layer = Experts(FORMATS[name], random_group(0))
    over = mesh((world,), ("dp",))
    fsdp2.fully_shard(layer, mesh=over, reshard_after_forward=True, shard_placement_fn=placed(cut))
    with Traffic() as traffic:
        y = layer(random_matrix(4, COLS, 1).requires_grad_()).sum()
        forward = traffic.nbytes("all_gather")
        y.backward()
    plans = local_tensor(layer.weight).gather_plans(world)
    return [forward, traffic.nbytes("all_gather") - forward], [plans[phase].nbytes for phase in fsdp2.Phase]


@every_cut
@every_format
def test_bytes_on_the_wire_are_those_of_one_direction(name: str, cut: str) -> None:
    format, member = FORMATS[name], Region.whole(ROWS, COLS)
    rowwise = format.select(*format.directions[:1])
    largest = max(MEMBERS * format.select(d).compact_bytes(member) for d in format.directions)
    largest = MEMBERS * rowwise.compact_bytes(member) if format.columnwise_is_derivable else largest
    for seen, planned in pool(2).run(count_bytes, name, cut):
        assert seen == planned
        # Scales of tiles that a cut goes through are sent by both ranks; fields of one wire start at 16 bytes.
        assert all(2 * each <= largest * 1.04 for each in seen)  # of two ranks


def refuse(rank: int, world: int, make: Callable[[], nn.Module], how: Callable[[nn.Module, object], object]) -> str:
    module = make()
    with pytest.raises((ValueError, RuntimeError)) as error:
        how(module, mesh((world,), ("dp",)))
    return str(error.value)


def matrix() -> nn.Module:
    module = nn.Module()
    storage = empty(FORMATS["mxfp8_1d"], Region.whole(64, COLS), dtype=torch.bfloat16, device="cpu")
    module.weight = nn.Parameter(QuantizedParameter(storage))
    return module


def experts() -> nn.Module:
    return Experts(FORMATS["mxfp8_1d"], random_group(0))


def odd_rows() -> nn.Module:
    return Experts(FORMATS["float8_tensorwise"], random_matrix(2 * 50, COLS, 0).view(2, 50, COLS))


def packed_rows() -> nn.Module:
    return Experts(FORMATS["nvfp4_1d_hadamard"], random_matrix(2 * 48, COLS, 0).view(2, 48, COLS))


def along(dim: int, module: nn.Module, over: object) -> None:
    fsdp2.fully_shard(module, mesh=over, shard_placement_fn=lambda param: Shard(dim))


def along_rows(module: nn.Module, over: object) -> None:
    along(1, module, over)


def along_columns(module: nn.Module, over: object) -> None:
    along(2, module, over)


def by_torch_along_rows(module: nn.Module, over: object) -> None:
    torch_fully_shard(module, mesh=over, shard_placement_fn=lambda param: Shard(1))
    module.unshard()


@pytest.mark.parametrize(
    ("make", "how", "world", "text"),
    [
        (matrix, along_rows, 2, "weight: shard_placement_fn gave .* wanted Shard.0., or None"),
        (experts, along_columns, 2, "weight: shard_placement_fn gave .* wanted Shard.0. or Shard.1."),
        (odd_rows, along_rows, 4, "50 rows of each member over 4 ranks are not equally many"),
        (packed_rows, along_rows, 2, "48 rows over 2 ranks are cut at row 24, inside a stored byte"),
        (experts, by_torch_along_rows, 2, "te_dist.fsdp2.fully_shard only"),
    ],
)
def test_cuts_that_cannot_be_gathered_are_refused_on_every_rank(
    make: Callable[[], nn.Module], how: Callable[[nn.Module, object], None], world: int, text: str
) -> None:
    first, *others = pool(world).run(refuse, make, how)
    assert re.search(text, first), first
    assert all(other == first for other in others)
