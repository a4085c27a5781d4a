"""What is computed in front of a kernel: how exact it is, and that fused and unfused give the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import _C, ops
from te_dist.formats import WHOLE
from te_dist.ops._checks import grid_shape
from te_dist.ops.evaluate import values
from te_dist.ops.panel_sums import column_sums
from te_dist.ops.source import Gathered, RmsNorm, Source, Summed, SwiGlu, SwiGluGradient, sums_shape
from te_dist.testing import assert_bitwise
from tests.codecs.kernel_inputs import DTYPES, KINDS, every_level, matrix
from tests.ops.sources import cases, sums_of, with_sums

F32, BF16 = torch.float32, torch.bfloat16
# Whole panels and ragged ones, halves that end inside of a vector, single rows and columns, nothing.
SHAPES = [(140, 260), (200, 170), (1, 514), (259, 2), (130, 35), (0, 128), (128, 0)]


def ulps(got: Tensor, want: Tensor) -> float:
    """Largest error of `got` (fp32) in units of the last place of `want` (fp64), where that is a normal fp32 number."""
    is_normal = want.abs() >= torch.finfo(F32).tiny
    unit = torch.exp2(torch.floor(torch.log2(want.abs())) - 23)
    return ((got.double() - want).abs() / unit)[is_normal].max().item()


def swiglu_of(gate: Tensor, up: Tensor) -> Tensor:
    return values(SwiGlu(torch.cat([gate, up], 1)))


def test_silu_is_exact_to_a_few_units():
    everywhere = torch.cat([torch.linspace(-87, 87, 400_000), torch.linspace(-2, 2, 400_000)])[None]
    small = torch.logspace(-38, 0, 200_000)[None]
    gate = torch.cat([everywhere, small, -small], 1)
    want = gate.double() / (1 + torch.exp(-gate.double()))
    for level in every_level():
        assert ulps(swiglu_of(gate, torch.ones_like(gate)), want) <= 4, level


def test_gradients_are_those_of_fp64():
    gate = torch.linspace(-40, 40, 300_000, dtype=torch.float64)[None].requires_grad_()
    up = torch.randn(gate.shape, dtype=torch.float64).requires_grad_()
    grad = torch.randn(gate.shape)
    (torch.nn.functional.silu(gate) * up).backward(grad.double())
    x = torch.cat([gate, up], 1).detach().float()
    for _ in every_level():
        got = values(SwiGluGradient(x, grad)).double()
        torch.testing.assert_close(got, torch.cat([gate.grad, up.grad], 1), rtol=2e-6, atol=2e-6)


def test_every_bf16_gate_is_rounded_as_torch_rounds_it():
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)[None]
    got, want = swiglu_of(gate, torch.ones_like(gate)), torch.nn.functional.silu(gate.double()).to(BF16)
    is_vanishing = gate < -87.7  # where the sigmoid is below all normal numbers, and 0 here
    assert torch.equal(got[gate.isfinite() & ~is_vanishing], want[gate.isfinite() & ~is_vanishing])
    assert (got[gate.isfinite() & is_vanishing] == 0).all()
    assert got[gate == torch.inf] == torch.inf
    assert got[gate == -torch.inf].isnan()  # the product of -inf and 0, as torch's own fp32 kernel has it
    assert got[gate.isnan()].isnan().all()


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_levels_compute_the_same_bits(shape, dtype, kind):
    for case in cases(shape, dtype, kind):
        levels = [(level, values(case.source)) for level in every_level()]
        for level, got in levels[1:]:
            assert_bitwise(got, levels[0][1], f"{case.name} {kind} {level}")


def planes(shape: tuple[int, int], length: int, *, square: bool) -> dict:
    """Both directions of a block format, poisoned."""
    rows, cols = shape
    found = {}
    for side, run in (("row", (1, length)), ("col", (length, 1))):
        tile = (length, length) if square else run
        grain = tile if length == 128 else run
        data = shape if side == "row" or length == 32 else (cols, rows)
        data = (data[0], data[1] // 2) if length == 16 else data
        found[f"{side}_tile"] = tile
        found[f"{side}_data"] = torch.full(data, 77, dtype=torch.uint8)
        scale = torch.full(grid_shape(shape, (0, 0), grain), 77.0)
        found[f"{side}_scale"] = scale if length == 128 else scale.to(torch.uint8)
    return found


def without(outputs: dict, part: str) -> dict:
    return {name: value for name, value in outputs.items() if not name.startswith(part)}


def block(x, outputs):
    ops.quantize_float8_block(x, phase=(0, 0), fp8="e4m3", pow2=False, eps=0.0, **outputs)


def mxfp8(x, outputs):
    ops.quantize_mxfp8(x, phase=(0, 0), fp8="e5m2", **outputs)


def nvfp4(x, outputs):
    amax = torch.empty(1, 1)
    ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=amax)
    rule = dict(e4m3_max=448, four_over_six="none", rng_state=torch.tensor([3, 5]))
    ops.quantize_nvfp4(x, phase=(0, 0), **rule, row_tensor_amax=amax, col_tensor_amax=amax, **outputs)


def tensor(x, outputs):
    data = {name: outputs[name] for name in ("row_data", "col_data") if name in outputs}
    ops.quantize_float8_tensor(x, torch.tensor([3.0]), fp8="e4m3", **data)


QUANTIZERS = [(block, 128), (mxfp8, 32), (nvfp4, 16), (tensor, 128)]


def folded(products: Tensor) -> Tensor:
    """Sums of rows over panels of 128 columns, (panels, rows), as `SwiGluGradient.row_sums` has them."""
    rows, cols = products.shape
    panels = -(-cols // 128)
    padded = torch.zeros(rows, 128 * panels)
    padded[:, :cols] = products
    octets = padded.view(rows, panels, 16, 8)
    sums = octets[..., 0]
    for i in range(1, 8):
        sums = sums + octets[..., i]
    while sums.shape[-1] > 1:
        upper, lower = sums.chunk(2, dim=-1)
        sums = upper + lower
    return canonical(sums[..., 0].t().contiguous())


def wanted_sums(source: Source) -> dict[str, Tensor]:
    """What `sums_of` should hold."""
    wanted = sums_of(source)
    ops.panel_sums(source, out=wanted["sums"])
    if "row_sums" in wanted:
        wanted["row_sums"] = folded(source.grad.float() * values(SwiGlu(source.x.float())))
    return wanted


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_levels_sum_rows_in_the_order_that_is_defined(shape, dtype, kind):
    for case in cases(shape, dtype, kind):
        sums = sums_of(case.source)
        for level in every_level() if "row_sums" in sums else ():
            values(with_sums(case.source, row_sums=sums["row_sums"].fill_(77.0)))
            assert_bitwise(sums["row_sums"], wanted_sums(case.source)["row_sums"], f"{kind} {level}")


def test_gradients_by_probabilities_are_those_of_fp64():
    x = torch.randn(40, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    probability = torch.rand(40, dtype=torch.float64).requires_grad_()
    grad = torch.randn(40, 300)
    gate, up = x.chunk(2, dim=1)
    out = torch.nn.functional.silu(gate) * up * probability[:, None]
    out.backward(grad.double())
    weights, plain = probability.detach().float(), x.detach().float()
    torch.testing.assert_close(values(SwiGlu(plain, weights)).double(), out, rtol=2e-6, atol=2e-6)
    sums = torch.full((3, 40), 77.0)
    got = values(SwiGluGradient(plain, grad, weights, sums))
    torch.testing.assert_close(got.double(), x.grad, rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(column_sums(sums).double(), probability.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["normal", "special", "extreme"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("quantize", "length"), QUANTIZERS)
def test_fused_and_unfused_give_the_same_bytes(quantize, length, shape, dtype, kind):
    if length == 16 and (shape[0] % 2 or shape[1] % 2):
        shape = tuple(extent // 2 * 2 for extent in shape)
    for case in cases(shape, dtype, kind):
        unfused = values(case.source)
        wanted = wanted_sums(case.source)
        for square, absent in ((False, "none"), (False, "row"), (False, "col"), (True, "none")):
            got, want = (without(planes(shape, length, square=square), absent) for _ in range(2))
            sums = sums_of(case.source)
            quantize(with_sums(case.source, **sums), got)
            quantize(unfused, want)
            got, want = got | sums, want | wanted
            for name, buffer in want.items():
                if isinstance(buffer, Tensor):
                    assert_bitwise(got[name], buffer, f"{name} without {absent} of {case.name} {kind}")


@pytest.mark.parametrize("tile", [(WHOLE, WHOLE), (1, WHOLE), (128, 128), (16, 1)])
def test_amaxes_are_those_of_the_values(tile):
    for shape in ((140, 260), (3, 9000)):
        for case in cases(shape, BF16, "special"):
            fused, unfused = (torch.full(grid_shape(shape, (0, 0), tile), 77.0) for _ in range(2))
            ops.tile_amax(case.source, phase=(0, 0), tile=tile, out=fused)
            ops.tile_amax(values(case.source), phase=(0, 0), tile=tile, out=unfused)
            assert_bitwise(fused, unfused, case.name)


def canonical(x: Tensor) -> Tensor:
    """NaN as kernels store it."""
    return torch.where(x.isnan(), torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(F32), x)


def sum_in_order(x: Tensor) -> Tensor:
    """Sums of panels as `panel_sums` defines them, an addition at a time."""
    rows, cols = x.shape
    padded = torch.zeros(-(-rows // 128) * 128, cols)
    padded[:rows] = x.float()
    panels = padded.view(len(padded) // 128, 8, 2, 8, cols)
    of_rows = panels[:, :, :, 0]
    for i in range(1, 8):
        of_rows = of_rows + panels[:, :, :, i]
    of_pairs = of_rows[:, :, 0] + of_rows[:, :, 1]
    total = torch.zeros(len(panels), cols)
    for i in range(8):
        total = total + of_pairs[:, i]
    return canonical(total)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (700, 1030)])
def test_columns_are_summed_in_the_order_that_is_defined(shape, dtype, kind):
    x = matrix(kind, shape, dtype)
    want = sum_in_order(x)
    for level in every_level():
        out = torch.full(sums_shape(x), 77.0)
        ops.panel_sums(x, out=out)
        assert_bitwise(out, want, f"{kind} {level}")


def test_sums_of_whole_columns_are_near_those_of_fp64():
    x = matrix("normal", (33_000, 70), BF16)
    sums = torch.full(sums_shape(x), 77.0)
    ops.panel_sums(x, out=sums)
    torch.testing.assert_close(column_sums(sums).double(), x.double().sum(0), rtol=0, atol=1e-4)
    assert column_sums(torch.empty(0, 70)).tolist() == [0.0] * 70


def rstd_in_order(x: Tensor, eps: float) -> Tensor:
    """What `rms_rstd` defines, an addition at a time."""
    rows, cols = x.shape
    padded = torch.zeros(rows, -(-cols // 256) * 256)
    padded[:, :cols] = x.float()
    sums = torch.zeros(rows, 256)
    for part in padded.split(256, dim=1):
        sums = sums + part * part
    for distance in (4, 2, 1):
        sums = sums.view(rows, 32, 8)
        sums = torch.cat([sums[..., :distance] + sums[..., distance : 2 * distance], sums[..., distance:]], -1)[..., :8]
        sums = sums.reshape(rows, 256)
    sums = sums.view(rows, 32, 8)[..., 0]
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    mean = sums[:, 0] / torch.full((rows,), float(cols))
    # NOTE: torch's fp32 root is not to the nearest; one in fp64 is, once it is rounded.
    return canonical(torch.ones(rows) / torch.sqrt((mean + torch.tensor(eps)).double()).float())


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 512), (3, 771), (40, 7), (2, 9000), (0, 128)])
def test_norms_of_rows_are_summed_in_the_order_that_is_defined(shape, dtype, kind):
    x = matrix(kind, shape, dtype)
    for level in every_level():
        out = torch.full(shape[:1], 77.0)
        ops.rms_rstd(x, eps=1e-5, out=out)
        assert_bitwise(out, rstd_in_order(x, 1e-5), f"{kind} {level}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_gathered_by_their_numbers(dtype):
    x = matrix("special", (5, 70), BF16)
    index = torch.tensor([4, 0, 0, 5, -1, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2], dtype=dtype)
    want = torch.zeros(8, 70, dtype=BF16)
    want[[0, 1, 2, 7]] = x[[4, 0, 0, 2]]
    for _ in every_level():
        assert_bitwise(values(Gathered(x, index)), want, "rows")
        rstd, gamma = x[:, 0].float().contiguous(), torch.full((70,), torch.inf)
        norm = RmsNorm(x, rstd, gamma)
        want_norm = torch.zeros_like(want)
        want_norm[[0, 1, 2, 7]] = values(norm)[[4, 0, 0, 2]]
        assert_bitwise(values(Gathered(norm, index)), want_norm, "rows of a norm")


def test_rms_norm_is_that_of_torch():
    x, gamma = matrix("normal", (64, 516), BF16), matrix("normal", (1, 516), F32, 1)[0]
    rstd = torch.empty(64)
    ops.rms_rstd(x, eps=1e-5, out=rstd)
    for zero_centered in (False, True):
        got = values(RmsNorm(x, rstd, gamma, zero_centered))
        want = torch.nn.functional.rms_norm(x.double(), (516,), gamma.double() + zero_centered, 1e-5)
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


X = torch.zeros(4, 6, dtype=BF16)
REFUSED = [
    (SwiGlu(X[:, :5].contiguous()), "even number"),
    (SwiGlu(X.t()), "contiguous"),
    (SwiGluGradient(X, torch.zeros(4, 3)), "grad: got torch.float32"),
    (SwiGluGradient(X, torch.zeros(4, 6, dtype=BF16)), r"grad: got shape \(4, 6\)"),
    (RmsNorm(X, torch.zeros(3), torch.zeros(6)), r"rstd: got shape \(3,\)"),
    (RmsNorm(X, torch.zeros(4), torch.zeros(12)[::2]), "gamma: got stride"),
    (Summed(SwiGlu(X), torch.zeros(2, 3)), r"sums: got shape \(2, 3\)"),
    (SwiGlu(X, torch.zeros(4, dtype=BF16)), "probability: got torch.bfloat16"),
    (SwiGluGradient(X, X[:, :3].contiguous(), torch.zeros(3)), r"probability: got shape \(3,\)"),
    (SwiGluGradient(X, X[:, :3].contiguous(), None, torch.zeros(1, 4)), "row_sums: got no probability"),
    (SwiGluGradient(X, X[:, :3].contiguous(), torch.zeros(4), torch.zeros(4, 1)), r"row_sums: got shape \(4, 1\)"),
    (Gathered(X, torch.zeros(4)), "index: got torch.float32"),
    (Gathered(X, torch.zeros(8, dtype=torch.int32)[::2]), "index: got stride"),
    (Gathered(X, torch.zeros(4, 1, dtype=torch.int32)), r"index: got shape \(4, 1\)"),
    (Gathered(SwiGlu(X.t()), torch.zeros(4, dtype=torch.int32)), "contiguous"),
    (Gathered(Gathered(X, torch.zeros(4, dtype=torch.int32)), torch.zeros(4, dtype=torch.int32)), "of: got Gathered"),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_tensors_that_do_not_fit_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        ops.evaluate(source, out=torch.empty(4, 3, dtype=BF16))


def test_sums_of_a_part_of_a_tile_are_refused():
    outputs = planes((64, 128), 32, square=False)
    with pytest.raises(ValueError, match="whole tiles"):
        ops.quantize_mxfp8(Summed(torch.zeros(64, 128), torch.empty(1, 128)), phase=(8, 0), fp8="e4m3", **outputs)


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="no source 'relu'"):
        _C.evaluate((X, "relu", [X]), X, 1)


def test_a_compiled_function_may_quantize_a_source():
    def quantize(x, data, scale, sums):
        source = Summed(SwiGlu(x), sums)
        ops.quantize_mxfp8(source, phase=(0, 0), fp8="e4m3", row_tile=(1, 32), row_data=data, row_scale=scale)
        return data.float().sum()

    x = matrix("normal", (64, 512), BF16)
    eager, traced = (
        (torch.zeros(64, 256, dtype=torch.uint8), torch.zeros(64, 8, dtype=torch.uint8), torch.zeros(1, 256))
        for _ in range(2)
    )
    quantize(x, *eager)
    torch.compile(quantize, backend="aot_eager", fullgraph=True)(x, *traced)
    for got, want in zip(traced, eager, strict=True):
        assert_bitwise(got, want, "traced")


@pytest.mark.parametrize("dtype", (F32, BF16, torch.float16))
def test_rows_are_summed_by_their_numbers_and_rounded_once(dtype):
    x, positions = torch.randn(9, 5).to(dtype), torch.tensor([[0, 8, 3], [-1, 2, 9], [4, 4, 4], [9, -7, 12]])
    out = torch.full((4, 5), 7.0, dtype=dtype)
    ops.gather_sum(x, positions=positions, out=out)
    wide = x.float()
    want = torch.stack((wide[0] + wide[8] + wide[3], wide[2], wide[4] + wide[4] + wide[4], torch.zeros(5)))
    assert_bitwise(out, (want + 0.0).to(dtype), "sums")


def test_positions_of_other_types_are_named():
    x, out = torch.randn(9, 5), torch.zeros(2, 5)
    with pytest.raises(ValueError, match="positions: got 1 dimensions"):
        ops.gather_sum(x, positions=torch.zeros(2, dtype=torch.int64), out=out)
    with pytest.raises(ValueError, match="positions: got torch.int32"):
        ops.gather_sum(x, positions=torch.zeros(2, 3, dtype=torch.int32), out=out)
