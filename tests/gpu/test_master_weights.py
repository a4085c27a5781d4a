"""Optimizers of torch over masters on CUDA: parameters are masters quantized, and steps can be captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_dist import optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import QuantizedParameter
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gpu


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def parameters(name: str) -> list[nn.Parameter]:
    matrices = [quantize(values(shape, i), FORMATS[name]) for i, shape in enumerate([(96, 160), (272, 144)])]
    return [*(nn.Parameter(QuantizedParameter(q.storage)) for q in matrices), nn.Parameter(values((33,), 5))]


def give_gradients(params: list[nn.Parameter], turn: int) -> None:
    for seed, param in enumerate(params):
        param.grad = values(tuple(param.shape), 100 * turn + seed)


def assert_written_back(optimizer: optim.MasterWeights) -> None:
    for param in optimizer.param_groups[0]["params"]:
        master = optimizer.state[param]["master_param"]
        if not isinstance(param.data, QuantizedTensor):
            assert_bitwise(param.detach().cpu(), master.bfloat16().cpu(), "bf16 parameter")
            continue
        want = quantize(master, param.data.format).storage
        for field, buffer in param.data.storage.buffers.items():
            assert_bitwise(buffer.cpu(), want.buffers[field].cpu(), field)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_parameters_are_their_masters_quantized(name: str, options: dict[str, bool]) -> None:
    params = parameters(name)
    optimizer = optim.MasterWeights(params, lambda own: torch.optim.AdamW(own, lr=0.1, **options))
    for turn in range(2):
        give_gradients(params, turn)
        optimizer.step()
        assert_written_back(optimizer)


@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise"])
def test_steps_are_captured_in_a_graph(name: str) -> None:
    captured, eager = parameters(name), parameters(name)
    make = lambda own: torch.optim.AdamW(own, lr=0.1, capturable=True)  # noqa: E731
    optimizers = [optim.MasterWeights(params, make) for params in (captured, eager)]
    for turn in range(2):
        for params, optimizer in zip((captured, eager), optimizers, strict=True):
            give_gradients(params, turn)
            optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for turn in range(2, 5):
        give_gradients(eager, turn)
        for param, other in zip(captured, eager, strict=True):
            param.grad.copy_(other.grad)
        graph.replay()
        optimizers[1].step()
        for param, other in zip(captured, eager, strict=True):
            masters = [o.state[p]["master_param"] for o, p in zip(optimizers, (param, other), strict=True)]
            assert_bitwise(masters[0].cpu(), masters[1].cpu(), f"master after turn {turn}")
        assert_written_back(optimizers[0])
