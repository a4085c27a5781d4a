"""Mixtures of experts in plain torch, which te_dist's are measured beside.

Shapes: T tokens, k choices of each, H columns, F of an expert, E experts, P ranks, R rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single


class PlainExperts(nn.Module):
    """SwiGLU between two `grouped_mm`."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(experts, 2 * ffn, hidden) * 0.02)
        self.second = nn.Parameter(torch.randn(experts, hidden, ffn) * 0.02)

    def forward(self, rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """(R, hidden) of rows (R, hidden) sorted by expert, those of expert e up to `ends[e]`.

        Args:
            weights: (R, 1), by which what comes of SwiGLU is multiplied.
        """
        gate, up = F.grouped_mm(rows, self.first.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        made = F.silu(gate) * up if weights is None else F.silu(gate) * up * weights
        return F.grouped_mm(made, self.second.transpose(1, 2), offs=ends)


class PlainMoE(nn.Module):
    """The router in bf16, tokens sorted by expert, `PlainExperts`, and sums of what was made."""

    def __init__(self, hidden: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Parameter(torch.randn(experts, hidden) * 0.02)
        self.experts = PlainExperts(hidden, ffn, experts)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden)."""
        tokens = x.flatten(0, -2)
        chosen, order, counts = self.routed(tokens)
        sources = order // self.top_k
        weights = chosen.flatten()[order, None].to(x.dtype)
        made = self.experts(tokens[sources], counts.cumsum(0).int(), weights)
        return torch.zeros_like(tokens).index_add(0, sources, made).view_as(x)

    def routed(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens (T, hidden) the weights of choices, f32 (T, k); (T k,), choices sorted by expert; rows of each."""
        scores = F.linear(tokens, self.router).float().softmax(-1)
        chosen, experts = scores.topk(self.top_k, dim=-1)
        counts = torch.zeros(scores.shape[1], dtype=torch.int32, device=tokens.device)
        counts.index_add_(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
        return chosen / chosen.sum(-1, keepdim=True), experts.flatten().argsort(stable=True), counts


class PlainExpertParallel(PlainMoE):
    """`PlainMoE` with experts over ranks. Probabilities are multiplied where tokens come back."""

    def __init__(self, hidden: int, ffn: int, experts: int, top_k: int, *, group: dist.ProcessGroup) -> None:
        super().__init__(hidden, ffn, experts // group.size(), top_k)
        self.router = nn.Parameter(torch.randn(experts, hidden) * 0.02)  # of all, those on other ranks too
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden)."""
        tokens = x.flatten(0, -2)
        chosen, order, counts = self.routed(tokens)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_rank = [each.view(self.group.size(), -1) for each in (counts, arriving)]
        sent, received = torch.stack([each.sum(1) for each in by_rank]).tolist()
        sources = order // self.top_k
        rows = self._exchanged(tokens[sources], sent, received)
        experts = torch.arange(by_rank[1].shape[1], device=x.device).repeat(self.group.size())
        by_expert = experts.repeat_interleave(arriving, output_size=len(rows)).argsort(stable=True)
        made = self.experts(rows[by_expert], by_rank[1].sum(0).cumsum(0).int())
        made = torch.empty_like(made).index_copy(0, by_expert, made)
        back = self._exchanged(made, received, sent) * chosen.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(tokens).index_add(0, sources, back).view_as(x)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.shape[1])
        return all_to_all_single(out, rows, received, sent, group=self.group)
