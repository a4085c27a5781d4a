"""FusedAdam over a group of matrices: each is updated and quantized as if it were a parameter of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_dist import grouped, optim
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.grouped import GroupedTensor
from te_dist.tensor import quantize
from te_dist.testing import assert_bitwise
from tests.grouped.samples import FORMATS, NAMES, RAGGED, assert_same, values
from tests.tensor.samples import of_each_family


def gradients(shapes: list[tuple[int, int]], step: int) -> list[Tensor]:
    return [values(*shape, seed=10 * step + i) - 0.5 for i, shape in enumerate(shapes)]


def packed(matrices: list[Tensor]) -> Tensor:
    """As the gradient of a group has it."""
    if len({m.shape for m in matrices}) == 1:
        return torch.stack(matrices)
    return torch.cat(matrices)


TILES, ROWS = [(128, 160)] * 3, [(96, 160)] * 3


@pytest.mark.parametrize(
    ("shapes", "directions"),
    [(TILES, "canonical"), (TILES, "both"), (ROWS, "both"), (list(RAGGED), "both")],
    ids=["tiles, canonical", "tiles", "rows", "ragged"],
)
@of_each_family
@pytest.mark.parametrize("name", NAMES)
def test_each_member_is_updated_as_if_alone(name: str, shapes: list[tuple[int, int]], directions: str) -> None:
    format, starts = FORMATS[name], [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    group = grouped.quantize(starts, format)
    if directions == "canonical":
        group.storage.buffers = {f.name: group.storage.buffers[f.name] for f in format.canonical.fields}
    kind = GroupedParameter if shapes[0] == shapes[1] else GroupedTensor
    together = nn.Parameter(kind(group.storage))
    alone = [nn.Parameter(QuantizedParameter(quantize(start, format).storage)) for start in starts]
    optimizers = [optim.FusedAdam([together], lr=0.05), optim.FusedAdam(alone, lr=0.05)]
    for step in range(3):
        together.grad = packed(gradients(shapes, step))
        for param, grad in zip(alone, gradients(shapes, step), strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        for index, (member, want) in enumerate(zip(together.members, alone, strict=True)):
            assert_same(member, want.data, f"member {index} after step {step}")
        masters = together.storage.split(optimizers[0].state[together]["master_param"])
        for got, want in zip(masters, alone, strict=True):
            assert_bitwise(got, optimizers[1].state[want]["master_param"], "master")
    assert optimizers[0].state[together]["step"] == 3


def test_values_written_between_steps_become_the_master() -> None:
    param = nn.Parameter(GroupedParameter(grouped.quantize(values(3, 128, 160), FORMATS["float8_block_2d"]).storage))
    optimizer = optim.FusedAdam([param], lr=0.0, weight_decay=0.0)
    for factor in (1, 8):
        with torch.no_grad():
            param.mul_(factor)
        want = param.dequantize(dtype=torch.float32)
        param.grad = torch.ones(3, 128, 160, dtype=torch.bfloat16)
        optimizer.step()
        assert_bitwise(optimizer.state[param]["master_param"], want, f"times {factor}")
