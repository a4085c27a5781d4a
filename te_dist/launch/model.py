"""A decoder in the manner of Llama, its projections `te_dist.Linear`, its feed-forward part dense or of experts.

Embedding and head stay in high precision: they are looked up and read out by token, their rows differ in scale by how
often a token occurs, and the head's errors go straight into the loss.

Shapes: B sequences of a micro batch, S tokens, H heads on this rank, D columns of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_dist as te
from te_dist.launch.config import ModelConfig
from te_dist.nn.moe import MoE, Routing

Rotary = tuple[Tensor, Tensor]  # cosines and sines, (S, D / 2) fp32 each
PARAMS_DTYPE = torch.bfloat16  # of what is not quantized; the optimizer holds fp32 masters


def call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Runs `function` and lets autograd save what it wants: the way a block runs unless recompute replaces it."""
    return function(*args)


def rotary_table(length: int, width: int, base: float, *, device: torch.device) -> Rotary:
    """Cosines and sines by which each pair of a head's columns is turned.

    Computed in every pass: a table kept as a buffer would have to be rebuilt after construction on the meta device.
    """
    frequency = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """Turns column pair (i, i + D / 2) of each head by its angle. x: (B, H, S, D); computed in fp32, returned as x."""
    cosine, sine = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def projection(num_in: int, num_out: int) -> te.Linear:
    """A linear map without bias, multiplied in the formats of the recipe."""
    return te.Linear(num_in, num_out, bias=False, params_dtype=PARAMS_DTYPE)


def norm(config: ModelConfig) -> nn.RMSNorm:
    """Divides each row by its root mean square and scales the columns."""
    return nn.RMSNorm(config.hidden, config.norm_epsilon, dtype=PARAMS_DTYPE)


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.columns_of_a_head
        self.query = projection(config.hidden, config.heads * self.width)
        self.key = projection(config.hidden, config.kv_heads * self.width)
        self.value = projection(config.hidden, config.kv_heads * self.width)
        self.out = projection(config.heads * self.width, config.hidden)

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """x: (B, S, hidden). The number of heads follows from the projections: tensor parallelism leaves a part."""
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            rotate(query, table), rotate(key, table), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # (B, H, S, D)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = projection(config.hidden, config.ffn)
        self.up = projection(config.hidden, config.ffn)
        self.down = projection(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(config: ModelConfig) -> MoE:
    """Experts, each a SwiGLU, and the router that chooses of them."""
    experts = config.experts
    routing = Routing(
        experts.count,
        experts.top_k,
        experts.score_function,
        experts.normalize,
        experts.scaling_factor,
        experts.aux_loss_coefficient,
        experts.bias_update_rate,
    )
    return MoE(
        config.hidden,
        experts.ffn,
        routing,
        shared_ffn_hidden_size=experts.shared_ffn,
        save_original_input=experts.save_original_input,
        params_dtype=PARAMS_DTYPE,
    )


class Block(nn.Module):
    """One layer; `call` says how it runs."""

    call: Callable[..., Tensor]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.call = call
        self.attention_norm = norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = norm(config)
        self.feed_forward = mixture(config) if config.experts.count else FeedForward(config)

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """x: (B, S, hidden)."""
        return self.call(self._layer, x, table)

    def _layer(self, x: Tensor, table: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden, dtype=PARAMS_DTYPE)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False, dtype=PARAMS_DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, S, vocab_size), fp32, of the token after each of `tokens` (B, S) int64."""
        x = self.embedding(tokens)
        width = self.config.columns_of_a_head
        table = rotary_table(tokens.shape[1], width, self.config.rope_base, device=tokens.device)
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x)).float()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats. logits: (B, S, vocab_size) fp32; targets: (B, S) int64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
