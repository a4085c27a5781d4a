"""Quantized tensors (FP8, MXFP8, NVFP4) as first-class citizens of PyTorch's distributed stack."""

from typing import TYPE_CHECKING

import torch  # noqa: F401  (its libraries are loaded before those of te_dist._C)

try:
    import te_dist._C as _C  # noqa: F401  (this form tells what is not there from what does not load)
except ModuleNotFoundError as error:
    if error.name != "te_dist._C":
        raise
    raise ImportError(
        f"{__path__[0]} holds the sources of te_dist and nothing compiled: leave the folder around it for another, in "
        "which Python finds the te_dist that pip installed, or run `make build` and take its .venv"
    ) from None

from te_dist import (
    checkpoints,
    flat_shards,
    fsdp2,
    grouped,
    nn,
    offload,
    optim,
    quantizers,
    recipe,
    recompute,
    tensor_parallel,
)
from te_dist.context import autocast, quantized_model_init
from te_dist.convert import convert
from te_dist.flat_shards import post_all_gather_processing, quantize_master_weights, replace_raw_data
from te_dist.grouped import GroupedTensor
from te_dist.nn import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, prepare
from te_dist.offload import get_cpu_offload_context
from te_dist.pickling import allow_loading
from te_dist.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizedTensor,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dist.recompute import checkpoint
from te_dist.tensor import QuantizedTensor

allow_loading()

__version__ = "0.1.0"

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "GroupedLinear",
    "GroupedTensor",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "checkpoints",
    "convert",
    "flat_shards",
    "fsdp2",
    "get_cpu_offload_context",
    "grouped",
    "nn",
    "offload",
    "optim",
    "post_all_gather_processing",
    "prepare",
    "quantize_master_weights",
    "quantized_model_init",
    "quantizers",
    "recipe",
    "recompute",
    "replace_raw_data",
    "tensor_parallel",
]

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_COLLECTIVES = "nothing: collectives are torch's own, without user buffers"
_ANY_SIZE = "nothing: groups of a GroupedLinear may have any size"
_REFUSES = "te_dist.prepare(model, recipe), which refuses what its device cannot compute"
_OF_RECIPES = (
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
)
_OF_TRANSFORMER_ENGINE = {
    "fp8_autocast": "te_dist.autocast(recipe=...)",
    "fp8_model_init": "te_dist.quantized_model_init(recipe=...)",
    "common": "te_dist.recipe",
    "get_default_recipe": "a recipe of te_dist.recipe, by its name",
    **{name: f"te_dist.recipe.{name}" for name in _OF_RECIPES},
    "TransformerLayer": f"a module of your own, of te_dist.LayerNormLinear, {_ATTENTION}, te_dist.Linear and "
    "te_dist.LayerNormMLP",
    "MultiheadAttention": f"te_dist.LayerNormLinear, {_ATTENTION} and te_dist.Linear",
    "DotProductAttention": _ATTENTION,
    "attention": _ATTENTION,
    "module": "te_dist.nn",
    "moe_permute": "te_dist.nn.moe.permute",
    "moe_permute_with_probs": "te_dist.nn.moe.permute, and te_dist.nn.moe.permute_probabilities",
    "moe_permute_and_pad_with_probs": "te_dist.nn.moe.permute, and te_dist.nn.moe.permute_probabilities: no group has "
    "to be padded",
    "moe_unpermute": "te_dist.nn.moe.unpermute",
    "moe_sort_chunks_by_index": "te_dist.nn.moe.ExpertParallel, which sorts what arrives",
    "moe_sort_chunks_by_index_with_probs": "te_dist.nn.moe.ExpertParallel, which sorts what arrives",
    "permutation": "te_dist.nn.moe",
    "Fp8Padding": _ANY_SIZE,
    "Fp8Unpadding": _ANY_SIZE,
    "distributed": "te_dist.checkpoint to recompute, te_dist.fsdp2.fully_shard to shard",
    "CudaRNGStatesTracker": "te_dist.fsdp2.materialize, which initializes alike on every mesh",
    "initialize_ub": _COLLECTIVES,
    "destroy_ub": _COLLECTIVES,
    "UserBufferQuantizationMode": _COLLECTIVES,
    "parallel_cross_entropy": "torch.distributed.tensor.parallel.loss_parallel",
    "optimizers": "te_dist.optim",
    "FusedAdam": "te_dist.optim.FusedAdam",
    "FusedSGD": "te_dist.optim.MasterWeights around torch.optim.SGD",
    "cpu_offload": "te_dist.offload",
    "mark_not_offload": "te_dist.offload.mark_not_offload",
    "ManualOffloadSynchronizer": "nothing: te_dist.offload orders its copies by events",
    "make_graphed_callables": "torch.cuda.make_graphed_callables",
    "onnx_export": "torch.export.export",
    "is_fp8_available": _REFUSES,
    "is_fp8_block_scaling_available": _REFUSES,
    "is_mxfp8_available": _REFUSES,
    "is_nvfp4_available": _REFUSES,
    "Quantizer": "te_dist.quantizers.Quantizer",
    "QuantizedTensorStorage": "te_dist.tensor.QuantizedStorage",
    **dict.fromkeys(
        ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor"),
        "te_dist.QuantizedTensor, of any format",
    ),
}

if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> object:
        """Raises: nothing is made up. Names that TransformerEngine has for what is here lead to it."""
        here = _OF_TRANSFORMER_ENGINE.get(name)
        hint = "" if here is None else f"; in the place of TransformerEngine's {name} take {here}"
        raise AttributeError(f"module 'te_dist' has no attribute {name!r}{hint}")
