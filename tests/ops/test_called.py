"""The catalog of calls names every op, and its calls are valid: they run on the CPU, or say that they do not."""

from __future__ import annotations

from te_dist import ops
from tests.gpu.catalog import catalog


def test_every_op_is_called():
    called = {call.op.__name__ for call in catalog()}
    assert called == set(ops.__all__)


def test_calls_are_valid():
    for call in catalog():
        try:
            call.run()
        except NotImplementedError as error:
            assert not call.is_exact and "runs on CUDA" in str(error), call.name
