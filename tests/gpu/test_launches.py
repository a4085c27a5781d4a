"""What every CUDA op promises besides its bytes: no wait for the host, no allocation, graphs, streams, large sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.ops.quantize_float8_current import WORKSPACE
from te_dist.testing import assert_bitwise
from tests.gpu.each_op import of_each_op
from tests.gpu.twins import assert_same, unrecorded
from tests.gpu.waits import neither_waiting_nor_allocating

pytestmark = pytest.mark.gpu

REPEATS = 1000


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").fill_(77)


def calls(rows: int, cols: int) -> Iterator[tuple[str, Callable[[], None], list[Tensor]]]:
    """Ops that read or write much, with their outputs on the GPU: name, call, outputs."""
    f32, bf16 = torch.float32, torch.bfloat16
    x = torch.randn(rows, cols, device="cuda", dtype=bf16)
    amax = empty(1, 1, dtype=f32)
    state = torch.tensor([1, 2], device="cuda")
    yield "amax", lambda: ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=amax), [amax]
    scale = torch.ones(1, device="cuda")
    row, col = empty(rows, cols), empty(cols, rows)
    both = dict(row_data=empty(rows, cols), row_scale=empty(1, 1, dtype=f32))
    both |= dict(col_data=empty(cols, rows), col_scale=empty(1, 1, dtype=f32))
    workspace = empty(*WORKSPACE, dtype=f32)
    current = dict(fp8="e4m3", pow2=False, eps=0.0, workspace=workspace)
    yield "current", lambda: ops.quantize_float8_current(x, **current, **both), list(both.values())
    yield "tensor", lambda: ops.quantize_float8_tensor(x, scale, fp8="e4m3", row_data=row, col_data=col), [row, col]
    block = dict(row_data=empty(rows, cols), row_scale=empty(rows, cols // 128, dtype=f32))
    block |= dict(col_data=empty(cols, rows), col_scale=empty(rows // 128, cols, dtype=f32))
    rule = dict(phase=(0, 0), fp8="e4m3", pow2=False, eps=0.0, row_tile=(1, 128), col_tile=(128, 1))
    yield "block", lambda: ops.quantize_float8_block(x, **rule, **block), list(block.values())
    mx = dict(row_data=empty(rows, cols), row_scale=empty(rows, cols // 32))
    mx |= dict(col_data=empty(rows, cols), col_scale=empty(rows // 32, cols))
    mx_rule = dict(phase=(0, 0), fp8="e4m3", row_tile=(1, 32), col_tile=(32, 1))
    yield "mx", lambda: ops.quantize_mxfp8(x, **mx_rule, **mx), list(mx.values())
    fp4 = dict(row_data=empty(rows, cols // 2), row_scale=empty(rows, cols // 16))
    fp4 |= dict(col_data=empty(cols, rows // 2), col_scale=empty(rows // 16, cols))
    fp4_rule = dict(phase=(0, 0), e4m3_max=448, four_over_six="none", rng_state=state, row_tile=(1, 16))
    fp4_rule |= dict(col_tile=(16, 1), row_tensor_amax=torch.ones(1, 1, device="cuda") * 5)
    fp4_rule |= dict(col_tensor_amax=torch.ones(1, 1, device="cuda") * 5)
    yield "fp4", lambda: ops.quantize_nvfp4(x, **fp4_rule, **fp4), list(fp4.values())
    mixed = fp4_rule | {"rng_state": torch.tensor([[1, 2], [3, 4]], device="cuda"), "col_hadamard": 3}
    fp4_mixed = {name: torch.empty_like(output).fill_(77) for name, output in fp4.items()}
    yield "fp4 transformed", lambda: ops.quantize_nvfp4(x, **mixed, **fp4_mixed), list(fp4_mixed.values())
    of_row, of_col = empty(1, 1, dtype=f32), empty(1, 1, dtype=f32)
    yield "amaxes", lambda: ops.direction_amax(x, hadamard=3, row_amax=of_row, col_amax=of_col), [of_row, of_col]
    turned, out = empty(cols, rows, dtype=bf16), empty(rows, cols, dtype=bf16)
    yield "hadamard", lambda: ops.hadamard(x, sign_mask=3, out=out), [out]
    yield "transpose", lambda: ops.transpose(x, bits=16, out=turned), [turned]
    back, joined = empty(rows, cols, dtype=bf16), empty(rows, cols, dtype=bf16)
    codes, scales = (
        torch.randint(0, 100, (rows, cols), device="cuda", dtype=torch.uint8),
        torch.rand(rows, 1, device="cuda"),
    )
    place = dict(tile=(1, WHOLE), phase=(0, 0), fp8="e4m3")
    yield "dequantize", lambda: ops.dequantize_float8(codes, scales, **place, out=back), [back]
    halves = [x[: rows // 2], x[rows // 2 :]]
    starts = dict(row_starts=[0, rows // 2], col_starts=[0, 0])
    yield "assemble", lambda: ops.assemble(halves, **starts, out=joined), [joined]


@pytest.mark.parametrize("call", of_each_op(), ids=lambda call: call.op.__name__)
def test_no_op_waits_for_the_host_or_allocates(call):
    on_gpu = call.on("cuda")
    for _ in range(3):  # chosen, recorded, played: see [Note: Tapes]
        on_gpu.run()
    with neither_waiting_nor_allocating():
        on_gpu.run()


@pytest.mark.parametrize("call", of_each_op(), ids=lambda call: call.op.__name__)
def test_a_thread_that_did_nothing_yet_runs_every_op(call):
    """It has no context of CUDA's; those of autograd begin so."""
    on_gpu = call.on("cuda")
    on_gpu.run()
    want = {name: output.clone() for name, output in on_gpu.outputs.items()}
    again = call.on("cuda")
    torch.cuda.synchronize()
    with unrecorded(), ThreadPoolExecutor(1) as pool:
        pool.submit(again.run).result()
    for name, output in again.outputs.items():
        assert_same(output.contiguous(), want[name].contiguous(), name)


@pytest.mark.parametrize("call", of_each_op(), ids=lambda call: call.op.__name__)
def test_every_op_can_be_captured_in_a_graph(call):
    on_gpu = call.on("cuda")
    before = {name: output.clone() for name, output in on_gpu.outputs.items()}
    on_gpu.run()
    torch.cuda.synchronize()
    want = {name: output.clone() for name, output in on_gpu.outputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.run()
    for name, output in on_gpu.outputs.items():
        output.copy_(before[name])
    graph.replay()
    for name, output in on_gpu.outputs.items():
        assert_same(output.contiguous(), want[name].contiguous(), name)


def test_repeats_give_the_same_bytes():
    for name, call, outputs in calls(1280, 1408):
        call()
        want = [output.clone() for output in outputs]
        differs = torch.zeros((), dtype=torch.bool, device="cuda")
        for turn in range(REPEATS):
            for output in outputs:
                output.fill_(turn % 7)
            call()
            for output, expected in zip(outputs, want, strict=True):
                differs |= (output != expected).any()
        assert not differs, name


def test_ops_run_on_the_current_stream():
    side = torch.cuda.Stream()
    x, out = torch.ones(64, 128, device="cuda"), empty(1, 1, dtype=torch.float32)
    ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=out)  # compiled and loaded
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=out)
    assert not side.query()
    side.synchronize()
    assert out.item() == 2.0


def test_tensors_of_more_than_2_31_elements():
    rows, cols = 33_792, 65_536
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    rule = dict(phase=(0, 0), fp8="e4m3", pow2=True, eps=0.0, row_tile=(1, 128), col_tile=(128, 1))
    f32 = torch.float32
    row, col = empty(rows, cols), empty(cols, rows)
    row_scale, col_scale = empty(rows, cols // 128, dtype=f32), empty(rows // 128, cols, dtype=f32)
    ops.quantize_float8_block(x, **rule, row_data=row, row_scale=row_scale, col_data=col, col_scale=col_scale)
    for part in (slice(0, 128), slice(rows - 128, rows)):
        few = x[part].cpu()
        data, scale = torch.empty(128, cols, dtype=torch.uint8), torch.empty(128, cols // 128)
        turned, turned_scale = torch.empty(cols, 128, dtype=torch.uint8), torch.empty(1, cols)
        outputs = dict(row_data=data, row_scale=scale, col_data=turned, col_scale=turned_scale)
        ops.quantize_float8_block(few, **rule, **outputs)
        assert_bitwise(row[part].cpu(), data, "row codes")
        assert_bitwise(row_scale[part].cpu(), scale, "row scales")
        assert_bitwise(col[:, part].cpu(), turned, "column codes")
        assert_bitwise(col_scale[part.start // 128 : part.start // 128 + 1].cpu(), turned_scale, "column scales")
    amax = empty(1, 1, dtype=f32)
    x[-1, -1] = 1000.0
    ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=amax)
    assert amax.item() == 1000.0
