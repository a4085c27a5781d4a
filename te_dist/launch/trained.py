"""What a run has trained, for use outside of jobs, by one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

import te_dist as te
from te_dist import checkpoints, recipe
from te_dist.launch import config_file, corpus, progress
from te_dist.launch.config import Config, RecipeName
from te_dist.launch.errors import JobError, require
from te_dist.launch.journal import CONFIG
from te_dist.launch.model import Decoder
from te_dist.launch.parallelize import RECIPES


@dataclass(frozen=True)
class Trained:
    """A model with what it takes to use it.

    Attributes:
        model: in evaluation mode; its weights are those of the checkpoint, codes as they were.
        recipe: by which it was trained, and gives the losses that the run recorded; None for bf16.
        config: of the run's latest start.
        tokenizer: file of its vocabulary, for `tokenizers.Tokenizer.from_file`.
    """

    model: Decoder
    recipe: recipe.Recipe | None
    config: Config
    tokenizer: Path


def load(run_dir: str | Path, *, checkpoint: str | Path | None = None, device: torch.device | str = "cpu") -> Trained:
    """Loads the model of a run, whatever its mesh was.

    Args:
        run_dir: of the run.
        checkpoint: one of it; the newest where none is named.
        device: of the model, all of which has to fit there.

    Raises:
        JobError: there is no run, or no checkpoint of one.
        CheckpointError: it is damaged.
    """
    config = _config(Path(run_dir))
    path = checkpoints.latest(progress.folder_in(run_dir)) if checkpoint is None else Path(checkpoint)
    require(
        path is not None,
        f"run directory {run_dir}",
        got="no checkpoint",
        wanted="one that is complete",
        remedy="let the run get to its first one",
    )
    assert path is not None
    saved = progress.saved(path)
    require(
        "text" in saved,
        f"checkpoint {path}",
        got="none that can be read, or one that another program wrote",
        wanted="a checkpoint of a run",
        remedy="check the path",
    )
    precision = RECIPES[cast(RecipeName, saved.get("recipe") or config.recipe)]
    with te.quantized_model_init(enabled=precision is not None, recipe=precision), torch.device(device):
        model = Decoder(config.model)
    if precision is not None:
        te.prepare(model, precision)  # histories are there to be loaded
    checkpoints.load(path, model=model)
    tokenizer = corpus.folder_in(run_dir, saved["text"]) / "tokenizer.json"
    return Trained(model.eval(), precision, config, tokenizer)


def _config(run_dir: Path) -> Config:
    file = run_dir / CONFIG
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise JobError(
            f"run directory {run_dir}", got=error, wanted="one that a job has written", remedy="check the path"
        ) from error
    return config_file.build(Config, table)
