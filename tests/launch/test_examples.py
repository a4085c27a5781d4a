"""The examples run on two processes, and learn."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


LOSSES = {"fsdp2": 20, "moe": 4}  # that an example prints


def assert_learned(output: str, number: int) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", output)]
    assert len(losses) == number
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_without_a_launcher_says_how_to_start_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(SystemExit, match=f"torchrun --nproc-per-node 2 examples/{path.name}"):
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.every_run(path=(EXAMPLES / "fsdp2.py",))
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_learns_on_two_processes(path: Path, two_ranks: Callable) -> None:
    code, output = two_ranks(str(path))
    assert code == 0, output[-3000:]
    assert_learned(output, LOSSES[path.stem])
    for before, after in re.findall(r"before it was saved ([0-9.]+), and after it was loaded ([0-9.]+)", output):
        assert before == after
