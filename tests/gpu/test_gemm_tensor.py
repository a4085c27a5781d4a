"""Products of FP8 with one scale each, by cuBLASLt: of small integers, whose sums are exact in any order and precision.

Where one is wrong the message says where and how: a tile, a bias, a scale, another operand look different.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from te_dist import ops
from te_dist.kernels import gemm_tensor
from te_dist.kernels.tape import Tapes
from te_dist.testing import assert_bitwise
from tests.gpu.waits import neither_waiting_nor_allocating
from tests.ops.groups import FP8
from tests.ops.whole_groups import integers, stored

pytestmark = pytest.mark.gpu

PAIRS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# (M, N, K): the smallest, one row, few rows, ragged rows, rows of a multiple of 16 only, few columns, long sums.
SHAPES = [
    (16, 16, 16),
    (1, 16, 16),
    (1, 4096, 1024),
    (7, 48, 144),
    (129, 16, 4096),
    (300, 208, 176),
    (1000, 80, 272),
    (256, 256, 256),
    (2048, 1024, 512),
    (48, 1536, 8192),
]


class Product:
    """Operands of small integers with scales that are powers of two, and their product."""

    def __init__(self, shape: tuple[int, int, int], fp8: tuple[str, str] = PAIRS[0], seed: int = 1) -> None:
        self.shape, self.fp8 = shape, fp8
        rows, cols, depth = shape
        a, b = integers((rows, depth), seed, "cuda"), integers((cols, depth), seed + 1, "cuda")
        self.a, self.b = stored(a, fp8[0]), stored(b, fp8[1])
        self.scales = [torch.full((1,), 2.0 ** (power - seed % 3), device="cuda") for power in (-1, 2)]
        self.want = a @ b.t() * self.scales[0].double() * self.scales[1].double()

    def multiply(self, out: Tensor, **how: Any) -> None:
        how = dict(fp8=self.fp8, bias=None, fast=False, accumulate=False, workspace=None) | how
        ops.gemm_float8_tensor(self.a, self.scales[0], self.b, self.scales[1], out=out, **how)

    def poisoned(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(self.shape[:2], torch.nan, device="cuda", dtype=dtype)


def check(out: Tensor, want: Tensor, name: str) -> None:
    """Bit for bit `want`, in float64, rounded once."""
    wanted = want.to(out.dtype)
    wrong = out != wanted  # NaN are other than anything
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        rows, cols = (int(wrong.any(1 - dim).sum()) for dim in (0, 1))
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values are off, in {rows} rows and {cols} columns, "
            f"{int(out.isnan().sum())} of them NaN; first at {first}: {out[tuple(first)].item()}, wanted "
            f"{wanted[tuple(first)].item()}; ratios {(out / wanted)[wrong][:4].tolist()}"
        )


@pytest.mark.parametrize("fast", (False, True))
@pytest.mark.parametrize("shape", [(512, 512, 65536), (768, 64, 8192)])
def test_sums_over_many_rows_are_cut_in_a_workspace(shape, fast):
    made = Product(shape)
    workspace = torch.empty(2**25, dtype=torch.uint8, device="cuda")
    for dtype in TYPES:
        out = made.poisoned(dtype)
        made.multiply(out, fast=fast, workspace=workspace)
        check(out, made.want, f"{shape} {dtype}")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("fp8", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_that_of_the_values(shape, fp8, fast):
    its = Product(shape, fp8)
    for dtype in TYPES:
        out = its.poisoned(dtype)
        its.multiply(out, fast=fast)
        check(out, its.want, f"{dtype}")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_is_added_before_rounding(shape, fast):
    its = Product(shape)
    for dtype in TYPES[1:]:
        bias, out = integers((shape[1],), 5, "cuda").to(dtype) + 0.25, its.poisoned(dtype)
        its.multiply(out, bias=bias, fast=fast)
        check(out, its.want + bias.double(), f"{dtype}")


@pytest.mark.parametrize("fp8", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_added_to_the_output(shape, fp8):
    its = Product(shape, fp8)
    before = integers(shape[:2], 7, "cuda")
    out = before.float()
    for count in (1, 2):
        its.multiply(out, accumulate=True)
        check(out, before + count * its.want, f"added {count} times")


@pytest.mark.parametrize("num_bytes", [2**22, 2**25])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_workspace_may_be_given(shape, num_bytes):
    its, workspace = Product(shape), torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    for dtype, fast in product(TYPES, (False, True)):
        out = its.poisoned(dtype)
        its.multiply(out, workspace=workspace, fast=fast)
        check(out, its.want, f"{dtype} {fast}")


@pytest.mark.parametrize("elements", [16, 32, 64, 128])
def test_operands_and_outputs_at_any_multiple_of_16_bytes(elements):
    its = Product((300, 208, 176))
    for name in "ab":
        codes = getattr(its, name)
        whole = torch.empty(codes.numel() + elements, dtype=torch.uint8, device="cuda")
        whole[elements:] = codes.flatten()
        setattr(its, name, whole[elements:].view(codes.shape))
    for dtype in TYPES:
        shift = elements // dtype.itemsize
        out = torch.full((300 * 208 + 2 * shift,), torch.nan, dtype=dtype, device="cuda")
        its.multiply(out[shift:-shift].view(300, 208))
        check(out[shift:-shift].view(300, 208), its.want, f"{dtype}")
        assert out[:shift].isnan().all() and out[-shift:].isnan().all(), f"{dtype}: written beside the output"


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_larger_matrices_are_multiplied_in_place(shape):
    its = Product(shape)
    its.a, its.b = (torch.nn.functional.pad(x, (16, 32), value=0x7F)[:, 16:-32] for x in (its.a, its.b))
    for dtype in TYPES:
        wide = torch.full((shape[0], shape[1] + 48), torch.nan, device="cuda", dtype=dtype)
        its.multiply(wide[:, 16:-32])
        check(wide[:, 16:-32], its.want, f"{dtype}")
        assert wide[:, :16].isnan().all() and wide[:, -32:].isnan().all(), f"{dtype}: written beside the output"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("fp8", PAIRS)
@pytest.mark.parametrize("shape", [(4096, 1024, 2048), (300, 208, 4096), (1, 1024, 1024)])
def test_errors_are_those_of_torch(shape, fp8, fast):
    rows, cols, depth = shape
    draw = torch.Generator("cuda").manual_seed(3)
    a, b = (
        torch.randn(n, depth, generator=draw, device="cuda").to(FP8[t]) for n, t in zip((rows, cols), fp8, strict=True)
    )
    scale = [torch.rand(1, generator=draw, device="cuda") + 0.5 for _ in range(2)]
    want = a.double() @ b.double().t() * scale[0].double() * scale[1].double()
    for dtype in TYPES:
        out = torch.full((rows, cols), torch.nan, device="cuda", dtype=dtype)
        how = dict(fp8=fp8, bias=None, fast=fast, accumulate=False, workspace=None)
        ops.gemm_float8_tensor(a.view(torch.uint8), scale[0], b.view(torch.uint8), scale[1], out=out, **how)
        whole = ScalingType.TensorWise
        theirs = scaled_mm(a, b.t(), scale[0], whole, scale[1], whole, output_dtype=dtype, use_fast_accum=fast)
        ours, torchs = (float((got.double() - want).norm() / want.norm()) for got in (out, theirs))
        # torch may split sums, and so has shorter ones in the tensor cores' precision.
        assert ours <= 4 * torchs + 1e-7, f"{dtype}: relative error {ours:.2e}, of torch's product {torchs:.2e}"


def test_scales_are_read_on_the_device_when_the_product_runs():
    its, out = Product((128, 128, 128)), torch.empty(128, 128, device="cuda")
    its.multiply(out)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    its.scales[0].mul_(4.0)
    its.multiply(out)
    check(out, 4 * its.want, "a product with another scale")


def test_product_repeats_its_bits():
    draw = torch.Generator("cuda").manual_seed(3)
    codes = [torch.randn(n, 2048, generator=draw, device="cuda").to(FP8["e4m3"]) for n in (2048, 1536)]
    its = Product((2048, 1536, 2048))
    its.a, its.b = (x.view(torch.uint8) for x in codes)
    for fast in (False, True):
        first, again = its.poisoned(), its.poisoned()
        its.multiply(first, fast=fast)
        for _ in range(100):
            again.fill_(torch.nan)
            its.multiply(again, fast=fast)
            assert_bitwise(again, first, f"a product, fast={fast}")


@pytest.mark.parametrize("shape", [(0, 128, 128), (128, 0, 128), (128, 128, 0)])
def test_empty_product(shape):
    its, bias = Product(shape), torch.randn(shape[1], device="cuda").bfloat16()
    out = its.poisoned(torch.bfloat16)
    its.multiply(out, bias=bias)
    assert torch.equal(out, bias.expand(*shape[:2]))
    there = torch.randn(shape[:2], device="cuda")
    added = there.clone()
    its.multiply(added, accumulate=True)
    assert torch.equal(added, there)


@pytest.mark.parametrize("is_known", [True, False])
def test_product_in_a_graph(is_known):
    """One that ran before, and one whose algorithm is found while the stream is captured."""
    its = Product((512, 768, 1024 if is_known else 1040))
    out, bias = its.poisoned(torch.bfloat16), integers((768,), 5, "cuda").bfloat16()
    added = torch.zeros(512, 768, device="cuda")
    if is_known:
        its.multiply(out, bias=bias, fast=True)
        its.multiply(its.poisoned(), accumulate=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        its.multiply(out, bias=bias, fast=True)
        its.multiply(added, accumulate=True)
    for count in (1, 2, 3):
        out.fill_(torch.nan)
        graph.replay()
        check(out, its.want + bias.double(), f"replay {count}")
        check(added, count * its.want, f"sum of replay {count}")


def test_threads_share_a_product():
    products = [Product((256, 128, 192), seed=3 * thread + 1 + thread % 3) for thread in range(4)]

    def multiply_often(its: Product) -> tuple[Tensor, Tensor]:
        wrong, want = torch.zeros((), dtype=torch.bool, device="cuda"), its.want.float()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            out = its.poisoned()
            for _ in range(500):
                out.fill_(torch.nan)
                its.multiply(out)
                wrong |= (out != want).any()
            torch.cuda.current_stream().synchronize()
        return wrong, out

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(products)) as pool:
        results = list(pool.map(multiply_often, products))
    for its, (wrong, out) in zip(products, results, strict=True):
        check(out, its.want, "the last product of a thread")
        assert not wrong, "a product of a thread was computed with another one's operands"


def test_product_waits_for_nothing_and_allocates_nothing():
    its = Product((256, 128, 192))
    out = its.poisoned()
    its.multiply(out)
    with neither_waiting_nor_allocating():
        its.multiply(out)


@pytest.mark.parametrize("has_workspace", [False, True])
def test_products_are_repeated_by_a_tape(has_workspace):
    tapes = Tapes()
    for seed in range(1, 6):
        its = Product((300, 208, 176), seed=seed)
        bias, there = integers((208,), seed, "cuda").bfloat16(), integers((300, 208), seed, "cuda").float()

        def function(its=its, bias=bias, there=there) -> tuple[tuple[Tensor, ...], None]:
            space = torch.empty(2**20, dtype=torch.uint8, device="cuda") if has_workspace else None
            out = torch.empty(300, 208, dtype=torch.bfloat16, device="cuda")
            its.multiply(out, bias=bias, workspace=space, fast=True)
            its.multiply(there, workspace=space, accumulate=True)
            return (out,), None

        want = there.double() + its.want
        (out,), _ = tapes.run("products", (its.a, *its.scales, its.b, bias, there), function)
        check(out, its.want + bias.double(), f"pass {seed}")
        check(there, want, f"sum of pass {seed}")
    (tape,) = tapes._tapes.values()
    assert tape is not None, "the products were not recorded"
    assert sum(hasattr(step, "program") for step in tape.steps) == 1, "both products are steps of one program"


def test_what_cublaslt_does_not_multiply_is_named():
    with pytest.raises(RuntimeError, match=r"e5m2 \(128 x 64\) by e5m2 \(32 x 64\).* as bfloat16"):
        gemm_tensor._product(
            0,
            ((128, 32, 64), (64, 64, 32)),
            ("e5m2", "e5m2", "bfloat16", ""),
            (16,) * 4,
            (False, False, 0, (False, False)),
        )


def shifted(tensor: Tensor, num_bytes: int) -> Tensor:
    """A copy at an address that much behind a multiple of 256."""
    whole = torch.empty(tensor.nbytes + num_bytes, dtype=torch.uint8, device="cuda")
    whole[num_bytes:] = tensor.contiguous().flatten().view(torch.uint8)
    return whole[num_bytes:].view(tensor.dtype).view(tensor.shape)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    its, odd = Product((128, 64, 96)), Product((128, 64, 88))
    scale, bias = its.scales[0], torch.zeros(64, device="cuda")
    half, full = its.poisoned(torch.bfloat16), its.poisoned()
    codes = dict(a=its.a, a_scale=scale, b=its.b, b_scale=scale)
    cases: list[tuple[str, Tensor, dict[str, Any]]] = [
        ("a: got address .* multiples of 16", half, dict(a=shifted(its.a, 8))),
        ("b: got address .* multiples of 16", half, dict(b=shifted(its.b, 4))),
        ("out: got address .* multiples of 16", shifted(half, 2), {}),
        ("wanted multiples of 16", half, dict(a=odd.a, b=odd.b)),
        ("wanted multiples of 16", half[:, :56].contiguous(), dict(b=its.b[:56])),
        ("a: got strides .* contiguous rows", half, dict(a=its.a.t().contiguous().t())),
        ("a: got .* 104 bytes apart", half, dict(a=torch.nn.functional.pad(its.a, (0, 8))[:, :96])),
        ("b: got shape", half, dict(b=its.b[:, :80].contiguous())),
        ("out: got shape", half[:64], {}),
        ("a_scale: got shape", half, dict(a_scale=torch.ones(2, device="cuda"))),
        ("b_scale: got torch.float64", half, dict(b_scale=scale.double())),
        ("a_scale: got address .* multiple of 16", half, dict(a_scale=shifted(scale, 4))),
        ("b_scale: got address .* multiple of 16", half, dict(b_scale=shifted(scale, 8))),
        ("fp8: got", half, dict(fp8=("e5m2", "e5m2"))),
        ("bias: got torch.float32", half, dict(bias=bias)),
        ("out: got torch.float32", full, dict(bias=bias)),
        ("out: got torch.bfloat16", half, dict(accumulate=True)),
        ("workspace: got torch.float32", half, dict(workspace=bias)),
    ]
    for text, out, wrong in cases:
        given = dict(fp8=PAIRS[0], bias=None, fast=True, accumulate=False, workspace=None) | codes | wrong
        operands = [given.pop(name) for name in codes]
        with pytest.raises(ValueError, match=text):
            ops.gemm_float8_tensor(*operands, out=out, **given)
        assert out.isnan().all(), text
