"""A decoder of plain modules in bf16, or of te_dist's: Llama's shape, or Qwen3's with experts.

What lies between the products is the same code for both.

Shapes: B sequences, S tokens, H query heads, C heads of keys and as many of values, D columns of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import te_dist as te
from benchmarks.plain_moe import PlainExpertParallel, PlainMoE
from te_dist.nn import LayerNormLinear, LayerNormMLP, MoE, Routing

Rotary = tuple[Tensor, Tensor]  # cosines and signed sines, (S, 1, D) each


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; `experts` of width `ffn`, `top_k` for each token, or 0 for a dense feed-forward part."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    top_k: int = 1
    width: int = 128
    vocabulary: int = 32768
    rope_base: float = 500000.0

    @property
    def attended(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.width

    @property
    def projected(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.width

    def flops(self, length: int) -> float:
        """Of products and causal attention, forward and backward, by token of sequences of `length`."""
        ffn = self.top_k * self.ffn
        products = self.hidden * (self.projected + self.attended + 3 * ffn)
        attention = length * self.attended  # of scores and of values, half of each
        return 6 * (self.layers * (products + attention) + self.hidden * self.vocabulary)


LLAMA = Shape(hidden=4096, ffn=14336, layers=8, heads=32, kv_heads=8)  # a quarter of the layers of Llama 3's 8B
QWEN = Shape(hidden=2048, ffn=768, layers=4, heads=32, kv_heads=4, experts=128, top_k=8)  # 4 of the 48 of Qwen3-30B


class PlainMLP(nn.Module):
    """SwiGLU in torch."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, 2 * ffn, bias=False)
        self.second = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden)."""
        gate, up = self.first(x).chunk(2, dim=-1)
        return self.second(F.silu(gate) * up)


@contextmanager
def in_bf16() -> Iterator[None]:
    """A block in which parameters are made in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rotary_table(shape: Shape, length: int, device: torch.device) -> Rotary:
    """By which each pair (i, i + D / 2) of a head's columns is turned, in bf16."""
    half = torch.arange(0, shape.width, 2, device=device, dtype=torch.float32) / shape.width
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), shape.rope_base**-half)
    cosine, sine = angle.cos(), angle.sin()
    tables = torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)
    return tables[0].bfloat16()[:, None], tables[1].bfloat16()[:, None]


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """x: (B, S, heads, D)."""
    cosine, sine = table
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, dims=-1), sine)


def norm_of(shape: Shape) -> nn.RMSNorm:
    """In the default dtype."""
    return nn.RMSNorm(shape.hidden, 1e-5)


def plain_feed_forward(shape: Shape, group: dist.ProcessGroup | None) -> nn.Module:
    """In torch, its experts over the ranks of `group`."""
    if not shape.experts:
        return PlainMLP(shape.hidden, shape.ffn)
    sizes = shape.hidden, shape.ffn, shape.experts, shape.top_k
    return PlainMoE(*sizes) if group is None else PlainExpertParallel(*sizes, group=group)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, *, quantized: bool, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.shape = shape
        hidden, ffn = shape.hidden, shape.ffn
        if quantized:
            bare: Any = {"bias": False}
            norm: Any = {"normalization": "RMSNorm", "eps": 1e-5, **bare}
            self.project = LayerNormLinear(hidden, shape.projected, **norm)
            self.out = te.Linear(shape.attended, hidden, **bare)
            self.feed_forward = (
                nn.Sequential(norm_of(shape), MoE(hidden, ffn, Routing(shape.experts, shape.top_k)))
                if shape.experts
                else LayerNormMLP(hidden, ffn, activation="swiglu", **norm)
            )
        else:
            self.project = nn.Sequential(norm_of(shape), nn.Linear(hidden, shape.projected, bias=False))
            self.out = nn.Linear(shape.attended, hidden, bias=False)
            self.feed_forward = nn.Sequential(norm_of(shape), plain_feed_forward(shape, group))

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """(B, S, hidden)."""
        x = x + self._attend(x, table)
        return x + self.feed_forward(x)

    def _attend(self, x: Tensor, table: Rotary) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        projected = self.project(x).unflatten(-1, (-1, self.shape.width))
        pairs, value = projected.split((heads + kv_heads, kv_heads), dim=-2)
        query, key = rotate(pairs, table).split((heads, kv_heads), dim=-2)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens (B, S) in, the mean loss of the token after each out. Parameters are made in torch's default dtype.

    Args:
        group: ranks over which torch's experts are spread; None: each has all. (te_dist's are spread once they are
            made.)
    """

    def __init__(self, shape: Shape, *, quantized: bool, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, quantized=quantized, group=group) for _ in range(shape.layers))
        self.norm = norm_of(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both (B, S) int64."""
        x = self.embedding(tokens)
        table = rotary_table(self.shape, tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, table)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
