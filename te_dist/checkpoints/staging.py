"""Copies for torch's own `async_save`, which copies tensors by their storage or by their values."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from te_dist._torch_private import tree_map_only


class Stager(AsyncStager):
    """For `torch.distributed.checkpoint.async_save(..., async_stager=Stager())`: quantized tensors are copied in bytes.

    Training may go on once `async_save` has returned.
    """

    @property
    def should_synchronize_after_execute(self) -> bool:
        """No: `stage` returns copies, not a promise of them."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All of it, tensors in CPU memory of their own."""
        return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state_dict)
