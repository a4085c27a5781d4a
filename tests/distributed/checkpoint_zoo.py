"""A model with one weight of every format, beside plain parameters and a buffer, on any mesh."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from te_dist import fsdp2
from te_dist.formats import Format, geometry
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, device, full_tensor, mesh
from tests.distributed.probe import FORMATS, Layer, assert_padding_is_zero, random_matrix

COLS = 160  # a ragged tile of 128; a multiple of 32 and 16
ROWS = 328  # over 2, 3 and 4 ranks the cuts go through tiles of 128, 32 and 16
ALIGNED_ROWS = 192  # the same for 2 and 4 ranks and 128 alone, for formats that can be cut at multiples of 16 only


def rows_of(format: Format) -> int:
    return ROWS if format.alignment(0) <= 2 else ALIGNED_ROWS


@functools.lru_cache(maxsize=64)
def whole_of(name: str, seed: int) -> QuantizedStorage:
    """The weight of a format before any cut."""
    format = FORMATS[name]
    return storages.quantize(random_matrix(rows_of(format), COLS, seed), format)


class Zoo(nn.Module):
    """Attributes: weights: by format; norm, head, seen: plain; their values differ with `seed`."""

    def __init__(self, seed: int, names: tuple[str, ...] = tuple(FORMATS), device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.seed = seed
        self.weights = nn.ModuleDict({n: self._layer(n, device) for n in names})
        self.norm = nn.LayerNorm(37)
        self.head = nn.Linear(37, 5, bias=False, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.tensor([seed]))
        nn.init.normal_(self.norm.weight)
        self.norm, self.head, self.seen = self.norm.to(device), self.head.to(device), self.seen.to(device)

    def _layer(self, name: str, device: torch.device | str) -> Layer:
        layer = Layer(FORMATS[name], random_matrix(rows_of(FORMATS[name]), COLS, self.seed).to(device))
        layer.weight.storage.initial = None
        return layer

    def forward(self, x: Tensor) -> Tensor:
        plain = self.head(self.norm(x[:, :37]).bfloat16()).float().square().mean()
        return plain + sum(layer(x).square().mean() for layer in self.weights.values())


def shard(model: Zoo, over: DeviceMesh) -> Zoo:
    """FSDP over the mesh, after "tp" has cut weights by rows and columns in turn."""
    if "tp" in over.mesh_dim_names:
        for index, layer in enumerate(model.weights.values()):
            _cut_by_tensor_parallelism(layer, over["tp"], index % 2)
        over = over["dp"]
    for layer in model.weights.values():
        fsdp2.fully_shard(layer, mesh=over)
    fsdp2.fully_shard(model.head, mesh=over)
    fsdp2.fully_shard(model, mesh=over)
    return model


def _cut_by_tensor_parallelism(layer: Layer, mesh: DeviceMesh, dim: int) -> None:
    whole = layer.weight
    if whole.shape[dim] // mesh.size() % whole.format.alignment(dim):
        dim = 1 - dim
    length = whole.shape[dim] // mesh.size()
    storage = whole.storage.narrow(dim, mesh.get_local_rank() * length, length)
    layer.weight = nn.Parameter(
        DTensor.from_local(
            fsdp2.QuantizedParameter(storage), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=(COLS, 1)
        )
    )


def assert_weights(model: Zoo, seed: int) -> None:
    """Every weight has the bytes of the whole that `seed` makes, cut where this rank cuts."""
    for name, layer in model.weights.items():
        assert_storage(local_tensor(layer.weight).storage, whole_of(name, seed), name)


def assert_storage(got: QuantizedStorage, whole: QuantizedStorage, name: str) -> None:
    """`got`, a part of `whole`, holds the bytes of that part in all fields, and zeros in their padding."""
    for field in got.fields:
        part = geometry.narrow(field, whole.buffers[field.name], whole.region, got.region)
        wire = geometry.compact(field, got.buffers[field.name], got.region)
        assert_bitwise(wire.cpu(), geometry.compact(field, part, got.region), f"{name}.{field.name} {got.region}")
    assert got.unsettled is None
    assert got.initial is None
    if got.device.type == "cpu":
        assert_padding_is_zero(got)


def assert_plain(model: Zoo, want: Zoo) -> None:
    """Plain parameters and buffers are those of an unsharded model."""
    for (name, got), expected in zip(_plain(model).items(), _plain(want).values(), strict=True):
        assert_bitwise(full_tensor(got).detach().cpu(), expected.detach().cpu(), name)


def _plain(model: Zoo) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t for name, t in state.items() if not isinstance(local_tensor(t), QuantizedTensor)}


@dataclass(frozen=True)
class Layout:
    """Shape and names of a mesh. "tp" cuts weights first; of ("replicate", "shard") only the second one cuts."""

    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    def mesh(self) -> DeviceMesh:
        return mesh(self.shape, self.names)

    def __str__(self) -> str:
        return "x".join(f"{name}{size}" for name, size in zip(self.names, self.shape, strict=True))


def data_parallel(world: int) -> Layout:
    return Layout((world,), ("dp",))


def zoo(seed: int, layout: Layout | None = None, names: tuple[str, ...] = tuple(FORMATS)) -> Zoo:
    """A zoo, sharded by `layout`; its values depend on `seed` alone."""
    torch.manual_seed(seed)
    if layout is None:
        return Zoo(seed, names)
    return shard(Zoo(seed, names, device()), layout.mesh())
