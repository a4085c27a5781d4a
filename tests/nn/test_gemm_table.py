"""The table of products: what is in it, and how it refuses what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.catalog import FORMATS, float8_block, float8_tensorwise, high_precision
from te_dist.codecs import Block, MxFp8, NvFp4, gemm, grouped_gemm
from te_dist.codecs.base import Codec
from te_dist.codecs.nvfp4 import SIGN_MASK
from te_dist.formats import Direction, Format, Region, Span
from te_dist.kernels import runtime
from te_dist.kernels.gemm import Kind, part_tiles
from te_dist.nn.products import operand
from te_dist.tensor import empty, quantize

GPUS = [torch.device("cuda", index) for index in (0, 1)]  # named, not used
HAS_COLUMNS = [name for name, format in FORMATS.items() if format.columnwise]


@pytest.mark.parametrize("other", HAS_COLUMNS)
@pytest.mark.parametrize("name", HAS_COLUMNS)
def test_any_two_formats_multiply_on_the_cpu(name: str, other: str) -> None:
    a, b = torch.randn(48, 64), torch.randn(48, 32)
    a, b = quantize(a, FORMATS[name]).storage, quantize(b, FORMATS[other]).storage
    pair = operand(a, Direction.COLUMNWISE), operand(b, Direction.COLUMNWISE)
    if ("hadamard" in name) != ("hadamard" in other):
        with pytest.raises(ValueError, match="transformed alike"):
            gemm.multiply(*pair, dtype=torch.float32)
        return
    got = gemm.multiply(*pair, dtype=torch.float32)
    values = [s.operand(Direction.COLUMNWISE, torch.float32).double() for s in (a, b)]
    assert got.shape == (64, 32)
    torch.testing.assert_close(got.double(), values[0].t() @ values[1], rtol=1e-5, atol=1e-4)


def test_a_transform_is_undone_by_the_product() -> None:
    a, b = torch.randn(2, 64, 32).bfloat16()
    storages = [quantize(x, FORMATS["nvfp4_1d_hadamard"]).storage for x in (a, b)]
    got = gemm.multiply(*(operand(s, Direction.COLUMNWISE) for s in storages), dtype=torch.float32)
    want = a.float().t() @ b.float()
    assert (got - want).norm() < 0.2 * want.norm()


def test_the_bias_is_added_before_rounding() -> None:
    x, w = (quantize(torch.ones(2, 4), FORMATS["high_precision"]).storage for _ in range(2))
    bias = torch.tensor([2.0**-7, 0.0])
    got = gemm.multiply(*(operand(s, Direction.ROWWISE) for s in (x, w)), dtype=torch.bfloat16, bias=bias)
    assert got[0, 0] == torch.tensor(4.0 + 2.0**-7).bfloat16()
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("pair", "target", "others"),
    [
        ((Block((1, 128)), MxFp8((1, 32))), "npu", "cpu, sm_90a"),
        ((Block((1, 128)), Block((1, 128))), "sm_100a", "cpu, sm_90a"),
    ],
)
def test_a_missing_pair_names_both_and_where_there_is_one(pair: tuple[Codec, Codec], target: str, others: str) -> None:
    names = " by ".join(type(codec).__name__ for codec in pair)
    with pytest.raises(NotImplementedError, match=f"no GEMM of {names} on {target}; there is one on {others}. "):
        gemm.find(*pair, target)


def test_groups_name_what_is_multiplied_in_them() -> None:
    block, plain = (FORMATS[name][Direction.ROWWISE] for name in ("float8_block_1d", "high_precision"))
    with pytest.raises(NotImplementedError, match="no products in groups of Block by HighPrecision on sm_90a; .*Block"):
        grouped_gemm.find(block, plain, "sm_90a")
    with pytest.raises(NotImplementedError, match="no products in groups of Block by Block on sm_100a"):
        grouped_gemm.find(block, block, "sm_100a")


def test_functions_are_chosen_by_the_architecture_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (9, 0), 1: (10, 0)}
    monkeypatch.setattr(runtime, "arch_of", runtime.arch_of.__wrapped__)
    monkeypatch.setattr(runtime._C.cuda, "compute_capability", capabilities.get)
    monkeypatch.setenv("TE_DIST_UNMEASURED_KERNELS", "1")
    assert runtime.target_of(torch.device("cpu")) == "cpu"
    assert [runtime.target_of(device) for device in GPUS] == ["sm_90a", "sm_100a"]
    for available, arch in ((False, "sm_90a"), (True, "sm_100a")):  # kernels are rehearsed for the current GPU
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert runtime.target_of(torch.device("meta")) == arch


def test_different_transforms_are_refused() -> None:
    with pytest.raises(ValueError, match="alike"):
        gemm.find(NvFp4((16, 1), hadamard=SIGN_MASK), NvFp4((16, 1), hadamard=0), "cpu")


def test_a_pair_has_one_function() -> None:
    with pytest.raises(ValueError, match="implemented twice"):
        gemm.implements([(Block, Block)], "cpu")(lambda a, b, result: None)


def test_a_product_may_be_added_to_what_is_there() -> None:
    a, b = (quantize(torch.randn(16, 32), FORMATS["mxfp8_1d"]).storage for _ in range(2))
    pair = operand(a, Direction.ROWWISE), operand(b, Direction.ROWWISE)
    product, there = gemm.multiply(*pair, dtype=torch.float32), torch.randn(16, 16)
    out = there.clone()
    assert gemm.multiply(*pair, dtype=torch.float32, out=out, accumulate=True) is out
    assert torch.equal(out, there + product)


def test_extents_that_a_function_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    key = (Block, Block, "cpu")
    monkeypatch.setitem(gemm._TABLE, key, gemm.Entry(gemm._TABLE[key].gemm, 16))
    a, b = (quantize(torch.randn(20, 32), FORMATS["float8_block_1d"]).storage for _ in range(2))
    with pytest.raises(ValueError, match="20 x 32 by 32 x 20 .* multiples of 16 .* pad with zeros"):
        gemm.multiply(operand(a, Direction.ROWWISE), operand(b, Direction.ROWWISE), dtype=torch.float32)


def test_extents_must_agree() -> None:
    a, b = (quantize(torch.randn(32, k), FORMATS["mxfp8_1d"]).storage for k in (32, 64))
    with pytest.raises(ValueError, match="sums over 32 values of one operand and 64"):
        gemm.multiply(operand(a, Direction.ROWWISE), operand(b, Direction.ROWWISE), dtype=torch.float32)


def product_of_blocks(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **how: Any) -> None:
    """What `ops.gemm_float8_block` promises, after its own checks."""
    with pytest.raises(NotImplementedError, match="runs on CUDA"):
        ops.gemm_float8_block(a, a_scale, b, b_scale, out=out, **how)
    (rows, depth), cols, codes = a.shape, b.shape[0], dict(e4m3=torch.float8_e4m3fn, e5m2=torch.float8_e5m2)
    col_tile, tile = ((torch.arange(size) + at) // 128 for size, at in zip((cols, depth), how["phase"], strict=True))
    sides = [x.view(codes[fp8]).double() for x, fp8 in zip((a, b), how["fp8"], strict=True)]
    sides[0] *= a_scale[tile, :rows].t()
    sides[1] *= b_scale[tile, :cols].t() if how["b_tile"] == (1, 128) else b_scale[col_tile][:, tile]
    ends = 128 * part_tiles(int(tile[-1]) + 1, how["parts"]) * torch.arange(how["parts"] + 1) - how["phase"][1]
    for part, its in enumerate(out.chunk(how["parts"])):
        (left, right), begin = (side[:, max(ends[part], 0) : ends[part + 1]] for side in sides), how["bias"]
        product = left @ right.t() + (0.0 if begin is None else begin.double())
        its.copy_(its + product if how["accumulate"] else product)


@pytest.mark.parametrize("begin", [dict(m=0, n=0, k=0), dict(m=16, n=48, k=0), dict(m=0, n=176, k=80)])
@pytest.mark.parametrize("dims", [(1, 1), (1, 2)])
@pytest.mark.parametrize("sums_over", [(1, 1), (1, 0), (0, 0)])
def test_blocks_are_handed_to_their_kernel_as_it_reads_them(
    monkeypatch: pytest.MonkeyPatch, sums_over: tuple[int, int], dims: tuple[int, int], begin: dict[str, int]
) -> None:
    """Of whole matrices, and of what a rank holds of some that were cut inside of tiles."""
    monkeypatch.setattr(gemm, "ops", SimpleNamespace(gemm_float8_block=product_of_blocks))
    extents, torch_side = dict(m=48, n=336, k=272), torch.Generator().manual_seed(0)
    spans = {dim: Span(begin[dim], size) for dim, size in extents.items()}
    pair = []
    for kept, dim, summed, code in zip("mn", dims, sums_over, ("e4m3", "e5m2"), strict=True):
        region = Region(spans[kept], spans["k"]) if summed == 1 else Region(spans["k"], spans[kept])
        values, format = torch.randn(region.shape, generator=torch_side), float8_block(dim, fp8=code)
        storage = empty(format, region, dtype=values.dtype, device=values.device, fields=format.fields)
        storage.quantize_(values)
        pair.append(operand(storage, Direction.ROWWISE if summed == 1 else Direction.COLUMNWISE))
    bias, there = torch.randn(336), torch.randn(48, 336)
    by_kernel, by_values = there.clone(), there.clone()
    monkeypatch.setattr(gemm, "_by_decoding", None)
    gemm._by_blocks(*pair, gemm.Result(by_kernel, bias, True))
    monkeypatch.undo()
    gemm.multiply(*pair, dtype=torch.float32, out=by_values, bias=bias, accumulate=True)
    torch.testing.assert_close(by_kernel, by_values, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("accumulate", (False, True))
@pytest.mark.parametrize("start", (0, 48))
def test_sums_over_many_rows_are_added_from_their_parts(
    monkeypatch: pytest.MonkeyPatch, start: int, accumulate: bool
) -> None:
    used = SimpleNamespace(gemm_float8_block=product_of_blocks, add_parts=ops.add_parts)
    monkeypatch.setattr(gemm, "ops", used)
    asked = []
    monkeypatch.setattr(gemm, "parts_of", lambda *place: asked.append(place) or 3)
    rows, pair = Span(start, 1600), []
    for cols, seed in ((48, 0), (80, 1)):
        x = torch.randn(1600, cols, generator=torch.Generator().manual_seed(seed))
        format = float8_block(1)
        storage = empty(format, Region(rows, Span(0, cols)), dtype=x.dtype, device=x.device, fields=format.fields)
        storage.quantize_(x)
        pair.append(operand(storage, Direction.COLUMNWISE))
    by_kernel, by_values = torch.ones(2, 48, 80)
    gemm._by_blocks(*pair, gemm.Result(by_kernel, None, accumulate))
    monkeypatch.undo()
    gemm.multiply(*pair, dtype=torch.float32, out=by_values, accumulate=accumulate)
    torch.testing.assert_close(by_kernel, by_values, rtol=1e-5, atol=1e-3)
    assert asked == [(48, 80, 13, Kind(False, 4, accumulate))]


def product_of_tensors(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out: Tensor, **how: Any) -> None:
    """What `ops.gemm_float8_tensor` promises, after its own checks."""
    with pytest.raises(NotImplementedError, match="runs on CUDA"):
        ops.gemm_float8_tensor(a, a_scale, b, b_scale, out=out, **how)
    codes = dict(e4m3=torch.float8_e4m3fn, e5m2=torch.float8_e5m2)
    left, right = (x.view(codes[fp8]).double() for x, fp8 in zip((a, b), how["fp8"], strict=True))
    product = left @ right.t() * a_scale.double() * b_scale.double()
    product += 0.0 if how["bias"] is None else how["bias"].double()
    out.copy_(out + product if how["accumulate"] else product)


@pytest.mark.parametrize("sums_over", [(1, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize(
    ("function", "formats", "tolerance"),
    [
        (gemm._by_cublaslt, (float8_tensorwise(columnwise="transposed"),) * 2, 1e-2),
        (gemm._by_cublaslt, tuple(float8_tensorwise(fp8=t, columnwise="transposed") for t in ("e5m2", "e4m3")), 1e-2),
        (gemm._by_cublaslt, (float8_tensorwise(fp8="e5m2", columnwise="transposed"),) * 2, 1e-2),
        (gemm._by_torch, (high_precision(torch.bfloat16),) * 2, 2e-2),
        (gemm._by_torch, (high_precision(torch.float32), high_precision(torch.bfloat16)), 1e-2),
    ],
)
def test_what_a_library_multiplies_on_a_gpu_is_the_product(
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    formats: tuple[Format, Format],
    tolerance: float,
    sums_over: tuple[int, int],
) -> None:
    monkeypatch.setattr(gemm, "_by_decoding", gemm._by_values)  # it is for GPUs alone
    monkeypatch.setattr(gemm, "ops", SimpleNamespace(gemm_float8_tensor=product_of_tensors))
    x = torch.randn(2, 48, 48, generator=torch.Generator().manual_seed(0))
    directions = [Direction.ROWWISE if summed == 1 else Direction.COLUMNWISE for summed in sums_over]
    pair = [operand(quantize(v, f).storage, d) for v, f, d in zip(x, formats, directions, strict=True)]
    bias, there = torch.randn(48), torch.randn(48, 48)
    for dtype, bias_type, accumulate in (
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, None, True),
    ):
        added = None if bias_type is None else bias.to(bias_type)
        want = there.clone()
        gemm.multiply(*pair, dtype=torch.float32, out=want, bias=added, accumulate=accumulate)
        for shift in (0, 1):  # the address of an output may be any
            got = torch.empty(there.numel() + shift, dtype=dtype)[shift:].view(48, 48).copy_(there)
            function(*pair, gemm.Result(got, added, accumulate))
            assert (got.float() - want).norm() < tolerance * want.norm()


def test_a_missing_direction_is_read_from_the_other_where_the_values_are_the_same() -> None:
    x = torch.randn(64, 96)
    both = quantize(x, FORMATS["float8_block_2d"]).storage
    rowwise = quantize(x, FORMATS["float8_block_2d"])
    rowwise.update_usage(columnwise_usage=False)
    got = operand(rowwise.storage, Direction.COLUMNWISE).values(torch.float32)
    assert torch.equal(got, operand(both, Direction.COLUMNWISE).values(torch.float32))
    independent = quantize(x, FORMATS["mxfp8_1d"])
    independent.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="columnwise direction"):
        operand(independent.storage, Direction.COLUMNWISE)


@pytest.mark.parametrize(("rows", "sums_over", "bytes_given"), [(8192, 0, 2**25), (128, 0, 0), (8192, 1, 0)])
def test_sums_over_many_rows_are_given_a_workspace(
    monkeypatch: pytest.MonkeyPatch, rows: int, sums_over: int, bytes_given: int
) -> None:
    given: list[Tensor | None] = []
    op = SimpleNamespace(gemm_float8_tensor=lambda *_, workspace, **how: given.append(workspace))
    monkeypatch.setattr(gemm, "ops", op)
    direction = Direction.COLUMNWISE if sums_over == 0 else Direction.ROWWISE
    shape = (rows, 16) if sums_over == 0 else (16, rows)
    x = torch.ones(shape)
    pair = [operand(quantize(x, float8_tensorwise(columnwise="transposed")).storage, direction) for _ in range(2)]
    gemm._by_cublaslt(*pair, gemm.Result(torch.zeros(16, 16), None, False))
    assert [0 if each is None else each.numel() for each in given] == [bytes_given]
