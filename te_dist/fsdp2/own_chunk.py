"""The one chunk of a parameter that a rank keeps, made without those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from te_dist.fsdp2.ahead import Shards


class OwnChunk(TorchFunctionMode):
    """While FSDP2 wraps a module, `torch.chunk` of its parameters makes the first chunk and this rank's.

    FSDP2 cuts a parameter into the chunks of all ranks, and looks at these two. Each chunk of a quantized parameter has
    buffers of its own: over thousands of ranks to make them takes longer than to build the model. In the place of the
    others are tensors without memory.

    Attributes:
        shards: by id, of the tensors that are cut.
    """

    def __init__(self, shards: Mapping[int, Shards]) -> None:
        super().__init__()
        self.shards = shards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.chunk and args and id(args[0]) in self.shards:
            return _chunks(self.shards[id(args[0])], *args, **kwargs)
        return func(*args, **kwargs)


def _chunks(shards: Shards, tensor: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """As `torch.chunk`, with empty ones in the place of those that are missing: FSDP2 makes them one by one."""
    shape = torch.empty(tensor.shape, device="meta").chunk(chunks, dim)
    own = shards.index
    if chunks != shards.count or own >= len(shape):
        own = 0
    extents = [each.shape[dim] for each in shape]
    before, after = sum(extents[1:own]), sum(extents[own + 1 :])
    sizes = [extents[0], before, extents[own], after] if own else [extents[0], after]
    made = tensor.split([size for size in sizes if size], dim) if len(shape) > 1 else tensor.chunk(1, dim)
    out: list[Tensor] = list(shape)
    out[0] = made[0]
    if own:
        out[own] = made[2 if before else 1]
    return out + [torch.empty(0, dtype=tensor.dtype, device=tensor.device)] * (chunks - len(out))
