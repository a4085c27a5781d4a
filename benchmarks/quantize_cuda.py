"""How near are the CUDA quantizers to a copy of as many bytes? Times every codec and direction on one GPU.

    python benchmarks/quantize_cuda.py --out benchmarks/results

Bytes are what a kernel must move: the input once (current scaling: twice), every output once. The copy beside each
kernel moves the same number, half read and half written. The L2 cache is flushed before every launch; medians.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

from te_dist import ops
from te_dist.codecs.nvfp4 import SIGN_MASK
from te_dist.formats import WHOLE
from te_dist.quantizers import NVFP4Quantizer

SHAPES = ((16384, 7168), (8192, 2048))
FLUSHED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Case:
    """A kernel and the bytes per element that it must move."""

    name: str
    directions: str
    call: Callable[[], None]
    bytes_per_element: float


@dataclass(frozen=True)
class Row:
    """A line of the table: times in microseconds, rate in TB/s."""

    shape: str
    name: str
    directions: str
    bytes_per_element: float
    time: float
    rate: float
    copy: float
    ratio: float


def median_time(call: Callable[[], None], repeats: int) -> float:
    """Microseconds of one call with a cold L2 cache."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):
        call()
    for begin, end in events:
        flushed.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)[repeats // 2]


def copy_time(nbytes: int, repeats: int) -> float:
    """Microseconds of a device copy that reads and writes `nbytes` in all."""
    source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return median_time(lambda: target.copy_(source), repeats)


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An output on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def tensorwise(x: Tensor) -> Iterator[Case]:
    """Per-tensor: by a scale known beforehand, and with the amax found first."""
    rows, cols = x.shape
    amax, scale = empty(1, 1, dtype=torch.float32), torch.ones(1, device="cuda")
    find = lambda: ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=amax)  # noqa: E731
    yield Case("amax", "-", find, 2)
    outputs = {"row": {"row_data": empty(rows, cols)}, "col": {"col_data": empty(cols, rows)}}
    outputs["both"] = outputs["row"] | outputs["col"]
    for name, data in outputs.items():

        def cast(data: dict[str, Tensor] = data) -> None:
            ops.quantize_float8_tensor(x, scale, fp8="e4m3", **data)

        def find_and_cast(cast: Callable[[], None] = cast) -> None:
            find()
            cast()

        yield Case("per-tensor, known scale", name, cast, 2 + len(data))
        yield Case("per-tensor, amax and cast", name, find_and_cast, 4 + len(data))


def tiled(x: Tensor) -> Iterator[Case]:
    """The block formats, by runs and by squares."""
    rows, cols = x.shape
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
            sides = {side: direction(side, (rows, cols), length, square) for side in ("row", "col")}
            if length == 16:
                sides = {side: planes | {f"{side}_tensor_amax": amax} for side, planes in sides.items()}
            for directions in ("row", "col", "both"):
                planes = sides["row"] | sides["col"] if directions == "both" else sides[directions]
                label = f"{name} {length}x{length}" if square else f"{name} 1x{length}"
                nbytes = sum(p.nbytes for key, p in planes.items() if key.endswith(("data", "scale")))

                def call(op: Callable = op, rule: dict = rule, planes: dict = planes) -> None:
                    op(x, phase=(0, 0), **rule, **planes)

                yield Case(label, directions, call, 2 + nbytes / x.numel())


def whole_calls(x: Tensor) -> Iterator[Case]:
    """NVFP4 quantizers from the input to a storage: the amaxes, then the codes of both directions."""
    for transforms, stochastic in ((False, False), (False, True), (True, False), (True, True)):
        quantizer = NVFP4Quantizer(with_rht=transforms, stochastic_rounding=stochastic)
        name = "NVFP4 quantizer" + ", transformed" * transforms + ", stochastic" * stochastic
        yield Case(name, "both", lambda quantizer=quantizer: quantizer.encode(x), 4 + 2 * (1 / 2 + 1 / 16))


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
    scale = torch.ones(rows, cols // 128, device="cuda")
    yield Case("hadamard", "-", lambda: ops.hadamard(x, sign_mask=SIGN_MASK, out=out), 4)
    yield Case("transpose 16", "-", lambda: ops.transpose(x, bits=16, out=turned), 4)
    yield Case("transpose 8", "-", lambda: ops.transpose(codes, bits=8, out=codes_t), 2)
    half, half_t = empty(rows, cols // 2), empty(cols, rows // 2)
    yield Case("transpose 4", "-", lambda: ops.transpose(half, bits=4, out=half_t), 1)
    rule = dict(tile=(1, 128), phase=(0, 0), fp8="e4m3", out=out)
    yield Case("dequantize 1x128", "row", lambda: ops.dequantize_float8(codes, scale, **rule), 3 + 4 / 128)
    yield Case("dequantize 1x128", "col", lambda: ops.dequantize_float8(codes_t.t(), scale, **rule), 3 + 4 / 128)


def measure(repeats: int) -> Iterator[Row]:
    """All lines."""
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        for case in (*tensorwise(x), *tiled(x), *whole_calls(x), *others(x)):
            nbytes = int(case.bytes_per_element * x.numel())
            time, copy = median_time(case.call, repeats), copy_time(nbytes, repeats)
            shape, rate = f"{rows} x {cols}", nbytes / time / 1e6
            yield Row(shape, case.name, case.directions, case.bytes_per_element, time, rate, copy, copy / time)


def main(out: Path | None = None, repeats: int = 41) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    about = {"gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__}
    lines = [f"# CUDA quantizers\n\n{about['gpu']}, driver {driver}, torch {torch.__version__}."]
    lines += ["bf16 in, cold L2, medians. Ratio: time of a device copy of the same bytes over the kernel's.\n"]
    lines += [
        "| shape | kernel | directions | bytes/element | us | TB/s | copy us | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = []
    for row in measure(repeats):
        rows.append(row)
        lines.append(
            f"| {row.shape} | {row.name} | {row.directions} | {row.bytes_per_element:.3f} | {row.time:.1f} | "
            f"{row.rate:.2f} | {row.copy:.1f} | {row.ratio:.2f} |"
        )
        print(lines[-1], flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "quantize_cuda.md").write_text("\n".join(lines) + "\n")
        (out / "quantize_cuda.json").write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
