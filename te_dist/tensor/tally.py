"""What modules count and collect while they train, in tensors that are no buffers.

DistributedDataParallel overwrites the buffers of every rank by those of rank 0 in front of a forward pass; a checkpoint
has no use for what a step has collected, and what is in no checkpoint has no values where a model comes from the meta
device. So these tensors follow a module when it uses them. What is loaded begins a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Tallying(nn.Module):
    """A module that collects something in each step."""

    @abstractmethod
    def clear_tally(self) -> None:
        """Forgets what the running step has collected."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # pyright: ignore[reportUnknownMemberType]
        if any(prefix + name in state_dict for name in self._buffers):
            self.clear_tally()


def tally_on(device: torch.device, tally: Tensor) -> Tensor:
    """`tally` itself where it is on `device`, else a copy there: of zeros where it comes from the meta device."""
    if tally.device == device:
        return tally
    with torch.inference_mode(False):  # what an evaluation came upon first, a later step writes into
        return torch.zeros_like(tally, device=device) if tally.is_meta else tally.to(device)
