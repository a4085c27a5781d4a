"""Quantizers of groups of rows: routings, outputs, and what the quantizers of matrices make of each group alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.group_table import padded_rows
from te_dist.testing import assert_bitwise

Pair = tuple[int, int]
Tensors = dict[str, Tensor]

POISON, SPARE_ROWS = 77, 9  # rows behind the last group
# Whole tiles, ragged and empty groups, one, none with rows, more groups than a warp has lanes.
ROUTINGS = {
    "aligned": [128, 384, 256],
    "ragged": [0, 5, 0, 300, 1, 64, 0],
    "one": [270],
    "empty": [0, 0],
    "many": [3, 0, 70, 1] * 12,
}


class Part(NamedTuple):
    """Where an output has what is a group's: along `dim`, `per_tile` for each of its tiles; 0: one for each row."""

    dim: int
    per_tile: int = 0


class GroupCodec(NamedTuple):
    """A quantizer of groups, and that of a matrix.

    Attributes:
        rule: keywords of the first.
        parts: of its outputs.
        make: outputs, by (rows, columns, padded rows), laid out for groups.
        alone: quantizes a matrix, that of a numbered group, into outputs made for its rows, without padding.
        given: tensors beside the rule, by the number of groups.
        shared: what other outputs must be, by the number of groups.
        grain: columns come in multiples of it.
    """

    name: str
    op: Callable[..., None]
    rule: dict[str, Any]
    parts: dict[str, Part]
    make: Callable[[int, int, int], Tensors]
    alone: Callable[[Tensor, Tensors, int], None]
    given: Callable[[int], Tensors] = lambda groups: {}
    shared: Callable[[int], Tensors] = lambda groups: {}
    grain: int = 1

    def columns(self, wanted: int) -> int:
        """As many columns, or some more."""
        return -(-wanted // self.grain) * self.grain

    def arguments(self, groups: int) -> dict[str, Any]:
        """Keywords of the quantizer of groups, without table, matrix and outputs."""
        return self.rule | self.given(groups)

    def outputs(self, rows: int, cols: int, groups: int) -> Tensors:
        """Outputs of the quantizer of groups, with room for more than there may be."""
        return self.make(rows, cols, padded_rows(rows, groups) + 128) | self.shared(groups)

    def want(self, x: Tensor, sizes: list[int]) -> Tensors:
        """What each group alone becomes, between what is poisoned; codes behind its last row are zero."""
        want = self.outputs(x.shape[0], x.shape[1], len(sizes))
        poison(want)
        want |= self.shared(len(sizes))
        begin = tile = 0
        for number, size in enumerate(sizes):
            if size == 0:
                continue
            found, tiles = self.make(size, x.shape[1], size), -(-size // 128)
            self.alone(x[begin : begin + size], found, number)
            for key, part in self.parts.items():
                first, length = (part.per_tile * tile, part.per_tile * tiles) if part.per_tile else (begin, size)
                place = want[key].narrow(part.dim, first, length)
                place.zero_()
                length = min(length, found[key].shape[part.dim])
                place.narrow(part.dim, 0, length).copy_(found[key].narrow(part.dim, 0, length))
            begin, tile = begin + size, tile + tiles
        return want


def poison(outputs: Tensors) -> None:
    """Fills them with what nothing writes."""
    for tensor in outputs.values():
        tensor.fill_(POISON)


def routed(sizes: list[int]) -> tuple[int, Tensor]:
    """(rows of a matrix with such groups, table)."""
    rows = sum(sizes) + SPARE_ROWS
    table = torch.full((4, len(sizes) + 1), -1, dtype=torch.int32)
    ops.group_table(torch.tensor(sizes).cumsum(0), rows=rows, out=table)
    return rows, table


def check(got: Tensors, want: Tensors, name: str) -> None:
    """Every byte, what nothing may write included."""
    for key, tensor in want.items():
        assert_bitwise(got[key], tensor, f"{key} of {name}")


def codes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def block(tiles: dict[str, Pair], fp8: str = "e4m3", pow2: bool = False) -> GroupCodec:
    """FP8 blocks; `tiles`: of the directions that are written."""
    parts, rule = {}, dict(fp8=fp8, pow2=pow2, eps=0.0) | {f"{side}_tile": tile for side, tile in tiles.items()}
    for side, tile in tiles.items():
        parts[f"{side}_data"] = Part(0) if side == "row" else Part(1, 128)
        parts[f"{side}_scale"] = Part(1) if tile == (1, 128) else Part(0, 1)

    def make(rows: int, cols: int, padded: int) -> Tensors:
        across, down = -(-cols // 128), -(-padded // 128)
        found = {"row_data": codes(rows, cols), "col_data": codes(cols, padded)}
        grids = {(1, 128): (across, rows), (128, 1): (down, cols), (128, 128): (down, across)}
        found |= {f"{side}_scale": torch.empty(grids[tile]) for side, tile in tiles.items()}
        return {key: found[key] for key in parts}

    def alone(x: Tensor, found: Tensors, _: int) -> None:
        planes = dict(found)
        if tiles.get("row") == (1, 128):
            planes["row_scale"] = found["row_scale"].t()
        ops.quantize_float8_block(x, phase=(0, 0), **rule, **planes)

    return GroupCodec(f"block {rule}", ops.grouped_quantize_float8_block, rule, parts, make, alone)


def tensor(name: str, each: bool, fp8: str, sides: tuple[str, ...] = ("row", "col")) -> GroupCodec:
    """FP8 with one scale for all groups or one for `each`, by "scale" or by "amax"."""
    is_current = name == "amax"
    rule = dict(fp8=fp8) | (dict(pow2=fp8 == "e5m2", eps=0.0) if is_current else {})
    op = ops.grouped_quantize_float8_current if is_current else ops.grouped_quantize_float8_tensor
    parts = {f"{side}_data": Part(0) if side == "row" else Part(1, 128) for side in sides}

    def given(groups: int) -> Tensors:
        values = torch.tensor([3.7, 0.25, 0.0, 1e-30, 40.0, 1.1] if is_current else [3.7, 0.25, 1e-3, 1.0, 40.0])
        return {name: values.repeat(-(-groups // len(values)))[: groups if each else 1]}

    def make(rows: int, cols: int, padded: int) -> Tensors:
        found = {"row_data": codes(rows, cols), "col_data": codes(cols, padded)}
        return {key: found[key] for key in parts}

    def alone(x: Tensor, found: Tensors, number: int) -> None:
        value = given(number + 1)[name][-1:]
        if is_current:
            ops.quantize_float8_current(x, amax=value, **rule, **found)
        else:
            ops.quantize_float8_tensor(x, value, **rule, **found)

    def shared(groups: int) -> Tensors:
        inverses = []
        for number in range(groups if each else 1):
            inverses.append(torch.empty(1))
            alone(torch.zeros(1, 1), {"row_data": codes(1, 1), "row_scale": inverses[-1]}, number)
        return {f"{side}_scale": torch.cat(inverses) for side in sides}

    return GroupCodec(f"{name} {each} {fp8} {sides}", op, rule, parts, make, alone, given, shared)


def mx(tiles: dict[str, Pair], fp8: str = "e4m3") -> GroupCodec:
    """MXFP8; `tiles`: of the directions that are written."""
    rule = dict(fp8=fp8) | {f"{side}_tile": tile for side, tile in tiles.items()}
    where = {"row_data": Part(0), "row_scale": Part(0), "col_data": Part(0, 128), "col_scale": Part(0, 4)}
    parts = {key: part for key, part in where.items() if key[:3] in tiles}

    def make(rows: int, cols: int, padded: int) -> Tensors:
        found = {"row_data": codes(rows, cols), "col_data": codes(padded, cols)}
        found |= {"row_scale": codes(rows, -(-cols // 32)), "col_scale": codes(-(-padded // 32), cols)}
        return {key: found[key] for key in parts}

    def alone(x: Tensor, found: Tensors, _: int) -> None:
        ops.quantize_mxfp8(x, phase=(0, 0), **rule, **found)

    return GroupCodec(f"mx {rule}", ops.grouped_quantize_mxfp8, rule, parts, make, alone)


def fp4(tiles: dict[str, Pair], each: bool, **changes: Any) -> GroupCodec:
    """NVFP4 below one amax for all groups or one for `each`; `tiles`: of the directions that are written."""
    rule = dict(e4m3_max=448, four_over_six="none", rng_state=None) | changes
    rule |= {f"{side}_tile": tile for side, tile in tiles.items()}
    where = {"row_data": Part(0), "row_scale": Part(0), "col_data": Part(1, 64), "col_scale": Part(1, 8)}
    parts = {key: part for key, part in where.items() if key[:3] in tiles}

    def given(groups: int) -> Tensors:
        amax = torch.arange(1.0, (groups if each else 1) + 1)
        return {f"{side}_tensor_amax": amax for side in tiles}

    def make(rows: int, cols: int, padded: int) -> Tensors:
        found = {"row_data": codes(rows, cols // 2), "col_data": codes(cols, -(-padded // 2))}
        found |= {"row_scale": codes(rows, -(-cols // 16)), "col_scale": codes(cols, -(-padded // 16))}
        return {key: found[key] for key in parts}

    def alone(x: Tensor, found: Tensors, number: int) -> None:
        planes = found | {key: amax[-1:, None] for key, amax in given(number + 1).items()}
        if "col" in tiles:
            # Rows come in pairs, transformed ones in groups of 16: what is there is followed by zeros.
            whole = 16 if changes.get("col_hadamard") else 2
            x = torch.cat((x, x.new_zeros(-x.shape[0] % whole, x.shape[1])))
            found |= make(x.shape[0], x.shape[1], x.shape[0])
            planes |= found | {"col_scale": found["col_scale"].t()}
        ops.quantize_nvfp4(x, phase=(0, 0), **rule, **planes)

    name, grain = f"fp4 {each} {rule}", 2 if rule["rng_state"] is None else 16
    return GroupCodec(name, ops.grouped_quantize_nvfp4, rule, parts, make, alone, given, grain=grain)


RUNS, SQUARES = {"row": (1, 128), "col": (128, 1)}, {"row": (128, 128), "col": (128, 128)}
CODECS = [
    block(RUNS),
    block(RUNS, "e5m2", pow2=True),
    block({"row": RUNS["row"]}),
    block({"col": RUNS["col"]}, pow2=True),
    block(SQUARES),
    block({"row": RUNS["row"], "col": SQUARES["col"]}),
    tensor("scale", False, "e4m3"),
    tensor("scale", True, "e5m2"),
    tensor("scale", True, "e4m3", ("col",)),
    tensor("amax", False, "e5m2"),
    tensor("amax", True, "e4m3"),
    tensor("amax", True, "e4m3", ("row",)),
    mx({"row": (1, 32), "col": (32, 1)}),
    mx({"row": (32, 32), "col": (32, 32)}, "e5m2"),
    mx({"row": (1, 32)}),
    mx({"col": (32, 1)}),
    fp4({"row": (1, 16), "col": (16, 1)}, True),
    fp4({"row": (16, 16), "col": (16, 16)}, False, e4m3_max=256),
    fp4({"row": (1, 16)}, True),
    fp4({"col": (16, 1)}, False, four_over_six="mse"),
    fp4({"row": (1, 16), "col": (16, 1)}, True, col_hadamard=0xD7E8),
]
# Where values lie, and not their group alone, says how they are rounded.
STATE = torch.tensor([12345, 2**32 - 3])
STOCHASTIC = [
    fp4({"row": (1, 16), "col": (16, 1)}, False, rng_state=STATE),
    fp4({"row": (1, 16), "col": (16, 1)}, True, rng_state=torch.stack((STATE, STATE + 5)), col_hadamard=0xD7E8),
]
