"""Keywords of TransformerEngine in the place of which there is something else here, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

# By keyword that is not here: what asks for nothing, and what to do instead of anything else.
Elsewhere = Mapping[str, tuple[Any, str]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def refuse(options: Mapping[str, Any], elsewhere: Elsewhere, *, name: str) -> None:
    """Raises for keywords that `name` does not take, unless they ask for nothing.

    Raises:
        ValueError: one of `elsewhere`; the message says what to do instead.
        TypeError: any other.
    """
    for option, value in options.items():
        if option not in elsewhere:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        nothing, remedy = elsewhere[option]
        if value != nothing:
            raise ValueError(f"{name}: {option}={value!r} is not supported: {remedy}")


def leads(elsewhere: Elsewhere, *, name: str) -> Callable[[_Function], _Function]:
    """Has a function `refuse` keywords that it does not take, and its signature say nothing of them."""

    def leading(function: _Function) -> _Function:
        taken = signature(function).parameters

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            others = [option for option in options if option not in taken]
            refuse({option: options.pop(option) for option in others}, elsewhere, name=name)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return leading
