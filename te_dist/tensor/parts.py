"""Parts of quantized tensors have bytes of their own, so that what is written into a part is not in the whole.

A scale may cover more than the part; new values of the part alone have no place in the whole. Ordinary code that takes
a slice for a view (torch.distributed.checkpoint does, where shards are cut in another way than those saved) would lose
what it writes; it is told so for as long as the whole lives.
"""

from __future__ import annotations

import weakref
from typing import Any

from te_dist.tensor.storage import QuantizedStorage

_WHOLES: weakref.WeakKeyDictionary[QuantizedStorage, weakref.ref[QuantizedStorage]] = weakref.WeakKeyDictionary()


def note(part: QuantizedStorage, whole: QuantizedStorage) -> QuantizedStorage:
    """Remembers what `part` was taken out of, in the end where that is a part too; gives it back."""
    first = _WHOLES.get(whole)
    _WHOLES[part] = weakref.ref(whole) if first is None or first() is None else first
    return part


def check_writable(tensor: Any) -> None:
    """Before values or bytes are written into a tensor.

    Raises:
        NotImplementedError: it is a part, and the whole would not see them.
    """
    storage = getattr(tensor, "storage", None)
    whole = _WHOLES.get(storage) if isinstance(storage, QuantizedStorage) else None
    if whole is not None and whole() is not None and tensor.numel():
        raise NotImplementedError(
            f"cannot write into a part of shape {tuple(tensor.shape)} of a quantized tensor: it has bytes of its own, "
            "and the whole would not change. Write the whole (values = whole.dequantize(); values[...] = ...; "
            "whole.copy_(values)), or clone the part to use it alone; checkpoints that are cut "
            "in another way than the model are loaded by te_dist.checkpoints"
        )
