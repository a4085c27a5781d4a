"""A model that is told by one number, and who saves it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from te_dist import checkpoints


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
