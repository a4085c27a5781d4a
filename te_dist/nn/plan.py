"""How the operands of a linear map are quantized, and the tapes that maps which compute alike have in common."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from te_dist.kernels.tape import Tapes
from te_dist.ops.quantize_nvfp4 import TILE as NVFP4_TILE
from te_dist.quantizers import Quantizer
from te_dist.recipe import UNIFORM, Recipe
from te_dist.scaling.delayed import DelayedScalingState

MAX_SHARED = 1024  # tapes of all maps that compute alike


@dataclass(frozen=True)
class Plan:
    """How the operands of one linear map are quantized.

    Attributes:
        input, weight, grad_output: by role; `weight` for plain weights only.
        row_multiple: of which products take inputs and gradients, see [Note: Rows that do not fit] in products.py.
        fits_groups: whether inputs and gradients have columns as groups of rows have.
        moves: histories that the end of backward brings up to date.
        fuses_wgrad: whether the gradient of the weight is added to its `main_grad` by the product itself.
        tensors: those that the quantizers hold.
        scaled_by: ranks that keep scales of past steps in common.
        cut_over: of a map in a graph, ranks that tensor parallelism cuts it over.
        tapes: of this map, or of all that compute alike, see `plan_by`.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    row_multiple: int = 1
    fits_groups: bool = True
    moves: DelayedScalingState | None = None
    fuses_wgrad: bool = False
    tensors: tuple[Tensor, ...] = ()
    scaled_by: dist.ProcessGroup | None = None
    cut_over: dist.ProcessGroup | None = None
    tapes: Tapes = field(default_factory=Tapes, compare=False)

    @cached_property
    def takes_groups(self) -> bool:
        """Whether inputs and gradients, both of which a product sums over, may be quantized as rows of one group."""
        quantizers = self.input, self.grad_output
        known = all(isinstance(quantizer, Quantizer) and quantizer.takes_groups for quantizer in quantizers)
        return self.fits_groups and known

    def draws(self, *roles: str) -> bool:
        """Whether operands of these roles are rounded by chance."""
        return any(getattr(self, role).draws for role in roles)

    @property
    def reads_gradients_once(self) -> bool:
        """Whether gradients of the output are quantized in one pass, so that they may be computed there."""
        return isinstance(self.grad_output, Quantizer) and self.grad_output.reads_once


def plan_by(
    recipe: Recipe,
    module_type: str,
    quantizers: Mapping[str, Any],
    *,
    features: Sequence[int],
    row_multiple: int = 1,
    fuses_wgrad: bool = False,
) -> Plan:
    """A plan that follows from a recipe: `quantizers` are its answers for maps of this type, None where it has others.

    `features`: those of inputs and outputs.

    Maps of one recipe have their tapes in common. What the layers of a model are given for the first time, another
    number of rows for instance, is worked out in the first, recorded in the second and played in all others. A recipe
    that may answer by names leaves each map tapes of its own.
    """
    is_shared = type(recipe) in UNIFORM
    fits_groups = all(extent % NVFP4_TILE == 0 for extent in features)  # rounded by chance they have whole tiles
    options = dict[str, Any](row_multiple=row_multiple, fits_groups=fits_groups, fuses_wgrad=fuses_wgrad)
    tapes = _shared_tapes(recipe, module_type, *options.values()) if is_shared else Tapes()
    return Plan(**quantizers, **options, tapes=tapes)


@cache
def _shared_tapes(*_: Hashable) -> Tapes:
    return Tapes(MAX_SHARED)
