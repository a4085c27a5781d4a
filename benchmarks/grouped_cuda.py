"""Products in groups beside other libraries: TFLOP/s of real rows on one GPU.

    python -m benchmarks.grouped_cuda --out benchmarks/results
    python -m benchmarks.grouped_cuda --out benchmarks/results --shapes 0 3 --legs wgrad --kinds blocks bf16
    python -m benchmarks.grouped_cuda --out benchmarks/results --tilings

Every leg (forward, gradient of rows, gradient of weights stored in bf16 and added to fp32) of FP8 blocks, FP8 with one
scale, bf16, MXFP8 and NVFP4. Sizes of groups: even up to 30 %, skewed (Zipf), with a tenth of them empty; of each in
multiples of 128 and not. Beside ours, in the same run: torch's grouped_mm and scaled_grouped_mm, loops of cuBLAS and
cuBLASLt over groups, DeepGEMM. Peers that are not installed, and sizes that a peer does not take, are left out. Random
codes, cold L2, medians of runs by turns in random order. All of it takes some minutes; a shape takes half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import tyro

from benchmarks import grouped_tilings
from benchmarks.grouped_cases import (
    KINDS,
    LEGS,
    ROUTINGS,
    SHAPES,
    Call,
    Kind,
    Leg,
    Problem,
    Routing,
    group_sizes,
    kernels,
    num_empty,
    ours,
)
from benchmarks.grouped_peers import peers
from benchmarks.report import Report, number, text
from benchmarks.timing import median_times
from te_dist.kernels.runtime import prepare

OURS = "te_dist"


@dataclass(frozen=True)
class Chosen:
    """What is measured.

    Attributes:
        shapes: by their places in `SHAPES`.
        routings: sizes of groups.
        legs: which products.
        kinds: of what.
    """

    shapes: tuple[int, ...] = tuple(range(len(SHAPES)))
    routings: tuple[Routing, ...] = ROUTINGS
    legs: tuple[Leg, ...] = LEGS
    kinds: tuple[Kind, ...] = KINDS


@dataclass(frozen=True)
class Row:
    """A line of the table. Times in microseconds.

    Attributes:
        ratio: of a peer, its time over ours.
        of_aligned: of ours, TFLOP/s over those with even groups of multiples of 128.
    """

    shape: str
    routing: str
    leg: str
    kind: str
    library: str
    time: float | None
    tflops: float | None
    ratio: float | None = None
    of_aligned: float | None = None


def measure(chosen: Chosen, repeats: int) -> Iterator[Row]:
    """All lines, ours before those of its peers."""
    products = product((SHAPES[place] for place in chosen.shapes), chosen.legs, chosen.kinds)
    prepare([spec for one in products for spec in kernels(*one)], torch.cuda.current_device())
    aligned: dict[tuple[object, ...], float] = {}
    for number_of_shape, routing in product(chosen.shapes, chosen.routings):
        shape = SHAPES[number_of_shape]
        groups, rows, *_ = shape
        if routing.startswith("empty") and not num_empty(groups):
            continue
        problem = Problem(shape, group_sizes(routing, groups, rows))
        for leg in chosen.legs:
            times: dict[str, float | str | None] = {}  # of peers, which several kinds may have
            for kind in chosen.kinds:
                yield from lines(problem, (routing, leg, kind), times, aligned, repeats)


def lines(
    problem: Problem,
    place: tuple[Routing, Leg, Kind],
    times: dict[str, float | str | None],
    aligned: dict[tuple[object, ...], float],
    repeats: int,
) -> Iterator[Row]:
    """Of one product; `times` and `aligned` hold what is known already."""
    routing, leg, kind = place
    calls, libraries = {OURS: ours(problem, leg, kind)}, peers(problem, leg, kind)
    made = {library: peer_call(make) for library, make in libraries.items() if library not in times}
    calls |= {library: call for library, call in made.items() if callable(call)}
    measured = dict(zip(calls, median_times(list(calls.values()), repeats), strict=True))
    time = measured[OURS]
    times |= {library: measured.get(library, call) for library, call in made.items()}  # type: ignore[arg-type]
    rate, key = problem.flops / time / 1e6, (problem.shape, leg, kind)
    if routing == "aligned":
        aligned[key] = rate
    of_aligned = rate / aligned[key] if routing != "aligned" and key in aligned else None
    yield Row(str(problem.shape), *place, OURS, time, rate, of_aligned=of_aligned)
    for library in libraries:
        its = times[library]
        if isinstance(its, str):
            yield Row(str(problem.shape), *place, f"{library}: {its}", None, None)
        elif its is not None:
            yield Row(str(problem.shape), *place, library, its, problem.flops / its / 1e6, its / time)


def peer_call(make: Callable[[], Call | None]) -> Call | str | None:
    """A call that runs; what it was refused with, or None where there is none."""
    try:
        call = make()
        if call is not None:
            call()
        return call
    except torch.AcceleratorError:
        raise  # nothing runs after that
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}".replace("|", "/")


REPORT = Report(
    "grouped_cuda",
    "Products in groups",
    "Cold L2, medians, all of a product by turns; real rows count. Ratio: time of a peer over te_dist's for the same "
    "product, more than 1 where te_dist is faster; a peer may have another format or store. Rowwise weights are those "
    "of forward products. torch stores gradients of weights in bf16, DeepGEMM adds them to fp32, in both legs. te_dist "
    "sums gradients of FP8 with one scale in fp32, peers where it is said. Of aligned: te_dist's TFLOP/s over its own "
    "with even groups of multiples of 128. "
    "Empty: the nearest to a tenth, 1 of 8 groups, 3 of 32, 13 of 128; 4 groups have none.",
    {
        "G, T, N, K": text("shape"),
        "groups": text("routing"),
        "leg": text("leg"),
        "kind": text("kind"),
        "library": text("library"),
        "us": number("time", 1),
        "TFLOP/s": number("tflops"),
        "ratio": number("ratio", 2),
        "of aligned": number("of_aligned", 2),
    },
)


def main(
    chosen: Annotated[Chosen, tyro.conf.arg(name="")] = Chosen(),  # noqa: B008  (nothing of it is written)
    *,
    out: Path | None = None,
    repeats: int = 21,
    tilings: bool = False,
) -> None:
    """Prints the table; writes it as Markdown and JSON into `out`. With `tilings`, what each way to cut reaches."""
    if not tilings:
        return REPORT.publish(measure(chosen, repeats), out)
    shapes, pairs = [SHAPES[place] for place in chosen.shapes], list(product(chosen.legs, chosen.kinds))
    routings = [routing for routing in chosen.routings if routing in ("aligned", "ragged")]
    grouped_tilings.REPORT.publish(grouped_tilings.rows(shapes, routings, pairs, repeats), out)


if __name__ == "__main__":
    tyro.cli(main)
