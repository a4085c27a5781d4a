"""Keywords of the modules' constructors, under TransformerEngine's names; those that are not here say where to go."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor

from te_dist.elsewhere import Elsewhere, refuse

InitMethod = Callable[[Tensor], Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class ModuleOptions(TypedDict, total=False):
    """What every module takes.

    params_dtype: nominal dtype of the parameters, and dtype of their gradients; torch's default dtype by default.
    device: where they are made; torch's default device by default.
    init_method: fills a weight in place, biases start at zero; by default both start as `torch.nn.Linear` does.
    name: of this module, for error messages and for the roles a `CustomRecipe` sees.
    """

    params_dtype: torch.dtype | None
    device: torch.device | str | None
    init_method: InitMethod | None
    name: str | None


class LinearOptions(ModuleOptions, total=False):
    """Keywords of `Linear`: those of `ModuleOptions`, and

    return_bias: leave the bias to the caller: `forward` returns (output without it, bias).
    fuse_wgrad_accumulation: inside of `autocast`, the product adds the gradient of a weight to its `main_grad` (fp32,
        of its shape, made by the caller), and none is returned to autograd. Not for weights that FSDP2 or DTensor hold.
    """

    return_bias: bool
    fuse_wgrad_accumulation: bool


class NormOptions(TypedDict, total=False):
    """Keywords of a module that normalizes first.

    eps: added under the root.
    normalization: "LayerNorm" or "RMSNorm".
    zero_centered_gamma: the norm's weight is stored less one and starts at zero.
    return_layernorm_output: `forward` returns (output, normalized input).
    """

    eps: float
    normalization: Literal["LayerNorm", "RMSNorm"]
    zero_centered_gamma: bool
    return_layernorm_output: bool


class LayerNormLinearOptions(NormOptions, LinearOptions, total=False):
    """Keywords of `LayerNormLinear`: those of `NormOptions` and `LinearOptions`."""


class LayerNormMLPOptions(NormOptions, LinearOptions, total=False):
    """Keywords of `LayerNormMLP`: those of `NormOptions` and `LinearOptions`, and

    activation: a name of `te_dist.nn.activations`.
    output_layer_init_method: fills the second weight; `init_method` by default.
    """

    activation: str
    output_layer_init_method: InitMethod | None


class NoOptions(TypedDict):
    """Keywords of a function that takes none, and says so of those in the place of which there is something here."""


_PARALLEL = "apply a style of te_dist.tensor_parallel to the finished module"
_DELAYED_WGRAD = "gradients are returned to autograd in params_dtype, so that FSDP2 and DTensor see them"
_OVERLAP = "te_dist has no userbuffers: collectives are torch's own"

# Keywords of TransformerEngine and torch that te_dist does not take -> (what asks for nothing, what to do instead).
REFUSED: Elsewhere = {
    "dtype": (None, "its name is params_dtype here, as in TransformerEngine"),
    "sequence_parallel": (False, _PARALLEL),
    "tp_group": (None, _PARALLEL),
    "tp_size": (1, _PARALLEL),
    "parallel_mode": (None, _PARALLEL),
    "set_parallel_mode": (False, _PARALLEL),
    "get_rng_state_tracker": (None, "fsdp2.materialize initializes alike on every mesh"),
    "rng_tracker_name": (None, "fsdp2.materialize initializes alike on every mesh"),
    "use_grouped_tensor": (None, "products in groups read their sizes on the device, always; leave it out"),
    "parameters_split": (None, "make one Linear for each part"),
    "delay_wgrad_compute": (False, _DELAYED_WGRAD),
    "return_layernorm_output_gathered": (False, _PARALLEL),
    "symmetric_ar_type": (None, _OVERLAP),
    "ub_overlap_ag": (False, _OVERLAP),
    "ub_overlap_rs": (False, _OVERLAP),
    "ub_overlap_rs_dgrad": (False, _OVERLAP),
    "ub_bulk_dgrad": (False, _OVERLAP),
    "ub_bulk_wgrad": (False, _OVERLAP),
    "ub_name": (None, _OVERLAP),
    "save_original_input": (False, "wrap the layer in te_dist.checkpoint to recompute instead of saving"),
    "checkpoint": (False, "wrap the layer in te_dist.checkpoint"),
    "activation_params": (None, "te_dist's activations have no parameters"),
    "seq_length": (None, "shapes are taken from the input"),
    "micro_batch_size": (None, "shapes are taken from the input"),
}

# The same of forward passes, which `te_dist.elsewhere.refuse` reads.
REFUSED_IN_FORWARD: Elsewhere = {
    "is_first_microbatch": (
        None,
        "leave it out; weights made inside of te_dist.quantized_model_init need no cache over micro batches, and plain "
        "ones are quantized in every pass; GroupedLinear and MoE take it",
    ),
    "fp8_output": (False, "outputs are in high precision, and whoever multiplies them quantizes them; leave it out"),
    "fp8_grad": (False, "gradients of inputs are in high precision; leave it out"),
}


class _Unsaid:
    """The default of a keyword, which the module's docstring tells; written as in stubs."""

    def __repr__(self) -> str:
        return "..."


def spells_out(known: type) -> Callable[[_Function], _Function]:
    """Has `inspect.signature`, `help` and `nn.utils.skip_init` see a function with the keywords of a TypedDict, in the
    place of `**options`.
    """

    def spelled_out(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_Unsaid(), annotation=getattr(of, "__forward_arg__", of)
            )
            for name, of in known.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return spelled_out


def read(options: dict[str, Any], known: type, module: str) -> dict[str, Any]:
    """`options` that a TypedDict `known` names.

    Raises:
        ValueError: a keyword of TransformerEngine or torch that te_dist does not take, unless it asks for nothing; or
            `params_dtype` holds no gradients.
        TypeError: any other keyword, or `params_dtype` is no dtype.
    """
    taken = {}
    for name, value in options.items():
        if name in known.__annotations__:
            taken[name] = value
        elif name not in REFUSED:
            raise TypeError(f"{module} takes no keyword {name!r}; it takes {sorted(known.__annotations__)}")
        else:
            refuse({name: value}, REFUSED, name=module)
    _check_dtype(taken.get("params_dtype"), module)
    return taken


def _check_dtype(dtype: Any, module: str) -> None:
    wanted = "wanted a dtype of 16 bits or more in which gradients are computed, as torch.bfloat16"
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{module}: params_dtype: got {dtype!r}, {wanted}")
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize == 1):
        raise ValueError(
            f"{module}: params_dtype: got {dtype}, {wanted}; weights are stored in fewer bits inside of "
            "te_dist.quantized_model_init(recipe=...)"
        )
