"""Registration of the ops: schema, CPU kernel, fake implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("te_dist", "DEF")


def register(schema: str, cpu: Callable[..., None]) -> None:
    """Defines an op that writes into its arguments and returns nothing."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, _missing(name), "CUDA")
    torch.library.register_fake(f"te_dist::{name}", _fake, lib=LIBRARY)


def _fake(*_: object) -> None:
    """Outputs are arguments: there is nothing to make up."""


def _missing(name: str) -> Callable[..., None]:
    def raise_missing(*_: object) -> None:
        raise NotImplementedError(f"te_dist::{name} has no CUDA kernel yet; move its tensors to the CPU")

    return raise_missing
