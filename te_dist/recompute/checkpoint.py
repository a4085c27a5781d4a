"""Activation checkpointing in which the second forward pass computes as the first one did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from te_dist.context import Autocast, lasting_autocast, restore_autocast

Contexts = tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]  # of the first pass, and of the one in backward
ContextFn = Callable[[], Contexts]

# Arguments of TransformerEngine's function that ask for what is done elsewhere here, and where.
_ELSEWHERE = {
    "distribute_saved_activations": "sequence parallelism shards what a region saves; see docs/tensor_parallel.md",
    "get_rng_state_tracker": "torch's generators are restored; pass preserve_rng_state=False to leave them alone",
    "tp_group": "parallel styles know their mesh; see docs/tensor_parallel.md",
}


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with te_dist's `autocast` restored when `function` runs again.

    Backward usually runs outside of `autocast`; torch restores its own autocast and the generators (so that stochastic
    rounding draws the same numbers), this restores the recipe. Delayed scaling moves its histories when backward ends,
    so that both passes see the same scales.

    Args:
        function: called with `args` now, and again in backward.
        args: what it is called with.
        use_reentrant: torch's older kind, which needs an input that requires grad and returns none through containers.
        kwargs: keyword arguments of `function`, and torch's: `preserve_rng_state`, `context_fn`, `determinism_check`,
            `debug`, `early_stop`.

    Raises:
        ValueError: an argument of TransformerEngine's `checkpoint` that has no meaning here.
    """
    for name, remedy in _ELSEWHERE.items():
        if kwargs.pop(name, None):
            raise ValueError(f"checkpoint takes no {name}: {remedy}")
    return torch_checkpoint.checkpoint(_Repeatable(function), *args, use_reentrant=use_reentrant, **kwargs)


def context_fn() -> Contexts:
    """For torch's own `checkpoint` and `checkpoint_wrapper`: `context_fn=te_dist.recompute.context_fn`.

    Returns:
        A context for the forward pass (it does nothing) and one for the recomputation (it restores `autocast`).
    """
    return nullcontext(), _restored(lasting_autocast())


def context_fn_with(others: ContextFn) -> ContextFn:
    """`context_fn` together with that of somebody else, such as selective checkpointing.

    Args:
        others: what torch's `checkpoint` would be given, `partial(create_selective_checkpoint_contexts, policy)` for
            instance.
    """

    def contexts() -> Contexts:
        (forward, again), (_, restored) = others(), context_fn()
        return forward, _Both(restored, again)

    return contexts


class _Both(AbstractContextManager[None]):
    """Two contexts, the first around the second; entered as often as they can be."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


class _Repeatable:
    """A function that always runs under the `autocast` of the moment this was made, see `lasting_autocast`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._state = lasting_autocast()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _restored(self._state):
            return self._function(*args, **kwargs)


def _restored(state: Autocast | None) -> AbstractContextManager[Any]:
    return nullcontext() if state is None else restore_autocast(state)
