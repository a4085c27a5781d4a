"""A layer that shows what FSDP2 hands to a module: the unsharded weight of each pass, as bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist.catalog import FORMATS
from te_dist.formats import Direction, Format, Region, geometry
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise

# One of every kind: for what tests/distributed/matrix runs with all of them, seen from another side.
SOME = ["float8_tensorwise", "float8_block_1d", "mxfp8_2d", "hybrid_mxfp8_nvfp4"]


def random_matrix(rows: int, cols: int, seed: int) -> Tensor:
    """Values of very different size between rows and columns, so that every scale tile has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float())
    return torch.randn(rows, cols, generator=generator) * spread


def wires(tensor: QuantizedTensor | QuantizedStorage) -> dict[str, Tensor]:
    """Copies of all unpadded fields by name."""
    storage = tensor if isinstance(tensor, QuantizedStorage) else tensor.storage
    return {f.name: geometry.compact(f, storage.buffers[f.name], storage.region).clone() for f in storage.fields}


def assert_padding_is_zero(storage: QuantizedStorage) -> None:
    for field in storage.fields:
        bare = storage.buffers[field.name].clone()
        geometry.compact(field, bare, storage.region).zero_()
        assert not bare.view(torch.uint8).any(), f"{field.name}: padding is not zero"


class _Product(torch.autograd.Function):
    """y = x W^T from the rowwise direction, dx = dy W from the columnwise one, dW = dy^T x in high precision."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        layer.seen_in_forward = wires(weight)
        if weight.storage.device.type == "cpu":
            assert_padding_is_zero(weight.storage)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.storage.operand(Direction.ROWWISE, torch.float32).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.layer.seen_in_backward = wires(weight)
        direction = Direction.COLUMNWISE if Direction.COLUMNWISE in weight.format else Direction.ROWWISE
        values = weight.storage.operand(direction, torch.float32)
        return dy @ values, (dy.t() @ x).to(weight.dtype), None


class Layer(nn.Module):
    """One quantized weight of `rows` x `cols`."""

    def __init__(self, format: Format, master: Tensor, device: str = "cpu") -> None:
        super().__init__()
        storage = storages.quantize(master, format)
        storage.initial = master.clone()
        self.weight = nn.Parameter(QuantizedParameter(storage))
        self.seen_in_forward: dict[str, Tensor] = {}
        self.seen_in_backward: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return _Product.apply(x, weight, self)


def fits(format: Format, rows: int, world: int) -> bool:
    """Whether `rows` over `world` ranks can be cut at all."""
    parts = Region.whole(rows, 1).chunk(world)
    return all(p.rows.start % format.alignment(0) == 0 for p in parts)


def assert_seen(layer: Layer, master: Tensor, *, backward: bool) -> None:
    """The unsharded weight is bit for bit the whole master, quantized."""
    format = local_tensor(layer.weight).format
    want = wires(storages.quantize(master, format))
    seen = layer.seen_in_backward if backward else layer.seen_in_forward
    needed = Direction.COLUMNWISE if backward and Direction.COLUMNWISE in format else Direction.ROWWISE
    readable = [needed, Direction.ROWWISE] if format.columnwise_is_derivable else [needed]
    present = [d for d in readable if {f.name for f in format[d].fields} <= seen.keys()]
    assert present, f"the {needed.value} direction can be read from none of {sorted(seen)}"
    for name, wire in seen.items():
        assert_bitwise(wire, want[name], f"{name} in {'backward' if backward else 'forward'}")


__all__ = ["FORMATS", "Layer", "assert_seen", "fits", "random_matrix", "wires"]


def assert_directions(layer: nn.Module, *, recompute: bool) -> None:
    """Forward holds the rowwise fields alone; backward the columnwise ones, and rowwise to recompute from.

    Of a derivable format there are no others than rowwise fields.
    """
    format = local_tensor(layer.weight).format
    row = {f.name for f in format.rowwise.fields}
    col = {f.name for f in format.canonical.columnwise.fields} if format.canonical.columnwise else row
    assert layer.seen_in_forward.keys() == row
    assert layer.seen_in_backward.keys() == (row | col if recompute else col)
