"""FusedAdam on CUDA: the CPU's bytes, and launches that do not depend on how many parameters there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from te_dist import grouped, optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.ops.multi_tensor import Batch, Call
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.gpu.waits import neither_waiting_nor_allocating

pytestmark = pytest.mark.gpu

SHAPES = [(96, 160), (128, 256), (272, 144), (16, 16)]  # whole and ragged tiles
PLAIN = [((160,), torch.bfloat16), ((33, 7), torch.float32), ((5,), torch.float16), ((70_001,), torch.bfloat16)]
TOGETHER = [name for name in FORMATS if name != "nvfp4_1d_hadamard"]  # a transform comes first, parameter by parameter


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(name: str, device: str, repeats: int = 1) -> list[nn.Parameter]:
    """Quantized and plain ones, the same on every device."""
    found = []
    for seed, shape in enumerate(SHAPES * repeats):
        storage = quantize(values(shape, seed, torch.bfloat16).to(device), FORMATS[name]).storage
        found.append(nn.Parameter(QuantizedParameter(storage)))
    for seed in range(repeats):
        storage = grouped.quantize(values((3, 96, 160), 50 + seed, torch.bfloat16).to(device), FORMATS[name]).storage
        found.append(nn.Parameter(GroupedParameter(storage)))
    for seed, (shape, dtype) in enumerate(PLAIN * repeats):
        found.append(nn.Parameter(values(shape, 100 + seed, dtype).to(device)))
    return found


def give_gradients(params: list[nn.Parameter], turn: int, dtype: torch.dtype | None = None) -> None:
    for seed, param in enumerate(params):
        param.grad = None
        param.grad_dtype = dtype or param.dtype
        param.grad = values(tuple(param.shape), 1000 * turn + seed, dtype or param.dtype).to(param.device)


def written(optimizer: optim.FusedAdam) -> dict[str, Tensor]:
    """All that a step writes, by name."""
    found = {}
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            found |= {f"{name} of {index}": value for name, value in optimizer.state[param].items()}
            local = param.data
            if isinstance(local, QuantizedTensor):
                found |= {f"{name} of {index}": value for name, value in local.storage.buffers.items()}
            else:
                found[f"parameter {index}"] = local
    return found


def assert_same(got: optim.FusedAdam, want: optim.FusedAdam, what: str) -> None:
    results, wanted = written(got), written(want)
    assert results.keys() == wanted.keys()
    for name, result in results.items():
        assert_bitwise(result.cpu(), wanted[name].cpu(), f"{name}, {what}")


@pytest.mark.parametrize("mode", ["AdamW", "Adam", "no masters"])
@pytest.mark.parametrize("name", FORMATS)
def test_cpu_and_gpu_write_the_same_bytes(name, mode):
    options = dict(lr=0.01, weight_decay=0.1, adam_w_mode=mode != "Adam", master_weights=mode != "no masters")
    sides = [(parameters(name, device), device) for device in ("cpu", "cuda")]
    optimizers = [optim.FusedAdam(params, **options) for params, _ in sides]
    for turn in range(3):
        for (params, _), optimizer in zip(sides, optimizers, strict=True):
            give_gradients(params, turn, (None, torch.float32, torch.float16)[turn])
            optimizer.step()
        assert_same(optimizers[1], optimizers[0], f"turn {turn}")


FEWER_BITS = {
    "bf16 moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "remainders, moments in bytes": {
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
        "store_param_remainders": True,
    },
    "bf16 masters": {"master_weight_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8},
    "no masters": {"master_weights": False, "stochastic_rounding": True, "seed": 2**40 + 3},
}


def without_fp16(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Which is not rounded by chance."""
    return [param for param in params if param.dtype != torch.float16]


@pytest.mark.parametrize("options", FEWER_BITS.values(), ids=FEWER_BITS)
@pytest.mark.parametrize("name", ["float8_block_2d", "float8_tensorwise", "mxfp8_1d", "nvfp4_2d", "high_precision"])
def test_cpu_and_gpu_write_the_same_bytes_in_fewer_bits(name, options):
    sides = [without_fp16(parameters(name, device)) for device in ("cpu", "cuda")]
    optimizers = [optim.FusedAdam(params, lr=0.01, weight_decay=0.1, **options) for params in sides]
    for turn in range(3):
        for params, optimizer in zip(sides, optimizers, strict=True):
            give_gradients(params, turn, (None, torch.float32, torch.float16)[turn])
            optimizer.step()
        assert_same(optimizers[1], optimizers[0], f"turn {turn}")


@pytest.mark.parametrize("options", FEWER_BITS.values(), ids=FEWER_BITS)
def test_launches_in_fewer_bits_do_not_depend_on_the_number_of_parameters(options):
    counts = {}
    for repeats in (1, 37):
        params = without_fp16(parameters("float8_tensorwise", "cuda", repeats))
        optimizer = optim.FusedAdam(params, **options)
        for turn in range(3):
            give_gradients(params, turn)
            started = on_device(optimizer.step)
        counts[repeats] = started
    assert len(counts[1]) == len(counts[37]) <= 24, counts


def test_steps_in_fewer_bits_are_captured_in_a_graph():
    captured, eager = (without_fp16(parameters("float8_tensorwise", "cuda")) for _ in range(2))
    options = FEWER_BITS["remainders, moments in bytes"]
    optimizers = [optim.FusedAdam(params, lr=0.01, capturable=True, **options) for params in (captured, eager)]
    for params, optimizer in zip((captured, eager), optimizers, strict=True):
        give_gradients(params, 0)
        optimizer.step()
    give_gradients(captured, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for turn in range(1, 4):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"].fill_(0.01 / turn)
        give_gradients(eager, turn)
        optimizers[1].step()
        for param, other in zip(captured, eager, strict=True):
            param.grad.copy_(other.grad)
        graph.replay()
        assert_same(optimizers[0], optimizers[1], f"turn {turn}")


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_are_their_masters_quantized(name):
    params = parameters(name, "cuda")
    optimizer = optim.FusedAdam(params, lr=0.01)
    for turn in range(2):
        give_gradients(params, turn)
        optimizer.step()
    for param in params[: len(SHAPES)]:
        storage = param.data.storage
        want = storage.blank(storage.format)
        want.quantize_(optimizer.state[param]["master_param"])
        for field, buffer in storage.buffers.items():
            assert_bitwise(buffer, want.buffers[field], field)


def on_device(call: Callable[[], object]) -> list[str]:
    """Names of the kernels that a call starts on the device; tables of addresses are copied when those are new."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kinds = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in kinds if not event.name.startswith("Memcpy")]


@pytest.mark.parametrize("name", TOGETHER)
def test_launches_do_not_depend_on_the_number_of_parameters(name):
    counts = {}
    for repeats in (1, 37):  # 9 and 333 parameters
        params = parameters(name, "cuda", repeats)
        optimizer = optim.FusedAdam(params)
        for turn in range(3):
            give_gradients(params, turn)
            started = on_device(optimizer.step)
        # NOTE: addresses are copied where they are others than in the step before, which is for torch to choose.
        counts[repeats] = len(started)
    assert counts[1] == counts[37] <= 16, (counts, started)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_step_neither_waits_nor_allocates(name):
    params = parameters(name, "cuda")
    optimizer = optim.FusedAdam(params)
    kept = []
    for turn in range(3):
        give_gradients(params, turn)
        kept.append([param.grad for param in params])  # so that gradients lie elsewhere at every step
        if turn < 2:
            optimizer.step()
    with neither_waiting_nor_allocating():
        optimizer.step()


@pytest.mark.parametrize("name", ["float8_block_2d", "mxfp8_1d", "float8_tensorwise", "nvfp4_2d"])
def test_steps_are_captured_in_a_graph_and_run_beside_it(name):
    captured, eager = (parameters(name, "cuda") for _ in range(2))
    lr = torch.tensor(0.01, device="cuda")
    optimizers = [optim.FusedAdam(captured, lr=lr), optim.FusedAdam(eager, lr=lr)]
    for params, optimizer in zip((captured, eager), optimizers, strict=True):
        give_gradients(params, 0)
        optimizer.step()
    give_gradients(captured, 1)  # where no step has seen them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    held = [param.grad for param in captured]
    for turn in range(1, 6):
        lr.fill_(0.01 * turn)
        give_gradients(eager, turn)
        optimizers[1].step()
        if turn == 3:  # a step of its own, by gradients that lie elsewhere
            give_gradients(captured, turn)
            optimizers[0].step()
            for param, grad in zip(captured, held, strict=True):
                param.grad = grad
        else:
            for grad, other in zip(held, eager, strict=True):
                grad.copy_(other.grad)
            graph.replay()
        assert_same(optimizers[0], optimizers[1], f"turn {turn}")


def test_a_scaler_unscales_and_leaves_out_steps_with_infinities():
    scaled, plain = (parameters("float8_block_2d", "cuda") for _ in range(2))
    optimizers = [optim.FusedAdam(scaled), optim.FusedAdam(plain)]
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for turn in range(3):
        for params in (scaled, plain):
            give_gradients(params, turn, torch.float32)
        scaler.scale(torch.zeros((), device="cuda"))
        for param in scaled:
            param.grad *= scaler.get_scale()
        if turn == 1:
            scaled[0].grad[0, 0] = torch.inf
        else:
            optimizers[1].step()
        scaler.step(optimizers[0])
        scaler.update()
        assert_same(optimizers[0], optimizers[1], f"turn {turn}")


@pytest.mark.parametrize("sizes", [(0,), (0, 5), (0, 0, 300, 0)])
def test_empty_tensors_are_passed_over(sizes: tuple[int, ...]) -> None:
    sources = [torch.randn(size, device="cuda") for size in sizes]
    targets = [torch.full((size,), 7.0, device="cuda", dtype=torch.bfloat16) for size in sizes]
    noop = torch.zeros(1, dtype=torch.int32, device="cuda")
    Batch([[Call("copy_", pair)] for pair in zip(targets, sources, strict=True)], noop).run()
    for target, source in zip(targets, sources, strict=True):
        assert_bitwise(target, source.bfloat16(), "a copy")
