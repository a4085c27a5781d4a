"""Which saved tensors are parked where there is no room for all.

[Note: Pace]
A link to the host carries a part of what a forward pass saves meanwhile. What is parked therefore lies evenly among
what is saved: the first tensors, one right after the other, would hold up the beginning of forward and the end of
backward, and leave the link idle in between. How much a pass is going to save is what the one before saved; of the
first one nothing is known, and what comes first is parked.
"""

from __future__ import annotations

from collections.abc import Hashable

_saved_before: dict[Hashable, int] = {}  # bytes of the latest pass, by what it was made with


class Pace:
    """Of bytes that are offered one after the other, says which are due to be taken.

    Attributes:
        taken: bytes so far.
    """

    def __init__(self, room: int | None, key: Hashable) -> None:
        """`room`: bytes that can be taken, None for all; `key`: equal for passes that save alike."""
        self._room, self._key = room, key
        self._expected = _saved_before.get(key, 0)
        self._offered = 0
        self.taken = 0

    def is_due(self, nbytes: int) -> bool:
        """Whether the next bytes are to be taken, if there is room."""
        before = self._offered
        self._offered += nbytes
        return self._room is None or self.taken * self._expected <= self._room * before

    def end(self) -> None:
        """Keeps for the next pass how much this one was offered."""
        if self._offered:
            _saved_before[self._key] = self._offered
