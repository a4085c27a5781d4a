"""Modules that multiply in the formats of a recipe."""

from te_dist.nn.group_tables import GroupTable, group_table
from te_dist.nn.grouped_linear import GroupedLinear
from te_dist.nn.layernorm_linear import LayerNormLinear
from te_dist.nn.layernorm_mlp import LayerNormMLP
from te_dist.nn.linear import Linear
from te_dist.nn.moe import ExpertParallel, MoE, Routing, scale_aux_losses, update_expert_biases
from te_dist.nn.norms import LayerNorm, RMSNorm
from te_dist.nn.preparation import prepare
from te_dist.nn.site import LinearSite

__all__ = [
    "ExpertParallel",
    "GroupTable",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearSite",
    "MoE",
    "RMSNorm",
    "Routing",
    "group_table",
    "prepare",
    "scale_aux_losses",
    "update_expert_biases",
]
