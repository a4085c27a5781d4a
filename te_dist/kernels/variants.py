"""Kernels that a model is likely to need: compiled ahead by `te-dist kernels build`, and checked by the tests.

Everything is there aligned, as whole matrices are, and at the narrowest access for matrices cut at any element. What
linear maps and experts launch by the recipes as they come, and by `Format.HYBRID`, is all in it; what recipes of one's
own launch may be compiled at first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from te_dist.kernels import (
    amax,
    dequantize,
    evaluation,
    gemm,
    gemm_staged,
    grouped_decoded,
    grouped_gemm,
    grouped_quantize,
    grouped_whole,
    histories,
    movement,
    quantize,
    routing,
    sorting,
)
from te_dist.kernels.gemm_decoded import WIDTHS, decoded
from te_dist.kernels.gemm_decoded import source as coded
from te_dist.kernels.grouped_whole import Operand
from te_dist.kernels.inputs import Source, adam, gathered, plain, rms_norm, summed, swiglu, swiglu_gradient
from te_dist.kernels.multi_adam import ADVANCE, compact
from te_dist.kernels.multi_tensor import multi_tensor, reading
from te_dist.kernels.panels import GROUPED_ROWS, ONE_MATRIX, SQUARE, WIDE, Panels
from te_dist.kernels.spec import Spec
from te_dist.kernels.task import Widths

_BYTES = {"BFloat16": 2, "Float16": 2, "Float32": 4}
_CODES = ("E4M3", "E5M2")
_PAIRS = (("E4M3", "E4M3"), ("E5M2", "E4M3"))  # of a product: E5M2 for gradients
_ABSENT, _RUN, _SQUARE, _TENSOR = (f"Share::k{name}" for name in ("Absent", "Run", "Square", "Tensor"))
_SPLIT, _BY_CHANCE = ("Remainder", "Nothing"), ("Stochastic", "Nothing")  # bf16 that Adam updates
_BLOCK_SHARES = ((_RUN, _RUN), (_RUN, _ABSENT), (_ABSENT, _RUN), (_SQUARE, _SQUARE), (_SQUARE, _ABSENT))
_FROM_COLUMNS = (_ABSENT, _SQUARE)  # of weights that are not kept quantized, whose squares forward has found
_PLAIN_RULE = ("kNearest", "kNone", "false", "false")
_TRANSFORMED = ("kNearest", "kNone", "false", "true")  # columns of what weights' gradients are computed from
_OF_GRADIENTS = ("kStochasticAligned", "kNone", "false", "true")
_TENSOR_SHARES = ((_TENSOR, _TENSOR), (_TENSOR, _ABSENT), (_ABSENT, _TENSOR))


def _mxfp8(source: Source, widths: Widths | None = None, **constants: Any) -> Iterator[Spec]:
    """By all panels that matrices of any width are read by. `widths`: where panels are not whole and aligned."""
    for lanes in (SQUARE, WIDE) if quantize.is_of_halves(source) else (SQUARE,):
        whole = (16, 8, lanes.panel[1] // quantize.MX_TILE[1])
        yield quantize.mxfp8(source, widths or whole, lanes=lanes, **constants)


def _and_pair(source: Source) -> Iterator[Source]:
    """It, and what reads whole halves in pairs."""
    yield source
    if source.pair is not None:
        yield source.pair


def quantizers(element: str) -> Iterator[Spec]:
    """All codecs and directions for inputs of one type."""
    source, narrow = plain(element), _BYTES[element]
    for code, shares in product(_CODES, (*_BLOCK_SHARES, _FROM_COLUMNS, *_TENSOR_SHARES)):
        lanes = quantize.float8_lanes(source, shares)
        yield quantize.float8(source, (16, 8, 16), code=code, shares=shares, lanes=lanes)
    for code, shares in product(_CODES, (*_BLOCK_SHARES, _FROM_COLUMNS)):
        yield from _mxfp8(source, code=code, shares=shares)
    wide = (16, 8, 16, 8, 8)
    for rounding in ("kNearest", "kStochasticAligned"):
        plain_rule, transformed = ((rounding, "kNone", "false", transforms) for transforms in ("false", "true"))
        for shares in (*_BLOCK_SHARES, _FROM_COLUMNS):
            yield quantize.nvfp4(source, wide, rule=plain_rule, shares=shares)
        for shares in ((_RUN, _RUN), (_ABSENT, _RUN)):
            yield quantize.nvfp4(source, wide, rule=transformed, shares=shares)
    for transforms, load in product(("false", "true"), (16, narrow)):
        yield quantize.direction_amaxes(source, (load,), transforms=transforms)
    for shares in ((_RUN, _RUN), (_SQUARE, _SQUARE)):
        yield quantize.float8(source, (narrow, 1, 1), code="E4M3", shares=shares)
        yield from _mxfp8(source, (narrow, 1, 1), code="E4M3", shares=shares)
        by_row = ("kStochastic", "kNone", "true", "false")
        yield quantize.nvfp4(source, (narrow, 1, 1, 1, 1), rule=by_row, shares=shares)
        yield quantize.nvfp4(source, wide, rule=("kNearest", "kMeanSquare", "false", "false"), shares=shares)
    for load in (16, narrow):
        yield from (amax.of_matrix(source, (load,), parts=parts) for parts in ("true", "false"))
        yield from (amax.of_tiles(source, (load,), whole=whole) for whole in ("true", "false"))


def fused(element: str) -> Iterator[Spec]:
    """What is computed in front of quantizers of whole matrices, and found beside, for inputs of one type."""
    yield from (evaluation.sums_of_rows(element, width) for width in (16, _BYTES[element]))
    computed = (swiglu(element), swiglu_gradient(element), rms_norm(element, element, "false"))
    computed = (*computed, gathered(plain(element), "int32_t"))
    routed = (swiglu(element, "kWeighted"), swiglu_gradient(element, "kDifferentiated"))
    for source in (*computed, *routed, summed(plain(element)), summed(swiglu_gradient(element))):
        for read in _and_pair(source):
            for shares in ((_RUN, _RUN), (_RUN, _ABSENT)):
                yield quantize.float8(read, (16, 8, 16), code="E4M3", shares=shares)
                yield quantize.mxfp8(read, (16, 8, 4), code="E4M3", shares=shares)
            yield quantize.float8(read, (16, 8, 16), code="E4M3", shares=(_TENSOR, _TENSOR))
        yield quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=_PLAIN_RULE, shares=(_RUN, _RUN))
    yield from gradients(summed(plain(element)), ONE_MATRIX)
    yield quantize.nvfp4(swiglu(element), (16, 8, 16, 8, 8), rule=_TRANSFORMED, shares=(_RUN, _RUN))
    yield quantize.direction_amaxes(swiglu(element), (16,), transforms="true")
    for source in (*computed, swiglu(element, "kWeighted"), swiglu_gradient(element, "kWeighted")):
        yield amax.of_matrix(source, (16,), parts="true")
    for source in (*computed[:-1], *routed):
        yield evaluation.values(source, (16, 16))
    for index, width, lanes in product(("int32_t", "int64_t"), (16, _BYTES[element]), (32, 1)):
        yield evaluation.rows_by_number(index, width, lanes)
    yield evaluation.values(summed(plain(element)), (16, 0))
    yield evaluation.rstd(plain(element), 16)


def gradients(source: Source, panels: Panels) -> Iterator[Spec]:
    """What quantizes the gradient of an output by each recipe."""
    for shares in ((_RUN, _RUN), (_TENSOR, _TENSOR)):
        yield quantize.float8(source, (16, 8, 16), code="E5M2", shares=shares, panels=panels)
    yield quantize.mxfp8(source, (16, 8, 4), code="E5M2", shares=(_RUN, _RUN), panels=panels)
    yield quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=_OF_GRADIENTS, shares=(_RUN, _RUN), panels=panels)


def _both_ways(source: Source, code: str, panels: Panels = GROUPED_ROWS) -> Iterator[Spec]:
    """In both directions, by what reads once."""
    for shares in ((_RUN, _RUN), (_TENSOR, _TENSOR)):
        yield quantize.float8(source, (16, 8, 16), code=code, shares=shares, panels=panels)
    yield quantize.mxfp8(source, (16, 8, 4), code=code, shares=(_RUN, _RUN), panels=panels)


def grouped_quantizers(element: str) -> Iterator[Spec]:
    """Of groups of rows of one type, and what is computed in front of them."""
    source, wide, narrow = plain(element), (16, 8, 16), (_BYTES[element], 1, 1)
    for code, shares in product(_CODES, (*_BLOCK_SHARES, *_TENSOR_SHARES)):
        yield quantize.float8(source, wide, code=code, shares=shares, panels=GROUPED_ROWS)
    for code, shares in product(_CODES, _BLOCK_SHARES):
        yield from _mxfp8(source, code=code, shares=shares, panels=GROUPED_ROWS)
    for rounding in ("kNearest", "kStochasticAligned"):
        plain_rule, transformed = ((rounding, "kNone", "false", transforms) for transforms in ("false", "true"))
        for shares in _BLOCK_SHARES:
            yield quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=plain_rule, shares=shares, panels=GROUPED_ROWS)
        yield quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=transformed, shares=(_RUN, _RUN), panels=GROUPED_ROWS)
    for transforms in ("false", "true"):
        yield quantize.direction_amaxes(source, (16,), transforms=transforms, panels=GROUPED_ROWS)
    yield quantize.float8(source, narrow, code="E4M3", shares=(_RUN, _RUN), panels=GROUPED_ROWS)
    yield from _mxfp8(source, narrow, code="E4M3", shares=(_RUN, _RUN), panels=GROUPED_ROWS)
    of_experts = (gathered(plain(element), "int64_t"), swiglu(element, "kWeighted"))
    computed = (swiglu(element), swiglu_gradient(element), rms_norm(element, element, "false"), *of_experts)
    for source in (*computed, summed(plain(element)), summed(swiglu_gradient(element))):
        for read in _and_pair(source):
            yield from _both_ways(read, "E4M3")
        yield quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=_PLAIN_RULE, shares=(_RUN, _RUN), panels=GROUPED_ROWS)
    for source in (summed(plain(element)), of_experts[0]):
        yield from gradients(source, GROUPED_ROWS)
    handed = swiglu_gradient(element), summed(swiglu_gradient(element))  # to quantizers that read once
    for source, code in product((*handed, swiglu_gradient(element, "kDifferentiated")), _CODES):
        for read in _and_pair(source):
            yield from _both_ways(read, code)
            yield from _both_ways(read, code, ONE_MATRIX) if source in handed else ()
    for source in (swiglu(element), *of_experts):
        yield quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=_TRANSFORMED, shares=(_RUN, _RUN), panels=GROUPED_ROWS)
        yield quantize.direction_amaxes(source, (16,), transforms="true", panels=GROUPED_ROWS)
    for source in (plain(element), *computed):
        yield grouped_quantize.amaxes(source, (16,))


def products(out: str) -> Iterator[Spec]:
    """Of FP8 blocks with an output of one type, once and in groups: all kinds of scales and tilings to choose from."""
    kinds = [kind for kind in grouped_gemm.ROWS_RATES if kind.out_bytes == _BYTES[out]]
    for codes, kind in product(_PAIRS, kinds):
        for shape in gemm.RATES.get(kind, ()):
            yield gemm.float8_block(codes, out, kind.square, shape, adds=kind.adds)
        for shape in grouped_gemm.SUMS_RATES.get(kind, ()):
            yield grouped_gemm.sums_float8_block(codes, out, shape, adds=kind.adds)
        for shape in grouped_gemm.ROWS_RATES[kind]:
            yield grouped_gemm.rows_float8_block(codes, out, kind.square, shape, adds=kind.adds, turns=kind.turns)
    for codes, shape in product(_PAIRS, gemm.RATES[gemm.Kind(False, _BYTES["Float32"])]):
        yield gemm.float8_block(codes, "Float32", False, shape)  # parts of a sum, whatever the output


def whole_groups(out: str) -> Iterator[Spec]:
    """Of 16-bit values and of FP8 with one scale, in groups, with an output of one type."""
    element = out if _BYTES[out] == 2 else "BFloat16"
    half, turned = Operand(element), Operand(element, turned=True)
    codes = [tuple(map(Operand, pair)) for pair in _PAIRS]
    shapes = tuple(product((2**17, 2**13, 2**8), (4096, 128), (8,)))
    for adds in (False, True) if out == "Float32" else (False,):
        for pair in ((half, half), (half, turned), *codes):
            itemsize = 1 if pair in codes else 2
            for split in dict.fromkeys(grouped_whole.products_split(*shape, itemsize) for shape in shapes):
                yield grouped_whole.whole(pair, out, split, adds=adds)
        of_sums = tuple(product(shapes, (False, True) if adds else (False,)))
        for split in dict.fromkeys(grouped_whole.sums_split(*shape, held=held) for shape, held in of_sums):
            yield grouped_whole.whole((turned, turned), out, split, sums=True, adds=adds)
        for pair in codes:
            for split in dict.fromkeys(grouped_whole.products_in_parts_split(*shape) for shape in shapes):
                yield grouped_whole.whole(pair, out, split, in_parts=True, adds=adds)
            for split in dict.fromkeys(grouped_whole.sums_in_parts_split(*shape, held=held) for shape, held in of_sums):
                yield grouped_whole.whole(pair, out, split, in_parts=True, sums=True, adds=adds)


def decoded_products() -> Iterator[Spec]:
    """Of MXFP8 and NVFP4, their mixtures, and of each and FP8 as weights of 16-bit inputs, read 16 bytes at a time."""
    powers, turned = (coded("e4m3", 32, turns, 16) for turns in (False, True))
    pairs, blocks = coded("e2m1", 16, False, 8), coded("e4m3", 0, False, 16)
    operands = [(powers, powers, "bfloat16"), (powers, turned, "bfloat16"), (turned, turned, "bfloat16")]
    operands += [(pairs, pairs, "float16"), (powers, pairs, "bfloat16"), (pairs, turned, "bfloat16")]
    for half in ("bfloat16", "float16"):
        plain, plain_turned = (coded(half, 0, turns, 16) for turns in (False, True))
        operands += [(plain, powers, "bfloat16"), (plain, pairs, half), (plain, blocks, half)]
        yield decoded(plain, blocks, half, WIDTHS[1], True)
        yield decoded(blocks, plain_turned, half, WIDTHS[1], True)
    yield decoded(blocks, blocks, "float16", WIDTHS[1], True)
    for (a, b, half), width in product(operands, WIDTHS):
        yield decoded(a, b, half, width, False)


def staged_products() -> Iterator[Spec]:
    """Of MXFP8 and NVFP4 and their mixtures, where whole matrices are aligned; of one format, in groups."""
    mx, turned, nv = ("e4m3", False), ("e4m3", True), ("e2m1", False)
    grad, turned_grad = ("e5m2", False), ("e5m2", True)
    of_grads = [(grad, turned), (turned_grad, turned)]
    operands = [(mx, mx), (mx, turned), (turned, turned), (nv, nv), (mx, nv), (nv, turned), *of_grads]
    for sides, height in product(operands, gemm_staged.HEIGHTS):
        yield gemm_staged.one_product(*_kinds_and_turns(sides), height)
    for sides, height in product(((mx, mx), (mx, turned), (nv, nv), of_grads[0]), gemm_staged.HEIGHTS):
        yield grouped_decoded.rows_decoded(*_kinds_and_turns(sides), height)
    for sides, height in product(((turned, turned), (nv, nv), of_grads[1]), gemm_staged.HEIGHTS):
        yield grouped_decoded.sums_decoded(*_kinds_and_turns(sides), height)


def _kinds_and_turns(sides: tuple[tuple[str, bool], ...]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    return tuple(kind for kind, _ in sides), tuple(turned for _, turned in sides)


def dequantizers(element: str) -> Iterator[Spec]:
    """All codecs and orders of codes, for outputs of one type."""
    narrow = _BYTES[element]
    for scales, code, order in product(("FloatScales", "PowerScales"), _CODES, ("kRows", "kColumns")):
        yield dequantize.decoder(element, code, scales, order, (8, 16))
        yield dequantize.decoder(element, code, scales, order, (1, narrow))
    for order in ("kPairsInRows", "kPairsInColumns"):
        yield dequantize.decoder(element, "E2M1", "NvFp4Scales", order, (4, 16))
        yield dequantize.decoder(element, "E2M1", "NvFp4Scales", order, (1, narrow))


def updaters(element: str) -> Iterator[Spec]:
    """Adam by gradients of one type, and what is done with fp32 masters meanwhile."""
    source = adam(element, "Float32")
    for shares in _BLOCK_SHARES:
        yield multi_tensor(quantize.float8(source, (16, 8, 16), code="E4M3", shares=shares))
        yield multi_tensor(quantize.mxfp8(source, (16, 8, 4), code="E4M3", shares=shares))
    yield multi_tensor(quantize.float8(source, (4, 1, 1), code="E4M3", shares=(_SQUARE, _ABSENT)))
    for width in (16, 4):
        yield multi_tensor(amax.of_tiles(source, (width,), whole="false"))
        yield from (multi_tensor(reading(source, (width,), copy=copy)) for copy in ("BFloat16", "Nothing"))


def compact_updaters(element: str) -> Iterator[Spec]:
    """Adam by gradients of one type, whose state is kept in fewer bytes."""
    master, moments = "Nearest<Float32>", ("Moment<BFloat16>", "MomentBytes")
    kept = [*product(((master, "Nothing"), (master, "BFloat16"), _SPLIT, _BY_CHANCE), moments)]
    kept += [(value, "Moment<Float32>") for value in (_SPLIT, _BY_CHANCE)]
    for (value, copy), moment in kept:
        for width in (16, 4):
            yield multi_tensor(compact((element, value, moment, moment, copy), (width,)))


def requantizers() -> Iterator[Spec]:
    """What quantizes fp32 masters by amaxes that are known."""
    source = plain("Float32")
    for shares in (*_BLOCK_SHARES, *_TENSOR_SHARES):
        yield multi_tensor(quantize.float8(source, (16, 8, 16), code="E4M3", shares=shares))
    for shares in _BLOCK_SHARES:
        yield multi_tensor(quantize.mxfp8(source, (16, 8, 4), code="E4M3", shares=shares))
    yield multi_tensor(quantize.nvfp4(source, (16, 8, 16, 8, 8), rule=_PLAIN_RULE, shares=(_SQUARE, _ABSENT)))
    yield multi_tensor(reading(source, (4,), copy="Float32"))
    yield ADVANCE


def masters() -> Iterator[Spec]:
    """What decodes a weight to its fp32 master, and quantizes that, one at a time; and sums that many panels have."""
    source, wide = plain("Float32"), (16, 8, 16, 8, 8)
    for shares in ((_SQUARE, _ABSENT), (_TENSOR, _ABSENT)):
        yield quantize.float8(source, (16, 8, 16), code="E4M3", shares=shares)
    for shares in ((_RUN, _RUN), (_SQUARE, _ABSENT)):
        yield quantize.mxfp8(source, (16, 8, 4), code="E4M3", shares=shares)
    yield quantize.nvfp4(source, wide, rule=_PLAIN_RULE, shares=(_SQUARE, _ABSENT))
    yield quantize.direction_amaxes(source, (16,), transforms="false")
    yield from (amax.of_matrix(source, (16,), parts=parts) for parts in ("true", "false"))
    yield from (amax.of_tiles(source, (16,), whole=whole) for whole in ("true", "false"))
    for scales in ("FloatScales", "PowerScales"):
        yield dequantize.decoder("Float32", "E4M3", scales, "kRows", (8, 16))
    yield dequantize.decoder("Float32", "E2M1", "NvFp4Scales", "kPairsInRows", (4, 16))
    yield from (evaluation.values(summed(source), (width, 0)) for width in (16, 8, 4))  # of any number of rows


def movers() -> Iterator[Spec]:
    """What moves values without a look at their types."""
    yield from (movement.transform(width) for width in (8, 2))
    for bits, load, narrow in ((4, 8, 1), (8, 16, 1), (16, 16, 2), (32, 16, 4)):
        yield from (movement.turn(bits, widths) for widths in ((load, 16), (narrow, narrow)))
    yield from (movement.turn(8, widths, squares=True) for widths in (*product((16, 8), (16, 8)), (1, 1)))
    yield from (movement.copies(width) for width in (16, 4, 1))
    yield from (movement.chunks(width, dim) for width, dim in product((16, 4, 1), range(3)))
    yield from (movement.sums_of_parts(out, width) for out, width in product(_BYTES, (1, 2, 4)))
    yield from map(histories.advance, ("true", "false"))
    yield amax.ZERO
    yield from (grouped_gemm.find_groups(kind, are_sizes=f) for kind in ("int32_t", "int64_t") for f in (False, True))
    yield grouped_quantize.SUMS
    yield from map(grouped_gemm.rest, (16, 4, 2))
    yield from (*map(sorting.count, (4, 1)), sorting.BEFORE, *map(sorting.place, (4, 1)), *routing.variants())
    yield evaluation.rows_by_number("int64_t", 4, 1)  # probabilities


def variants(*elements: str) -> list[Spec]:
    """All of them, for inputs and outputs of the named types (all by default)."""
    families = (quantizers, fused, grouped_quantizers, products, whole_groups, dequantizers, updaters, compact_updaters)
    typed = (spec for name in elements or _BYTES for family in families for spec in family(name))
    return list(
        dict.fromkeys([*movers(), *masters(), *requantizers(), *decoded_products(), *staged_products(), *typed])
    )
