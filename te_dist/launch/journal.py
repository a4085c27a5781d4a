"""What a run tells: a progress line, `metrics.jsonl`, a picture of the loss and a table at the end. Rank 0 only."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from te_dist.launch.errors import unwritable
from te_dist.launch.measure import size

CONFIG = "config.json"
METRICS = "metrics.jsonl"
PICTURE = "loss.png"


class Journal:
    """The record of a run; on other ranks than 0 every method does nothing.

    Attributes:
        folder: run directory.
    """

    def __init__(self, folder: Path, steps: int, *, writes: bool) -> None:
        self.folder = folder
        self._writes = writes
        self._latest = ""  # line of the metrics
        self._console = Console(quiet=not writes)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Journal:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, step: int, config: str) -> None:
        """Writes the configuration down and drops metrics after `step`: those that an interrupted run left.

        Raises:
            JobError: the directory cannot be written.
        """
        if not self._writes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / CONFIG, config)
            self._drop_after(step)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        self._bar.update(self._task, completed=step)

    def _drop_after(self, step: int) -> None:
        """Rewrites the metrics, if anything is to be dropped, and says so."""
        path = self.folder / METRICS
        lines = self._lines()
        kept = [line for line in lines if (record := _parsed(line)) is not None and record["step"] <= step]
        if kept != lines:
            _replace(path, "".join(kept))
            self.note(f"{len(lines) - len(kept)} lines of {METRICS} are dropped: damaged, or of steps behind {step}")
        self._latest = kept[-1] if kept else ""

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def record(self, step: int, **values: Any) -> None:
        """Appends a line to the metrics, unless it is the latest one already: that of a run that had ended.

        Raises:
            JobError: it cannot be written.
        """
        if not self._writes:
            return
        line = json.dumps({"step": step, **values}) + "\n"
        if line == self._latest:
            return
        self._latest = line
        try:
            with (self.folder / METRICS).open("a") as out:
                out.write(line)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def training(self, step: int, **values: float) -> None:
        """Records a look at the training loss and shows it: as the bar's text, or as a line where there is no bar."""
        self.record(step, **values)
        text = (
            f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{size(values['memory_bytes'])}  lr {values['learning_rate']:.2e}"
        )
        if "dropped" in values:
            text += f"  dropped {values['dropped']:.2%}"
        self._bar.update(self._task, completed=step, description=text)
        if not self._console.is_terminal:
            self.note(f"step {step}  {text}")

    def draw(self, unigram: float) -> None:
        """Draws the losses of `metrics.jsonl` so far, of each step the newest, with the unigram model's loss as a line.

        Where it cannot, it says so.
        """
        if not self._writes:
            return
        records = list(self._records())
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for key, style in (("loss", "-"), ("validation_loss", "o-")):
            points = {record["step"]: record[key] for record in records if key in record}
            axes.plot(list(points), list(points.values()), style, label=key.replace("_", " "))
        axes.axhline(unigram, linestyle="--", color="gray", label="unigram model, validation")
        axes.set(xlabel="step", ylabel="nats per token")
        axes.legend()
        axes.grid(alpha=0.3)
        try:
            figure.savefig(self.folder / PICTURE, dpi=120)
        except OSError as error:
            self.note(f"no picture of the loss: {error}")

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Prints a table; all columns but the first are figures."""
        table = Table(title=title)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def _records(self) -> Iterator[dict[str, Any]]:
        yield from (record for record in map(_parsed, self._lines()) if record is not None)

    def _lines(self) -> list[str]:
        path = self.folder / METRICS
        if not path.exists():
            return []
        with path.open(errors="replace") as lines:
            return list(lines)


def _replace(path: Path, text: str) -> None:
    """Writes a file anew: what a kill meanwhile leaves is the file as it was."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    os.replace(draft, path)


def _parsed(line: str) -> dict[str, Any] | None:
    """The record of a line; None for one that is damaged, or without an end, as a killed run leaves its latest."""
    try:
        record = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
