"""How a router scores, chooses and balances experts: its options, and the formulas of balancing.

Shapes: T tokens, E experts, k experts of a token, G groups of experts. All scores are fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import torch
from torch import Tensor

from te_dist.kernels.routing import MOST_GROUPS
from te_dist.kernels.sorting import MOST_EXPERTS
from te_dist.ops.route import RoutingRule


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
        aux_loss_coefficient: of the balancing loss, see `balancing_weights` (HF router_aux_loss_coef); 0 for none.
        bias_update_rate: of the balancing bias, see `next_bias` (MC moe_router_bias_update_rate, torchtitan
            load_balance_coeff); 0 for no bias.
        num_groups: G, of E / G experts next to each other, from which a token chooses in two steps (HF n_group); 1 for
            one step.
        top_groups: groups that a token may choose experts of (HF topk_group): those whose two best experts have the
            largest sum (DeepSeek-V3, section 2.1.2, as its published code ranks groups).
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
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            if not isinstance(getattr(self, name), Integral):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, wanted an int")
        for name in ("scaling_factor", "aux_loss_coefficient", "bias_update_rate"):
            found = getattr(self, name)
            if not isinstance(found, Real) or not math.isfinite(found):
                raise TypeError(f"{name}: got {found!r}, wanted a finite float")
        if not 1 <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(f"num_experts: got {self.num_experts}, wanted 1 to {MOST_EXPERTS}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k: got {self.top_k} of {self.num_experts} experts, wanted 1 to {self.num_experts}")
        if self.score_function not in ("softmax", "sigmoid"):
            raise ValueError(f'score_function: got {self.score_function!r}, wanted "softmax" or "sigmoid"')
        for name in ("aux_loss_coefficient", "bias_update_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted 0 (none) or a positive number")
        if not 1 <= self.num_groups <= MOST_GROUPS or self.num_experts % self.num_groups:
            wanted = f"a divisor of {self.num_experts} experts, at most {MOST_GROUPS}"
            raise ValueError(f"num_groups: got {self.num_groups}, wanted {wanted}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups: got {self.top_groups} of {self.num_groups} groups, wanted 1 up to that")
        reachable = self.top_groups * self.num_experts // self.num_groups
        if reachable < self.top_k:
            raise ValueError(
                f"top_k: got {self.top_k}, but {self.top_groups} of {self.num_groups} groups hold {reachable} experts; "
                "raise top_groups, or lower top_k"
            )

    @property
    def rule(self) -> RoutingRule:
        """How experts and probabilities come of logits."""
        return RoutingRule(
            self.score_function, self.normalizes, self.num_groups, self.top_groups, float(self.scaling_factor)
        )


def balancing_weights(counts: Tensor, tokens: int, routing: Routing) -> Tensor:
    """f32 (E,): what the balancing loss multiplies the sum of every expert's scores by; `counts` f32 (E,): of choices.

    The loss is coefficient * E * sum over experts of f * P, which is the coefficient where all are chosen alike. f is
    the part of the choices that fell on an expert, P its mean score, scores adding up to one; the gradient goes through
    P. Fedus et al., Switch Transformers, arXiv:2101.03961, equations 4 to 6; for several choices and for sigmoid scores
    as in DeepSeek-V3, equations 17 to 20, over all tokens at hand.
    """
    return counts * (
        routing.aux_loss_coefficient * routing.num_experts / max(tokens * routing.top_k, 1) / max(tokens, 1)
    )


def next_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """f32 (E,): the bias raised by `rate` for experts that were chosen less than the mean, lowered for the others.

    Wang et al., Auxiliary-loss-free load balancing, arXiv:2408.15664, algorithm 1.
    """
    return bias + rate * torch.sign(counts.mean() - counts)
