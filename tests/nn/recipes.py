"""Recipes for tests, each with how far its products may be from exact ones, and exact products of what it quantizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from te_dist import recipe
from te_dist.formats import Direction
from te_dist.quantizers import (
    Float8BlockQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dist.recipe import QuantizerRole, Recipe
from te_dist.scaling.history import DelayedScalingRequest

ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE
# Every recipe as its users first meet it.
DEFAULTS = [
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(),
]


@dataclass(frozen=True)
class Case:
    """A recipe under test.

    Attributes:
        recipe: deterministic, so that two runs can be compared.
        error: largest error of a product relative to the exact one, by norm, for normal values.
    """

    recipe: Recipe
    error: float


def mxfp8_forward_nvfp4_backward(role: QuantizerRole) -> Quantizer:
    """Hybrids of independent directions; gradients are read in backward only."""
    if role.tensor_type == "grad_output":
        return NVFP4Quantizer()
    return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=NVFP4Quantizer())


def high_precision_backward(role: QuantizerRole) -> Quantizer:
    """FP8 in forward; backward multiplies high-precision gradients with the values forward has seen."""
    if role.tensor_type == "grad_output":
        return IdentityQuantizer()
    return HybridQuantizer(
        rowwise_quantizer=Float8BlockQuantizer(block_scaling_dim=1),
        columnwise_quantizer=IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    )


def delayed_inputs_only(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    """Histories for one tensor of three."""
    return DelayedScalingRequest(amax_history_len=3) if role.tensor_type == "input" else Float8BlockQuantizer()


CASES = {
    "delayed": Case(recipe.DelayedScaling(amax_history_len=4), 0.08),
    "current": Case(recipe.Float8CurrentScaling(), 0.08),
    "current_e4m3": Case(recipe.Float8CurrentScaling(recipe.Format.E4M3, use_power_2_scales=True), 0.06),
    "block": Case(recipe.Float8BlockScaling(), 0.06),
    "block_2d": Case(recipe.Float8BlockScaling(use_f32_scales=True, grad_block_scaling_dim=2), 0.06),
    "mxfp8": Case(recipe.MXFP8BlockScaling(), 0.06),
    "mxfp8_2d": Case(recipe.MXFP8BlockScaling(enable_2d_quantization=True), 0.06),
    "nvfp4": Case(recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), 0.2),
    "nvfp4_plain": Case(
        recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True), 0.2
    ),
    "nvfp4_4over6": Case(
        recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"), 0.2
    ),
    "nvfp4_row_scaled": Case(
        recipe.NVFP4BlockScaling(row_scaled_activation=True, disable_stochastic_rounding=True), 0.2
    ),
    "hybrid": Case(recipe.CustomRecipe(mxfp8_forward_nvfp4_backward), 0.2),
    "high_precision_backward": Case(recipe.CustomRecipe(high_precision_backward), 0.06),
    "delayed_inputs_only": Case(recipe.CustomRecipe(delayed_inputs_only), 0.06),
}


def quantizer(made_by: Recipe, tensor_type: str) -> Quantizer:
    """The recipe's quantizer for a role; for delayed scaling one with the scale histories start from."""
    answer = made_by.quantizer(QuantizerRole("linear", tensor_type))
    if not isinstance(answer, DelayedScalingRequest):
        return answer
    return DelayedAtStart(answer.fp8)


class DelayedAtStart(Quantizer):
    """Delayed scaling with a scale of one."""

    def __init__(self, fp8: str) -> None:
        super().__init__()
        self.fp8 = fp8

    def values(self, x: Tensor) -> Tensor:
        """What `x` becomes."""
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[self.fp8]
        largest = torch.finfo(dtype).max
        return x.float().clamp(-largest, largest).to(dtype).double()


def operand(made_by: Recipe, tensor_type: str, x: Tensor, direction: Direction) -> Tensor:
    """What a product reads of `x` (rows, cols) in fp64, rows padded with zeros to a multiple of 16."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16))
    found = quantizer(made_by, tensor_type)
    if isinstance(found, DelayedAtStart):
        return found.values(padded)
    return found.encode(padded, *found.declare(x.dtype).directions).operand(direction, torch.float32).double()


def exact_products(made_by: Recipe, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of `x` and gradient of `weight` in fp64, from the operands as the recipe quantizes them."""
    forward, transposed = (operand(made_by, "weight", weight, d)[: len(weight)] for d in (ROWWISE, COLUMNWISE))
    out = operand(made_by, "input", x, ROWWISE) @ forward.t()
    grad_x = operand(made_by, "grad_output", grad, ROWWISE) @ transposed
    grad_w = operand(made_by, "grad_output", grad, COLUMNWISE).t() @ operand(made_by, "input", x, COLUMNWISE)
    return out[: len(x)], grad_x[: len(x)], grad_w


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm().clamp_min(1e-30))
