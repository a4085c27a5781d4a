"""TransformerEngine's way of offloading: some layers of a model, one context per layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_dist.offload import get_cpu_offload_context
from te_dist.offload.host import pool_of
from te_dist.testing import assert_bitwise

LAYERS, ROWS, WIDTH = 4, 512, 512  # each layer saves 1 MiB, the least that is parked


def run(layers: nn.ModuleList, x: Tensor, offloading) -> tuple[list[Tensor], list[int]]:
    """Gradients, and host bytes after each layer."""
    context, synchronize = offloading
    live = []
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)
        live.append(pool_of(torch.device("cpu")).live)
    x.sum().backward()
    grads = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    return grads, live


@pytest.fixture
def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def test_layers_are_offloaded_evenly_spread_and_results_are_bitwise_the_same(layers):
    x = torch.randn(ROWS, WIDTH)
    want, live = run(layers, x, get_cpu_offload_context())
    assert live == [0] * LAYERS
    context = get_cpu_offload_context(enabled=True, num_layers=2, model_layers=LAYERS)
    for _ in range(2):  # counting starts again with every forward pass
        got, live = run(layers, x, context)
        assert live == [x.nbytes, x.nbytes, 2 * x.nbytes, 2 * x.nbytes]
        assert pool_of(torch.device("cpu")).live == 0
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b, "gradient")


def test_a_layer_that_is_not_synchronized_is_reported(layers):
    context, synchronize = get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    with pytest.raises(RuntimeError, match="run each layer inside the context first"):
        synchronize(torch.ones(1))
    with context:
        pass
    with pytest.raises(RuntimeError, match=r"layer 0 was entered twice"), context:
        pass


def test_a_layer_that_fails_ends_the_step(layers):
    context, sync = get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), context:
            raise ZeroDivisionError
    with context:
        out = layers[0](torch.randn(4, WIDTH))
    assert sync(out) is out


@pytest.mark.parametrize("num_layers", [0, 4, 5])
def test_some_layers_are_offloaded_and_never_the_last(num_layers):
    with pytest.raises(ValueError, match=rf"num_layers={num_layers} of model_layers=4: 1 to model_layers - 1"):
        get_cpu_offload_context(enabled=True, num_layers=num_layers, model_layers=4)


def test_arguments_that_ask_for_something_else_say_what_to_do():
    with pytest.raises(ValueError, match="offload_weights=True is not possible: weights stay"):
        get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2, offload_weights=True)
    with pytest.raises(TypeError, match="no argument 'offload_everything'"):
        get_cpu_offload_context(offload_everything=True)
    with pytest.warns(UserWarning, match="double_buffering=False has no effect"):
        get_cpu_offload_context(double_buffering=False)
    get_cpu_offload_context(double_buffering=True, offload_weights=False, retain_pinned_cpu_buffers=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_inside_of_what_is_run_again_is_told(reentrant: bool) -> None:
    context, synchronize = get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)

    def region(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with context:
                x = torch.tanh(x) * 2
            x = synchronize(x)
        return x

    y = checkpoint(region, torch.ones(4, requires_grad=True), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="has the context around it, not inside"):
        y.sum().backward()
