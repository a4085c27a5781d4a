"""One call of every op, simulated: the bytes of the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from tests.codecs.kernel_inputs import matrix
from tests.gpu.catalog import Call, catalog, shifted
from tests.gpu.twins import assert_same

MOST = 150_000  # elements of a tensor
TO_E5M2 = ("quantize_float8_tensor", "dequantize_float8")  # also by this type, which has infinities


def one_of_each() -> list[Call]:
    """The first with something to do, and not too much, of those whose bytes are defined."""
    found: dict[str, Call] = {}
    for call in catalog():
        values = [value for value in (*call.inputs.values(), *call.outputs.values()) if isinstance(value, Tensor)]
        if call.is_exact and all(0 < v.numel() <= MOST for v in values):
            has_own_kernel = call.name.startswith("gathered") or call.name.endswith("squares")
            found.setdefault(call.name if has_own_kernel else call.op.__name__, call)
            if call.op.__name__ in TO_E5M2 and call.inputs["fp8"] == "e5m2":
                found.setdefault(f"{call.op.__name__} to e5m2", call)
    return list(found.values())


def special(call: Call) -> Call | None:
    """The same with NaN, infinities and what becomes too large among the values of its matrix; None without one."""
    x = call.inputs.get("x")
    if x is None or x.shape[0] < 2:
        return None
    values = matrix("special", tuple(x.shape), x.dtype)
    values[::7, ::5] *= 1e4
    return replace(call, name=f"{call.name}, special", inputs=call.inputs | dict(x=shifted(values, x.storage_offset())))


def blank(call: Call) -> Call:
    """The same with outputs of its own."""
    return replace(call, outputs={name: value.clone() for name, value in call.outputs.items()})


CALLS = one_of_each()


@pytest.mark.parametrize("call", [*CALLS, *filter(None, map(special, CALLS))], ids=lambda call: call.name)
def test_bytes_are_those_of_the_cpu(call, request):
    want = blank(call)
    want.run()
    request.getfixturevalue("simulated")
    got = blank(call)
    got.run()
    for name, output in got.outputs.items():
        assert_same(output, want.outputs[name], f"{name} of {call.name}")
