"""How near are the CUDA quantizers to a copy of as many bytes? Times every codec and direction on one GPU.

    python benchmarks/quantize_cuda.py --out benchmarks/results

Bytes are what a kernel must move: the input once (current scaling: twice), every output once. The copy beside each
kernel moves the same number, half read and half written. Peers are what torch.compile makes of the same computation
(without guards against a zero amax), or torch's own kernel. The L2 cache is flushed before every launch; medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

from benchmarks.report import Report, number, text
from benchmarks.timing import copy_time, median_time
from te_dist import ops
from te_dist.codecs.nvfp4 import SIGN_MASK
from te_dist.formats import WHOLE
from te_dist.kernels import runtime
from te_dist.kernels.variants import variants
from te_dist.ops.quantize_float8_current import WORKSPACE
from te_dist.quantizers import NVFP4Quantizer

SHAPES = ((16384, 7168), (8192, 2048))
FP8_MAX = 448.0

# TransformerEngine 2.20.2 on another H200 on another day, 16384 x 7168, microseconds: rowwise, both, columnwise.
ANCHORS = {"current scaling": (149.5, 196.1, None), "1x128": (109.4, 175.0, 125.2), "128x128": (92.0, 127.3, 96.2)}

Moved = dict[str, int]  # bytes of each tensor


@dataclass(frozen=True)
class Case:
    """A kernel, the bytes that it must move, and what does the same in torch."""

    name: str
    directions: str
    call: Callable[[], object]
    moved: Moved
    peer: Callable[[], object] | None = None

    def formula(self, elements: int) -> str:
        """Bytes by tensor, in units of the number of elements."""
        return " + ".join(f"{name} {nbytes / elements:.4g}" for name, nbytes in self.moved.items())


@dataclass(frozen=True)
class Row:
    """A line of the table: times in microseconds, rate in TB/s."""

    shape: str
    name: str
    directions: str
    formula: str
    nbytes: int
    time: float
    rate: float
    copy: float
    ratio: float
    peer: float | None


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An output on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def outputs_of(planes: dict[str, object]) -> Moved:
    """Bytes of codes and scales of the directions that are written."""
    names = {"data": "codes", "scale": "scales"}
    found = ((key.partition("_"), value) for key, value in planes.items() if isinstance(value, Tensor))
    return {f"{side} {names[part]}": value.nbytes for (side, _, part), value in found if part in names}


def amaxes(x: Tensor) -> Iterator[Case]:
    """Largest magnitudes of tiles."""
    for tile in ((WHOLE, WHOLE), (128, 128), (1, 128), (128, 1), (32, 32), (1, 16)):
        out = empty(*(extent // t if t else 1 for extent, t in zip(x.shape, tile, strict=True)), dtype=torch.float32)
        peer = torch.compile(lambda: x.abs().amax()) if tile == (WHOLE, WHOLE) else None
        name = "amax" if WHOLE in tile else f"amax {tile[0]}x{tile[1]}"
        call = lambda out=out, tile=tile: ops.tile_amax(x, phase=(0, 0), tile=tile, out=out)  # noqa: E731
        yield Case(name, "-", call, {"x": x.nbytes, "amax": out.nbytes}, peer)


def tensorwise(x: Tensor) -> Iterator[Case]:
    """Per-tensor: by a scale known beforehand, with and without its amax recorded, and by the tensor's own."""
    rows, cols = x.shape
    f32 = torch.float32
    scale, recorded, workspace = (
        torch.ones(1, device="cuda"),
        torch.zeros(1, device="cuda"),
        empty(*WORKSPACE, dtype=f32),
    )
    row = {"row_data": empty(rows, cols), "row_scale": empty(1, 1, dtype=f32)}
    col = {"col_data": empty(cols, rows), "col_scale": empty(1, 1, dtype=f32)}

    def current() -> tuple[Tensor, Tensor]:
        multiplier = FP8_MAX / x.abs().amax().float()
        return (x.float() * multiplier).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), multiplier.reciprocal()

    def current_both() -> tuple[Tensor, Tensor, Tensor]:
        codes, inverse = current()
        return codes, codes.t().contiguous(), inverse

    peers = {"row": torch.compile(current), "col": None, "both": torch.compile(current_both)}
    for name, planes in (("row", row), ("col", col), ("both", row | col)):
        once = {"x": x.nbytes} | outputs_of(planes)
        known = dict(fp8="e4m3", **planes)
        rule = known | dict(pow2=False, eps=0.0, workspace=workspace)
        yield Case("known scale", name, lambda k=known: ops.quantize_float8_tensor(x, scale, **k), once)
        record = lambda k=known: ops.quantize_float8_tensor(x, scale, amax=recorded, **k)  # noqa: E731
        yield Case("known scale, amax recorded", name, record, once)
        twice = {"x twice": 2 * x.nbytes} | outputs_of(planes)
        yield Case("current scaling", name, lambda r=rule: ops.quantize_float8_current(x, **r), twice, peers[name])


def tiled(x: Tensor) -> Iterator[Case]:
    """The block formats, by runs and by squares."""
    amax, state = torch.full((1, 1), 6.0, device="cuda"), torch.tensor([1, 2], device="cuda")
    rules = {
        "block fp32": (ops.quantize_float8_block, 128, dict(fp8="e4m3", pow2=False, eps=0.0)),
        "block pow2": (ops.quantize_float8_block, 128, dict(fp8="e4m3", pow2=True, eps=0.0)),
        "MXFP8": (ops.quantize_mxfp8, 32, dict(fp8="e4m3")),
        "NVFP4": (ops.quantize_nvfp4, 16, dict(e4m3_max=448, four_over_six="none", rng_state=None)),
        "NVFP4 stochastic": (ops.quantize_nvfp4, 16, dict(e4m3_max=448, four_over_six="none", rng_state=state)),
        "NVFP4 transformed": (
            ops.quantize_nvfp4,
            16,
            dict(e4m3_max=448, four_over_six="none", rng_state=None, col_hadamard=SIGN_MASK),
        ),
        "NVFP4 four over six": (ops.quantize_nvfp4, 16, dict(e4m3_max=448, four_over_six="mse", rng_state=None)),
    }
    for name, (op, length, rule) in rules.items():
        for square in (False, True):
            if square and "transformed" in name:
                continue  # squares hold the same values both ways
            sides = {side: direction(side, tuple(x.shape), length, square) for side in ("row", "col")}
            if length == 16:
                sides = {side: planes | {f"{side}_tensor_amax": amax} for side, planes in sides.items()}
            peer = torch.compile(lambda: cast_runs(x)) if name == "block fp32" and not square else None
            for directions in ("row", "col", "both"):
                planes = sides["row"] | sides["col"] if directions == "both" else sides[directions]
                label = f"{name} {length}x{length}" if square else f"{name} 1x{length}"

                def call(op: Callable = op, rule: dict = rule, planes: dict = planes) -> None:
                    op(x, phase=(0, 0), **rule, **planes)

                moved = {"x": x.nbytes} | outputs_of(planes)
                yield Case(label, directions, call, moved, peer if directions == "row" else None)


def whole_calls(x: Tensor) -> Iterator[Case]:
    """NVFP4 quantizers from the input to a storage: the amaxes, then the codes of both directions."""
    for transforms, stochastic in ((False, False), (False, True), (True, False), (True, True)):
        quantizer = NVFP4Quantizer(with_rht=transforms, stochastic_rounding=stochastic)
        name = "NVFP4 quantizer" + ", transformed" * transforms + ", stochastic" * stochastic
        one = {"codes": x.numel() // 2, "scales": x.numel() // 16}
        written = {f"{side} {part}": nbytes for side in ("row", "col") for part, nbytes in one.items()}
        call = lambda quantizer=quantizer: quantizer.encode(x)  # noqa: E731
        yield Case(name, "both", call, {"x twice": 2 * x.nbytes} | written)


def cast_runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of runs of 128 along rows, in plain torch."""
    runs = x.float().view(x.shape[0], -1, 128)
    multiplier = FP8_MAX / runs.abs().amax(2, keepdim=True)
    return (runs * multiplier).to(torch.float8_e4m3fn).view(x.shape), multiplier.reciprocal().squeeze(2)


def direction(side: str, shape: tuple[int, int], length: int, square: bool) -> dict[str, object]:
    """Tile, data and scales of one direction as a field would have them."""
    rows, cols = shape
    is_row = side == "row"
    run = (1, length) if is_row else (length, 1)
    tile = (length, length) if square else run
    grain = tile if length == 128 else run
    grid = (rows // grain[0], cols // grain[1])
    data = empty(rows, cols) if is_row or length == 32 else empty(cols, rows)
    if length == 16:
        data = empty(data.shape[0], data.shape[1] // 2)
    scale = empty(*grid, dtype=torch.float32 if length == 128 else torch.uint8)
    if (is_row and length == 128 and not square) or (not is_row and length == 16):
        scale = empty(*grid[::-1], dtype=scale.dtype).t()
    return {f"{side}_tile": tile, f"{side}_data": data, f"{side}_scale": scale}


def others(x: Tensor) -> Iterator[Case]:
    """Transform, transposes and dequantizers."""
    rows, cols = x.shape
    out, turned = empty(rows, cols, dtype=x.dtype), empty(cols, rows, dtype=x.dtype)
    codes, codes_t = empty(rows, cols), empty(cols, rows)
    codes.random_(0, 100)
    codes_t.random_(0, 100)
    yield Case("hadamard", "-", lambda: ops.hadamard(x, sign_mask=SIGN_MASK, out=out), {"x": x.nbytes, "out": x.nbytes})
    half, half_t = empty(rows, cols // 2), empty(cols, rows // 2)
    for bits, source, target in ((16, x, turned), (8, codes, codes_t), (4, half, half_t)):
        call = lambda s=source, b=bits, t=target: ops.transpose(s, bits=b, out=t)  # noqa: E731
        peer = (lambda s=source, t=target: t.copy_(s.t())) if bits > 4 else None
        yield Case(f"transpose {bits}", "-", call, {"in": source.nbytes, "out": target.nbytes}, peer)
    scales = {
        (1, 128): torch.ones(rows, cols // 128, device="cuda"),
        (128, 1): torch.ones(rows // 128, cols, device="cuda"),
    }
    for name, data, tile in (("row", codes, (1, 128)), ("col", codes_t.t(), (128, 1)), ("col", codes_t.t(), (1, 128))):
        rule = dict(tile=tile, phase=(0, 0), fp8="e4m3", out=out)
        call = lambda d=data, s=scales[tile], r=rule: ops.dequantize_float8(d, s, **r)  # noqa: E731
        moved = {"codes": codes.nbytes, "scales": scales[tile].nbytes, "out": out.nbytes}
        yield Case(f"dequantize {tile[0]}x{tile[1]}", name, call, moved)
    exponents = {(1, 32): empty(rows, cols // 32).fill_(120), (32, 1): empty(rows // 32, cols).fill_(120)}
    for name, grain in (("row", (1, 32)), ("col", (32, 1))):
        rule = dict(grain=grain, phase=(0, 0), fp8="e4m3", out=out)
        call = lambda s=exponents[grain], r=rule: ops.dequantize_mxfp8(codes, s, **r)  # noqa: E731
        moved = {"codes": codes.nbytes, "scales": exponents[grain].nbytes, "out": out.nbytes}
        yield Case("dequantize MXFP8", name, call, moved)


def measure(repeats: int, only: str) -> Iterator[Row]:
    """All lines of cases whose name begins with `only`."""
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        for case in (*amaxes(x), *tensorwise(x), *tiled(x), *whole_calls(x), *others(x)):
            if not case.name.startswith(only):
                continue
            nbytes = sum(case.moved.values())
            time, copy = median_time(case.call, repeats), copy_time(nbytes, repeats)
            peer = median_time(case.peer, repeats) if case.peer else None
            shape, rate, formula = f"{rows} x {cols}", nbytes / time / 1e6, case.formula(x.numel())
            yield Row(shape, case.name, case.directions, formula, nbytes, time, rate, copy, copy / time, peer)


def anchors() -> list[str]:
    """Lines that say what the anchors are."""
    lines = ["", "Anchors, not peers: TransformerEngine 2.20.2 on another H200 on another day, 16384 x 7168, us.", ""]
    lines += ["| kernel | row | both | col |", "|---|---|---|---|"]
    texts = ([name, *("-" if time is None else f"{time:.1f}" for time in times)] for name, times in ANCHORS.items())
    return lines + [f"| {' | '.join(text)} |" for text in texts]


REPORT = Report(
    "quantize_cuda",
    "CUDA quantizers",
    "bf16 in, cold L2, medians. Bytes: of each tensor, for one element of the matrix. Ratio: time of a device copy of "
    "the same bytes over the kernel's. Peer: the same in torch, see benchmarks/quantize_cuda.py.",
    {
        "shape": text("shape"),
        "kernel": text("name"),
        "directions": text("directions"),
        "bytes per element": text("formula"),
        "MB": lambda row: f"{row.nbytes / 1e6:.1f}",
        "us": number("time", 1),
        "TB/s": number("rate", 2),
        "copy us": number("copy", 1),
        "ratio": number("ratio", 2),
        "peer us": number("peer", 1),
    },
)


def main(out: Path | None = None, repeats: int = 41, only: str = "", commit: str | None = None) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`.

    Args:
        only: measure cases whose name begins so.
        commit: of the sources, where they are no git checkout.
    """
    runtime.prepare(variants("BFloat16"), 0)
    REPORT.publish(measure(repeats, only), out, facts={"commit": commit} if commit else {}, end=anchors())


if __name__ == "__main__":
    tyro.cli(main)
