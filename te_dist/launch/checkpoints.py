"""Checkpoints of a run directory: which there are, what a run starts from, what is kept."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_dist import checkpoint
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, require
from te_dist.launch.world import World

NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: all that a restart needs beside the weights and the optimizer.

    Attributes:
        step: optimizer steps done.
        position: sequences that all ranks together have seen.
        text: digest of the corpus they were taken from.
    """

    step: int
    position: int
    text: str


def folder(config: Config) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.run_dir, "checkpoints")


def steps(config: Config) -> list[int]:
    """Steps of the checkpoints there are, rising. A checkpoint appears under its name once it is complete."""
    found = folder(config).glob("step-*")
    return sorted(int(match[1]) for path in found if (match := NAME.fullmatch(path.name)))


def path_of(config: Config, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder(config) / f"step-{step:08d}"


def choose(config: Config) -> Path | None:
    """The checkpoint the run starts from, None for a new run.

    Raises:
        JobError: a named checkpoint does not exist, or a new run would mix its checkpoints with those of another.
    """
    resume = config.checkpoint.resume
    there = steps(config)
    if resume == "auto":
        return path_of(config, there[-1]) if there else None
    if resume == "none":
        require(
            not there,
            "checkpoint.resume",
            got=f'"none" while {folder(config)} holds step {there[-1] if there else ""}',
            wanted="a run directory without checkpoints",
            remedy='set another run_dir, or resume = "auto" to go on',
        )
        return None
    path = Path(resume)
    require(
        path.is_dir(),
        "checkpoint.resume",
        got=f"{resume!r}, which is no directory",
        wanted='"auto", "none" or a checkpoint',
        remedy=f"choose one of {there} under {folder(config)}" if there else "check the path",
    )
    return path


def save(config: Config, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Writes a checkpoint, then drops the oldest ones beyond `checkpoint.keep`. Called by every rank."""
    extra = {"step": progress.step, "position": progress.position, "identity": _identity(config, progress.text)}
    path = path_of(config, progress.step)
    try:
        checkpoint.save(path, model=model, optimizer=optimizer, extra=extra)
    except checkpoint.CheckpointError as error:
        raise JobError(
            f"checkpoint {path}", got=error, wanted="a complete one", remedy="free space or change run_dir"
        ) from error
    if world.rank == 0:
        for step in steps(config)[: -config.checkpoint.keep]:
            shutil.rmtree(path_of(config, step), ignore_errors=True)


def load(path: Path, config: Config, text: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Reads a checkpoint into model and optimizer. Called by every rank.

    Args:
        text: digest of this run's corpus.

    Raises:
        JobError: a damaged checkpoint, one of another model, or one that was trained on other text.
    """
    try:
        extra = checkpoint.load(path, model=model, optimizer=optimizer)
    except checkpoint.CheckpointError as error:
        raise JobError(
            f"checkpoint {path}",
            got=error,
            wanted="a complete checkpoint of this model",
            remedy="resume from another one, or correct [model] and recipe",
        ) from error
    _compare(path, extra.get("identity", {}), _identity(config, text))
    return Progress(extra["step"], extra["position"], text)


def _identity(config: Config, text: str) -> dict[str, Any]:
    """What must be equal for the next step to be the one that the interrupted run would have made."""
    return {
        "the text": text,
        "data.sequence_length": config.data.sequence_length,
        "seed": config.seed,
        "model.heads": config.model.heads,
        "model.rope_base": config.model.rope_base,
    }


def _compare(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for key, wanted in ours.items():
        require(
            theirs.get(key) == wanted,
            f"checkpoint {path}: {key}",
            got=f"{theirs.get(key)!r} in the checkpoint",
            wanted=f"{wanted!r}, as this run is configured",
            remedy=f"restore {key}, or start anew in another run_dir",
        )
