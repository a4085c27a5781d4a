"""Groups of quantized matrices under FSDP2, cut by members or by rows: modules see the quantized whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from te_dist import fsdp2, grouped, optim
from te_dist.formats import Direction, Format, geometry
from te_dist.tensor.placement import local_tensor
from te_dist.testing import StorageTracker, assert_bitwise, mesh, pool
from tests.distributed.probe import FORMATS, assert_directions, assert_padding_is_zero, random_matrix
from tests.distributed.test_fsdp2 import assert_nothing_unsharded

MEMBERS, ROWS, COLS = 6, 192, 160  # over four ranks two, two, two and none; ragged tiles of 128
every_format = pytest.mark.parametrize("name", FORMATS)
every_cut = pytest.mark.parametrize("cut", ["members", "rows"])
TOGETHER = ["float8_tensorwise_tn", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "hybrid_mxfp8_nvfp4"]


def random_group(seed: int, members: int = MEMBERS) -> Tensor:
    return random_matrix(members * ROWS, COLS, seed).view(members, ROWS, COLS)


def wires(storage: grouped.GroupedStorage) -> dict[str, Tensor]:
    """Copies of all unpadded fields, of all members, by name."""
    return {
        f.name: torch.stack([geometry.compact(f, m.buffers[f.name], m.region) for m in storage.members])
        for f in storage.fields
    }


class _Products(torch.autograd.Function):
    """y_e = x W_e^T from the rowwise direction, dx = sum of dy_e W_e from the columnwise one, dW_e = dy_e^T x."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        layer.seen_in_forward = wires(weight.storage)
        for member in weight.storage.members:
            assert_padding_is_zero(member)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return torch.einsum("tk,enk->etn", x, weight.storage.operand(Direction.ROWWISE, torch.float32))

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.layer.seen_in_backward = wires(weight.storage)
        direction = Direction.COLUMNWISE if Direction.COLUMNWISE in weight.format else Direction.ROWWISE
        values = weight.storage.operand(direction, torch.float32)
        return torch.einsum("etn,enk->tk", dy, values), torch.einsum("etn,tk->enk", dy, x).to(weight.dtype), None


class Experts(nn.Module):
    """A quantized weight of each expert, in one parameter."""

    def __init__(self, format: Format, values: Tensor) -> None:
        super().__init__()
        storage = grouped.quantize(values, format).storage
        storage.initial = values.clone()
        self.weight = nn.Parameter(fsdp2.GroupedParameter(storage))
        self.seen_in_forward: dict[str, Tensor] = {}
        self.seen_in_backward: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return _Products.apply(x, self.weight, self)


def assert_seen(layer: Experts, master: Tensor) -> None:
    """The unsharded weights of both passes are bit for bit those of the whole masters, quantized."""
    want = wires(grouped.quantize(master, local_tensor(layer.weight).format).storage)
    for when in ("forward", "backward"):
        seen = getattr(layer, f"seen_in_{when}")
        assert seen
        for name, wire in seen.items():
            assert_bitwise(wire, want[name], f"{name} in {when}")


def placed(cut: str):
    return (lambda param: Shard(1)) if cut == "rows" else None


def train_and_compare(rank: int, world: int, name: str, cut: str, how: str) -> None:
    """Two optimizer steps; every unsharded weight against the gathered masters, quantized whole."""
    masters = [random_group(seed) for seed in (0, 1)]
    layers = [Experts(FORMATS[name], master) for master in masters]
    over = mesh((world,), ("dp",))
    for layer in layers:
        if how == "torch":
            torch_fully_shard(layer, mesh=over)
        else:
            how_often = dict(reshard_after_forward=how != "kept", recompute=how == "recompute")
            fsdp2.fully_shard(layer, mesh=over, shard_placement_fn=placed(cut), **how_often)
    optimizer = optim.FusedAdam([layer.weight for layer in layers], lr=0.05)
    for step in range(2):
        x = random_matrix(8, COLS, 100 * step + rank).requires_grad_()
        with StorageTracker() as tracker:
            y = [layer(x) for layer in layers]
            sum((each**2).mean() for each in y).backward()
        for layer, master in zip(layers, masters, strict=True):
            assert_seen(layer, master)
            if how in ("ours", "recompute"):
                assert_directions(layer, recompute=how == "recompute")
        shards = [t for layer in layers for t in (layer.weight.grad._local_tensor, layer.weight._local_tensor)]
        seen = [w for layer in layers for d in (layer.seen_in_forward, layer.seen_in_backward) for w in d.values()]
        if how != "recompute":
            kept = [x.grad, *y, *shards, *seen]
            del y
            assert_nothing_unsharded(tracker, kept, MEMBERS * ROWS * COLS // 4)
        optimizer.step()
        optimizer.zero_grad()
        before, masters = (
            masters,
            [optimizer.state[layer.weight]["master_param"].full_tensor().clone() for layer in layers],
        )
        assert all((new != old).flatten(1).any(1).all() for new, old in zip(masters, before, strict=True))
        assert not any(layer.weight._local_tensor.storage.unsettled is not None for layer in layers)


@pytest.mark.every_run(name=TOGETHER)
@every_format
def test_unsharded_weights_are_the_quantized_whole(name: str) -> None:
    pool(2).run(train_and_compare, name, "rows", "ours")


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["float8_tensorwise_tn", "float8_block_2d", "hybrid_mxfp8_nvfp4"])
@pytest.mark.parametrize(("world", "cut"), [(1, "rows"), (2, "members"), (4, "members"), (4, "rows")])
def test_any_number_of_ranks_and_either_cut(world: int, cut: str, name: str) -> None:
    pool(world).run(train_and_compare, name, cut, "ours")


@pytest.mark.each_value
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(
    ("how", "cut"), [("torch", "members"), ("kept", "members"), ("kept", "rows"), ("recompute", "members")]
)
def test_every_way_to_wrap(how: str, cut: str, name: str) -> None:
    pool(2).run(train_and_compare, name, cut, how)
