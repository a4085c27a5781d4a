"""Gradients of weights that backward leaves for later, for `delay_wgrad_compute`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Left(NamedTuple):
    """A product, what it reads, and how often each of these had been written when it was left."""

    compute: Callable[[], None]
    reads: Sequence[Tensor]
    versions: Sequence[int]


class LeftGradients:
    """In the order in which backward left them."""

    def __init__(self) -> None:
        self._left: list[_Left] = []

    def leave(self, compute: Callable[[], None], reads: Sequence[Tensor]) -> None:
        """Keeps a product.

        Args:
            reads: memory that is the caller's, or may be: the input, the gradient of the output.
        """
        known = [tensor for tensor in reads if not tensor.is_inference()]  # others count no writes
        self._left.append(_Left(compute, known, [tensor._version for tensor in known]))

    def compute(self, label: str) -> bool:
        """All of them; whether there were any. Where one cannot be computed, it is kept, and those behind it.

        Args:
            label: of the module, for errors.

        Raises:
            RuntimeError: what one reads was written in place since it was left.
        """
        had_some = bool(self._left)
        while self._left:
            left = self._left[0]
            if [tensor._version for tensor in left.reads] != left.versions:
                raise RuntimeError(
                    f"{label}: the input or the gradient of the output was written in place after backward, and "
                    "backward_dw reads it; call backward_dw before, or discard_dw to do without this gradient"
                )
            with torch.no_grad():
                left.compute()
            del self._left[0]
        return had_some

    def discard(self) -> None:
        """None is computed."""
        self._left.clear()
