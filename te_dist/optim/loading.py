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


@contextmanager
def first_post_hook(optimizer: Optimizer, state_of: Callable[[Tensor], Any]) -> Iterator[None]:
    """Inside the context `state_dict` begins with what `state_of` says of each parameter that has state; other hooks
    change that."""

    def current(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        states = dict(saved["state"])
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            found = zip(group["params"], packed["params"], strict=True)
            states |= {number: state_of(param) for param, number in found if states.get(number)}
        return saved | {"state": states}

    handle = optimizer.register_state_dict_post_hook(current, prepend=True)
    try:
        yield
    finally:
        handle.remove()
