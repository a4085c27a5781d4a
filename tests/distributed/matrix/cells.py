"""Runs a situation for all formats, on the ranks of a pool, and says what became of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from te_dist.catalog import FORMATS
from te_dist.testing import WorkerPool
from tests.distributed.matrix import placing, sharding, starting  # noqa: F401  (they register situations)
from tests.distributed.matrix.catalog import SITUATIONS, Situation, reason_of

GREEN = "green"
FILE = Path(__file__).parents[3] / "docs" / "fsdp2_matrix.json"


def run_all(rank: int, world: int, name: str, formats: tuple[str, ...]) -> dict[str, str]:
    """By format, `GREEN` or the text of the refusal."""
    which = SITUATIONS[name]
    if which.together:
        state = _state(which, formats)
        assert state == GREEN, f"{name} is refused for some format, and no other can be told: give it together=False"
        return dict.fromkeys(formats, state)
    return {format: _state(which, (format,)) for format in formats}


def _state(which: Situation, names: tuple[str, ...]) -> str:
    torch.manual_seed(0)
    try:
        refusal = which.run(tuple(FORMATS[name] for name in names))
    except Exception as error:
        error.add_note(f"in the situation {which.name}, blocks of {dict(enumerate(names))}")
        raise
    return GREEN if refusal is None else refusal


def states(which: Situation, workers: WorkerPool, formats: tuple[str, ...] = tuple(FORMATS)) -> dict[str, str]:
    """By format, `GREEN` or why torch has it refused; of what all ranks found, which is the same."""
    first, *others = (
        {name: state if state == GREEN else reason_of(state) for name, state in found.items()}
        for found in workers.run(run_all, which.name, formats)
    )
    for other in others:
        assert other == first, f"ranks disagree: {other} on one, {first} on rank 0"
    return first


def entry(which: Situation, found: dict[str, str]) -> dict[str, Any]:
    """What the file says of a situation."""
    since = ".".join(str(number) for number in which.since)
    return {"group": which.group, "title": which.title, "world": which.world, "torch": since, "cells": found}


def recorded() -> dict[str, dict[str, Any]]:
    """By name of a situation, what the file says of it."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}
