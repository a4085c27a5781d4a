"""Offloading inside of what `torch.compile` is given: it runs as in eager mode, or is refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist.offload import activations, get_cpu_offload_context
from te_dist.offload.host import pool_of
from te_dist.recipe import Float8CurrentScaling
from te_dist.testing import assert_bitwise

ROWS, WIDTH, LAYERS = 512, 512, 3  # what one operation saves is 1 MiB, the least that is parked by layers


class Layer(nn.Module):
    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.linear = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * 2


def by_block(layers: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = x * 2
        with activations(min_bytes=0):
            for layer in layers:
                x = layer(x).sin()
        return x * 3

    return forward


def by_layers(layers: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    context, synchronize = get_cpu_offload_context(enabled=True, num_layers=2, model_layers=LAYERS)

    def forward(x: Tensor) -> Tensor:
        x = x * 2
        for layer in layers:
            with context:
                x = layer(x).sin()
            x = synchronize(x)
        return x * 3

    return forward


def by_layers_of_a_pass(layers: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return by_layers(layers)(x)

    return forward


WAYS = [by_block, by_layers, by_layers_of_a_pass]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def results(forward: Callable[[Tensor], Tensor], layers: nn.ModuleList) -> tuple[list[Tensor], list[int]]:
    """Outputs and gradients of some passes, and the host bytes before and behind each backward pass."""
    found, live = [], []
    for seed in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        with te.autocast(recipe=Float8CurrentScaling()):
            y = forward(x)
        live.append(pool_of(torch.device("cpu")).live)
        y.sum().backward()
        live.append(pool_of(torch.device("cpu")).live)
        found += [y.detach(), x.grad, *(p.grad for p in layers.parameters())]
        layers.zero_grad()
    return found, live


@pytest.mark.parametrize("linear", [nn.Linear, te.Linear])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_around_it_parks_and_computes_as_in_eager_mode(way, linear):
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(linear) for _ in range(LAYERS))
    forward = way(layers)
    want, _ = results(forward, layers)
    got, live = results(torch.compile(forward, backend="aot_eager"), layers)
    assert all(live[::2]), "nothing was parked"
    assert not any(live[1::2])
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {index}")


@pytest.mark.parametrize("way", [by_block, by_layers_of_a_pass])
def test_a_full_graph_is_refused_with_the_remedy(way):
    layers = nn.ModuleList(Layer(nn.Linear) for _ in range(LAYERS))
    with pytest.raises(RuntimeError, match="compile the model and call it inside of the block"):
        torch.compile(way(layers), backend="eager", fullgraph=True)(torch.randn(ROWS, WIDTH, requires_grad=True))
