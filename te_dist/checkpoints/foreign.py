"""What states of TransformerEngine have beside values: passed over, and never unpickled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from torch import Tensor

_EXTRA = "_extra_state"  # torch's key for what `get_extra_state` of a module gives
_has_warned = False


def names_extra_state(key: str) -> bool:
    """Whether a module says of itself what lies under this key: no parameter and no buffer."""
    return key.rpartition(".")[2] == _EXTRA


def pass_over(state_dict: Mapping[str, Any], prefix: str, unexpected: list[str]) -> None:
    """Takes the extra state of a module out of what is unexpected of its state.

    Args:
        prefix: of the module's keys.
        unexpected: what torch did not expect so far; not this key, where a class takes it (`set_extra_state`).
    """
    key = prefix + _EXTRA
    if key in state_dict and key in unexpected:
        unexpected.remove(key)
        warn_unless(is_empty(state_dict[key]))


def is_empty(value: object) -> bool:
    """Whether an extra state holds nothing: None, or no bytes."""
    if isinstance(value, Tensor):
        return not value.numel()
    if isinstance(value, BytesIO):
        return not value.getbuffer().nbytes
    return value is None or value == b""


def warn_unless(are_empty: bool) -> None:
    """Once, where extra states hold something."""
    global _has_warned  # noqa: PLW0603
    if _has_warned or are_empty:
        return
    _has_warned = True
    warnings.warn(
        "a state has what modules of TransformerEngine pickled beside their weights (_extra_state), which is not read: "
        "if it holds histories of delayed scaling, these start anew",
        stacklevel=2,
    )
