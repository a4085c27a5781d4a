"""How a router scores, chooses and balances experts: its options, and the formulas as functions of tensors.

Shapes: T tokens, E experts, k experts of a token, G groups of experts. All scores are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from te_dist import ops

TINY = 1e-20  # beside a sum of scores that is divided by
BEST_OF_GROUP = 2  # scores of a group that are added up to rank it


@dataclass(frozen=True)
class Routing:
    """Options of a router. Names of other programs in parentheses: HF for transformers, MC for Megatron-LM.

    Attributes:
        num_experts: E.
        top_k: experts of a token (HF num_experts_per_tok).
        score_function: "softmax" over all experts (Shazeer et al., arXiv:1701.06538), or "sigmoid" of each logit
            (DeepSeek-V3, arXiv:2412.19437, equation 15).
        normalizes: whether the chosen scores are divided by their sum (HF norm_topk_prob, torchtitan route_norm).
        scaling_factor: by which probabilities are multiplied at last (HF routed_scaling_factor, torchtitan
            route_scale).
        aux_loss_coefficient: of the balancing loss, see `balancing_loss` (HF router_aux_loss_coef); 0 for none.
        bias_update_rate: of the balancing bias, see `next_bias` (MC moe_router_bias_update_rate, torchtitan
            load_balance_coeff); 0 for no bias.
        num_groups: G, of E / G experts next to each other, from which a token chooses in two steps (HF n_group); 1 for
            one step.
        top_groups: groups that a token may choose experts of (HF topk_group).
    """

    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: bool = True
    scaling_factor: float = 1.0
    aux_loss_coefficient: float = 0.0
    bias_update_rate: float = 0.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"num_experts: got {self.num_experts}, wanted 1 or more")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k: got {self.top_k} of {self.num_experts} experts, wanted 1 to {self.num_experts}")
        if self.score_function not in ("softmax", "sigmoid"):
            raise ValueError(f'score_function: got {self.score_function!r}, wanted "softmax" or "sigmoid"')
        for name in ("aux_loss_coefficient", "bias_update_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted 0 (none) or a positive number")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups: got {self.num_groups}, wanted a divisor of {self.num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups: got {self.top_groups} of {self.num_groups} groups, wanted 1 up to that")
        reachable = self.top_groups * self.num_experts // self.num_groups
        if reachable < self.top_k:
            raise ValueError(
                f"top_k: got {self.top_k}, but {self.top_groups} of {self.num_groups} groups hold {reachable} experts; "
                "raise top_groups, or lower top_k"
            )


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """f32 (T, E) of f32 logits (T, E)."""
    return logits.softmax(dim=-1) if routing.score_function == "softmax" else logits.sigmoid()


def choose(scores: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """int64 (T, k): experts of every token, of falling score; of equal scores the first.

    With groups, the best are chosen of those groups whose two best experts have the largest sum (DeepSeek-V3, section
    2.1.2, as its published code ranks groups).

    Args:
        scores: f32 (T, E).
        bias: f32 (E,), added for the choice alone, or None.
    """
    ranked = scores.detach()
    if routing.num_groups > 1:
        ranked = ranked if bias is None else ranked + bias
        ranked, bias = ranked.masked_fill(~_in_best_groups(ranked, routing), -torch.inf), None
    chosen = torch.empty((*scores.shape[:1], routing.top_k), dtype=torch.int64, device=scores.device)
    ops.top_k(ranked.contiguous(), bias=bias, out=chosen)
    return chosen


def _in_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """bool (T, E): the experts of the groups that a token may choose of."""
    grouped = ranked.unflatten(-1, (routing.num_groups, -1))
    best = grouped.topk(min(BEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(-1)
    groups = best.topk(routing.top_groups, dim=-1).indices
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, groups, True)
    return allowed.unsqueeze(-1).expand_as(grouped).flatten(-2)


def probabilities_of(scores: Tensor, experts: Tensor, routing: Routing) -> Tensor:
    """f32 (T, k), by which the outputs of the chosen `experts` are weighted; differentiable by `scores`."""
    chosen = scores.gather(-1, experts)
    if routing.normalizes:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
    return chosen * routing.scaling_factor


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """f32 (E,): how many tokens chose each expert; exact below 2^24."""
    chosen = torch.zeros(experts.shape[0], num_experts, dtype=torch.float32, device=experts.device)
    return chosen.scatter_(-1, experts, 1.0).sum(0)


def balancing_loss(scores: Tensor, counts: Tensor, routing: Routing) -> Tensor:
    """Scalar f32: coefficient * E * sum over experts of f * P, which is the coefficient where all are chosen alike.

    f is the part of the choices that fell on an expert, P its mean score, scores adding up to one. Fedus et al.,
    Switch Transformers, arXiv:2101.03961, equations 4 to 6; for several choices and for sigmoid scores as in
    DeepSeek-V3, equations 17 to 20, over all tokens at hand. The gradient goes through P.
    """
    tokens = scores.shape[0]
    if routing.score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + TINY)
    parts = counts.detach() / max(tokens * routing.top_k, 1)
    means = scores.sum(0) / max(tokens, 1)
    return routing.aux_loss_coefficient * routing.num_experts * (parts * means).sum()


def next_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """f32 (E,): the bias raised by `rate` for experts that were chosen less than the mean, lowered for the others.

    Wang et al., Auxiliary-loss-free load balancing, arXiv:2408.15664, algorithm 1.
    """
    return bias + rate * torch.sign(counts.mean() - counts)
