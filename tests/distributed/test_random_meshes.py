"""Layers whose options a seed draws, cut over the ranks of tensor parallelism and sharded over others by FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, testing
from te_dist.optim import FusedAdam
from te_dist.tensor_parallel import ColumnParallel, GatherInput, RowParallel, SequenceParallel
from te_dist.testing import assert_bitwise, full_tensor
from tests.distributed.test_tensor_parallel import assert_near, normal
from tests.nn.random_modules import RECIPES

FEW, TOGETHER, WORLD = 3, 15, 4
BLOCKS = [block if block < FEW else pytest.param(block, marks=pytest.mark.exhaustive) for block in range(40)]
REFUSED = "inside a stored byte|updated from its masters"
MAPS = ("up", "gate", "down")


@dataclass
class Drawn:
    """A layer, and how it is cut and trained.

    Attributes:
        recipe: by name.
        sizes: features of input and between the maps.
        shape: of tokens.
        ranks: of tensor parallelism; FSDP2 has the others.
        cut: the dimension along which tokens are; None where every rank has them whole.
        norm: "inside" of the first map, or a module "before" it.
        gated: whether two maps read the input.
        gathers: the one of them by which it is gathered for both; "" where each gathers for itself.
        frozen: the map whose weight is; "" where all are trained.
        passes: of a step.
    """

    recipe: str
    quantized: bool
    sizes: tuple[int, int]
    shape: tuple[int, int]
    ranks: int
    cut: int | None
    norm: str
    gated: bool
    gathers: str
    bias: bool
    returns_bias: bool
    frozen: str
    checkpoint: bool
    passes: int
    syncs_last: bool
    reshards: bool | None


def draw(seed: int) -> Drawn:
    """What belongs to a seed."""
    random = Random(seed)

    def chance(part: float) -> bool:
        return random.random() < part

    gated, cut, norm = chance(0.5), random.choice((None, 0, 1, 1)), random.choice(("inside", "before"))
    gathers = gated and cut is not None and norm == "before" and chance(0.7)
    return Drawn(
        recipe=random.choice(list(RECIPES)),
        quantized=chance(0.7),
        sizes=(random.choice((64, 96, 128, 160, 256)), random.choice((64, 128, 192, 256, 320, 512))),
        shape=(4, random.choice((4, 8, 16, 32, 48, 64))),
        ranks=random.choice((2, 2, 4)),
        cut=cut,
        norm=norm,
        gated=gated,
        gathers=random.choice(("up", "gate")) if gathers else "",
        bias=chance(0.5),
        returns_bias=chance(0.2),
        frozen=random.choice(MAPS) if chance(0.3) else "",
        checkpoint=chance(0.25),
        passes=random.choice((1, 1, 2)),
        syncs_last=chance(0.5),
        reshards=random.choice((None, True, False)),
    )


class Maps(nn.Module):
    """One or two maps of the input, and one of what comes of them."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        features, hidden = drawn.sizes
        first: Any = te.LayerNormLinear if drawn.norm == "inside" else te.Linear
        self.up = first(features, hidden, bias=drawn.bias)
        self.gate = first(features, hidden, bias=False) if drawn.gated else None
        self.down = te.Linear(hidden, features, bias=drawn.bias, return_bias=drawn.returns_bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        out = self.down(hidden if self.gate is None else hidden * torch.sigmoid(self.gate(x)))
        if not self.down.return_bias:
            return out
        out, bias = out
        return out if bias is None else out + (bias.to_local() if isinstance(bias, DTensor) else bias)


class Layer(nn.Module):
    """Maps and what goes past them."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.norm = te.RMSNorm(drawn.sizes[0]) if drawn.norm == "before" else nn.Identity()
        self.maps = Maps(drawn)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + (te.checkpoint(self.maps, normed) if self.drawn.checkpoint else self.maps(normed))


def build(drawn: Drawn) -> Layer:
    """The same values on every rank."""
    torch.manual_seed(0)
    made_by = RECIPES[drawn.recipe] if drawn.quantized else None
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by), testing.device():
        layer = Layer(drawn)
    if frozen := getattr(layer.maps, drawn.frozen or "none", None):
        frozen.weight.requires_grad_(False)
    return layer


def spread(layer: Layer, mesh: DeviceMesh) -> Layer:
    """Cuts a layer over the ranks of tensor parallelism."""
    drawn, plan = layer.drawn, {}
    tokens = None if drawn.cut is None else Shard(drawn.cut)
    if tokens and drawn.norm == "before":
        plan["norm"] = SequenceParallel()
    if drawn.gathers:
        plan["maps"] = GatherInput(drawn.gathers, input_layouts=tokens)
    for name in ("up", "gate")[: 1 + drawn.gated]:
        plan[f"maps.{name}"] = ColumnParallel(input_layouts=None if drawn.gathers else tokens)
    plan["maps.down"] = RowParallel(output_layouts=tokens)
    parallelize_module(layer, mesh, plan)
    return layer


def trained(layer: Layer, part: Callable[[Tensor], Tensor], steps: int) -> list[dict[str, Tensor]]:
    """Of each step, outputs and gradients."""
    drawn, made_by, found = layer.drawn, RECIPES[layer.drawn.recipe], []
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    for step in range(steps):
        its: dict[str, Tensor] = {}
        for number in range(drawn.passes):
            x, grad = (part(normal(*drawn.shape, drawn.sizes[0], seed=10 * step + 2 * number + i)) for i in range(2))
            x = x.clone().requires_grad_()
            if drawn.syncs_last and hasattr(layer, "set_requires_gradient_sync"):
                layer.set_requires_gradient_sync(number == drawn.passes - 1)
            with te.autocast(enabled=made_by is not None, recipe=made_by, amax_reduction_group=dist.group.WORLD):
                out = layer(x)
            (out * grad).sum().backward()
            its |= {f"output {number}": out.detach(), f"input {number}": x.grad}
        named = {name: param.grad for name, param in layer.named_parameters()}
        found.append(its | {name: full_tensor(grad).clone() for name, grad in named.items() if grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(rank: int, world: int, seeds: range) -> int:
    """How many of the layers can be made and cut; the tokens of all ranks of FSDP2 are the same."""
    compared = 0
    for seed in seeds:
        drawn = draw(seed)
        mesh = testing.mesh((world // drawn.ranks, drawn.ranks), ("dp", "tp"))

        def part(x: Tensor, dim: int | None = drawn.cut, tp: DeviceMesh = mesh["tp"]) -> Tensor:
            return x if dim is None else x.chunk(tp.size(), dim)[tp.get_local_rank()]

        try:
            layers = [spread(build(drawn), mesh["tp"]) for _ in range(2)]
            want = trained(layers[0], part, 2)
        except ValueError as error:  # on every rank alike
            assert re.search(REFUSED, str(error)), drawn
            continue
        compared += 1
        options = dict(recompute=drawn.checkpoint, reshard_after_forward=drawn.reshards)
        got = trained(fsdp2.fully_shard(layers[1], mesh=mesh["dp"], **options), part, 2)
        for number, (its, wanted) in enumerate(zip(got, want, strict=True)):
            assert its.keys() == wanted.keys(), drawn
            for name, value in its.items():
                assert_bitwise(value, wanted[name], f"{name} of step {number} of seed {seed}: {drawn}")
        (alone,) = trained(build(drawn), lambda x: x, 1)
        assert alone.keys() == want[0].keys(), drawn
        for name, value in want[0].items():
            its = part(alone[name]) if name.startswith(("output", "input")) else alone[name]
            assert_near(value, its, f"{name} of seed {seed}: {drawn}")
    return compared


@pytest.mark.parametrize("block", BLOCKS)
def test_layers_over_two_dimensions_train_as_over_one_and_as_whole_ones(ranks: Callable, block: int) -> None:
    compared = ranks(WORLD).run(compare, range(block * TOGETHER, (block + 1) * TOGETHER))
    assert len(set(compared)) == 1
    assert compared[0] > 0
