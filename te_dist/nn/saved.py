"""What linear maps save for backward comes back as it was, or backward raises."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_dist._torch_private import unpacks_by_checkpoint
from te_dist.codecs.base import MOVE_SAVED
from te_dist.nn.passes import wait_for
from te_dist.tensor import QuantizedTensor

_DECODED = (
    "a hook on saved tensors decoded what a linear map had saved quantized: a plain tensor came back, by which "
    f"gradients would be others. {MOVE_SAVED}"
)
_RAN_AGAIN = (
    "a forward pass that ran inside of autocast ran again outside of it, or by another recipe, after another pass had: "
    "torch's checkpoint needs context_fn=te_dist.recompute.context_fn then; or use te_dist.checkpoint"
)


def save(ctx: Any, *tensors: Tensor | None, inputs: int) -> None:
    """`ctx.save_for_backward`, for `saved`.

    Args:
        inputs: place of the tensor that the map has quantized itself, which nothing else changes.
    """
    wait_for(ctx)
    ctx.save_for_backward(*tensors)
    ctx.quantized = [place for place, tensor in enumerate(tensors) if isinstance(tensor, QuantizedTensor)]
    found = tensors[inputs]
    ctx.inputs = (inputs, found.storage.format) if isinstance(found, QuantizedTensor) else None


def saved(ctx: Any) -> tuple[Any, ...]:
    """What `save` was given.

    Raises:
        RuntimeError: something else came back, from a hook that decodes or from a forward pass that ran again by
            another recipe or none.
    """
    tensors = ctx.saved_tensors
    for place in ctx.quantized:
        if not isinstance(tensors[place], QuantizedTensor):
            raise _other(ctx)
    if ctx.inputs is not None:
        place, format = ctx.inputs
        found = tensors[place].storage.format
        if found is not format and found != format:
            raise RuntimeError(_RAN_AGAIN)
    return tensors


def let_go(ctx: Any) -> None:
    """What `saved` gave is held by its caller alone from here on, unless backward may run again (`retain_graph`).

    Else autograd holds it until this backward pass has ended; so does a torch whose Functions cannot let go.
    """
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)
    if clear is not None:
        clear()


def _other(ctx: Any) -> RuntimeError:
    """The error of a plain tensor in the place of a quantized one."""
    ran_again = unpacks_by_checkpoint(ctx)
    if ran_again is None:
        return RuntimeError(f"{_DECODED}. Or, with torch's checkpoint: {_RAN_AGAIN}")
    return RuntimeError(_RAN_AGAIN if ran_again else _DECODED)
