"""One call of every op out of the catalog, and the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.gpu.catalog import Call, catalog


def of_each_op() -> list[Call]:
    """Of every op the first call that takes the most tensors, with something to do."""
    found: dict[str, Call] = {}
    for call in catalog():
        given = list(tensors(call))
        if all(tensor.numel() for _, tensor in given):
            most = found.setdefault(call.op.__name__, call)
            if len(given) > len(list(tensors(most))):
                found[call.op.__name__] = call
    return list(found.values())


def with_tensor(call: Call, name: str, changed: Callable[[Tensor], Tensor]) -> Call:
    """The call with another tensor of that name (the last of a list)."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        if name not in values:
            return values
        value = values[name]
        return values | {name: [*value[:-1], changed(value[-1])] if isinstance(value, list) else changed(value)}

    return replace(call, inputs=change(call.inputs), outputs=change(call.outputs))


def tensors(call: Call) -> Iterator[tuple[str, Tensor]]:
    """What it reads and writes, by name; tensors of a list share theirs."""
    for name, value in (*call.inputs.items(), *call.outputs.items()):
        yield from (
            (name, tensor) for tensor in (value if isinstance(value, list) else [value]) if isinstance(tensor, Tensor)
        )
