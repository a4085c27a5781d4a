"""Bytes of parameters that are allocated at once: predicted, and as storages grow. One process stands for a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from te_dist import fsdp2
from te_dist._torch_private import pretended_ranks
from te_dist.testing import StorageTracker
from te_dist.testing.memory import allocated_bytes
from tests.distributed.probe import FORMATS, SOME, Layer, random_matrix
from tests.distributed.test_grouped_fsdp2 import Experts, random_group

TOKENS, COLS = 7, 160  # seven: what has as many rows is no parameter
WAYS = ["kept", "recompute", "torch", "ahead", "cast", "experts", "rows of experts", "replicas"]


class _Touch(torch.autograd.Function):
    """Keeps a weight for backward, and computes nothing with it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (_,) = ctx.saved_tensors
        return dy.clone(), None


class Block(nn.Module):
    """Frozen weights, a plain parameter, and an inner module that runs between them."""

    def __init__(self, *layers: nn.Module, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weights, self.inner = nn.ParameterList([layer.weight for layer in layers]), inner
        for weight in self.weights:
            weight.storage.initial = None
        self.gain = nn.Parameter(torch.ones(COLS + 1, device=self.weights[0].storage.device))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Touch.apply(x, weight)
        x = self.inner(x) if self.inner is not None else x
        return _Touch.apply(x, self.gain)


def build(name: str, how: str, mesh: DeviceMesh, *, factor: int = 1) -> nn.Module:
    """Three blocks of different sizes in one that is larger; with experts, one of the three has some inside.

    Args:
        factor: by which matrices are longer and wider.
    """

    def layer(rows: int, cols: int = COLS) -> Layer:
        return Layer(FORMATS[name], random_matrix(rows * factor, cols * factor, 0).to(mesh.device_type))

    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": how != "kept", "recompute": how == "recompute"}
    if how == "cast":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    if how == "torch":
        del options["recompute"]
    shard = torch_fully_shard if how == "torch" else fsdp2.fully_shard
    rows = [size if FORMATS[name].alignment(0) == 1 else 192 for size in (328, 112, 250)]
    blocks = [Block(layer(size), layer(size, 2 * COLS)) for size in rows]
    if "experts" in how:
        blocks[1].inner = Block(Experts(FORMATS[name], random_group(0).to(mesh.device_type)))
        by_rows = (lambda param: Shard(1) if param.dim() == 3 else None) if how == "rows of experts" else None
        shard(blocks[1].inner, shard_placement_fn=by_rows, **options)
    for block in blocks:
        shard(block, **options)
    model = Block(layer(384), inner=nn.Sequential(*blocks))
    shard(model, **options | ({"reshard_after_forward": None} if how == "ours" else {}))
    if how == "ahead":
        model.set_modules_to_forward_prefetch(blocks[:2])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    return model


def run_and_compare(name: str, how: str, mesh: DeviceMesh) -> None:
    """Two steps: peaks of each pass, and what is left after each, are those predicted."""
    model = build(name, how, mesh)
    predicted = fsdp2.peak_bytes(fsdp2.footprints(model))
    x = torch.ones(TOKENS, 1, requires_grad=True)
    if mesh.get_rank():  # whose shards are shorter: FSDP2 replaces them when it runs first
        model(x).backward(torch.ones(TOKENS, 1))
    assert allocated_bytes(p._local_tensor for p in model.parameters()) == predicted.idle
    for _ in range(2):
        with StorageTracker(counts=is_of_parameters) as tracker:
            y = model(x)
            assert tracker.peak == predicted.forward - predicted.idle
            tracker.assert_alive(predicted.between - predicted.idle, besides=[x, y])
            tracker.peak = 0
            y.backward(torch.ones(TOKENS, 1))
            assert tracker.peak == predicted.backward - predicted.idle
            tracker.assert_alive(0, besides=[x, y, x.grad])


def is_of_parameters(tensor: Tensor) -> bool:
    return tensor.shape[:1] != (TOKENS,)


@pytest.fixture
def as_rank() -> Callable[..., None]:
    """Runs a function as one rank of a mesh; collectives move nothing."""

    def run(function: Callable[..., None], shape: tuple[int, ...], rank: int, *arguments: Any) -> None:
        with pretended_ranks(torch.Size(shape).numel(), rank):
            names = ("replicate", "shard")[-len(shape) :]
            function(*arguments, init_device_mesh("cpu", shape, mesh_dim_names=names))

    return run


@pytest.mark.every_run(name=SOME)
@pytest.mark.parametrize("name", FORMATS)
def test_peak_is_the_predicted_one(as_rank: Callable, name: str) -> None:
    for rank in (0, 2) if name in SOME else (2,):
        as_rank(run_and_compare, (3,), rank, name, "ours")


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["hybrid_mxfp8_nvfp4", "mxfp8_2d"])  # of unequal directions, and of one
@pytest.mark.parametrize("how", WAYS)
def test_peak_of_every_way_to_wrap(as_rank: Callable, how: str, name: str) -> None:
    shape = (2, 2) if how == "replicas" else (4,) if how == "rows of experts" else (3,)
    as_rank(run_and_compare, shape, 0, name, how)


@pytest.mark.every_run(name=("hybrid_mxfp8_nvfp4",))
@pytest.mark.parametrize("name", SOME)
def test_peak_of_one_rank(as_rank: Callable, name: str) -> None:
    for how in ("ours", "experts", "cast"):
        as_rank(run_and_compare, (1,), 0, name, how)
