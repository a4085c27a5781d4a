"""Does a whole training in a recipe follow bf16's? One job for each recipe, both losses in one picture.

    python -m benchmarks.curves --nproc 8 --recipes bf16 float8_block --out benchmarks/results

Same data in the same order, same initial weights, seed and schedule. The first recipe is what the others are held
against. Whatever follows `--` goes to the jobs: `-- --train.steps 500 --data.files 'text/**/*.txt'`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from benchmarks.report import Report, number, text

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """config: of the job.  nproc: its processes.  runs: folder of the runs.  out: folder of table and picture."""

    config: Path = ROOT / "launch" / "configs" / "llama_300m.toml"
    recipes: tuple[str, ...] = ("bf16", "float8_block")
    nproc: int = 8
    runs: Path = Path("runs/curves")
    out: Path | None = None


@dataclass(frozen=True)
class Row:
    """A run: losses in nats a token, of the last tenth of training and held out; how far from the first run's."""

    recipe: str
    steps: int
    training: float
    held_out: float
    distance: float
    largest: float
    tokens: float
    memory: float


def train(options: Options, recipe: str, arguments: list[str]) -> list[dict[str, Any]]:
    """The journal of a job, run now unless it was before. All jobs share the text that the first one prepares."""
    run_dir, shared = options.runs / recipe, options.runs / "text"
    run_dir.mkdir(parents=True, exist_ok=True)
    shared.mkdir(exist_ok=True)
    if not (run_dir / "text").exists():
        (run_dir / "text").symlink_to(shared.resolve())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc)]
    job = ["-m", "te_dist.launch.train", str(options.config), "--recipe", recipe, "--run-dir", str(run_dir), *arguments]
    subprocess.run([*launcher, *job], check=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def smoothed(losses: list[float]) -> list[float]:
    """Means over the last ten looks."""
    return [statistics.mean(losses[max(0, end - 10) : end]) for end in range(1, len(losses) + 1)]


def rows_of(found: dict[str, list[dict[str, Any]]]) -> Iterator[Row]:
    """Every run beside the first."""
    first = None
    for recipe, records in found.items():
        looks = [record for record in records if "loss" in record]
        losses = [look["loss"] for look in looks]
        held_out = [record["validation_loss"] for record in records if "validation_loss" in record]
        first = first or (held_out, losses)
        tail = len(losses) - len(losses) // 10
        apart = [abs(mine / other - 1) for mine, other in zip(losses[tail:], first[1][tail:], strict=True)]
        yield Row(
            recipe,
            looks[-1]["step"],
            statistics.mean(losses[tail:]),
            held_out[-1],
            100 * (held_out[-1] / first[0][-1] - 1),
            100 * max(apart),
            statistics.median(look["tokens_per_second"] for look in looks),
            looks[-1]["memory_bytes"] / 2**30,
        )


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """All losses over the steps: in training, smoothed, and held out."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, (recipe, records) in enumerate(found.items()):
        looks = [(record["step"], record["loss"]) for record in records if "loss" in record]
        steps, losses = zip(*looks, strict=True)
        axes.plot(steps, losses, color=f"C{index}", alpha=0.3, linewidth=0.8)
        axes.plot(steps, smoothed(list(losses)), color=f"C{index}", label=f"{recipe}, training")
        points = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
        axes.plot(list(points), list(points.values()), "o", color=f"C{index}", label=f"{recipe}, held out")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(options: Options, arguments: list[str]) -> None:
    """Runs the jobs, prints the table, draws the picture."""
    found = {recipe: train(options, recipe, arguments) for recipe in options.recipes}
    name = f"curve_{options.config.stem}"
    note = (
        f"Job of `{options.config.name}` with `{' '.join(arguments)}` over {options.nproc} processes. Losses in nats "
    )
    note += (
        f"a token; see {name}.png. Apart: held-out loss beside the first's, and the most that training losses of the "
    )
    note += "last tenth of all looks differ."
    columns = {
        "recipe": text("recipe"),
        "steps": text("steps"),
        "training loss, last tenth": number("training", 4),
        "held out": number("held_out", 4),
        "apart %": number("distance", 2),
        "largest in training %": number("largest", 2),
        "tokens/s": number("tokens"),
        "GiB in use": number("memory", 1),
    }
    Report(name, "Loss over a whole training", note, columns).publish(rows_of(found), options.out)
    if options.out is not None:
        draw(found, options.out / f"{name}.png")


if __name__ == "__main__":
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Options, args=sys.argv[1:separator]), sys.argv[separator + 1 :])
