"""Products in groups by other libraries, and by te_dist in other ways, on operands of the same sizes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import grouped_cases
from benchmarks.grouped_cases import TILE, Call, Kind, Leg, Problem, sums

DEEP_GEMM = "deep_gemm"
_FP8 = torch.float8_e4m3fn
_MULTIPLE = 16  # of what torch's FP8 sums over, and of its groups
_BF16 = "torch grouped_mm, bf16"


def peers(problem: Problem, leg: Leg, kind: Kind) -> dict[str, Callable[[], Call | None]]:
    """What makes the calls of each library; None where it is not installed or does not take these sizes."""
    return {name: partial(make, problem, leg) for name, make in _PEERS[kind].items()}


def torch_halves(problem: Problem, leg: Leg) -> Call:
    """One launch for all groups; gradients of weights are stored in bf16."""
    a, b = grouped_cases.halves(problem, leg)
    a, rest = a[: problem.real_rows], {"offs": problem.ends}
    if sums(leg):
        return partial(F.grouped_mm, a.t(), b[: problem.real_rows], **rest)
    return partial(F.grouped_mm, a, b.transpose(1, 2) if leg == "fprop" else b, **rest)


def looped_halves(problem: Problem, leg: Leg) -> Call:
    """cuBLAS, a call for each group; gradients of weights are stored in bf16."""
    (a, b), out = grouped_cases.halves(problem, leg), problem.out("wgrad" if sums(leg) else leg)
    calls = []
    for group, rows in problem.parts():
        if sums(leg):
            sides, its = (a[rows].t(), b[rows]), out.view(problem.groups, *problem.extents(leg))[group]
        else:
            sides, its = (a[rows], b[group].t() if leg == "fprop" else b[group]), out[rows]
        calls.append(partial(torch.mm, *sides, out=its))
    return partial(run_all, calls)


def torch_rows(problem: Problem, leg: Leg, *, fast: bool = True) -> Call | None:
    """One launch for all groups of FP8 with a scale for each row; gradients of weights are stored in bf16.

    Not `fast`: parts of sums are added in fp32, for gradients.
    """
    if any(size % _MULTIPLE for size in problem.sizes) or (leg == "fprop" and not fast):
        return None
    (kept, other), groups, real = problem.extents(leg), problem.groups, problem.real_rows
    operands, by_row = grouped_cases.whole(problem, leg), F.ScalingType.RowWise
    rest = {"offs": problem.ends, "output_dtype": torch.bfloat16, "use_fast_accum": fast}
    ones = functools.partial(torch.ones, device=problem.device)
    if sums(leg):
        a, b = (side[:, :real].contiguous().view(_FP8) for side in (operands.a, operands.b))
        return partial(F.scaled_grouped_mm, a, b.t(), ones(groups * kept), by_row, ones(groups * other), by_row, **rest)
    a, b = operands.a[:real].view(_FP8), operands.b.view(_FP8).view(groups, kept, other).transpose(1, 2)
    return partial(F.scaled_grouped_mm, a, b, ones(real), by_row, ones(groups, kept), by_row, **rest)


def looped_whole(problem: Problem, leg: Leg, *, fast: bool = True) -> Call | None:
    """cuBLASLt on FP8 with one scale, a call for each group; stored in bf16. `fast` as of `torch_rows`.

    What is summed over is a multiple of 16: groups of rows are copied so before time is taken.
    """
    if leg == "fprop" and not fast:
        return None
    kept, other = problem.extents(leg)
    operands, one = grouped_cases.whole(problem, leg), torch.ones(1, device=problem.device)
    its_type = F.ScalingType.TensorWise
    calls = []
    for group, rows in problem.parts():
        if sums(leg):
            padded = -(-(rows.stop - rows.start) // _MULTIPLE) * _MULTIPLE
            a, b = (side[:, :padded].contiguous().view(_FP8) for side in (operands.a, operands.b))
        else:
            a, b = operands.a[rows].view(_FP8), operands.b.view(-1, kept, other)[group].view(_FP8)
        rest = {"output_dtype": torch.bfloat16, "use_fast_accum": fast}
        calls.append(partial(F.scaled_mm, a, b.t(), one, its_type, one, its_type, **rest))
    return partial(run_all, calls)


def run_all(calls: list[Call]) -> None:
    """One after the other."""
    for call in calls:
        call()


def _deep_gemm(problem: Problem) -> Any:
    """The module; None where it is not installed or a group is no multiple of its tile."""
    if importlib.util.find_spec(DEEP_GEMM) is None or any(size % TILE for size in problem.sizes):
        return None
    return importlib.import_module(DEEP_GEMM)


def _owners(problem: Problem) -> Tensor:
    """int32: the group of every real row."""
    groups = torch.arange(problem.groups, device=problem.device, dtype=torch.int32)
    return torch.repeat_interleave(groups, torch.tensor(problem.sizes, device=problem.device))


def deep_gemm_blocks(problem: Problem, leg: Leg) -> Call | None:
    """FP8 blocks; gradients of weights are added to fp32 in both legs, there is no other way."""
    library, real = _deep_gemm(problem), problem.real_rows
    if library is None:
        return None
    operands, (kept, other), groups = grouped_cases.blocks(problem, leg), problem.extents(leg), problem.groups
    if sums(leg):
        sizes = torch.tensor(problem.sizes, device=problem.device, dtype=torch.int32)
        total = problem.out("wgrad-added").view(groups, kept, other)
        a, b = (
            (codes[:, :real].reshape(-1).view(_FP8), scale[: real // TILE].contiguous().t())
            for codes, scale in ((operands.a, operands.a_scale), (operands.b, operands.b_scale))
        )
        return partial(library.k_grouped_fp8_gemm_nt_contiguous, a, b, total, problem.sizes, sizes, total)
    scales = operands.b_scale[:, : -(-other // TILE)].contiguous().view(groups, -(-kept // TILE), -1)
    a = operands.a[:real].view(_FP8), operands.a_scale[:, :real].t()
    b = operands.b.view(_FP8).view(groups, kept, other), scales
    out, owners = problem.out(leg)[:real], _owners(problem)
    return partial(library.m_grouped_fp8_gemm_nt_contiguous, a, b, out, owners, disable_ue8m0_cast=True)


def deep_gemm_halves(problem: Problem, leg: Leg) -> Call | None:
    """bf16 rows by matrices that are summed along their memory."""
    library, (kept, other) = _deep_gemm(problem), problem.extents(leg)
    if library is None or sums(leg) or not hasattr(library, "m_grouped_bf16_gemm_nt_contiguous"):
        return None
    a, b = problem.halves(problem.real_rows, other), problem.halves(problem.groups, kept, other)
    out = problem.out(leg)[: problem.real_rows]
    return partial(library.m_grouped_bf16_gemm_nt_contiguous, a, b, out, _owners(problem))


_PEERS: dict[Kind, dict[str, Callable[[Problem, Leg], Call | None]]] = {
    "blocks": {
        "te_dist, rowwise weights as they lie": partial(grouped_cases.rowwise_blocks, turns=True),
        "te_dist, rowwise weights transposed first": partial(grouped_cases.rowwise_blocks, turns=False),
        "DeepGEMM, blocks": deep_gemm_blocks,
        _BF16: torch_halves,
    },
    "fp8": {
        "torch scaled_grouped_mm, FP8 by rows": torch_rows,
        "torch scaled_grouped_mm, FP8 by rows, fp32 sums": partial(torch_rows, fast=False),
        "loop of torch scaled_mm, FP8": looped_whole,
        "loop of torch scaled_mm, FP8, fp32 sums": partial(looped_whole, fast=False),
        _BF16: torch_halves,
    },
    "bf16": {
        _BF16: torch_halves,
        "loop of torch.mm, bf16": looped_halves,
        "DeepGEMM, bf16": deep_gemm_halves,
    },
    "mxfp8": {_BF16: torch_halves},
    "nvfp4": {_BF16: torch_halves},
}
