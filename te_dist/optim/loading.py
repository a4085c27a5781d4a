"""What optimizers do about state that is loaded or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def last_pre_hook(optimizer: Optimizer, read: Callable[[Optimizer, dict[str, Any]], None]) -> Iterator[None]:
    """Inside the context `load_state_dict` shows `read` what all other hooks have made of a state dictionary."""
    handle = optimizer.register_load_state_dict_pre_hook(read)  # hooks run in the order in which they came
    try:
        yield
    finally:
        handle.remove()


def with_states(optimizer: Optimizer, state_dict: dict[str, Any], state_of: Callable[[Tensor], Any]) -> dict[str, Any]:
    """A state dictionary of `optimizer` with what `state_of` says of each parameter that has state."""
    params = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    saved = state_dict["state"]
    return state_dict | {"state": saved | {n: state_of(param) for n, param in enumerate(params) if saved.get(n)}}
