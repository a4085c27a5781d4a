"""One call, and more, of every op: over whole tiles and ragged ones, cut anywhere, misaligned, of one row, empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import product
from typing import Any

import torch
from torch import Tensor

from te_dist import ops
from te_dist.formats import WHOLE
from te_dist.ops._checks import grid_shape
from te_dist.ops.gemm_decoded import Coded
from te_dist.ops.quantize_float8_current import WORKSPACE
from te_dist.ops.sort_by_expert import workspace_size
from te_dist.ops.source import Gathered, Source, sums_shape
from tests.codecs.kernel_inputs import matrix, scale_view
from tests.ops import grouped_quantize
from tests.ops.assembled import assembled
from tests.ops.grouped_decoded import DecodedOperand
from tests.ops.groups import RUN, SQUARE, Operand, group_ends, table_of
from tests.ops.half_products import half_products
from tests.ops.histories import advanced_histories
from tests.ops.routing import decisions
from tests.ops.sorting import experts_of, sorted_outputs
from tests.ops.sources import cases, sums_of, with_sums
from tests.ops.turned_squares import turned_squares
from tests.ops.whole_groups import HALVES, KINDS, padded

Pair = tuple[int, int]

# Extents, offset of the first element inside its tile, elements between the start of the storage and the matrix.
PLACES = [
    ((256, 384), (0, 0), 0),
    ((72, 512), (0, 0), 0),  # whole wide panels; a part of a tall one
    ((130, 270), (100, 90), 1),
    ((1, 515), (5, 1), 0),
    ((66, 1), (0, 7), 3),
    ((0, 128), (0, 0), 0),
]
EVEN_PLACES = [((256, 384), (0, 0), 0), ((70, 300), (6, 10), 1), ((2, 514), (14, 2), 0), ((0, 128), (0, 0), 0)]
DTYPES = (torch.bfloat16, torch.float32)
HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Call:
    """An op with its arguments. `is_exact`: whether the CPU writes the same bytes, if it computes this at all."""

    name: str
    op: Callable[..., None]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    is_exact: bool = True

    def on(self, device: str) -> Call:
        """The same call on another device: strides, offsets and what lies around the matrices as they are."""
        return replace(self, inputs=_on(self.inputs, device), outputs=_on(self.outputs, device))

    def run(self) -> None:
        self.op(**self.inputs, **self.outputs)


def _on(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return [_on(each, device) for each in value]
    if not isinstance(value, Tensor):
        return value
    target = torch.empty(0, dtype=value.dtype, device=device)
    storage = value.untyped_storage().to(device=device)
    return target.set_(storage, value.storage_offset(), value.shape, value.stride())


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """The same matrix, contiguous, that many elements behind the start of its storage."""
    buffer = torch.zeros(elements + tensor.numel(), dtype=tensor.dtype)
    buffer[elements:] = tensor.reshape(-1)
    return buffer[elements:].view(tensor.shape)


def codes(shape: Pair, shift: int = 0) -> Tensor:
    return shifted(torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)), shift)


def bytes_of(shape: Pair, shift: int) -> Tensor:
    return shifted(torch.zeros(shape, dtype=torch.uint8), shift)


@cache
def catalog() -> tuple[Call, ...]:
    """`calls()`, made once in a process."""
    return tuple(calls())


def calls() -> Iterator[Call]:
    """All of them, on the CPU."""
    yield from amaxes()
    yield from quantizers()
    yield from fp4_quantizers()
    yield from sources()
    yield from gathers()
    yield from (Call(*each) for each in (*decisions(), *half_products(), *advanced_histories()))
    yield from sorts()
    yield from dequantizers()
    yield from (*movers(), *(Call(*each) for each in turned_squares()))
    yield from products_of_blocks()
    yield from products_of_tensors()
    yield from products_by_decoding()
    yield from groups()
    yield from groups_by_decoding()
    yield from grouped_quantizers()
    yield from groups_summed_whole()


def amaxes() -> Iterator[Call]:
    tiles = [(1, 128), (128, 1), (128, 128), (WHOLE, WHOLE), (1, WHOLE), (3, 5)]
    for (shape, phase, shift), dtype, tile in product(PLACES, DTYPES, tiles):
        x = shifted(matrix("wide", shape, dtype), shift)
        inner = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
        out = torch.zeros(grid_shape(shape, inner, tile))
        yield Call(f"amax {shape} {dtype} {tile}", ops.tile_amax, dict(x=x, phase=inner, tile=tile), dict(out=out))


def quantizers() -> Iterator[Call]:
    for (shape, phase, shift), dtype, fp8 in product(PLACES, DTYPES, ("e4m3", "e5m2")):
        name, x = f"{shape} {dtype} {fp8}", shifted(matrix("wide", shape, dtype), shift)
        row, col = bytes_of(shape, shift), bytes_of(shape[::-1], shift)
        outputs = dict(row_data=row, row_scale=torch.zeros(1, 1), col_data=col, col_scale=torch.zeros(1, 1))
        inputs = dict(x=x, scale=torch.tensor([3.7]), fp8=fp8)
        with_amax = outputs | dict(amax=torch.zeros(1))
        yield Call(f"tensor {name}", ops.quantize_float8_tensor, inputs, outputs)
        by_columns = dict(col_data=col, col_scale=torch.zeros(1, 1))
        yield Call(f"columns of tensor {name}", ops.quantize_float8_tensor, inputs, by_columns)
        yield Call(f"tensor {name} and amax", ops.quantize_float8_tensor, inputs, with_amax)
        scalars = outputs | dict(row_scale=torch.zeros(()), col_scale=torch.zeros(1))
        of_scalars = scalars | dict(amax=torch.zeros(()))
        yield Call(f"tensor {name} and scalars", ops.quantize_float8_tensor, inputs, of_scalars)
        for flag in (0, 1):
            flagged = inputs | dict(noop=torch.tensor([flag], dtype=torch.int32))
            yield Call(f"tensor {name} and noop {flag}", ops.quantize_float8_tensor, flagged, with_amax)
        inputs = dict(x=x, fp8=fp8, pow2=fp8 == "e5m2", eps=0.0, workspace=torch.zeros(WORKSPACE))
        yield Call(f"current {name}", ops.quantize_float8_current, inputs, outputs)
        inputs = dict(x=x, fp8=fp8, pow2=fp8 == "e5m2", eps=0.0)
        by_amax, by_scalar = (inputs | dict(amax=amax) for amax in (torch.tensor([[9.0]]), torch.tensor(9.0)))
        yield Call(f"current {name} by amax", ops.quantize_float8_current, by_amax, outputs)
        yield Call(f"current {name} by scalars", ops.quantize_float8_current, by_scalar, scalars)
        for square in (False, True):
            tiles = {"row": (128, 128), "col": (128, 128)} if square else {"row": (1, 128), "col": (128, 1)}
            outputs = directions(shape, phase, shift, tiles=tiles)
            rule = dict(phase=phase, fp8=fp8, pow2=square, eps=0.0, row_tile=tiles["row"], col_tile=tiles["col"])
            yield Call(f"block {name} {square}", ops.quantize_float8_block, dict(x=x, **rule), outputs)
            tiles = {"row": (32, 32), "col": (32, 32)} if square else {"row": (1, 32), "col": (32, 1)}
            outputs = directions(shape, phase, shift, tiles=tiles)
            rule = dict(phase=phase, fp8=fp8, row_tile=tiles["row"], col_tile=tiles["col"])
            yield Call(f"mx {name} {square}", ops.quantize_mxfp8, dict(x=x, **rule), outputs)


def directions(shape: Pair, phase: Pair, shift: int, *, tiles: dict[str, Pair]) -> dict[str, Tensor]:
    """Data and scales of both directions, as fields of blocks (tiles of 128) or of MXFP8 (32) or NVFP4 (16) lie."""
    outputs = {}
    for side, tile in tiles.items():
        is_row, length = side == "row", max(tile)
        is_block = length == 128
        grain = tile if is_block else (1, length) if is_row else (length, 1)
        extents = shape if is_row or length == 32 else shape[::-1]
        data = (extents[0], extents[1] // 2) if length == 16 else extents
        dtype, order = (
            (torch.float32, "km") if is_block and is_row else (torch.float32 if is_block else torch.uint8, "mk")
        )
        outputs[f"{side}_data"] = bytes_of(data, shift)
        outputs[f"{side}_scale"] = scale_view(grid_shape(shape, phase, grain), dtype, order=order)
    return outputs


def fp4_quantizers() -> Iterator[Call]:
    state = torch.tensor([12345, 2**32 - 3])
    rules = [("none", None), ("mse", None), ("none", state)]
    for (shape, phase, shift), dtype, (four_over_six, rng_state), square in product(
        EVEN_PLACES, DTYPES, rules, (False, True)
    ):
        x = shifted(matrix("wide", shape, dtype), shift)
        tiles = {"row": (16, 16), "col": (16, 16)} if square else {"row": (1, 16), "col": (16, 1)}
        rule = dict(phase=phase, e4m3_max=448, four_over_six=four_over_six, rng_state=rng_state)
        rule |= dict(row_tile=tiles["row"], col_tile=tiles["col"])
        rule |= dict(row_tensor_amax=torch.tensor([[9.0]]), col_tensor_amax=torch.tensor([[9.0]]))
        name = f"fp4 {shape} {dtype} {four_over_six} {rng_state is not None} {square}"
        yield Call(name, ops.quantize_nvfp4, dict(x=x, **rule), directions(shape, phase, shift, tiles=tiles))


def sources() -> Iterator[Call]:
    """Everything that is computed in front, written, and before a quantizer with sums of columns beside."""
    for (shape, _, shift), dtype in product(PLACES, DTYPES):
        x = shifted(matrix("wide", shape, dtype), shift)
        yield Call(f"rstd {shape} {dtype}", ops.rms_rstd, dict(x=x, eps=1e-5), dict(out=torch.zeros(shape[0])))
        sums = dict(out=torch.zeros(sums_shape(x)))
        yield Call(f"sums {shape} {dtype}", ops.panel_sums, dict(x=x), sums)
        for kind in (torch.int32, torch.int64):
            index = torch.arange(-2, shape[0] + 3, dtype=kind).flip(0)  # rows that there are, and others
            out = shifted(torch.zeros(len(index), shape[1], dtype=dtype), shift)
            gathered = of_source(ops.evaluate, Gathered, ("of", "index"))
            yield Call(f"gathered {shape} {dtype} {kind}", gathered, dict(of=x, index=index), dict(out=out))
        for case in cases(shape, dtype, "wide"):
            name = f"{case.name} {shape} {dtype}"
            tensors = {key: shifted(tensor, shift) for key, tensor in case.tensors.items()}
            outputs = dict(out=shifted(torch.zeros(shape, dtype=dtype), shift))
            yield Call(name, of_source(ops.evaluate, case.make, tuple(tensors)), tensors, outputs)
            outputs = directions(shape, (0, 0), shift, tiles={"row": (1, 32), "col": (32, 1)})
            outputs |= sums_of(case.source)
            rule = dict(phase=(0, 0), fp8="e4m3", row_tile=(1, 32), col_tile=(32, 1))
            op = of_source(ops.quantize_mxfp8, case.make, tuple(tensors))
            yield Call(f"mx of {name}", op, tensors | rule, outputs)


def sorts() -> Iterator[Call]:
    """Copies sorted by expert, some of them nobody's."""
    for rows, copies, num_experts in ((300, 3, 7), (1, 1, 1), (0, 2, 3), (257, 8, 100), (40, 2, 3000)):
        name, inputs = f"{rows} rows of {copies} to {num_experts}", experts_of(rows, copies, num_experts)
        workspace = torch.zeros(workspace_size(rows * copies, num_experts), dtype=torch.int32)
        for first in (None, 2):
            given = dict(experts=inputs, first=first, workspace=workspace)
            yield Call(f"{name}, {first}", ops.sort_by_expert, given, sorted_outputs(inputs, num_experts))


def gathers() -> Iterator[Call]:
    """Sums of rows, of which some are not there."""
    for (rows, cols, copies, shift), dtype in product(((70, 256, 8, 0), (33, 45, 3, 1), (5, 64, 11, 4)), HALF_AND_FULL):
        x = shifted(matrix("normal", (rows, cols), dtype), shift)
        positions = torch.randint(-2, rows + 3, (2 * rows + 1, copies), generator=torch.Generator().manual_seed(1))
        out = shifted(torch.zeros(2 * rows + 1, cols, dtype=dtype), shift)
        yield Call(f"sums of {copies} rows {dtype}", ops.gather_sum, dict(x=x, positions=positions), dict(out=out))


def of_source(op: Callable[..., None], make: Callable[..., Source], names: tuple[str, ...]) -> Callable[..., None]:
    """`op`, given the tensors of a source, and where sums go."""

    @wraps(op)
    def call(**arguments: Any) -> None:
        source = make(**{name: arguments.pop(name) for name in names})
        sums = {name: arguments.pop(name) for name in ("sums", "row_sums") if name in arguments}
        op(with_sums(source, **sums), **arguments)

    return call


def dequantizers() -> Iterator[Call]:
    for (shape, phase, shift), dtype, fp8 in product(PLACES, DTYPES, ("e4m3", "e5m2")):
        name, straight = f"{shape} {dtype} {fp8}", codes(shape, shift)
        out = shifted(torch.zeros(shape, dtype=dtype), shift)
        for order, data in (("mk", straight), ("km", codes(shape[::-1], shift).t())):
            for tile in ((1, 128), (128, 128), (WHOLE, WHOLE)):
                inner = tuple(p % t if t else 0 for p, t in zip(phase, tile, strict=True))
                scale = torch.rand(grid_shape(shape, inner, tile)).t().contiguous().t()
                inputs = dict(data=data, scale=scale, tile=tile, phase=inner, fp8=fp8)
                yield Call(f"from block {name} {order} {tile}", ops.dequantize_float8, inputs, dict(out=out))
            for grain in ((1, 32), (32, 1)):
                inner = tuple(p % g for p, g in zip(phase, grain, strict=True))
                inputs = dict(
                    data=data, scale=codes(grid_shape(shape, inner, grain)), grain=grain, phase=inner, fp8=fp8
                )
                yield Call(f"from mx {name} {order} {grain}", ops.dequantize_mxfp8, inputs, dict(out=out))
    for (shape, phase, shift), dtype, packed_dim in product(EVEN_PLACES, DTYPES, (0, 1)):
        rows, cols = shape
        grain = (1, 16) if packed_dim == 1 else (16, 1)
        inner = tuple(p % g for p, g in zip(phase, grain, strict=True))
        inputs = dict(data=codes((rows, cols // 2) if packed_dim == 1 else (cols, rows // 2), shift))
        inputs |= dict(scale=codes(grid_shape(shape, inner, grain)), amax=torch.tensor([[3.3]]))
        inputs |= dict(packed_dim=packed_dim, phase=inner, e4m3_max=448)
        out = shifted(torch.zeros(shape, dtype=dtype), shift)
        yield Call(f"from fp4 {shape} {dtype} {packed_dim}", ops.dequantize_nvfp4, inputs, dict(out=out))


def movers() -> Iterator[Call]:
    kinds = ((4, torch.uint8), (8, torch.uint8), (16, torch.bfloat16), (32, torch.float32))
    for (shape, _, shift), (bits, dtype) in product([*PLACES, ((2, 300), (0, 0), 1)], kinds):
        rows, cols = shape[0] + (shape[0] % 2 if bits == 4 else 0), shape[1]
        src = shifted(codes((rows, cols * dtype.itemsize)).view(dtype), shift)
        out = shifted(torch.zeros((2 * cols, rows // 2) if bits == 4 else (cols, rows), dtype=dtype), shift)
        yield Call(f"transpose {shape} {bits}", ops.transpose, dict(src=src, bits=bits), dict(out=out))
    for bits, dtype in kinds:
        src = codes((3 * 34, 50 * dtype.itemsize)).view(dtype).view(3, 34, 50)
        out = torch.zeros((3, 100, 17) if bits == 4 else (3, 50, 34), dtype=dtype)
        yield Call(f"transposes {bits}", ops.transpose, dict(src=src, bits=bits), dict(out=out))
        out = torch.ones((3, 84, 20) if bits == 4 else (3, 42, 40), dtype=dtype)
        yield Call(f"transposes {bits} between padded lines", ops.transpose, dict(src=src, bits=bits), dict(out=out))
    for shape, shift in (((64, 100), 0), ((32, 3), 1), ((256, 64), 0), ((0, 5), 0)):
        x = shifted(matrix("normal", shape, torch.bfloat16), shift)
        out = shifted(torch.zeros(shape, dtype=torch.bfloat16), shift)
        yield Call(f"hadamard {shape}", ops.hadamard, dict(x=x, sign_mask=0xD7E8), dict(out=out))
        found = dict(row_amax=torch.zeros(1, 1), col_amax=torch.zeros(1, 1))
        yield Call(f"direction amax {shape}", ops.direction_amax, dict(x=x, hadamard=0xD7E8), found)
        rule = dict(phase=(0, 0), e4m3_max=448, four_over_six="none", rng_state=None, col_hadamard=0xD7E8)
        rule |= dict(col_tile=(16, 1), col_tensor_amax=torch.tensor([[9.0]]))
        outputs = directions(shape, (0, 0), shift, tiles={"col": (16, 1)})
        yield Call(f"fp4 transformed {shape}", ops.quantize_nvfp4, dict(x=x, **rule), outputs)
    yield from (Call(*each) for each in assembled())


def products_of_blocks() -> Iterator[Call]:
    """Whole tiles and ragged ones, cut inside of them, one row or column, nothing to sum, no rows."""
    shapes = ((512, 384, 256), (130, 70, 208), (1, 9, 16), (300, 1, 272), (33, 130, 0), (0, 128, 128))
    for (rows, cols, depth), square, dtype in product(shapes, (False, True), (*DTYPES, torch.float16)):
        phase = (96 if square else 0, 80) if rows == 130 else (0, 0)  # noqa: PLR2004
        tiles = -(-(phase[1] + depth) // 128)
        inputs = dict(a=finite((rows, depth)), a_scale=torch.rand(tiles, -(-rows // 4) * 4), phase=phase, parts=1)
        grid = (-(-(phase[0] + cols) // 128), -(-tiles // 4) * 4) if square else (tiles, -(-cols // 4) * 4)
        inputs |= dict(b=finite((cols, depth)), b_scale=torch.rand(grid), b_tile=(128, 128) if square else (1, 128))
        inputs |= dict(
            fp8=("e5m2", "e4m3") if dtype == torch.float32 else ("e4m3", "e4m3"), bias=None, accumulate=False
        )
        for shift in (0, 1):
            out = dict(out=shifted(torch.zeros(rows, cols, dtype=dtype), shift))
            name = f"product {(rows, cols, depth)} {square} {dtype} {shift}"
            yield Call(name, ops.gemm_float8_block, inputs, out, is_exact=False)
        added = inputs | dict(bias=torch.rand(cols), accumulate=dtype == torch.float32)
        yield Call(f"{name} added", ops.gemm_float8_block, added, out, is_exact=False)


def products_of_tensors() -> Iterator[Call]:
    """Many rows, few and one, with and without what may be added; nothing to sum, no rows."""
    shapes = ((256, 384, 256), (130, 80, 208), (1, 16, 16), (300, 32, 272), (33, 128, 0), (0, 128, 128))
    for (rows, cols, depth), dtype in product(shapes, HALF_AND_FULL):
        inputs = dict(a=finite((rows, depth)), a_scale=torch.rand(1), b=finite((cols, depth)), b_scale=torch.rand(1, 1))
        has_bias = dtype != torch.float32
        inputs |= dict(fp8=("e4m3", "e4m3") if has_bias else ("e5m2", "e4m3"), fast=has_bias, workspace=None)
        name, out = f"product {(rows, cols, depth)} {dtype}", dict(out=torch.zeros(rows, cols, dtype=dtype))
        plain = dict(bias=None, accumulate=False)
        yield Call(name, ops.gemm_float8_tensor, inputs | plain, out, is_exact=False)
        added = dict(bias=torch.rand(cols).to(dtype) if has_bias else None, accumulate=not has_bias)
        yield Call(f"{name} added", ops.gemm_float8_tensor, inputs | added, out, is_exact=False)


def products_by_decoding() -> Iterator[Call]:
    """Every way to scale and to lie, in whole tiles and ragged ones; nothing to sum, no rows."""
    shapes = ((256, 384, 160), (130, 70, 96), (2, 10, 34), (64, 32, 0), (0, 128, 64))
    pairs = (("powers", "turned"), ("floats", "floats"), ("blocks", "powers"), ("plain", "blocks"), ("turned", "plain"))
    for (rows, cols, depth), (first, second), dtype in product(shapes, pairs, DTYPES):
        inputs = {f"a_{key}": value for key, value in coded_parts(first, rows, depth).items()}
        inputs |= {f"b_{key}": value for key, value in coded_parts(second, cols, depth).items()}
        inputs |= dict(bias=torch.rand(cols), accumulate=dtype == torch.float32)
        out = dict(out=shifted(torch.zeros(rows, cols, dtype=dtype), rows % 4))
        name = f"{first} by {second} {(rows, cols, depth)} {dtype}"
        yield Call(name, of_parts(ops.gemm_decoded), inputs, out, is_exact=False)


def coded_parts(kind: str, kept: int, depth: int) -> dict[str, Any]:
    """Parts of a `Coded`, with scales near 1."""
    blocks = -(-depth // 32)
    if kind == "powers":
        return dict(codes=finite((kept, depth)), kind="e4m3", scale=bytes_of((kept, blocks), 0) | 127, tile=(1, 32))
    if kind == "turned":
        scale = (bytes_of((blocks, kept), 0) | 127).t()
        return dict(codes=finite((depth, kept)).t(), kind="e5m2", scale=scale, tile=(1, 32))
    if kind == "floats":
        parts = dict(codes=codes((kept, depth // 2)), kind="e2m1", tile=(1, 16), factor=torch.rand(1, 1))
        return parts | dict(scale=bytes_of((kept, -(-depth // 16)), 0) | 0x38, constant=1 / 2688)
    if kind == "blocks":
        return dict(codes=finite((kept, depth)), kind="e4m3", scale=torch.rand(kept, -(-depth // 128)), tile=(1, 128))
    return dict(codes=matrix("normal", (kept, depth), torch.bfloat16), kind="bfloat16")


def of_parts(op: Callable[..., None]) -> Callable[..., None]:
    """An op on two `Coded`, with the parts of its operands one by one: a_codes, and so on."""

    @wraps(op)
    def call(**arguments: Any) -> None:
        parts = {
            side: {key[2:]: arguments.pop(key) for key in list(arguments) if key[:2] == f"{side}_"} for side in "ab"
        }
        op(*(Coded(**parts[side]) for side in "ab"), **arguments)

    return call


def finite(shape: Pair) -> Tensor:
    """Codes that stand for numbers in every 8-bit type."""
    return codes(shape) & 0x5F


def groups_by_decoding() -> Iterator[Call]:
    """Products and sums of ragged and empty groups, with rows behind the last; B either way around."""
    for sizes, kind, dtype in product(([0, 5, 0, 130, 1], [128, 64], [0, 0]), ("e4m3", "e2m1"), DTYPES):
        rows, count, name = sum(sizes) + 9, len(sizes), f"{sizes} {kind} {dtype}"
        table, accumulate = table_of(sizes, rows, "cpu"), dtype == torch.float32
        turned = kind == "e4m3"
        a = DecodedOperand(rows, 384, kind, seed=1, groups=count)
        b = DecodedOperand(
            *((80, count * 384) if turned else (count * 80, 384)), kind, seed=2, groups=count, turned=turned
        )
        inputs = parts_of("a", a) | parts_of("b", b) | dict(table=table, accumulate=accumulate)
        beside = dict(bias=torch.rand(count, 80), row_factor=torch.rand(rows))
        out = dict(out=shifted(torch.zeros(rows, 80, dtype=dtype), int(turned)))
        yield Call(f"products {name}", of_parts(ops.grouped_gemm_decoded), inputs | beside, out, is_exact=False)
        depth = 128 * int(table[1, -1]) or 128
        a, b = (DecodedOperand(extent, depth, kind, seed=3, groups=count, turned=turned) for extent in (144, 80))
        inputs = parts_of("a", a) | parts_of("b", b) | dict(table=table, accumulate=accumulate)
        out = dict(out=shifted(torch.zeros(count * 144, 80, dtype=dtype), int(turned)))
        yield Call(f"sums {name}", of_parts(ops.grouped_wgrad_decoded), inputs, out, is_exact=False)


def parts_of(side: str, operand: DecodedOperand) -> dict[str, Any]:
    """Parts of its `Coded` for `of_parts`."""
    return {f"{side}_{key}": value for key, value in operand.coded._asdict().items()}


def groups() -> Iterator[Call]:
    """Tables, products and sums of ragged and empty groups, with rows behind the last."""
    for sizes, square, dtype in product(([0, 5, 0, 130, 1], [128, 64], [0, 0]), (False, True), DTYPES):
        rows, name = sum(sizes) + 9, f"{sizes} {square} {dtype}"
        table = table_of(sizes, rows, "cpu")
        for given, are_sizes in ((group_ends(sizes), False), (torch.tensor(sizes), True)):
            inputs = dict(given=given, rows=rows, are_sizes=are_sizes)
            yield Call(f"table {name} {are_sizes}", ops.group_table, inputs, dict(out=table.clone()))
        a = Operand(rows, 272, RUN, seed=1, device="cpu")
        b = Operand(70, 272, SQUARE if square else RUN, groups=len(sizes), seed=2, device="cpu")
        inputs = dict(a=a.codes, a_scale=a.scale, b=b.codes, b_scale=b.scale, table=table, b_tile=b.tile)
        inputs |= dict(fp8=(a.fp8, b.fp8), bias=torch.rand(len(sizes), 70), row_factor=torch.rand(rows))
        inputs |= dict(summed_dim=1, accumulate=dtype == torch.float32)
        out = shifted(torch.zeros(rows, 70, dtype=dtype), int(square))
        yield Call(f"products {name}", ops.grouped_gemm_float8_block, inputs, dict(out=out), is_exact=False)
        if square:
            yield turned_products(name, sizes, dtype)
        depth = 128 * int(table[1, -1]) or 128
        a, b = (Operand(extent, depth, RUN, seed=3, device="cpu") for extent in (130, 70))
        inputs = dict(a=a.codes, a_scale=a.scale, b=b.codes, b_scale=b.scale, table=table, fp8=(a.fp8, b.fp8))
        inputs |= dict(accumulate=dtype == torch.float32)
        out = shifted(torch.zeros(len(sizes) * 130, 70, dtype=dtype), int(square))
        yield Call(f"sums {name}", ops.grouped_wgrad_float8_block, inputs, dict(out=out), is_exact=False)


def turned_products(name: str, sizes: list[int], dtype: torch.dtype) -> Call:
    """Of matrices that lie along what is kept."""
    rows, groups = sum(sizes) + 9, len(sizes)
    a = Operand(rows, 256, RUN, seed=1, device="cpu")
    b = Operand(144, 256, SQUARE, groups=groups, seed=2, device="cpu")
    codes, scale = b.turned()
    inputs = dict(a=a.codes, a_scale=a.scale, b=codes, b_scale=scale, table=table_of(sizes, rows, "cpu"))
    inputs |= dict(summed_dim=0, b_tile=b.tile, fp8=(a.fp8, b.fp8), bias=None, row_factor=None)
    inputs |= dict(accumulate=dtype == torch.float32)
    out = dict(out=torch.zeros(rows, 144, dtype=dtype))
    return Call(f"turned products {name}", ops.grouped_gemm_float8_block, inputs, out, is_exact=False)


def grouped_quantizers() -> Iterator[Call]:
    """Of aligned and ragged groups, of none, with rows and tiles behind the last."""
    for (routing, sizes), dtype in product(grouped_quantize.ROUTINGS.items(), DTYPES):
        rows, table = grouped_quantize.routed(sizes)
        for codec in (*grouped_quantize.CODECS, *grouped_quantize.STOCHASTIC):
            wide = 512 if codec.op is ops.grouped_quantize_mxfp8 else 272  # of whole wide panels
            cols, shift = (wide, 0) if dtype == torch.bfloat16 else (codec.columns(131), 1)
            name = f"{codec.name} {routing} {cols} {dtype}"
            outputs = {
                key: shifted(tensor.zero_(), shift) for key, tensor in codec.outputs(rows, cols, len(sizes)).items()
            }
            x = shifted(matrix("wide", (rows, cols), dtype), shift)
            yield Call(name, codec.op, dict(x=x, table=table, **codec.arguments(len(sizes))), outputs)
        for count in (1, len(sizes)):
            amax = dict(out=torch.zeros(count))
            yield Call(f"amax {count} {routing} {dtype}", ops.grouped_amax, dict(x=x, table=table), amax)
            found = dict(row_amax=torch.zeros(count), col_amax=torch.zeros(count))
            inputs = dict(x=x, table=table, hadamard=0xD7E8)
            yield Call(f"amaxes {count} {routing} {dtype}", ops.grouped_direction_amax, inputs, found)
        for cols in (64, 33):
            rest = shifted(matrix("normal", (rows, cols), dtype), cols % 2)
            yield Call(f"rest {cols} {routing} {dtype}", ops.clear_rest, dict(table=table), dict(out=rest))
        sums = matrix("normal", (int(table[1, -1]) + 1, 70), torch.float32)
        out = torch.zeros(len(sizes), 70)
        yield Call(f"sums {routing} {dtype}", ops.group_sums, dict(sums=sums, table=table), dict(out=out))


def groups_summed_whole() -> Iterator[Call]:
    """Products and sums of ragged and empty groups without scales, or with few, with rows behind the last."""
    for sizes, kind, dtype in product(([0, 5, 0, 130, 1], [128, 64], [0, 0]), KINDS, DTYPES):
        rows, name, groups = sum(sizes) + 9, f"{sizes} {kind} {dtype}", len(sizes)
        table, added = table_of(sizes, rows), dtype == torch.float32
        a, b, both = (matrix("normal", (extent, 72), torch.bfloat16) for extent in (rows, 72 * groups, rows - 9))
        ends = dict(bias=torch.rand(groups, 72), row_factor=torch.rand(rows), accumulate=added, table=table)
        sums = dict(accumulate=added, table=table)
        out, grad = shifted(torch.zeros(rows, 72, dtype=dtype), int(added)), torch.zeros(groups * 72, 72, dtype=dtype)
        if kind.is_half:
            half = HALVES[kind.a]
            inputs = dict(a=a.to(half), b=b.to(half), summed_dim=kind.summed_dim, **ends)
            yield Call(f"products {name}", ops.grouped_gemm_half, inputs, dict(out=out), is_exact=False)
            inputs = dict(a=both.to(half), b=both.to(half), **sums)
            yield Call(f"sums {name}", ops.grouped_wgrad_half, inputs, dict(out=grad), is_exact=False)
            continue
        scales = dict(a_scale=torch.rand(1), b_scale=torch.rand(groups), fp8=(kind.a, kind.b))
        inputs = dict(a=finite((rows, 80)), b=finite((72 * groups, 80)), fast=kind.fast, **scales, **ends)
        yield Call(f"products {name}", ops.grouped_gemm_float8_tensor, inputs, dict(out=out), is_exact=False)
        side = padded(torch.ones(rows - 9, 72), sizes).to(torch.uint8)
        inputs = dict(a=side, b=side, **scales, **sums)
        yield Call(f"sums {name}", ops.grouped_wgrad_float8_tensor, inputs, dict(out=grad), is_exact=False)
