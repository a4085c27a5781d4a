"""Products in groups with each of the ways to cut them: what the rates that te_dist chooses by were taken from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch

from benchmarks.gemm_cuda import TILINGS, fits, label
from benchmarks.grouped_cases import Kind, Leg, Problem, Routing, Shape, group_sizes, ours, sums, unsized
from benchmarks.tilings import Case, Row, report
from te_dist.kernels import grouped_gemm, grouped_whole
from te_dist.kernels.grouped_whole import Split
from te_dist.kernels.runtime import prepare, recording
from te_dist.kernels.spec import Spec

# What `grouped_whole` may choose from.
SPLITS = [Split(*split) for split in product((256, 128), (2, 1), (8, 16))]
SPLITS_IN_PARTS = [replace(split, cols=min(192, split.cols)) for split in SPLITS]
REPORT = report("grouped_tilings_cuda", "Ways to cut products in groups")


def rows(
    shapes: Iterable[Shape], routings: Iterable[Routing], chosen: Iterable[tuple[Leg, Kind]], repeats: int
) -> Iterator[Row]:
    """All lines of FP8 blocks, FP8 with one scale and bf16; other kinds have nothing to choose."""
    wanted = [(leg, kind) for leg, kind in chosen if kind in ("blocks", "fp8", "bf16")]
    of_shapes = list(product(shapes, wanted))
    prepare([spec for shape, pair in of_shapes for spec in specs(shape, *pair)], torch.cuda.current_device())
    for (shape, (leg, kind)), routing in product(of_shapes, routings):
        problem = Problem(shape, group_sizes(routing, shape[0], shape[1]))
        yield from case(problem, routing, leg, kind).rows(repeats)


def specs(shape: Shape, leg: Leg, kind: Kind) -> list[Spec]:
    """Kernels of one product, cut in all ways."""
    calls = case(unsized(shape), "aligned", leg, kind).calls()
    with recording() as found:
        for _ in calls:
            pass
    return found


def case(problem: Problem, routing: Routing, leg: Leg, kind: Kind) -> Case:
    """One product with all that may be chosen for it."""
    place = (f"{problem.shape}, {routing}", f"{kind} {leg}", ours(problem, leg, kind), problem.flops)
    if kind == "blocks":
        tilings = {label(t): t for t in TILINGS if fits(t, square=not sums(leg), adds=leg == "wgrad-added")}
        return Case(*place, grouped_gemm, ("rows_tiling", "sums_tiling"), tilings)
    in_parts = kind == "fp8" and leg != "fprop"
    found = SPLITS_IN_PARTS if in_parts else SPLITS
    splits = {f"{split.cols}/{split.cluster}/{split.band}": split for split in found}
    functions = ("products_in_parts_split", "sums_in_parts_split") if in_parts else ("products_split", "sums_split")
    return Case(*place, grouped_whole, functions, splits)
