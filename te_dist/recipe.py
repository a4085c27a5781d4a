"""Recipes: by its role in a matrix multiplication, which format a tensor is quantized into.

A recipe is a frozen value without anything live on it. It answers with quantizers, or with a request for delayed
scaling, whose history the module that uses the tensor keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar

from te_dist.elsewhere import Elsewhere, leads
from te_dist.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dist.scaling.history import DelayedScalingRequest

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizerRole",
    "Recipe",
]

Fp8Name = Literal["e4m3", "e5m2"]
TensorType = Literal["input", "weight", "grad_output"]
Choice = Literal["none", "weights", "activations", "all"]
Dims = Literal[1, 2]

_Made = TypeVar("_Made", bound=type)


class Format(Enum):
    """8-bit type of forward and of gradients: (forward, gradients)."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")  # gradients need range more than precision

    _value_: tuple[Fp8Name, Fp8Name]

    def __repr__(self) -> str:
        return f"Format.{self.name}"  # as it is written

    def of(self, tensor_type: TensorType) -> Fp8Name:
        """ "e4m3" or "e5m2" for a tensor of this role."""
        return self.value[tensor_type == "grad_output"]


@dataclass(frozen=True)
class QuantizerRole:
    """A tensor's part in a module.

    Attributes:
        module_type: "linear", or what another module calls itself.
        tensor_type: "input", "weight" or "grad_output" of a matrix multiplication.
        name: the module's, with that of the layer inside it where there are several ("mlp.fc1").
    """

    module_type: str
    tensor_type: TensorType
    name: str = ""


# Of recipes; where one has a field of such a name, it is that.
_NO_ATTENTION = False, "attention is torch's, in high precision, whatever the recipe; leave it out"
_OF_RECIPES: Elsewhere = {
    "interval": (1, "scales move once per backward pass; leave it out"),
    "margin": (0, "scales of tiles leave no powers of two unused; leave it out"),
    "override_linear_precision": (
        (False, False, False),
        "take a CustomRecipe, in which the te_dist.IdentityQuantizer of a te_dist.HybridQuantizer leaves a direction "
        "in high precision",
    ),
    "scaling_factor_compute_algo": (None, "there is one rule for scales; DelayedScaling(margin=...) lowers them"),
    "backward_override": (None, "take a CustomRecipe, whose te_dist.HybridQuantizer says what backward multiplies"),
    "fp4_format": (None, "values of NVFP4 are E2M1; leave it out"),
    "fp8_format": (Format.E4M3, "scales of NVFP4 are E4M3; leave it out"),
    "fp8_dpa": _NO_ATTENTION,
    "fp8_mha": _NO_ATTENTION,
    **dict.fromkeys(
        ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"),
        (None, "forward is summed in the tensor cores' own precision, gradients in fp32; leave it out"),
    ),
}


def _leading(made: _Made) -> _Made:
    """Has the constructor of a recipe `refuse` keywords of TransformerEngine's."""
    made.__init__ = leads(_OF_RECIPES, name=made.__name__)(made.__init__)
    return made


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes."""

    def __post_init__(self) -> None:
        chosen = getattr(self, "fp8_format", Format.HYBRID)
        if not isinstance(chosen, Format):
            names = ", ".join(str(each) for each in Format)
            raise TypeError(f"{type(self).__name__}: fp8_format: got {chosen!r}, wanted one of {names}")

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        """How a tensor of this role is quantized."""
        raise NotImplementedError


@_leading
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 by one scale per tensor, taken from the largest magnitudes of past steps.

    Inputs and gradients keep histories. Weights are scaled by their present amax: they change by requantization only,
    which finds it anyway.

    Attributes:
        margin: the scale leaves this many powers of two unused.
        fp8_format: 8-bit types of forward and gradients.
        amax_history_len: steps a history covers.
        amax_compute_algo: the largest amax of the history, or the last one.
        reduce_amax: take the largest amax over the group `autocast` is given.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._request("input")

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        if role.tensor_type == "weight":
            return Float8CurrentScalingQuantizer(self.fp8_format.of("weight"))
        return self._request(role.tensor_type)

    def _request(self, tensor_type: TensorType) -> DelayedScalingRequest:
        fp8 = self.fp8_format.of(tensor_type)
        return DelayedScalingRequest(fp8, self.margin, self.amax_history_len, self.amax_compute_algo, self.reduce_amax)


@_leading
@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 by one scale per tensor, taken from the tensor itself.

    Attributes:
        fp8_format: 8-bit types of forward and gradients.
        use_power_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of every amax.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            self.fp8_format.of(role.tensor_type),
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=self.amax_epsilon,
        )


@_leading
@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with fp32 scales for runs of 128 values, or squares of 128 x 128.

    Attributes:
        use_f32_scales: any fp32 number is a scale, instead of powers of two.
        fp8_format: 8-bit types of forward and gradients.
        x_block_scaling_dim: 1 (runs) or 2 (squares) for inputs.
        w_block_scaling_dim: the same for weights.
        grad_block_scaling_dim: the same for gradients.
        amax_epsilon: lower bound of every amax.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: Dims = 1
    w_block_scaling_dim: Dims = 2
    grad_block_scaling_dim: Dims = 1
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if any(dim not in (1, 2) for dim in dims):
            raise ValueError(f"block scaling dims of input, weight and gradient are 1 or 2, got {dims}")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        dims: dict[TensorType, Dims] = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return Float8BlockQuantizer(
            self.fp8_format.of(role.tensor_type),
            force_pow_2_scales=not self.use_f32_scales,
            amax_epsilon=self.amax_epsilon,
            block_scaling_dim=dims[role.tensor_type],
        )


@_leading
@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale byte for runs of 32 values.

    Attributes:
        fp8_format: 8-bit types of forward and gradients.
        enable_2d_quantization: squares of 32 x 32 for weights, the same values in forward and backward.
    """

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        squares = self.enable_2d_quantization and role.tensor_type == "weight"
        return MXFP8Quantizer(self.fp8_format.of(role.tensor_type), with_2d_quantization=squares)


@_leading
@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Four-bit values: squares for weights; inputs and gradients transformed for wgrad, gradients rounded by chance.

    Attributes:
        disable_rht: no Hadamard transform of the columnwise inputs and gradients.
        disable_stochastic_rounding: gradients to nearest.
        disable_2d_quantization: runs instead of squares for weights.
        row_scaled_activation: inputs have an amax per row in forward.
        nvfp4_4over6: which tensors choose per block whether the largest value maps to 6 or to 4. Gradients never do.
        nvfp4_4over6_e4m3_use_256: which of those have 256 instead of 448 as their largest scale byte.
        nvfp4_4over6_err_mode: error by which 4 or 6 is chosen.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: Choice = "none"
    nvfp4_4over6_e4m3_use_256: Choice = "all"
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"

    def __post_init__(self) -> None:
        for choice in (self.nvfp4_4over6, self.nvfp4_4over6_e4m3_use_256):
            if choice not in ("none", "weights", "activations", "all"):
                raise ValueError(f'nvfp4_4over6 is "none", "weights", "activations" or "all", got {choice!r}')
        if self._chosen("input", self.nvfp4_4over6) and not self.disable_rht:
            raise ValueError("nvfp4_4over6 of activations compares exact errors: set disable_rht=True with it")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        kind = role.tensor_type
        over = self._chosen(kind, self.nvfp4_4over6)
        return NVFP4Quantizer(
            with_rht=not self.disable_rht and kind != "weight",
            with_2d_quantization=not self.disable_2d_quantization and kind == "weight",
            stochastic_rounding=not self.disable_stochastic_rounding and kind == "grad_output",
            row_scaled_nvfp4=self.row_scaled_activation and kind == "input",
            nvfp4_use_4over6=over,
            nvfp4_e4m3_max=256 if over and self._chosen(kind, self.nvfp4_4over6_e4m3_use_256) else 448,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode,
        )

    @staticmethod
    def _chosen(kind: TensorType, choice: Choice) -> bool:
        return choice in {"weight": ("weights", "all"), "input": ("activations", "all")}.get(kind, ())


# Types that answer by their fields and by what a tensor is, whatever the module is called: all maps have one answer.
UNIFORM = frozenset((DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling))


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Whatever `qfactory` answers.

    Attributes:
        qfactory: from a role to a quantizer or a `DelayedScalingRequest`; asked once for every tensor of a module. It
            must give equal answers to equal questions.

    Raises:
        TypeError: it is a quantizer itself, or no function.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.qfactory, Quantizer) or not callable(self.qfactory):
            raise TypeError(
                f"qfactory: got {self.qfactory!r}, wanted a function from a QuantizerRole to a quantizer, as "
                "lambda role: Float8CurrentScalingQuantizer()"
            )

    def quantizer(self, role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        answer = self.qfactory(role)
        if not isinstance(answer, Quantizer | DelayedScalingRequest):
            raise ValueError(f"qfactory({role}) gave {answer!r}; a quantizer or a DelayedScalingRequest is wanted")
        return answer
