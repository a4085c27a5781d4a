"""Histories of amaxes against sequences worked out by hand, and modules of one call against each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.testing import assert_bitwise
from tests.ops.histories import as_lists, module

INF, NAN = float("inf"), float("nan")
E4M3 = 448.0


def column(*values: float) -> Tensor:
    """A history of one tensor."""
    return torch.tensor(values)[:, None]


@pytest.mark.parametrize(
    ("running", "history", "algo", "want_history", "want_scale"),
    [
        # The running step becomes the last row, the oldest (row 1) drops out, but counts for the maximum once more.
        (2.0, (0.0, 8.0, 4.0), "max", (0.0, 4.0, 2.0), E4M3 / 8),
        (2.0, (0.0, 8.0, 4.0), "most_recent", (0.0, 4.0, 2.0), E4M3 / 2),
        (2.0, (0.0, 0.0, 0.0), "max", (0.0, 0.0, 2.0), E4M3 / 2),
        (2.0, (0.0,), "max", (0.0,), E4M3 / 2),
        # Nothing seen: nothing moves.
        (0.0, (0.0, 8.0, 4.0), "max", (0.0, 8.0, 4.0), 7.0),
        # Not a number to scale by: the history moves, and the scale follows from the others, or stays.
        (INF, (0.0, 8.0, 4.0), "max", (0.0, 4.0, INF), E4M3 / 8),
        (2.0, (0.0, INF, 4.0), "max", (0.0, 4.0, 2.0), E4M3 / 4),
        (INF, (0.0, NAN, INF), "max", (0.0, INF, INF), 7.0),
        (INF, (0.0, 8.0, 4.0), "most_recent", (0.0, 4.0, INF), 7.0),
        (2.0, (0.0, NAN, 4.0), "max", (0.0, 4.0, 2.0), E4M3 / 4),
        # The quotient overflows.
        (1e-40, (0.0, 0.0, 0.0), "max", (0.0, 0.0, 1e-40), torch.finfo(torch.float32).max),
        # What lies in the row of the running step does not count.
        (2.0, (9.0, 8.0, 4.0), "max", (0.0, 4.0, 2.0), E4M3 / 8),
        (0.0, (9.0, 8.0, 4.0), "max", (0.0, 8.0, 4.0), 7.0),
    ],
)
def test_one_step(running: float, history: Any, algo: Any, want_history: Any, want_scale: float) -> None:
    moved, amax, scale = column(*history), torch.tensor([running]), torch.tensor([7.0])
    maxima = torch.tensor([E4M3])
    ops.advance_histories([moved], running=[amax], scales=[scale], scaled_max=[maxima], algo=algo)
    assert_bitwise(scale, torch.tensor([want_scale]), "scale")
    assert_bitwise(moved, column(*want_history), "history")
    assert_bitwise(amax, torch.tensor([0.0]), "running")


def test_columns_and_modules_move_independently() -> None:
    together = [module(5, width, seed=width) for width in (2, 70, 1)]
    apart = [
        module(5, 1, seed=0) | {n: t[..., i : i + 1].clone() for n, t in m.items()}
        for m in together
        for i in range(m["scales"].numel())
    ]
    for modules in (together, *([each] for each in apart)):
        ops.advance_histories(**as_lists(modules), algo="max")
    alone = iter(apart)
    for its in together:
        for index in range(its["scales"].numel()):
            for name, tensor in next(alone).items():
                assert_bitwise(tensor, its[name][..., index : index + 1], name)


def good(**changes: Any) -> dict[str, Any]:
    return as_lists([module(5, width, seed=width) for width in (2, 3)]) | {"algo": "max"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo": "mean"}, "algo: got 'mean'; choose one of 'max', 'most_recent'"),
        ({"running": []}, r"\[2, 0, 2, 2\] histories, running, scales and scaled_max, wanted as many of each"),
        ({"histories": [torch.zeros(5, 2), torch.zeros(4, 3)]}, r"histories\[1\]: got 4 rows, wanted 5"),
        ({"histories": [torch.zeros(0, 2), torch.zeros(0, 3)]}, r"histories\[0\]: got 0 rows, wanted 1"),
        ({"histories": [torch.zeros(5, 2), torch.zeros(3, 5).t()]}, r"histories\[1\]: got strides"),
        ({"histories": [torch.zeros(5, 2).half(), torch.zeros(5, 3)]}, r"histories\[0\]: got torch.float16"),
        ({"scales": [torch.ones(2), torch.ones(2)]}, r"scales\[1\]: got shape \(2,\), wanted \(3,\)"),
        ({"scaled_max": [torch.ones(2).double(), torch.ones(3)]}, r"scaled_max\[0\]: got torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.advance_histories(**good(**changes))


def test_no_modules_are_nothing_to_do() -> None:
    ops.advance_histories([], running=[], scales=[], scaled_max=[], algo="max")
