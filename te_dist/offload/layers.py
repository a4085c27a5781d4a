"""`get_cpu_offload_context`: TransformerEngine's name for offloading the activations of some layers of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from te_dist._torch_private import in_backward
from te_dist.offload.activations import OUTSIDE, Session, policy

# Further arguments of TransformerEngine's function: the values that ask for nothing, and what to do instead of others.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "offload_activations": ((True,), "use enabled=False to offload nothing"),
    "offload_weights": ((False,), "weights stay; let FSDP2 shard them, or use torch's CPUOffloadPolicy"),
    "manual_synchronization": ((False,), "copies are ordered by events; drop the argument and the synchronizer"),
    "offload_stream": ((None,), "te_dist copies on streams of its own, one for each direction"),
}
_IMPLIED = {
    "double_buffering": "copies back are always started ahead",
    "retain_pinned_cpu_buffers": "pinned memory is always kept for the next step",
}


class LayerwiseOffload:
    """A context to enter once per layer: it offloads `num_layers` of them, evenly spread, and never the last.

    Each layer is `with ctx: y = layer(x)` and `y = ctx.synchronize(y)`; after `model_layers` counting starts again.
    """

    def __init__(self, session: Session, num_layers: int, model_layers: int) -> None:
        self._session, self._num_layers, self._model_layers = session, num_layers, model_layers
        self._layer = 0
        self._hooks: AbstractContextManager[Any] | None = None  # of the layer that was entered and not synchronized

    @torch.compiler.disable(reason=OUTSIDE)
    def __enter__(self) -> None:
        if in_backward():
            raise RuntimeError(
                "a layer was entered in backward, which would be counted once more: a region that is run again, as by "
                "torch's checkpoint, has the context around it, not inside; or take te_dist.offload.activations"
            )
        if self._hooks is not None:
            raise RuntimeError(f"layer {self._layer} was entered twice; call the sync function on each layer's output")
        self._hooks = nullcontext()
        last = self._model_layers - 1
        if self._layer < last and self._layer * self._num_layers % last < self._num_layers:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._session.pack, self._session.unpack)
        self._hooks.__enter__()

    @torch.compiler.disable(reason=OUTSIDE)
    def __exit__(self, *error: Any) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*error)
        if error[0] is not None:  # the step is over: the next one starts with the first layer
            self._hooks, self._layer = None, 0

    @torch.compiler.disable(reason=OUTSIDE)
    def synchronize(self, output: Tensor) -> Tensor:
        """Ends a layer; returns its output."""
        if self._hooks is None:
            raise RuntimeError("the sync function was called without a layer; run each layer inside the context first")
        self._hooks = None
        self._layer = (self._layer + 1) % self._model_layers
        return output


@torch.compiler.disable(reason=OUTSIDE)
def get_cpu_offload_context(
    enabled: bool = False, num_layers: int = 1, model_layers: int = 1, **options: Any
) -> tuple[AbstractContextManager[None], Callable[[Tensor], Tensor]]:
    """(context, sync function) that offload the activations of `num_layers` layers of a model, evenly spread.

        ctx, sync = get_cpu_offload_context(enabled=True, num_layers=3, model_layers=4)
        for layer in layers:
            with ctx:
                x = layer(x)
            x = sync(x)

    `te_dist.offload.activations` does the same for a whole forward pass, with a budget in bytes instead of a count.

    Args:
        enabled: False returns a context and a function that do nothing.
        num_layers: how many layers to offload; the last layer of a model never is, since backward starts there.
        model_layers: how many layers there are.
        **options: TransformerEngine's further arguments. What is always so here is accepted; what is not possible
            raises.

    Raises:
        ValueError: `num_layers` leaves no layer, or an option asks for what this does not do.
        TypeError: an option that TransformerEngine does not have either.
    """
    _check(options)
    if not enabled:
        return nullcontext(), lambda output: output
    if not 0 < num_layers < model_layers:
        raise ValueError(
            f"num_layers={num_layers} of model_layers={model_layers}: 1 to model_layers - 1 layers can be offloaded, "
            "since backward starts with the last one"
        )
    session = Session(policy(None, "1MiB", "256MiB"), None)
    layers = LayerwiseOffload(session, num_layers, model_layers)
    return layers, layers.synchronize


def _check(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _IMPLIED:
            if not value:
                warnings.warn(f"{name}=False has no effect: {_IMPLIED[name]}", stacklevel=3)
        elif name not in _NEUTRAL:
            raise TypeError(f"get_cpu_offload_context has no argument {name!r}; it has {[*_NEUTRAL, *_IMPLIED]}")
        elif value not in _NEUTRAL[name][0]:
            raise ValueError(f"{name}={value!r} is not possible: {_NEUTRAL[name][1]}")
