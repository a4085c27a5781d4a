"""How far a run has come, and the checkpoints that say so."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_dist import checkpoints
from te_dist.checkpoints import CheckpointError
from te_dist.checkpoints.folder import in_the_way, resolve
from te_dist.checkpoints.manifest import Manifest
from te_dist.launch import corpus
from te_dist.launch.config import Config
from te_dist.launch.errors import require


@dataclass(frozen=True)
class Progress:
    """All that a restart needs beside the weights and the optimizer.

    Attributes:
        step: optimizer steps done.
        position: sequences that all ranks together have seen.
        text: digest of the corpus they were taken from.
        recipe: by which they were trained; "" where a checkpoint does not say.
        began: checkpoint that the run began with, of another directory where there is such a one; "" for none.
        named: the latest that a configuration named, as it did; it may be a link that points elsewhere since.
    """

    step: int
    position: int
    text: str
    recipe: str = ""
    began: str = ""
    named: str = ""

    def of_run(self, config: Config, path: Path) -> Progress:
        """The same as that of a run of this configuration, which goes on from a checkpoint."""
        if path != Path(config.checkpoint.resume):
            return replace(self, recipe=config.recipe)
        place = path.resolve()
        began = self.began if place.parent == folder(config).resolve() else ""
        return replace(self, recipe=config.recipe, began=began or str(place), named=str(path))


def folder(config: Config) -> Path:
    """Where a run keeps its checkpoints."""
    return folder_in(config.run_dir)


def folder_in(run_dir: str | Path) -> Path:
    """Where the checkpoints of a run are."""
    return Path(run_dir, "checkpoints")


def choose(config: Config, *, goes_on: bool = False) -> Path | None:
    """The checkpoint the run starts from, None for a new run.

    A run that begins with a named one goes on from its own newest when the same job is started again, also where the
    named one is no longer there.

    Args:
        goes_on: whether this is a later attempt of the launch that began the run, which made what is there.

    Raises:
        JobError: a named checkpoint does not exist, a run would mix its checkpoints with those of another, or something
            else lies where it will save one.
    """
    resume, newest = config.checkpoint.resume, checkpoints.latest(folder(config))
    blocked = in_the_way(folder(config))
    require(
        not blocked,
        "run_dir",
        got=f"{', '.join(map(str, blocked))}: no checkpoint",
        wanted="checkpoints, or nothing, where this run will save",
        remedy="move it away, or set another run_dir",
    )
    if resume == "auto" or (goes_on and newest is not None):
        return newest
    if resume == "none":
        require(
            newest is None,
            "checkpoint.resume",
            got=f'"none" while there is {newest}',
            wanted="a run directory without checkpoints",
            remedy='set another run_dir, or resume = "auto" to go on',
        )
        return None
    named = Path(resume)
    if newest is not None and _began_with(newest, named):
        return newest
    require(
        named.is_dir(),
        "checkpoint.resume",
        got=f"{resume!r}, which is no directory",
        wanted='"auto", "none" or a checkpoint',
        remedy=f"the newest one of the run directory is {newest}" if newest else "check the path",
    )
    require(
        newest is None or newest.resolve() == named.resolve(),
        "checkpoint.resume",
        got=f"{resume!r} while there is {newest}",
        wanted="the newest one of the run directory, or a run directory without checkpoints",
        remedy='set another run_dir, or resume = "auto" to go on from the newest',
    )
    return named


def save(config: Config, progress: Progress, model: nn.Module, *, optimizer: torch.optim.Optimizer) -> Path:
    """Writes a checkpoint and returns its path. Called by every rank.

    Raises:
        CheckpointError: on every rank alike.
    """
    path = folder(config) / f"step_{progress.step:08d}"
    extra = {"progress": asdict(progress), "settings": _settings(config, progress.text)}
    checkpoints.save(path, model=model, optimizer=optimizer, extra=extra)
    return path


def load(path: Path, config: Config, text: str, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Reads a checkpoint into model and optimizer. Called by every rank.

    Args:
        text: digest of this run's corpus.

    Raises:
        CheckpointError: it is damaged or of another model; on every rank alike.
        JobError: the next step would not be the one that the run which wrote it would have made.
    """
    extra = checkpoints.load(path, model=model, optimizer=optimizer)
    require(
        "progress" in extra and "settings" in extra,
        f"checkpoint {path}",
        got="one that another program wrote",
        wanted="a checkpoint of this job",
        remedy='choose another one, or resume = "none"',
    )
    progress = Progress(**extra["progress"])
    theirs = {"text": progress.text, **extra["settings"]}
    for key, wanted in {**_settings(config, text), "text": text}.items():
        require(
            theirs.get(key, wanted) == wanted,  # older checkpoints say less
            f"checkpoint {path}: {key}",
            got=f"{theirs.get(key)!r} in the checkpoint",
            wanted=f"{wanted!r}, as this run is configured",
            remedy="restore it, or start anew in another run_dir",
        )
    return progress


def saved_recipe(path: Path) -> str:
    """By which a checkpoint's run was trained; "" where it does not say, or cannot be read, as `load` tells."""
    return saved(path).get("recipe", "")


def saved(path: Path) -> dict[str, Any]:
    """The fields of `Progress` as a checkpoint has them; none where it cannot be read or is no run's."""
    with suppress(CheckpointError, KeyError, TypeError):
        return dict(Manifest.read(resolve(path)).extra["progress"])
    return {}


def _began_with(newest: Path, named: Path) -> bool:
    """Whether the run of a checkpoint began with a named one: by the place that had then, or by its name."""
    its = saved(newest)
    return its.get("began") == str(named.resolve()) or its.get("named") == str(named)


def _settings(config: Config, text: str) -> dict[str, Any]:
    """What no parameter's shape tells and yet decides the next step; of the text, what its digest follows from."""
    experts = config.model.experts
    of_experts = ("top_k", "score_function", "normalize", "scaling_factor") if experts.count else ()
    made_of = corpus.made_of(corpus.folder_in(config.run_dir, text))
    return {
        **{f"text.{name}": value for name, value in made_of.items()},
        "data.sequence_length": config.data.sequence_length,
        "seed": config.seed,
        **{f"model.{name}": getattr(config.model, name) for name in ("heads", "rope_base", "norm_epsilon")},
        **{f"model.experts.{name}": getattr(experts, name) for name in of_experts},
    }
