"""Members of a group as its users hold them: what is written into one, the group knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_dist.formats import Direction, Group
from te_dist.ops.evaluate import values
from te_dist.ops.source import Source
from te_dist.tensor import QuantizedStorage, writes

if TYPE_CHECKING:
    from te_dist.grouped.storage import GroupedStorage


_BUFFERS: Any = QuantizedStorage.buffers  # where a storage keeps them


class MemberView(QuantizedStorage):
    """One matrix of a group, whose writes the group takes note of; copies of it belong to no group.

    Attributes:
        owner: the group; None of what was pickled.
        index: of the member.
    """

    __slots__ = ("index", "owner")

    def __init__(self, owner: GroupedStorage, index: int) -> None:
        member = owner.members[index]
        super().__init__(member.format, member.buffers, member.region, dtype=member.dtype)
        self.owner, self.index = owner, index

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Those of the group as it is now, whose directions may come and go."""
        owner = getattr(self, "owner", None)
        return _BUFFERS.__get__(self) if owner is None else owner.members[self.index].buffers

    @buffers.setter
    def buffers(self, buffers: dict[str, Tensor]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of one without a group."""
        if getattr(self, "owner", None) is not None:
            raise NotImplementedError(
                f"member {self.index} of a group: its buffers are those of the group; clone the member to use it alone"
            )
        _BUFFERS.__set__(self, buffers)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Of one without a group, as of any matrix.

        Raises:
            NotImplementedError: the group would have other directions.
        """
        wanted = {Direction.ROWWISE: rowwise_usage, Direction.COLUMNWISE: columnwise_usage}
        changes = any(usage not in (None, direction in self.directions) for direction, usage in wanted.items())
        if self.owner is None:
            super().update_usage(rowwise_usage, columnwise_usage)
        elif changes:
            raise NotImplementedError(
                f"member {self.index} of a group: its directions are those of the group; call update_usage of that, or "
                "clone the member to use it alone"
            )

    def prepare_for_saving(self) -> tuple[list[Tensor], QuantizedStorage]:
        """As of any matrix, but that the group keeps its buffers."""
        return self.holding(dict(self.buffers)).prepare_for_saving()

    @property
    def best_values(self) -> Tensor | None:
        """Of this member, in high precision: those of the master, now or when a copy of the group was made; or those
        kept at initialization. None where there are none."""
        group = self.owner
        if group is None or not isinstance(group.group, Group):
            return None
        known = (writes.master_of(group), writes.former_values(group), group.initial)
        whole = next((each for each in known if each is not None), None)
        return None if whole is None else whole.view(group.shape)[self.index]

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedStorage:
        """A storage around `fn` of every buffer, which remembers the values of a master."""
        mapped, best = super().map(fn), self.best_values
        return mapped if best is None else MemberCopy(mapped, best.clone())

    def note_values(self, matrix: Tensor | Source, *, is_settled: bool = False) -> None:
        """As of a matrix that is alone."""
        super().note_values(matrix, is_settled=is_settled)
        if self.owner is not None:
            self.owner.note_written(self.index, values(matrix))

    def _take_history(self, source: QuantizedStorage) -> None:
        super()._take_history(source)
        if self.owner is None:
            return
        kept = source.best_values if isinstance(source, MemberView | MemberCopy) else source.initial
        if kept is None and isinstance(source, MemberView) and source.is_as_old_as(self):
            kept = self.best_values
        self.owner.note_written(self.index, source.dequantize(torch.float32) if kept is None else kept)

    def is_as_old_as(self, other: MemberView) -> bool:
        """Whether both are of groups with the values of one master, which it still has, and the same member."""
        if self.owner is None or other.owner is None:
            return False
        return self.index == other.index and self.owner.mastered == other.owner.mastered != 0

    def __getstate__(self) -> Any:
        others, slots = super().__getstate__()  # type: ignore[misc]
        return others, slots | {"owner": None}


class MemberCopy(QuantizedStorage):
    """A copy of one matrix of a group, with the values that its codes stand for in high precision."""

    __slots__ = ("best_values",)

    def __init__(self, copy: QuantizedStorage, best_values: Tensor) -> None:
        super().__init__(copy.format, copy.buffers, copy.region, dtype=copy.dtype, cut=copy.cut)
        self.cut_dims, self.best_values = copy.cut_dims, best_values

    def note_values(self, matrix: Tensor | Source, *, is_settled: bool = False) -> None:
        """As of a matrix that is alone; what was known of the values before is forgotten."""
        super().note_values(matrix, is_settled=is_settled)
        self.best_values = None  # type: ignore[assignment]

    def _take_history(self, source: QuantizedStorage) -> None:
        super()._take_history(source)
        self.best_values = None  # type: ignore[assignment]
