"""A model that is told by one number, and who saves it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from te_dist import checkpoints
from te_dist.checkpoints import store

LONG = 0.5  # seconds for which a save in the background lets another one go first, if that does


def filled(value: float, device: torch.device | str = "cpu") -> nn.Linear:
    model = nn.Linear(4, 4, device=device)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    return model


def first_value(path: Path, device: torch.device | str = "cpu") -> float:
    model = filled(-1.0, device)
    checkpoints.load(path, model=model)
    return model.weight[0, 0].item()


def in_background() -> bool:
    return threading.current_thread() is not threading.main_thread()


def late_write() -> tuple[Callable[..., None], list[str]]:
    """`store.write` that waits in the background for one in the foreground, for a while; who wrote in which order."""
    original, wrote, order = store.write, threading.Event(), []

    def write(*args: object) -> None:
        if in_background():
            wrote.wait(LONG)
        original(*args)
        order.append("background" if in_background() else "foreground")
        if not in_background():
            wrote.set()

    return write, order
