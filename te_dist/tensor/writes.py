"""Numbers of writes from masters into quantized weights, which copies keep: no two processes have the same."""

from __future__ import annotations

import itertools
import os
import uuid


class _Numbers:
    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self.left = itertools.count(uuid.uuid4().int >> 64 | 1)


_numbers = _Numbers()


def next_write() -> int:
    """Above 0."""
    return next(_numbers.left)
