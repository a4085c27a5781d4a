"""Checkpoints of models with quantized parameters, for torch.distributed.checkpoint and any number of processes."""

from te_dist.checkpoints.errors import CheckpointError
from te_dist.checkpoints.exchange import export_safetensors, high_precision_state_dict, import_safetensors
from te_dist.checkpoints.folder import latest, prune
from te_dist.checkpoints.loading import load
from te_dist.checkpoints.saving import async_save, save
from te_dist.checkpoints.staging import Stager

__all__ = [
    "CheckpointError",
    "Stager",
    "async_save",
    "export_safetensors",
    "high_precision_state_dict",
    "import_safetensors",
    "latest",
    "load",
    "prune",
    "save",
]
