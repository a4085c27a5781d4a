"""Does training in each recipe reach the loss of bf16? Every recipe over several seeds, beside bf16 in the same run.

    python -m benchmarks.recipes --seeds 3 --jobs 8 --out benchmarks/results/recipes.json

Each training is the job of `launch/configs/quickstart.toml` as one CPU process, from the same initial weights and on
the same text for equal seeds. The figure is the loss on held-out files after the last step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import rich
import tyro
from rich.table import Table

from benchmarks.environment import describe
from te_dist.launch.config import RecipeName

ROOT = Path(__file__).parents[1]
BASELINE = "bf16"


@dataclass(frozen=True)
class Options:
    """seeds: trainings per recipe.  steps: of each.  jobs: trainings at a time.  threads: of each.  out: JSON file."""

    seeds: int = 3
    steps: int = 200
    jobs: int = 1
    threads: int = 2
    out: Path | None = None
    config: Path = ROOT / "launch" / "configs" / "quickstart.toml"


def main(options: Options) -> None:
    """Runs all trainings and prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        _train(options, (BASELINE, 0), Path(folder), warm=True)  # tokenizes the text once for all
        runs = [(recipe, seed) for seed in range(options.seeds) for recipe in get_args(RecipeName)]
        with ThreadPoolExecutor(options.jobs) as executor:
            losses = list(executor.map(lambda run: _train(options, run, Path(folder)), runs))
    by_recipe: dict[str, list[float]] = {}
    for (recipe, _), loss in zip(runs, losses, strict=True):
        by_recipe.setdefault(recipe, []).append(loss)
    _print(by_recipe)
    if options.out:
        record = describe() | {"steps": options.steps, "validation_loss": by_recipe}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


def _train(options: Options, run: tuple[str, int], folder: Path, *, warm: bool = False) -> float:
    """Validation loss of one training."""
    recipe, seed = run
    run_dir = folder / f"{recipe}_{seed}"
    steps = 1 if warm else options.steps
    if not warm:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "text").symlink_to(folder / "warm" / "text")
    else:
        run_dir = folder / "warm"
    overrides = {
        "recipe": recipe,
        "seed": seed,
        "run-dir": run_dir,
        "mesh.dp": 1,
        "train.steps": steps,
        "evaluation.every": steps,
        "checkpoint.every": steps,
    }
    arguments = [text for name, value in overrides.items() for text in (f"--{name}", str(value))]
    threads = ["env", f"OMP_NUM_THREADS={options.threads}"]
    launcher = [*threads, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    subprocess.run(
        [*launcher, "-m", "te_dist.launch.train", str(options.config), *arguments],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line["validation_loss"] for line in reversed(lines) if "validation_loss" in line)


def _print(by_recipe: dict[str, list[float]]) -> None:
    baseline = statistics.mean(by_recipe[BASELINE])
    table = Table("recipe", "mean loss", "range over seeds", "against bf16")
    for recipe, losses in by_recipe.items():
        mean = statistics.mean(losses)
        table.add_row(recipe, f"{mean:.4f}", f"{min(losses):.4f} to {max(losses):.4f}", f"{mean / baseline - 1:+.2%}")
    rich.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
