"""Reading a checkpoint of one format into a model of another, by way of high-precision values that were saved too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_dist.checkpoints import model_state, optimizer_state
from te_dist.checkpoints.initial import SAVED
from te_dist.checkpoints.manifest import Manifest
from te_dist.checkpoints.packing import Key, Packing
from te_dist.checkpoints.store import WholeReader
from te_dist.grouped import place_whole
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor


def compare(named: dict[str, Tensor], manifest: Manifest) -> tuple[dict[str, Key], list[str]]:
    """By name of each tensor to convert, the key of its saved high-precision values; and why others cannot be read."""
    sources: dict[str, Key] = {}
    problems: list[str] = []
    for name, tensor in named.items():
        saved, wanted = manifest.model.get(name), model_state.describe(tensor)
        if saved is None:
            problems.append(f"{name} is not in it")
        elif saved["shape"] != wanted["shape"]:
            problems.append(f"{name} has shape {saved['shape']} in it, wanted {wanted['shape']}")
        elif not _same_bytes(saved, wanted):
            refused = _refused(name, tensor, manifest)
            source = _source(name, manifest)
            if source is not None and not refused:
                sources[name] = source
            else:
                problems += refused or [_no_source(name, manifest, wanted)]
    return sources, problems


def convert(where: Path, named: dict[str, Tensor], sources: dict[str, Key], *, packing: Packing) -> None:
    """Fills tensors from the whole of their high-precision values, one tensor at a time; not collective.

    The bytes are those of the whole quantized at once, so they do not depend on how the tensor is cut.

    Args:
        named: tensors of the model.
        sources: by name, the key of the values.
        packing: how names of the checkpoint differ from those of the model.
    """
    if not sources:
        return
    reader = WholeReader(where)
    for name, key in sources.items():
        fill(named[name], packing.read(name, key, reader.read))


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Puts this rank's part of whole plain values into a tensor; float64 is quantized by way of fp32."""
    is_wide = whole.dtype == torch.float64 and isinstance(local_tensor(tensor), QuantizedTensor)
    place_whole(tensor, whole.to(tensor.device, torch.float32 if is_wide else whole.dtype))


def dtype_of(tensor: Tensor) -> torch.dtype:
    """In which values are told apart that `fill` puts into a tensor."""
    return torch.float32 if isinstance(local_tensor(tensor), QuantizedTensor) else tensor.dtype


def _same_bytes(saved: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether saved bytes can be taken as they are; the nominal dtype of quantized values is no matter of bytes."""
    if "format" in saved or "format" in wanted:
        return all(saved.get(key) == wanted.get(key) for key in ("format", "members"))
    return saved["dtype"] == wanted["dtype"]


def _source(name: str, manifest: Manifest) -> Key | None:
    """Key of the saved high-precision values of a tensor, None where there are none."""
    if optimizer_state.MASTER in _states(manifest).get(name, {}):
        return "optimizer.state.", f".{optimizer_state.MASTER}"
    saved = manifest.model[name]
    if saved.get(SAVED):
        return f"{SAVED}.", ""
    is_plain = "format" not in saved and getattr(torch, saved["dtype"]).is_floating_point
    return ("model.", "") if is_plain else None


def _refused(name: str, tensor: Tensor, manifest: Manifest) -> list[str]:
    """Why the saved tensor, the only source there is, cannot become this one by its dtype."""
    saved = manifest.model[name]
    if "format" in saved or optimizer_state.MASTER in _states(manifest).get(name, {}):
        return []
    problems = model_state.dtype_problems(name, getattr(torch, saved["dtype"]), tensor)
    return [f"{problem}; decode or convert it before it is saved" for problem in problems]


def _no_source(name: str, manifest: Manifest, wanted: dict[str, Any]) -> str:
    saved, states = manifest.model[name], _states(manifest).values()
    if any(optimizer_state.MASTER in state for state in states):
        remedy = (
            "the saved optimizer has no master of it, as of every frozen weight; load it into a model of the saved "
            "format, export_safetensors(..., optimizer=) from there and import_safetensors here, which quantizes anew"
        )
    else:
        remedy = (
            "load it into a model of the saved format, or save it with an optimizer that keeps masters "
            "(te_dist.optim.FusedAdam), after its first step"
        )
    return (
        f"{name} is saved as {model_state.format_name(saved)}, wanted {model_state.format_name(wanted)}, and no "
        f"high-precision values of it are saved to make the one from the other; {remedy}"
    )


def _states(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """By parameter, what a manifest says of the optimizer's state of it; empty where none was saved."""
    params = manifest.optimizer["params"] if manifest.optimizer else {}
    return {name: entry["state"] for name, entry in params.items()}
