"""The benchmark of quantizers of groups calls ops with what these take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from benchmarks import grouped_quantize_cuda as benchmark


class OnCpu(TorchFunctionMode):
    """A block in which what is made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with OnCpu():
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("routing", benchmark.ROUTINGS)
def test_ops_take_what_they_are_called_with(routing: Any) -> None:
    groups = benchmark.groups_of(routing, 8, 1000, 256)
    cases = [*benchmark.blocks(groups), *benchmark.tensorwise(groups), *benchmark.small_runs(groups)]
    for case in cases:
        case.call()
        if case.alone is not None:
            case.alone()
        assert all(size > 0 for size in case.moved.values()), case.name
    names = {case.name for case in cases}
    assert {"block 1x128", "current scaling of each", "MXFP8 1x32", "NVFP4 1x16", "NVFP4 stochastic 1x16"} <= names
