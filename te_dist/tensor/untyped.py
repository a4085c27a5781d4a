"""What torch declares no types of, or half of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint

TENSOR: Any = torch.Tensor  # its methods take the tensor first
CHECKPOINT: Any = checkpoint
