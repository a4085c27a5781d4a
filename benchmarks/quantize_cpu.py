"""How fast are the CPU kernels, measured against a copy of as many bytes and against plain torch?

Every kernel is timed in turn with a copy that reads and writes as many bytes together, in the same process; the ratio
of the medians is what the table shows (1.0: as fast as memory allows a copy to be). The plain-torch column is the
oracle of te_dist.codecs.reference, on a smaller matrix, by time per element. Matrices are larger than the caches.

    python -m benchmarks.quantize_cpu --json results.json --markdown results.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import describe
from te_dist import _C, ops
from te_dist.codecs import reference
from te_dist.formats import WHOLE

U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
ORACLE_ROWS = 256
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One line of the table: `run` moves `num_bytes`; `oracle` does the same to `oracle_rows` rows in plain torch."""

    name: str
    num_bytes: int
    run: Run
    oracle: Run | None = None
    oracle_rows: int = ORACLE_ROWS


@dataclass(frozen=True)
class Result:
    """Ratios of medians; larger is faster."""

    name: str
    to_copy: float
    to_torch: float | None


def empty(*shape: int, dtype: torch.dtype = U8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def float8_block_cases(x: Tensor, pow2: bool) -> Iterator[Case]:
    (m, k), size = x.shape, x.element_size()
    name = f"float8 block {str(x.dtype).removeprefix('torch.')} {'pow2' if pow2 else 'fp32'} scales"
    rule = dict(fp8="e4m3", pow2=pow2, eps=0.0)
    row = dict(row_tile=(1, 128), row_data=empty(m, k), row_scale=empty(k // 128, m, dtype=F32).t())
    col = dict(col_tile=(128, 1), col_data=empty(k, m), col_scale=empty(m // 128, k, dtype=F32))
    square_row = dict(row_tile=(128, 128), row_data=row["row_data"], row_scale=empty(m // 128, k // 128, dtype=F32))
    square_col = dict(col_tile=(128, 128), col_data=col["col_data"], col_scale=empty(k // 128, m // 128, dtype=F32).t())
    few = x[:ORACLE_ROWS]

    def run(**planes: object) -> Run:
        return lambda: ops.quantize_float8_block(x, phase=(0, 0), **rule, **planes)

    def oracle(*tiles: tuple[int, int]) -> Run:
        return lambda: [reference.encode_float8_block(few, tile, **rule) for tile in tiles]

    yield Case(f"{name}, 1 x 128 rowwise", m * k * (size + 1), run(**row), oracle((1, 128)))
    yield Case(f"{name}, both directions", m * k * (size + 2), run(**row, **col), oracle((1, 128), (128, 1)))
    squares = run(**square_row, **square_col)
    yield Case(f"{name}, 128 x 128 both", m * k * (size + 2), squares, oracle((128, 128)))


def float8_tensor_cases(x: Tensor) -> Iterator[Case]:
    (m, k), size = x.shape, x.element_size()
    scale, row, col = torch.tensor([17.3]), empty(m, k), empty(k, m)
    amax, few = empty(1, 1, dtype=F32), x[:ORACLE_ROWS]

    def whole_amax() -> None:
        ops.tile_amax(x, phase=(0, 0), tile=(WHOLE, WHOLE), out=amax)

    def both() -> None:
        ops.quantize_float8_tensor(x, scale, fp8="e4m3", row_data=row, col_data=col)

    def rowwise() -> None:
        ops.quantize_float8_tensor(x, scale, fp8="e4m3", row_data=row)

    def oracle() -> Tensor:
        return reference.encode_float8_tensor(few, scale, "e4m3")

    yield Case("amax of a tensor", m * k * size, whole_amax, lambda: reference.tile_amax(few, (WHOLE, WHOLE)))
    yield Case("float8 tensor, rowwise", m * k * (size + 1), rowwise, oracle)
    yield Case("float8 tensor, both directions", m * k * (size + 2), both, lambda: oracle().t().contiguous())


def mxfp8_cases(x: Tensor) -> Iterator[Case]:
    (m, k), size = x.shape, x.element_size()
    row = dict(row_tile=(1, 32), row_data=empty(m, k), row_scale=empty(m, k // 32))
    col = dict(col_tile=(32, 1), col_data=empty(m, k), col_scale=empty(m // 32, k))
    few = x[:ORACLE_ROWS]

    def run(**planes: object) -> Run:
        return lambda: ops.quantize_mxfp8(x, phase=(0, 0), fp8="e4m3", **planes)

    def oracle(*tiles: tuple[int, int]) -> Run:
        return lambda: [reference.encode_mxfp8(few, tile, fp8="e4m3") for tile in tiles]

    yield Case("mxfp8, rowwise", m * k * (size + 1), run(**row), oracle((1, 32)))
    yield Case("mxfp8, both directions", m * k * (size + 2), run(**row, **col), oracle((1, 32), (32, 1)))


def nvfp4_cases(x: Tensor) -> Iterator[Case]:
    (m, k), size = x.shape, x.element_size()
    amax, few = x.abs().max().float().reshape(1, 1), x[:ORACLE_ROWS]
    row = dict(row_tile=(1, 16), row_tensor_amax=amax, row_data=empty(m, k // 2), row_scale=empty(m, k // 16))
    col = dict(col_tile=(16, 1), col_tensor_amax=amax, col_data=empty(k, m // 2), col_scale=empty(k, m // 16).t())
    plain = dict(e4m3_max=448, four_over_six="none", rng_state=None)
    rules = {"": plain, ", four over six": plain | {"four_over_six": "mae"}}
    rules[", stochastic"] = plain | {"rng_state": torch.tensor([1, 2])}

    def run(rule: dict, **planes: object) -> Run:
        return lambda: ops.quantize_nvfp4(x, phase=(0, 0), **rule, **planes)

    def oracle(rule: dict, *tiles: tuple[int, int]) -> Run:
        return lambda: [reference.encode_nvfp4(few, tile, tensor_amax=amax, **rule) for tile in tiles]

    for name, rule in rules.items():
        yield Case(f"nvfp4{name}, rowwise", m * k * (2 * size + 1) // 2, run(rule, **row), oracle(rule, (1, 16)))
    both = oracle(plain, (1, 16), (16, 1))
    yield Case("nvfp4, both directions", m * k * (size + 1), run(plain, **row, **col), both)


def decoding_cases(m: int, k: int, dtype: torch.dtype) -> Iterator[Case]:
    codes, out, few = torch.randint(0, 126, (m, k), dtype=U8), empty(m, k, dtype=dtype), ORACLE_ROWS
    name = str(dtype).removeprefix("torch.")
    size = out.element_size()
    runs, squares = torch.rand(m, k // 128), torch.rand(m // 128, k // 128)
    columns = torch.rand(m // 128, k)
    transposed, exponents = codes.t().contiguous(), torch.full((m, k // 32), 120, dtype=U8)

    def float8(data: Tensor, scale: Tensor, tile: tuple[int, int]) -> Run:
        return lambda: ops.dequantize_float8(data, scale, tile=tile, phase=(0, 0), fp8="e4m3", out=out)

    def oracle() -> Tensor:
        return reference.decode_float8(codes[:few], runs[:few], (1, 128), (0, 0), "e4m3").to(dtype)

    def mxfp8() -> None:
        ops.dequantize_mxfp8(codes, exponents, grain=(1, 32), phase=(0, 0), fp8="e4m3", out=out)

    def mxfp8_oracle() -> Tensor:
        return reference.decode_mxfp8(codes[:few], exponents[:few], (1, 32), (0, 0), "e4m3").to(dtype)

    num_bytes = m * k * (size + 1)
    yield Case(f"decode float8 1 x 128 to {name}", num_bytes, float8(codes, runs, (1, 128)), oracle)
    yield Case(f"decode float8 128 x 128 to {name}", num_bytes, float8(codes, squares, (128, 128)), oracle)
    yield Case(f"decode float8 columnwise to {name}", num_bytes, float8(transposed.t(), columns, (128, 1)), oracle)
    yield Case(f"decode mxfp8 to {name}", num_bytes, mxfp8, mxfp8_oracle)


def geometry_cases(m: int, k: int) -> Iterator[Case]:
    for bits, dtype in ((8, U8), (16, BF16), (32, F32)):
        src, out = empty(m, k, dtype=dtype), empty(k, m, dtype=dtype)

        def run(src: Tensor = src, bits: int = bits, out: Tensor = out) -> None:
            ops.transpose(src, bits=bits, out=out)

        num_bytes = 2 * m * k * bits // 8
        yield Case(f"transpose, {bits} bits", num_bytes, run, lambda src=src: src.t().contiguous(), m)
    x = torch.randn(m, k).to(BF16)
    rotated, few = torch.empty_like(x), x[:ORACLE_ROWS]
    yield Case(
        "hadamard",
        4 * m * k,
        lambda: ops.hadamard(x, sign_mask=0xD7E8, out=rotated),
        lambda: reference.hadamard(few, 0xD7E8),
    )


def cases(m: int, k: int) -> Iterator[Case]:
    x = torch.randn(m, k)
    for dtype in (BF16, F32):
        for pow2 in (False, True):
            yield from float8_block_cases(x.to(dtype), pow2)
    yield from float8_tensor_cases(x.to(BF16))
    yield from mxfp8_cases(x.to(BF16))
    yield from nvfp4_cases(x.to(BF16))
    yield from decoding_cases(m, k, BF16)
    yield from decoding_cases(m, k, F32)
    yield from geometry_cases(m, k)


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(case: Case, m: int, repeats: int) -> Result:
    source = torch.ones(case.num_bytes // 2, dtype=U8)
    target = torch.zeros_like(source)
    case.run(), target.copy_(source)
    pairs = [(seconds(case.run), seconds(lambda: target.copy_(source))) for _ in range(repeats)]
    kernel, copy = (statistics.median(times) for times in zip(*pairs, strict=True))
    if case.oracle is None:
        return Result(case.name, copy / kernel, None)
    case.oracle()
    oracle = statistics.median(seconds(case.oracle) for _ in range(max(3, repeats // 8)))
    return Result(case.name, copy / kernel, oracle * (m / case.oracle_rows) / kernel)


def environment() -> dict[str, object]:
    return describe() | {"threads": torch.get_num_threads(), "simd": _C.simd_level()}


def markdown(about: dict[str, object], shape: tuple[int, int], results: list[Result]) -> str:
    lines = [
        "# CPU kernels",
        "",
        f"`benchmarks/quantize_cpu.py`, {shape[0]} x {shape[1]}: ratio of medians, larger is faster. To copy: a copy "
        "that moves as many bytes, in the same process. To torch: the plain-torch definition of the same codec.",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        "| kernel | to copy | to torch |",
        "|---|---|---|",
    ]
    for r in results:
        lines.append(f"| {r.name} | {r.to_copy:.2f} | {'' if r.to_torch is None else f'{r.to_torch:.0f}'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--simd", choices=_C.simd_levels(), default=_C.simd_level())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _C.set_simd_level(args.simd)
    results = []
    for case in cases(args.rows, args.cols):
        results.append(measure(case, args.rows, args.repeats))
        print(
            f"{case.name:55s} to copy {results[-1].to_copy:5.2f}   to torch {results[-1].to_torch or 0:7.1f}",
            flush=True,
        )
    about = environment()
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(
            json.dumps({"environment": about, "shape": [args.rows, args.cols], "results": rows}, indent=1)
        )
    if args.markdown:
        args.markdown.write_text(markdown(about, (args.rows, args.cols), results))


if __name__ == "__main__":
    main()
