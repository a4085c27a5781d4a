"""How near are the CUDA quantizers of groups of rows to a copy of as many bytes, and to those of one matrix?

    python -m benchmarks.grouped_quantize_cuda --out benchmarks/results

Bytes are what a kernel must move for the groups at hand: their rows once, every output once, zeros that fill tiles
included. The copy beside each kernel moves the same number, half read and half written. Beside: the quantizer of one
matrix of as many rows. The L2 cache is flushed before every launch; medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import tyro
from torch import Tensor

from benchmarks.grouped_cases import group_sizes
from benchmarks.quantize_cuda import direction, empty
from benchmarks.report import Report, number, text
from benchmarks.timing import copy_time, median_time
from te_dist import ops
from te_dist.codecs.nvfp4 import SIGN_MASK
from te_dist.ops.group_table import padded_rows
from te_dist.ops.source import Source, Summed, SwiGlu

# (groups, rows of all, K)
SHAPES = ((8, 32768, 7168), (128, 65536, 2048))
ROUTINGS = ("aligned", "ragged", "empty")
SIDES = {"row": ("row",), "col": ("col",), "both": ("row", "col")}

Moved = dict[str, int]  # bytes by what is moved


@dataclass(frozen=True)
class Groups:
    """A matrix of groups of rows.

    Attributes:
        tiles: of 128 rows, of all groups.
    """

    x: Tensor
    sizes: list[int]
    table: Tensor
    tiles: int

    @property
    def rows(self) -> int:
        """Of all groups."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Case:
    """A kernel, the bytes that it must move, and the kernel for one matrix."""

    name: str
    directions: str
    call: Callable[[], object]
    moved: Moved
    alone: Callable[[], object] | None = None


@dataclass(frozen=True)
class Row:
    """A line of the table: times in microseconds."""

    shape: str
    routing: str
    name: str
    directions: str
    formula: str
    nbytes: int
    time: float
    copy: float
    ratio: float
    alone: float | None


def groups_of(routing: str, groups: int, rows: int, cols: int) -> Groups:
    """Random bf16."""
    sizes = group_sizes(routing, groups, rows)
    x = torch.randn(sum(sizes), cols, device="cuda", dtype=torch.bfloat16)
    table = empty(4, groups + 1, dtype=torch.int32)
    ops.group_table(torch.tensor(sizes, device="cuda").cumsum(0), rows=sum(sizes), out=table)
    return Groups(x, sizes, table, int(table[1, -1]))


def blocks(groups: Groups) -> Iterator[Case]:
    """FP8 blocks by runs and squares; runs with what is computed in front or summed beside."""
    (rows, cols), padded, tiles, f32 = groups.x.shape, padded_rows(*_extents(groups)), groups.tiles, torch.float32
    rule = dict(fp8="e4m3", pow2=False, eps=0.0)
    codes = {"row": empty(rows, cols), "col": empty(cols, padded)}
    runs = {"row": empty(cols // 128, rows, dtype=f32), "col": empty(padded // 128, cols, dtype=f32)}
    squares = {side: empty(padded // 128, cols // 128, dtype=f32) for side in SIDES["both"]}
    written = {"row": rows * cols, "col": 128 * tiles * cols}
    sums, pair = empty(padded // 128, cols, dtype=f32), torch.cat((groups.x, groups.x), 1)
    beside: dict[str, tuple[Tensor | Source, Moved]] = {
        "": (groups.x, {"x": groups.x.nbytes}),
        ", summed": (Summed(groups.x, sums), {"x": groups.x.nbytes, "sums": 4 * tiles * cols}),
        " of swiglu": (SwiGlu(pair), {"x": pair.nbytes}),
    }
    for square, (label, (x, read)), (name, sides) in product((False, True), beside.items(), SIDES.items()):
        if label and (square or name != "both"):
            continue
        planes, alone, moved = {}, {}, dict(read)
        for side in sides:
            scales = (squares if square else runs)[side]
            tile = (128, 128) if square else (1, 128) if side == "row" else (128, 1)
            planes |= {f"{side}_tile": tile, f"{side}_data": codes[side], f"{side}_scale": scales}
            count = tiles * cols // 128 if square else rows * cols // 128 if side == "row" else tiles * cols
            moved |= {f"{side} codes": written[side], f"{side} scales": 4 * count}
            alone |= direction(side, (rows // 128 * 128, cols), 128, square)
        call = lambda x=x, planes=planes: ops.grouped_quantize_float8_block(  # noqa: E731
            x, table=groups.table, **rule, **planes
        )
        one = groups.x[: rows // 128 * 128]
        peer = lambda one=one, alone=alone: ops.quantize_float8_block(one, phase=(0, 0), **rule, **alone)  # noqa: E731
        tile = "128x128" if square else "1x128"
        yield Case(f"block {tile}{label}", name, call, moved, None if label else peer)
    out = empty(len(groups.sizes), cols, dtype=f32)
    moved = {"sums": 4 * tiles * cols, "out": out.nbytes}
    yield Case("sums of groups", "-", lambda: ops.group_sums(sums, table=groups.table, out=out), moved)


def small_runs(groups: Groups) -> Iterator[Case]:
    """MXFP8, and NVFP4 below an amax of each group: to nearest, stochastically, of the Hadamard transform."""
    (rows, cols), padded, table = groups.x.shape, padded_rows(*_extents(groups)), groups.table
    one, amax = groups.x[: rows // 128 * 128], torch.full((len(groups.sizes),), 6.0, device="cuda")
    state = torch.tensor([1, 2], device="cuda")
    fp4 = dict(e4m3_max=448, four_over_six="none", rng_state=None)
    rules = {
        "MXFP8": (ops.grouped_quantize_mxfp8, ops.quantize_mxfp8, 32, dict(fp8="e4m3")),
        "NVFP4": (ops.grouped_quantize_nvfp4, ops.quantize_nvfp4, 16, fp4),
        "NVFP4 stochastic": (ops.grouped_quantize_nvfp4, ops.quantize_nvfp4, 16, fp4 | dict(rng_state=state)),
        "NVFP4 transformed": (ops.grouped_quantize_nvfp4, ops.quantize_nvfp4, 16, fp4 | dict(col_hadamard=SIGN_MASK)),
    }
    for (label, (op, of_one, run, rule)), (name, sides) in product(rules.items(), SIDES.items()):
        planes, alone, moved = {}, {}, {"x": groups.x.nbytes}
        for side in sides:
            height = rows if side == "row" else 128 * groups.tiles
            moved |= {f"{side} codes": height * cols // (2 if run == 16 else 1), f"{side} scales": height * cols // run}
            extents = (rows, cols) if side == "row" else (padded, cols)
            if side == "col" and run == 16:
                extents = extents[::-1]
            data = empty(extents[0], extents[1] // 2 if run == 16 else extents[1])
            along = 0 if side == "col" and run == 32 else 1
            scale = empty(*(extent // run if dim == along else extent for dim, extent in enumerate(extents)))
            tile = (1, run) if side == "row" else (run, 1)
            planes |= {f"{side}_tile": tile, f"{side}_data": data, f"{side}_scale": scale}
            alone |= direction(side, tuple(one.shape), run, False)
            if run == 16:
                planes[f"{side}_tensor_amax"], alone[f"{side}_tensor_amax"] = amax, amax[:1, None]
        call = lambda op=op, rule=rule, planes=planes: op(groups.x, table=table, **rule, **planes)  # noqa: E731
        peer = lambda op=of_one, rule=rule, alone=alone: op(one, phase=(0, 0), **rule, **alone)  # noqa: E731
        yield Case(f"{label} 1x{run}", name, call, moved, peer)
    found = dict(row_amax=amax.clone(), col_amax=amax.clone())
    both = lambda: ops.grouped_direction_amax(groups.x, table=table, hadamard=SIGN_MASK, **found)  # noqa: E731
    yield Case("NVFP4 amaxes of each, transformed", "both", both, {"x": groups.x.nbytes})


def tensorwise(groups: Groups) -> Iterator[Case]:
    """FP8 by one scale, and by one for each group that follows from its amax; the amaxes alone."""
    (rows, cols), padded, x, table = groups.x.shape, padded_rows(*_extents(groups)), groups.x, groups.table
    codes = {"row": empty(rows, cols), "col": empty(cols, padded)}
    written = {"row": rows * cols, "col": 128 * groups.tiles * cols}
    one, amax = torch.ones(1, device="cuda"), torch.ones(len(groups.sizes), device="cuda")
    yield Case("amax of each", "-", lambda: ops.grouped_amax(x, table=table, out=amax), {"x": x.nbytes})
    for name, sides in SIDES.items():
        planes = {f"{side}_data": codes[side] for side in sides}
        outputs = {f"{side} codes": written[side] for side in sides}
        known = lambda p=planes: ops.grouped_quantize_float8_tensor(x, one, table=table, fp8="e4m3", **p)  # noqa: E731
        yield Case("known scale", name, known, {"x": x.nbytes} | outputs)

        def current(planes: dict[str, Tensor] = planes) -> None:
            ops.grouped_amax(x, table=table, out=amax)
            ops.grouped_quantize_float8_current(x, amax, table=table, fp8="e4m3", pow2=False, eps=0.0, **planes)

        yield Case("current scaling of each", name, current, {"x twice": 2 * x.nbytes} | outputs)


def _extents(groups: Groups) -> tuple[int, int]:
    return groups.x.shape[0], len(groups.sizes)


def measure(repeats: int, only: str) -> Iterator[Row]:
    """All lines of cases whose name begins with `only`."""
    for shape, routing in product(SHAPES, ROUTINGS):
        groups = groups_of(routing, *shape)
        for case in (*blocks(groups), *tensorwise(groups), *small_runs(groups)):
            if not case.name.startswith(only):
                continue
            nbytes, elements = sum(case.moved.values()), groups.x.numel()
            time, copy = median_time(case.call, repeats), copy_time(nbytes, repeats)
            alone = median_time(case.alone, repeats) if case.alone else None
            formula = " + ".join(f"{name} {size / elements:.4g}" for name, size in case.moved.items())
            name = f"{shape[1]} x {shape[2]} in {shape[0]}"
            yield Row(name, routing, case.name, case.directions, formula, nbytes, time, copy, copy / time, alone)


REPORT = Report(
    "grouped_quantize_cuda",
    "CUDA quantizers of groups",
    "bf16 in, cold L2, medians. Bytes: of each tensor, for one element of the matrix. Ratio: time of a device copy of "
    "the same bytes over the kernel's. One matrix: the same quantizer without groups.",
    {
        "shape": text("shape"),
        "routing": text("routing"),
        "kernel": text("name"),
        "directions": text("directions"),
        "bytes per element": text("formula"),
        "MB": lambda row: f"{row.nbytes / 1e6:.1f}",
        "us": number("time", 1),
        "copy us": number("copy", 1),
        "ratio": number("ratio", 2),
        "one matrix us": number("alone", 1),
    },
)


def main(out: Path | None = None, repeats: int = 21, only: str = "", commit: str | None = None) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`.

    Args:
        only: measure cases whose name begins so.
        commit: of the sources, where they are no git checkout.
    """
    REPORT.publish(measure(repeats, only), out, facts={"commit": commit} if commit else {})


if __name__ == "__main__":
    tyro.cli(main)
