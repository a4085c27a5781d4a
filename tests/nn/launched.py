"""Kernels that linear maps and experts launch by the recipes as they come."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import te_dist as te
from te_dist import recipe
from te_dist.fsdp2.ahead import kernels_of
from te_dist.kernels.spec import Spec
from te_dist.nn.moe import MoE, Routing
from tests.nn.recipes import DEFAULTS

HYBRID = recipe.Format.HYBRID
RECIPES = [*DEFAULTS, recipe.Float8BlockScaling(fp8_format=HYBRID), recipe.MXFP8BlockScaling(fp8_format=HYBRID)]


def modules(dtype: torch.dtype) -> Iterator[nn.Module]:
    """Of every kind, with and without bias, on the meta device."""
    options = dict(params_dtype=dtype, device="meta")
    for bias in (False, True):
        yield te.Linear(1024, 2048, bias=bias, **options)
        yield te.LayerNormLinear(1024, 2048, bias=bias, **options)
        yield te.LayerNormLinear(1024, 2048, normalization="RMSNorm", bias=bias, **options)
        yield te.LayerNormMLP(1024, 2048, bias=bias, **options)
        yield te.LayerNormMLP(1024, 2048, activation="swiglu", bias=bias, **options)
        yield te.GroupedLinear(4, 1024, 2048, bias=bias, **options)
        yield te.LayerNormMLP(896, 1408, activation="swiglu", bias=bias, **options)  # odd multiples of 128
        yield te.GroupedLinear(4, 896, 1408, bias=bias, **options)
    yield MoE(1024, 1024, Routing(8, 2), shared_ffn_hidden_size=1024, **options)


def kernels(made_by: recipe.Recipe, dtype: torch.dtype, *, quantized: bool) -> set[Spec]:
    """What passes of the modules launch, and what quantizes weights that are kept so."""
    with te.quantized_model_init(quantized, recipe=made_by):
        model = nn.ModuleList(modules(dtype))
    if not quantized:
        te.prepare(model, made_by)
    return set(kernels_of(model))
