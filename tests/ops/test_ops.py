"""What every op promises besides its bytes: registration, messages, work under tracing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_dist import _C, ops
from te_dist._torch_private import TorchDispatchMode, tree_leaves
from te_dist.kernels.runtime import recording
from te_dist.ops.assemble import Chunking
from tests.gpu.catalog import groups, groups_by_decoding

U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
CHUNKED = Chunking(0, 4, 2, 1)
BLOCK_RULE = dict(phase=(0, 0), fp8="e4m3", pow2=True, eps=0.0)


@pytest.mark.parametrize("name", ops.__all__)
def test_every_op_is_defined_for_cpu_and_cuda(name):
    overload = getattr(torch.ops.te_dist, name).default
    assert overload._schema.is_mutable
    assert not overload._schema.returns
    assert overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)
    assert overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA)


def test_wrappers_run_on_fake_tensors():
    with FakeTensorMode():
        x, data, scale = torch.empty(256, 256, dtype=BF16), torch.empty(256, 256, dtype=U8), torch.empty(256, 2)
        ops.quantize_float8_block(x, **BLOCK_RULE, row_tile=(1, 128), row_data=data, row_scale=scale)
        ops.dequantize_float8(data, scale, tile=(1, 128), phase=(0, 0), fp8="e4m3", out=x)


def test_a_compiled_function_may_quantize():
    def quantize(x, data, scale):
        ops.quantize_float8_block(x, **BLOCK_RULE, row_tile=(1, 128), row_data=data, row_scale=scale)
        return data.float().sum()

    x = torch.randn(64, 256, dtype=BF16)
    eager, traced = ((torch.zeros(64, 256, dtype=U8), torch.zeros(64, 2)) for _ in range(2))
    quantize(x, *eager)
    torch.compile(quantize, backend="aot_eager", fullgraph=True)(x, *traced)
    assert torch.equal(eager[0], traced[0])
    assert torch.equal(eager[1], traced[1])


def test_a_tensor_without_memory_is_refused():
    x, data, scale = torch.randn(64, 256, dtype=BF16), torch.zeros(64, 256, dtype=U8), torch.zeros(64, 2)
    data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"\[64, 256\]\) has no memory"):
        ops.quantize_float8_block(x, **BLOCK_RULE, row_tile=(1, 128), row_data=data, row_scale=scale)


def empty(*shape: int, dtype: torch.dtype = U8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


X = empty(256, 256, dtype=BF16)
RUNS = dict(row_tile=(1, 128), row_data=empty(256, 256), row_scale=empty(256, 2, dtype=F32))
CURRENT_RULE = dict(fp8="e4m3", pow2=False, eps=0.0)
NVFP4_RULE = dict(phase=(0, 0), e4m3_max=448, four_over_six="none", rng_state=None)
REFUSED = [
    (lambda: ops.tile_amax(X.double(), phase=(0, 0), tile=(0, 0), out=empty(1, 1, dtype=F32)), "x: got torch.float64"),
    (lambda: ops.tile_amax(X.t()[:5], phase=(0, 0), tile=(0, 0), out=empty(1, 1, dtype=F32)), "contiguous"),
    (lambda: ops.tile_amax(X, phase=(0, 0), tile=(1, 128), out=empty(256, 3, dtype=F32)), r"out: .*wanted \(256, 2\)"),
    (lambda: ops.quantize_float8_block(X, **BLOCK_RULE | {"fp8": "e3m4"}, **RUNS), "fp8: got 'e3m4'"),
    (lambda: ops.quantize_float8_block(X, **BLOCK_RULE, **RUNS | {"row_tile": (1, 64)}), r"row_tile: got \(1, 64\)"),
    (lambda: ops.quantize_float8_block(X, **BLOCK_RULE, **RUNS | {"row_scale": None}), "row_scale: got None"),
    (lambda: ops.quantize_float8_block(X, **BLOCK_RULE, **RUNS | {"row_data": empty(256, 128)}), "row_data: got shape"),
    (lambda: ops.quantize_float8_block(X, **BLOCK_RULE, **RUNS | {"row_amax": empty(1, 1, dtype=F32)}), "row_amax"),
    (lambda: ops.quantize_nvfp4(empty(3, 4, dtype=F32), **NVFP4_RULE, col_data=empty(4, 1)), "share a byte"),
    (lambda: ops.quantize_nvfp4(X, **NVFP4_RULE, row_data=empty(256, 128)), "row_tensor_amax: got None"),
    (lambda: ops.quantize_nvfp4(X, **NVFP4_RULE | {"rng_state": torch.arange(4)[::2]}), r"rng_state: got strides \(2,"),
    (lambda: ops.quantize_nvfp4(X, **NVFP4_RULE | {"rng_state": torch.ones(2, 2).long().t()}), "rng_state: .*strides"),
    (lambda: ops.quantize_mxfp8(X, phase=(0, 0), fp8="e4m3", noop=torch.zeros(1, dtype=U8)), "noop: got torch.uint8"),
    (lambda: ops.quantize_mxfp8(X, phase=(0, 0), fp8="e4m3", noop=torch.zeros(2)), "noop: got shape"),
    (lambda: ops.quantize_float8_tensor(X, torch.ones(1), fp8="e4m3"), "row_data: got None"),
    (lambda: ops.quantize_float8_current(X, **CURRENT_RULE, row_data=empty(256, 256)), "workspace: got None"),
    (lambda: ops.quantize_float8_current(X, **CURRENT_RULE, amax=torch.ones(2), row_data=X), "amax: got shape"),
    (lambda: ops.hadamard(X[:8], sign_mask=0, out=X[:8].clone()), "multiple of 16"),
    (lambda: ops.direction_amax(X[:8], hadamard=0), "multiple of 16"),
    (
        lambda: ops.quantize_nvfp4(X, **NVFP4_RULE | {"phase": (8, 0)}, col_hadamard=0),
        "offset 8, wanted each a multiple",
    ),
    (
        lambda: ops.quantize_nvfp4(X, **NVFP4_RULE | {"four_over_six": "mse"}, col_hadamard=0),
        "'mse' beside col_hadamard",
    ),
    (lambda: ops.transpose(empty(3, 4), bits=4, out=empty(8, 1)), "even number"),
    (lambda: ops.transpose(empty(4, 4), bits=4, out=empty(8, 2), square=2), "square: got 2 with 4 bits"),
    (lambda: ops.transpose(empty(32, 2), bits=8, out=empty(33, 2), square=16), r"\(32, 2\)"),
    (lambda: ops.transpose(X, bits=8, out=X.clone()), "src: got torch.bfloat16"),
    (lambda: ops.assemble([empty(3, 4)], row_starts=[2], col_starts=[0], out=empty(4, 4)), r"wires\[0\].*inside"),
    (
        lambda: ops.assemble_chunks(empty(2, 8), CHUNKED._replace(phase=1), dim=0, out=empty(4, 4)),
        "chunking: got Chunk",
    ),
    (
        lambda: ops.assemble_chunks(empty(2, 8), CHUNKED._replace(length=0), dim=0, out=empty(4, 4)),
        "chunking: got Chun",
    ),
    (lambda: ops.assemble_chunks(empty(2, 8), CHUNKED, dim=2, out=empty(4, 4)), "dim: got 2"),
    (lambda: ops.assemble_chunks(empty(2, 8), CHUNKED, dim=0, out=empty(5, 4)), "out: got 5 values along 0, wanted 4"),
    (lambda: ops.assemble_chunks(empty(1, 8), CHUNKED, dim=0, out=empty(4, 4)), r"gathered: .*\(2, 8\)"),
    (lambda: ops.assemble_chunks(empty(2, 7), CHUNKED, dim=1, out=empty(4, 4)), r"gathered: .*\(2, 8\)"),
    (lambda: ops.assemble_chunks(X, CHUNKED, dim=1, out=empty(4, 4)), "gathered: got torch.bfloat16"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_what_is_one_element_may_have_any_number_of_dimensions(shape):
    x, codes, scales = torch.randn(64, 256), [torch.zeros(64, 256, dtype=U8) for _ in range(2)], torch.zeros(2, *shape)
    amaxes = torch.tensor([5.0, 5.0]).view(2, *shape)

    def quantize(x, codes, scales, amaxes):
        current, tensor = (dict(row_data=data, row_scale=scale) for data, scale in zip(codes, scales, strict=True))
        ops.quantize_float8_current(x, **CURRENT_RULE, amax=amaxes[0], **current)
        ops.quantize_float8_tensor(x, torch.full((1,), 448 / 5, device=x.device), fp8="e4m3", amax=amaxes[1], **tensor)

    quantize(x, codes, scales, amaxes)
    assert torch.equal(codes[0], codes[1]) and codes[0].any()
    assert torch.equal(scales[0], scales[1]) and amaxes.flatten()[1] == max(5.0, x.abs().max())
    with recording() as specs:
        quantize(x.to("meta"), [data.to("meta") for data in codes], scales.to("meta"), amaxes.to("meta"))
    assert len(specs) == 2


def test_an_unknown_simd_level_is_refused():
    with pytest.raises(ValueError, match="no SIMD level 'mmx'"):
        _C.set_simd_level("mmx")


def test_the_fastest_level_is_in_use():
    assert _C.simd_level() == _C.simd_levels()[-1]


def test_products_in_groups_make_no_tensor_elsewhere():
    """What is made on another device keeps a pass from being recorded, see [Note: Tapes]."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
            assert all(tensor.device == torch.device("cpu") for tensor in made), f"{func} in {call.name}"
            return out

    ran = set()
    for call in (*groups_by_decoding(), *groups()):
        if call.op.__name__ not in ran:
            ran.add(call.op.__name__)
            with Watch():
                call.run()
    assert {"grouped_gemm_decoded", "grouped_gemm_float8_block"} <= ran
