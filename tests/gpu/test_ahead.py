"""Kernels that a prepared model launches are there before its first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.kernels import compiler, movement, runtime
from tests.nn.recipes import DEFAULTS

pytestmark = pytest.mark.gpu


def refuse(spec, *_):
    raise AssertionError(f"{spec.template} was not prepared")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("model_recipe", DEFAULTS, ids=lambda r: type(r).__name__)
def test_a_prepared_model_compiles_nothing_in_its_passes(model_recipe, quantized, monkeypatch):
    monkeypatch.setattr(runtime, "_loaded", {})
    options = dict(params_dtype=torch.bfloat16, device="cuda")
    with te.quantized_model_init(quantized, recipe=model_recipe):
        model = nn.Sequential(
            te.LayerNormLinear(256, 512, **options),
            te.Linear(512, 256, **options),
            te.LayerNormMLP(256, 512, **options),
            te.LayerNormMLP(256, 512, activation="swiglu", **options),
        )
    te.prepare(model, model_recipe)
    optimizer = te.optim.FusedAdam(model.parameters())
    for _ in range(2):
        with monkeypatch.context() as prepared:
            prepared.setattr(runtime, "_load", refuse)
            with te.autocast(recipe=model_recipe):
                out = model(torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True))
            out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_prepared_kernel_may_be_launched_first_under_capture(monkeypatch):
    monkeypatch.setattr(runtime, "_loaded", {})
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    runtime.prepare([movement.transform(8)], 0)
    monkeypatch.setattr(compiler, "compile_kernel", refuse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.hadamard(x, sign_mask=0, out=out)
    graph.replay()
    want = torch.empty(32, 256, dtype=torch.bfloat16)
    ops.hadamard(x.cpu(), sign_mask=0, out=want)
    assert torch.equal(out.cpu(), want)


def test_what_is_not_loaded_is_refused_under_capture(monkeypatch):
    monkeypatch.setattr(runtime, "_loaded", {})
    x, out = torch.ones(8, 8, device="cuda"), torch.empty(1, 1, device="cuda")
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="would be loaded under CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=out)
