"""Mixtures of experts: router, sorting of rows by expert, experts over ranks, and the block of all of it."""

from te_dist.nn.moe.block import ExpertParallel, MoE
from te_dist.nn.moe.experts import GroupedMLP, SwiGluMLP
from te_dist.nn.moe.permutation import Permutation, permute, permute_probabilities, sort_by_expert, unpermute
from te_dist.nn.moe.router import Routed, TopKRouter, attach_loss, scale_aux_losses, update_expert_biases
from te_dist.nn.moe.routing import Routing
from te_dist.nn.moe.stacked import StackedExperts

__all__ = [
    "ExpertParallel",
    "GroupedMLP",
    "MoE",
    "SwiGluMLP",
    "Permutation",
    "Routed",
    "Routing",
    "StackedExperts",
    "TopKRouter",
    "attach_loss",
    "permute",
    "permute_probabilities",
    "scale_aux_losses",
    "sort_by_expert",
    "unpermute",
    "update_expert_biases",
]
