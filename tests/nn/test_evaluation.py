"""What is evaluated: a row alone and among others, what stays as it is, what can be freed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist import recipe
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise

WIDTH, ROWS = 256, 7
ROUNDING = {"rtol": 2**-7, "atol": 2**-8}  # of sums in another order
BY_ROWS: dict[str, Recipe] = {
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "delayed": recipe.DelayedScaling(),
}
TOGETHER: dict[str, Recipe] = {"current": recipe.Float8CurrentScaling(), "nvfp4": recipe.NVFP4BlockScaling()}


def model_of(made_by: Recipe) -> nn.Module:
    torch.manual_seed(0)
    kind = dict(params_dtype=torch.bfloat16)
    with te.quantized_model_init(recipe=made_by):
        return nn.Sequential(
            te.LayerNormLinear(WIDTH, WIDTH, **kind), nn.ReLU(), te.Linear(WIDTH, WIDTH, **kind)
        ).eval()


def tokens() -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3] *= 50  # which would say much about the others
    return x


def evaluated(model: nn.Module, x: Tensor, made_by: Recipe) -> Tensor:
    with torch.inference_mode(), te.autocast(recipe=made_by):
        return model(x)


def alone(model: nn.Module, made_by: Recipe) -> Tensor:
    return torch.cat([evaluated(model, row[None], made_by) for row in tokens()])


@pytest.mark.parametrize("made_by", BY_ROWS.values(), ids=BY_ROWS)
def test_a_row_alone_is_what_it_is_among_others(made_by: Recipe) -> None:
    model = model_of(made_by)
    torch.testing.assert_close(alone(model, made_by), evaluated(model, tokens(), made_by), **ROUNDING)


@pytest.mark.parametrize("made_by", TOGETHER.values(), ids=TOGETHER)
def test_rows_that_share_a_scale_depend_on_each_other(made_by: Recipe) -> None:
    model = model_of(made_by)
    assert not torch.allclose(alone(model, made_by), evaluated(model, tokens(), made_by), **ROUNDING)


def test_evaluation_moves_no_history() -> None:
    made_by = BY_ROWS["delayed"]
    model = model_of(made_by)
    with te.autocast(recipe=made_by):
        model(tokens()).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "scaling" in name}
    evaluated(model, 100 * tokens(), made_by)
    after = model.state_dict()
    assert before
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_the_direction_that_backward_reads_can_be_freed() -> None:
    made_by = BY_ROWS["mxfp8"]
    model = model_of(made_by)
    want = evaluated(model, tokens(), made_by)
    weight = model[2].weight
    stored = sum(buffer.nbytes for buffer in weight.storage.buffers.values())
    weight.update_usage(columnwise_usage=False)
    assert 2 * sum(buffer.nbytes for buffer in weight.storage.buffers.values()) == stored
    assert_bitwise(evaluated(model, tokens(), made_by), want, "output")


def test_members_of_grouped_weights_are_read_and_written_in_inference_mode() -> None:
    with te.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        module = te.GroupedLinear(3, 64, 96, single_grouped_weight=True)
    want = [float(member.norm()) for member in module.weight.detach()]
    with torch.inference_mode():
        assert [float(member.norm()) for member in module.weight] == want
        module.weight[1].mul_(2.0)
        assert float(module.weight[1].norm()) == 2 * want[1]
    module(torch.ones(6, 64), [1, 2, 3]).sum().backward()
    assert module.weight.grad is not None
