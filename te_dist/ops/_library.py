"""Registration of the ops: schema, kernels, fake implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_dist.kernels.runtime import is_recording

LIBRARY = torch.library.Library("te_dist", "DEF")


def register(schema: str, cpu: Callable[..., None], cuda: Callable[..., None]) -> None:
    """Defines an op that writes into its arguments and returns nothing."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"te_dist::{name}", _rehearsed(cuda), lib=LIBRARY)


def _rehearsed(cuda: Callable[..., None]) -> Callable[..., None]:
    def fake(*args: object) -> None:
        """Outputs are arguments: there is nothing to make up. See [Note: Kernels ahead of time]."""
        if is_recording():
            cuda(*args)

    return fake
