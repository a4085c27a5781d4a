"""Benchmarks of products in groups call ops and other libraries with what these take."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import grouped_cases, grouped_cuda, grouped_peers, grouped_tilings, tilings
from benchmarks.grouped_cases import KINDS, LEGS, ROUTINGS, SHAPES, Problem, group_sizes, kernels, ours, sums, unsized
from te_dist.kernels import grouped_gemm, grouped_whole
from te_dist.kernels.runtime import recording

SMALL = (3, 512, 128, 256)
SIZES = {"aligned": [128, 0, 256], "ragged": [70, 0, 301]}
every_product = pytest.mark.parametrize(("leg", "kind"), list(product(LEGS, KINDS)), ids=str)
every_routing = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


@pytest.mark.parametrize("groups", sorted({shape[0] for shape in SHAPES}))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_sizes_of_groups(routing: Any, groups: int) -> None:
    sizes = group_sizes(routing, groups, 512 * groups)
    assert len(sizes) == groups and 0.7 * 512 * groups < sum(sizes) <= 512 * groups
    assert all(size % 128 == 0 for size in sizes) == (routing in ("aligned", "zipf-aligned", "empty-aligned"))
    if routing == "empty":
        assert sizes.count(0) == {4: 0, 8: 1, 32: 3, 128: 13}[groups]


@every_routing
@every_product
def test_ops_take_what_they_are_called_with(leg: Any, kind: Any, sizes: list[int]) -> None:
    problem = Problem(SMALL, sizes, device="cpu")
    call = ours(problem, leg, kind)
    out, rows = call.keywords["out"], 3 * 128 if sums(leg) else sum(sizes)  # type: ignore[attr-defined]
    out.zero_()
    call()
    assert out.isfinite().all()
    of_group = out.view(3, -1).any(1) if sums(leg) else out[:rows].any(1)
    assert of_group.tolist() == [True, False, True] if sums(leg) else of_group.all()


@pytest.mark.parametrize("leg", LEGS)
@every_routing
def test_bf16_of_all_libraries_is_the_same_product(leg: Any, sizes: list[int], monkeypatch: Any) -> None:
    problem = Problem(SMALL, sizes, device="cpu")
    operands = grouped_cases.halves(problem, leg)
    monkeypatch.setattr(grouped_cases, "halves", lambda *_: operands)
    outs = []
    monkeypatch.setattr(Problem, "out", lambda its, leg, made=Problem.out: outs.append(made(its, leg)) or outs[-1])
    call = ours(problem, leg, "bf16")
    call()
    grouped_peers.looped_halves(problem, leg)()
    end = len(outs[0]) if sums(leg) else sum(sizes)
    torch.testing.assert_close(outs[1][:end].float(), outs[0][:end].float(), rtol=2e-2, atol=0.5)
    of_torch = grouped_peers.torch_halves(problem, leg)().reshape(-1, outs[0].shape[1])  # type: ignore[attr-defined]
    torch.testing.assert_close(of_torch[:end].float(), outs[0][:end].float(), rtol=2e-2, atol=0.5)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has scaled products on GPUs only",
)
@every_routing
@pytest.mark.parametrize("leg", LEGS)
def test_a_loop_of_scaled_products_runs(leg: Any, sizes: list[int]) -> None:
    problem = Problem(SMALL, sizes, device="cpu")
    call = grouped_peers.looped_whole(problem, leg)
    assert len(call.args[0]) == 2  # type: ignore[union-attr]
    call()  # type: ignore[misc]
    assert (grouped_peers.looped_whole(problem, leg, fast=False) is None) == (leg == "fprop")


@pytest.mark.parametrize("leg", LEGS)
def test_scaled_products_in_groups_of_torch_get_what_they_want(leg: Any, monkeypatch: Any) -> None:
    problem, got = Problem(SMALL, SIZES["aligned"], device="cpu"), {}
    monkeypatch.setattr(F, "scaled_grouped_mm", lambda *args, **rest: got.update(args=args, rest=rest))
    grouped_peers.torch_rows(problem, leg)()
    a, b, a_scale, b_scale = (got["args"][place] for place in (0, 1, 2, 4))
    kept, other, rows = *problem.extents(leg), sum(problem.sizes)
    assert a.shape == ((kept, rows) if sums(leg) else (rows, other)) and a.is_contiguous()
    assert b.shape == ((rows, other) if sums(leg) else (3, other, kept)) and b.stride(-2) == 1
    assert a_scale.shape == ((3 * kept,) if sums(leg) else (rows,))
    assert b_scale.shape == ((3 * other,) if sums(leg) else (3, kept))
    assert grouped_peers.torch_rows(Problem(SMALL, SIZES["ragged"], device="cpu"), leg) is None


@pytest.mark.parametrize("leg", LEGS)
def test_another_library_gets_what_it_wants_where_it_is_installed(leg: Any, monkeypatch: Any) -> None:
    calls: list[Any] = []

    def rows(a: Any, b: Any, out: Any, owners: Any, **_: Any) -> None:
        calls.append((a[0].shape, a[1].shape, b[0].shape, b[1].shape, out.shape, owners.tolist()))

    def sums_of(a: Any, b: Any, out: Any, sizes: list[int], on_device: Any, added: Any) -> None:
        calls.append((a[0].shape, a[1].shape, b[0].shape, b[1].shape, out.shape, on_device.tolist()))

    library = SimpleNamespace(
        m_grouped_fp8_gemm_nt_contiguous=rows,
        k_grouped_fp8_gemm_nt_contiguous=sums_of,
        m_grouped_bf16_gemm_nt_contiguous=lambda a, b, out, owners: calls.append((a.shape, b.shape, out.shape)),
        __spec__=SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, grouped_peers.DEEP_GEMM, library)
    problem, (kept, other) = Problem(SMALL, SIZES["aligned"], device="cpu"), Problem(SMALL, []).extents(leg)
    for make in (grouped_peers.deep_gemm_blocks, grouped_peers.deep_gemm_halves):
        call = make(problem, leg)
        assert (call is None) == (sums(leg) and make is grouped_peers.deep_gemm_halves)
        if call is not None:
            call()
        assert make(Problem(SMALL, SIZES["ragged"], device="cpu"), leg) is None
    if sums(leg):
        sides = ((384 * kept,), (kept, 3)), ((384 * other,), (other, 3))
        assert calls == [(*sides[0], *sides[1], (3, kept, other), [128, 0, 256])]
        return
    a, b = ((384, other), (384, other // 128)), ((3, kept, other), (3, kept // 128, other // 128))
    owners = [0] * 128 + [2] * 256
    assert calls == [(*a, *b, (384, kept), owners), (a[0], b[0], (384, kept))]


@every_product
def test_kernels_of_all_shapes_are_known_beforehand(leg: Any, kind: Any) -> None:
    for shape in SHAPES[3:]:
        assert len(kernels(shape, leg, kind)) == 1


@pytest.mark.parametrize(("leg", "kind"), list(product(LEGS, ("blocks", "fp8", "bf16"))), ids=str)
def test_every_way_to_cut_is_another_kernel_or_order(leg: Any, kind: Any) -> None:
    case = grouped_tilings.case(unsized(SHAPES[3]), "aligned", leg, kind)
    specs = grouped_tilings.specs(SHAPES[3], leg, kind)
    assert len(specs) == len(case.candidates) > 1
    assert len(set(specs)) >= len(specs) // 2  # bands differ in numbers alone
    assert case.module is (grouped_gemm if kind == "blocks" else grouped_whole)
    assert set(kernels(SHAPES[3], leg, kind)) <= set(specs)


@pytest.fixture
def on_cpu(monkeypatch: Any) -> None:
    """Benchmarks of small groups on the CPU, whose calls run once and take 5 us."""
    monkeypatch.setattr(grouped_cuda, "SHAPES", (SMALL,))
    for module in (grouped_cuda, grouped_tilings):
        monkeypatch.setattr(module, "prepare", lambda *_: None)
        monkeypatch.setattr(module, "Problem", partial(Problem, device="cpu"))
    time_of = lambda call: 5.0 if call() is None else 10.0  # noqa: E731
    monkeypatch.setattr(tilings, "median_time", lambda call, _: time_of(call))
    monkeypatch.setattr(grouped_cuda, "median_times", lambda calls, _: [time_of(call) for call in calls])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("on_cpu")
def test_tables_have_all_legs_and_ratios(tmp_path: Path) -> None:
    chosen = grouped_cuda.Chosen(shapes=(0,), routings=("aligned", "ragged", "empty"))
    grouped_cuda.main(chosen, out=tmp_path, repeats=1)
    rows = json.loads((tmp_path / "grouped_cuda.json").read_text())["rows"]
    ours = [row for row in rows if row["library"] == "te_dist"]
    assert [(r["routing"], r["leg"], r["kind"]) for r in ours] == list(product(("aligned", "ragged"), LEGS, KINDS))
    assert {row["of_aligned"] is None for row in ours[:20]} == {True} and all(row["of_aligned"] for row in ours[20:])
    by_torch = [row for row in rows if row["library"].startswith("torch grouped_mm")]
    assert len(by_torch) == len(ours) and {row["ratio"] for row in by_torch} == {2.0}
    refused = [row["library"] for row in rows if row["time"] is None]
    assert refused and all("NotImplementedError" in library for library in refused)


@pytest.mark.usefixtures("on_cpu")
def test_tables_of_ways_to_cut_are_written(tmp_path: Path) -> None:
    chosen = grouped_cuda.Chosen(shapes=(0,), legs=("dgrad", "wgrad-added"))
    grouped_cuda.main(chosen, out=tmp_path, repeats=1, tilings=True)
    rows = json.loads((tmp_path / "grouped_tilings_cuda.json").read_text())["rows"]
    assert {row["product"] for row in rows} == {f"{k} {leg}" for leg in chosen.legs for k in ("blocks", "fp8", "bf16")}
    assert len({(row["shape"], row["product"], row["tiling"]) for row in rows}) == len(rows)


def test_what_te_dist_chooses_is_marked(monkeypatch: Any) -> None:
    monkeypatch.setattr(tilings, "median_time", lambda *_: 5.0)
    for leg, kind in product(LEGS, ("blocks", "fp8", "bf16")):
        case = grouped_tilings.case(unsized(SHAPES[3]), "aligned", leg, kind)
        with recording():
            assert [row.chosen for row in case.rows(1)].count(True) == 1, (leg, kind)
