"""StackedExperts: the experts of models that somebody else wrote, in their place and under their names."""

from __future__ import annotations

import math
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist.nn import rehearsal
from te_dist.nn.grouped_linear import each_member
from te_dist.nn.grouped_products import Given
from te_dist.nn.grouped_site import PLAIN, GroupedSite
from te_dist.nn.module import QuantizedModule, weight_of
from te_dist.nn.moe.dispatch import Arrived
from te_dist.nn.moe.experts import TwoEach, are_traceable, multiply, table_of
from te_dist.nn.moe.permutation import permute_probabilities, sort_by_expert
from te_dist.nn.options import ModuleOptions, read, spells_out
from te_dist.nn.site import without_values

NAMES: tuple[str, str] = ("gate_up_proj", "down_proj")
_MATRICES = 3  # dimensions of a parameter that stacks them


class StackedExperts(QuantizedModule):
    """`y = sum over the chosen experts of weight * down(silu(gate) * up)`, gates and ups by `gate_up_proj`.

    What transformers (from 5.0 on) keeps as `experts` beside a router, with its names and its forward; computed as
    `GroupedMLP` is, without reading on the host how many rows an expert has.

    Attributes:
        gate_up_proj: (num_experts, 2 intermediate_dim, hidden_dim), gates first.
        down_proj: (num_experts, hidden_dim, intermediate_dim).
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    @spells_out(ModuleOptions)
    def __init__(
        self, num_experts: int, hidden_dim: int, intermediate_dim: int, **options: Unpack[ModuleOptions]
    ) -> None:
        """See `ModuleOptions` for the keywords; raises as `GroupedLinear` does."""
        known = read(dict(options), ModuleOptions, "StackedExperts")
        super().__init__(known)
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        prefix = f"{self.name}." if self.name else ""
        self.fc1 = GroupedSite(num_experts, hidden_dim, 2 * intermediate_dim, name=f"{prefix}gate_up_proj")
        self.fc2 = GroupedSite(num_experts, intermediate_dim, hidden_dim, name=f"{prefix}down_proj")
        for name, site in zip(NAMES, self._sites, strict=True):
            bound = 1 / math.sqrt(site.in_features)
            fill = known.get("init_method") or partial(nn.init.uniform_, a=-bound, b=bound)
            self._fillers[name] = partial(each_member, fill, dims=_MATRICES)
            shape = num_experts, site.out_features, site.in_features
            values = torch.empty(shape, dtype=self.params_dtype, device=self._device)
            self.init_parameter(name, values)
            self.register_parameter(name, weight_of(site, values))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(..., hidden_dim) of `hidden_states` of that shape.

        Args:
            hidden_states: T tokens.
            top_k_index: int64 (T, k), experts of every token; numbers that are none stand for nobody.
            top_k_weights: (T, k), by which what they make is multiplied, in fp32; differentiable.

        Raises:
            ValueError: choices and weights are not of T tokens, k of each, or choices are no whole numbers.
        """
        if torch.compiler.is_compiling() and not are_traceable(*self._maps, x=hidden_states):
            return self._outside_of_graphs(hidden_states, top_k_index, top_k_weights)
        return self._mix(hidden_states, top_k_index, top_k_weights)

    def rehearse(self, dtype: torch.dtype | None) -> None:
        """See `rehearsal.rehearse`."""
        rehearsal.rehearse(TwoEach(self, self.num_experts, StackedExperts._of_arrived), dtype, groups=self.num_experts)

    def _made_with(self) -> str:
        return f"{self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}"

    def _mix(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        shape, weights = top_k_index.shape, top_k_weights.shape
        if shape != weights or len(shape) != 2 or shape[0] != x.shape[0] or top_k_index.is_floating_point():  # noqa: PLR2004
            raise ValueError(
                f"{self.name or 'StackedExperts'}: got choices {tuple(shape)} of {top_k_index.dtype} and weights "
                f"{tuple(weights)} for {x.shape[0]} tokens, wanted whole numbers of experts and their weights, both "
                "(tokens, k): of all scores of a router take those of its choices"
            )
        by_expert = sort_by_expert(top_k_index, self.num_experts)
        arrived = Arrived(x, by_expert, permute_probabilities(top_k_weights.float(), by_expert))
        return self._of_arrived(x, arrived).view(hidden_states.shape)

    @torch.compiler.disable(
        reason="these experts keep histories of delayed scaling in Python; leave out fullgraph=True: what surrounds "
        "them is compiled"
    )
    def _outside_of_graphs(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self._mix(hidden_states, top_k_index, top_k_weights)

    def _of_arrived(self, rows: Tensor, arrived: Arrived) -> Tensor:
        maps = self._maps
        if maps[0][1].is_meta and not rows.is_meta:
            raise without_values(self.name or "StackedExperts")
        return multiply(maps, rows, arrived, given=Given(table_of(arrived), PLAIN))

    @property
    def _maps(self) -> tuple[tuple[GroupedSite, Tensor], ...]:
        """Both, with the weight of each, or what this rank has of it."""
        return tuple((site, _local(getattr(self, name))) for site, name in zip(self._sites, NAMES, strict=True))

    @property
    def _sites(self) -> tuple[GroupedSite, GroupedSite]:
        return self.fc1, self.fc2


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
