"""Classes that `torch.load` may make with `weights_only=True`, its default: declarations, and what holds tensors."""

from __future__ import annotations

import torch

from te_dist import codecs
from te_dist.formats import Direction, Encoding, Field, Format, Group, RaggedGroup, Region, Span
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.grouped import GroupCut, GroupedStorage, GroupedTensor
from te_dist.grouped.members import MemberCopy, MemberView
from te_dist.tensor import Cut, QuantizedStorage, QuantizedTensor
from te_dist.tensor.writes import Write

DECLARATIONS = (Direction, Encoding, Field, Format, Group, RaggedGroup, Region, Span, Cut, GroupCut, frozenset)
TENSORS = (
    GroupedParameter,
    GroupedStorage,
    GroupedTensor,
    MemberCopy,
    MemberView,
    QuantizedParameter,
    QuantizedStorage,
    QuantizedTensor,
    Write,
)


def allow_loading() -> None:
    """Tells torch that making objects of these classes runs no code of a file."""
    torch.serialization.add_safe_globals([*DECLARATIONS, *codecs.FAMILIES, *TENSORS])
