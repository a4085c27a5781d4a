"""The model that every situation runs: sharded in some way, beside the same model that nobody shards.

Values are made on the CPU and moved, so that every device starts from the same bits. Sums over ranks are the only
arithmetic that may differ between the two models; the unsharded one therefore goes on with the sums of the other, and
everything else is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import te_dist as te
from te_dist import grouped, optim, testing
from te_dist.formats import Direction, Format
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.grouped import first_member
from te_dist.nn.fronts import Fronts
from te_dist.nn.site import LinearSite
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.testing import assert_bitwise
from tests.distributed.matrix.catalog import Formats
from tests.distributed.probe import random_matrix

WIDTH, HIDDEN = 128, 192  # over two ranks, both cuts go through tiles of 128
ROWS = 16  # of an input
TOLERANCE = 1e-5  # of sums over ranks in another order, relative to the largest value


class _Products(torch.autograd.Function):
    """y = x W^T from the rowwise direction, dx = dy W from the columnwise one (rowwise where there is none)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.storage.operand(Direction.ROWWISE, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        direction = Direction.COLUMNWISE if Direction.COLUMNWISE in weight.format else Direction.ROWWISE
        return dy @ weight.storage.operand(direction, dy.dtype), (dy.t() @ x).to(weight.dtype)


class _Site(LinearSite):
    """The product of a `te.Linear` for formats that no product with plain inputs reads."""

    def _at_once(self, x: Tensor, weight: Tensor, bias: Tensor | None, **fronts: Unpack[Fronts]) -> Tensor:
        out = _Products.apply(x, weight)
        return out if bias is None else out + bias

    def _in_graph(self, x: Tensor, weight: Tensor, bias: Tensor | None, front: str) -> Tensor:
        return self._outside_of_graphs(x, weight, bias, front)


def has_products(format: Format) -> bool:
    """Whether `te.Linear` trains a weight of this format: in both directions, neither of them transformed."""
    return format.columnwise is not None and not any(getattr(format[d].codec, "hadamard", 0) for d in format.directions)


@cache
def _quantized(format: Format, shape: tuple[int, int], seed: int, dtype: torch.dtype) -> QuantizedTensor:
    """Made once in a process: of all formats, a model has many."""
    return quantize((random_matrix(*shape, seed) / 256).to(dtype), format)


def linear(
    format: Format,
    sizes: tuple[int, int],
    seed: int,
    *,
    device: torch.device | str = "",
    dtype: torch.dtype = torch.float32,
) -> te.Linear:
    """A `te.Linear` of `sizes` (K, N) whose weight has this format."""
    device = device or testing.device()
    layer = te.Linear(*sizes, device="meta", params_dtype=dtype)
    if not has_products(format):
        layer.gemm = _Site(*sizes, name="")
    weight = _quantized(format, sizes[::-1], seed, dtype).clone().storage
    weight.buffers = {f.name: weight.buffers[f.name] for f in format.canonical.fields}
    layer.weight = nn.Parameter(QuantizedParameter(weight).to(device))
    layer.bias = nn.Parameter(torch.full((sizes[1],), 0.25, dtype=dtype, device=device))
    return layer


class Experts(nn.Module):
    """Three-dimensional weights (E, N, K), each expert quantized on its own; the outputs of all are added up."""

    def __init__(self, format: Format, shape: tuple[int, int, int], seed: int) -> None:
        super().__init__()
        values = random_matrix(shape[0] * shape[1], shape[2], seed).view(shape) / 256
        storage = grouped.quantize(values, format).storage
        storage.buffers = {f.name: storage.buffers[f.name] for f in format.canonical.fields}
        self.weight = nn.Parameter(GroupedParameter(storage).to(testing.device()))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return _Sum.apply(x, weight)


class _Sum(torch.autograd.Function):
    """As `_Products`, over all members."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        values = weight.storage.operand(Direction.ROWWISE, x.dtype)
        return torch.einsum("tk,enk->tn", x, values).clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        direction = Direction.COLUMNWISE if Direction.COLUMNWISE in weight.format else Direction.ROWWISE
        dx = torch.einsum("tn,enk->tk", dy, weight.storage.operand(direction, dy.dtype))
        return dx, torch.einsum("tn,tk->nk", dy, x).expand(weight.shape).to(weight.dtype).contiguous()


class Block(nn.Module):
    """x + down(silu(up(norm(x))))."""

    def __init__(self, format: Format, sizes: tuple[int, int], seed: int, **options: Any) -> None:
        super().__init__()
        dtype = options.setdefault("dtype", torch.float32)
        self.norm = nn.LayerNorm(sizes[0], device=options.get("device") or testing.device(), dtype=dtype)
        self.up = linear(format, sizes, 2 * seed, **options)
        self.down = linear(format, (sizes[1], sizes[0]), 2 * seed + 1, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, one after the other; `around` runs each (activation checkpointing, say)."""

    around: Callable[..., Tensor] | None = None

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x) if self.around is not None else block(x)
        return x


def net(formats: Formats, sizes: tuple[int, int] = (WIDTH, HIDDEN), each: int = 1, **options: Any) -> Net:
    """The same model whenever it is made: of every format so many blocks, one after the other."""
    kinds = [format for format in formats for _ in range(each)]
    return Net([Block(format, sizes, seed, **options) for seed, format in enumerate(kinds)])


def batch(seed: int, cols: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input of this number."""
    x = torch.randn(ROWS, cols, generator=torch.Generator().manual_seed(1000 + seed))
    return x.to(testing.device(), dtype).requires_grad_()


@dataclass
class Beside:
    """A sharded model, and the same one unsharded.

    Attributes:
        sharded: as the situation wrapped it.
        alone: never wrapped.
        ranks: on how many different inputs the gradient is averaged.
        index: which of them is this rank's.
        is_exact: whether outputs and gradients are the same bits; False where products are summed over ranks.
        sums_alike: whether gradients are added up in the same order; False where each is reduced on its own.
        lr: of the optimizer.
        group_of: by name of a parameter, the ranks that have it; None for all.
    """

    sharded: nn.Module
    alone: nn.Module
    ranks: int
    index: int
    is_exact: bool = True
    sums_alike: bool = True
    lr: float = 0.02
    group_of: Callable[[str], dist.ProcessGroup | None] = lambda name: None

    def __post_init__(self) -> None:
        self.optimizers = [self._optimizer(model) for model in (self.sharded, self.alone)]

    def _optimizer(self, model: nn.Module) -> optim.FusedAdam:
        return optim.FusedAdam([p for p in model.parameters() if p.requires_grad], lr=self.lr)

    def follow(self, steps: int = 0, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        """Trains both; compares outputs, gradients and, after each step, the bytes of all shards.

        Args:
            steps: so many. By default one, and where few ranks share the machine a further pass, with updated weights.
            run: forward and backward of a model.
        """
        run = run or forward_backward
        self.compare_weights("at the start")
        for step in range(steps or 1):
            self.step(step, run)
        if not steps and dist.get_world_size() <= 2:
            self.compare_pass(1, run)

    def step(self, step: int, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        """One step of both."""
        self.compare_pass(step, run)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare_weights(f"after step {step}")

    def compare_pass(self, step: int, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        """Forward and backward of both."""
        cols = self.cols
        mine, other = (batch(step * self.ranks + self.index, cols) for _ in range(2))
        out, want = run(self.sharded, mine), run(self.alone, other)
        self.compare(out.detach(), want.detach(), "the output")
        if mine.grad is not None:
            self.compare(mine.grad, other.grad, "the gradient of the input")
        self.compare_gradients()

    @property
    def cols(self) -> int:
        """Of an input."""
        norm = next((m for m in self.alone.modules() if isinstance(m, nn.LayerNorm)), None)
        return norm.normalized_shape[0] if norm is not None else WIDTH

    def compare_gradients(self) -> None:
        """The reduced gradients against the mean of those of all ranks, with which both models go on."""
        by_group: dict[Any, list[tuple[str, Any, Any]]] = {}
        for name, got, want in pairs(self.sharded, self.alone):
            if want.requires_grad:
                by_group.setdefault(self.group_of(name), []).append((name, got, want))
            else:
                assert got.grad is None, f"{name} is frozen and has a gradient"
        for group, params in by_group.items():
            num = dist.get_world_size(group)
            flat = torch.cat([want.grad.view(-1) for _, _, want in params])
            dist.all_reduce(flat, group=group)
            means = (flat / num).split([want.numel() for _, _, want in params])
            for (name, got, want), mean in zip(params, means, strict=True):
                want.grad = mean.view(want.shape).to(want.dtype, copy=True)
                part, own = part_of(want.grad, got.grad), local_tensor(got.grad)
                is_summed = num > 2 or not self.sums_alike
                self.compare(own, part.to(own.device), f"the gradient of {name}", summed=is_summed)
                own.copy_(part)

    def compare(self, got: Tensor, want: Tensor, what: str, *, summed: bool = False) -> None:
        """Bit for bit, or where sums are in another order, by the largest value."""
        if self.is_exact and not summed:
            assert_bitwise(got, want, what)
        else:
            assert got.shape == want.shape, f"{what}: got {tuple(got.shape)}, want {tuple(want.shape)}"
            error = torch.linalg.vector_norm(got - want, torch.inf).item() if got.numel() else 0.0
            largest = torch.linalg.vector_norm(want, torch.inf).item() if got.numel() else 0.0
            assert error <= TOLERANCE * largest, f"{what}: differs by {error}, the largest value is {largest}"

    def compare_weights(self, when: str) -> None:
        """The bytes of every shard are those of the whole weight, quantized at once; plain shards, their values."""
        for name, got, want in pairs(self.sharded, self.alone):
            assert_shard(got, want, f"{name} {when}")


def pairs(sharded: nn.Module, alone: nn.Module) -> list[tuple[str, Any, Any]]:
    """(name, parameter, parameter) of both."""
    others = dict(alone.named_parameters())
    return [(name, param, others[name]) for name, param in sharded.named_parameters()]


def part_of(whole: Tensor, like: Any) -> Tensor:
    """Of a plain tensor, what this rank has of `like`."""
    return local_part(whole, like) if isinstance(like, DTensor) else whole


def assert_shard(got: Any, want: Any, what: str) -> None:
    """The part that this rank has of `want`."""
    local = local_tensor(got)
    if not isinstance(want, QuantizedTensor):
        assert_bitwise(local.detach().cpu(), part_of(want.detach(), got).cpu(), what)
        return
    assert isinstance(local, QuantizedTensor), f"{what}: is a plain {type(local).__name__}"
    storage, part = local.storage, want.storage
    if storage.matrix_dim:
        part = part.narrow(0, first_member(got), storage.shape[0])
    region, dim = storage.region, storage.matrix_dim
    if region != part.region:
        part = part.narrow(dim, region.rows.start, len(region.rows))
        part = part.narrow(dim + 1, region.cols.start, len(region.cols))
    for field in storage.format.canonical.fields:
        assert_bitwise(storage.buffers[field.name].cpu(), part.buffers[field.name].cpu(), f"{what}: {field.name}")


def forward_backward(model: nn.Module, x: Tensor) -> Tensor:
    """The output; gradients of a mean are left behind."""
    out = model(x)
    out.float().square().mean().backward()
    return out
