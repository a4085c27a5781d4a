"""Ops on CPU tensors that run the kernels for CUDA, simulated."""

from __future__ import annotations

import sys
from functools import partial
from itertools import product

import pytest
import torch

from te_dist import kernels
from te_dist.kernels import multi_adam, multi_tensor, runtime
from tests.simulation import build


@pytest.fixture
def simulated(monkeypatch):
    """Two multiprocessors, so that blocks walk over several tiles."""
    changes = ((runtime.launch, build.launch), (runtime.multiprocessors, lambda _: 2))
    modules = [module for name, module in sys.modules.items() if name.startswith("te_dist.kernels.")]
    for module, (old, new) in product(modules, changes):
        if getattr(module, old.__name__, None) is old:
            monkeypatch.setattr(module, old.__name__, new)
    for name in filter(partial(hasattr, torch.ops.te_dist), kernels.__all__):
        monkeypatch.setattr(torch.ops.te_dist, name, getattr(kernels, name))


@pytest.fixture
def on_host(simulated, monkeypatch) -> None:
    """Parameters of launches lie in ordinary memory."""
    uploaded = lambda content, device: torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)  # noqa: E731
    for module in (multi_adam, multi_tensor):
        monkeypatch.setattr(module, "upload", uploaded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plain = lambda self: torch.empty(self.table.shape, dtype=torch.int64)  # noqa: E731
    monkeypatch.setattr(multi_tensor.Pointers, "_staging", plain)
