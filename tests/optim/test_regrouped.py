"""Groups that are edited while training: masters and their state go where their parameters go, as in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from te_dist import optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import QuantizedParameter
from te_dist.optim.masters import MASTER
from te_dist.tensor import quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import SHAPE, signed

NUM_PARAMS = 4
Edit = Callable[[torch.optim.Optimizer, list[nn.Parameter]], object]


def dropped_and_added(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    del optimizer.param_groups[0]["params"][1]
    optimizer.param_groups[0]["lr"] = 0.03
    optimizer.add_param_group({"params": [params[1]], "lr": 0.02})


def moved(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))


def replaced(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"] = params[2:3]
    optimizer.param_groups[1]["params"] = [params[1], params[0]]


def fewer(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[1]["params"].extend(optimizer.param_groups.pop(0)["params"])


def cleared(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": params[1:], "lr": 0.02})
    optimizer.add_param_group({"params": params[:1], "betas": (0.5, 0.9)})


EDITS: dict[str, Edit] = {
    "one is dropped and added": dropped_and_added,
    "one moves": moved,
    "lists are others": replaced,
    "a group goes": fewer,
    "all groups go": cleared,
    "one begins": lambda optimizer, params: optimizer.param_groups[0]["params"].append(params[3]),
    "one ends": lambda optimizer, params: optimizer.param_groups[0]["params"].pop(0),
    "a group ends": lambda optimizer, params: optimizer.param_groups.pop(0),
    "order": lambda optimizer, params: optimizer.param_groups.reverse(),
}


def made() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Quantized, 16-bit and fp32 parameters, and their values in fp32."""
    matrices = [signed(seed=seed) for seed in range(2)]
    quantized = [nn.Parameter(QuantizedParameter(quantize(m, FORMATS["float8_block_2d"]).storage)) for m in matrices]
    for param, matrix in zip(quantized, matrices, strict=True):
        param.storage.initial = matrix.float()
    others = [signed(33, seed=2).bfloat16(), signed(5, seed=3).float()]
    params = [quantized[0], nn.Parameter(others[0]), quantized[1], nn.Parameter(others[1])]
    plain = [matrices[0], others[0], matrices[1], others[1]]
    return params, [nn.Parameter(value.float()) for value in plain]


def optimizers(
    params: list[nn.Parameter], plain: list[nn.Parameter]
) -> tuple[optim.MasterWeights, torch.optim.Optimizer]:
    """Of two groups; the last parameter is in none."""

    def make(groups: list) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)

    def groups(of: list[nn.Parameter]) -> list[dict]:
        return [{"params": of[:2]}, {"params": of[2:3], "lr": 0.05}]

    return optim.MasterWeights(groups(params), make), make(groups(plain))


def step(turn: int, params: list[nn.Parameter], plain: list[nn.Parameter], *its: torch.optim.Optimizer) -> None:
    for number, (param, other) in enumerate(zip(params, plain, strict=True)):
        param.grad = signed(*param.shape, seed=100 * turn + number).to(param.dtype)
        other.grad = param.grad.float()
    for optimizer in its:
        optimizer.step()


def assert_alike(
    params: list[nn.Parameter], plain: list[nn.Parameter], own: torch.optim.Optimizer, oracle: torch.optim.Optimizer
) -> None:
    assert [{k: v for k, v in g.items() if k != "params"} for g in own.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in oracle.param_groups
    ]
    for number, (param, other) in enumerate(zip(params, plain, strict=True)):
        state = own.state.get(param, {})
        assert_bitwise(state.get(MASTER, param.detach()).float(), other.detach(), f"values of {number}")
        assert state.keys() - {MASTER} == oracle.state.get(other, {}).keys()
        for key, value in oracle.state.get(other, {}).items():
            assert_bitwise(state[key], value, f"{key} of {number}")
        if number % 2 == 0:
            want = quantize(state[MASTER], param.storage.format)
            assert torch.equal(param.detach(), want), f"codes of {number}"


@pytest.mark.parametrize("is_away", [False, True], ids=["here", "moved away"])
@pytest.mark.parametrize("name", EDITS)
def test_regrouped_parameters_keep_masters_and_state(name: str, is_away: bool) -> None:
    params, plain = made()
    own, oracle = optimizers(params, plain)
    for turn in range(2):
        step(turn, params, plain, own, oracle)
    if is_away:
        own.move_state("cpu")
    EDITS[name](own, params)
    EDITS[name](oracle, plain)
    for turn in range(2, 4):
        step(turn, params, plain, own, oracle)
        assert_alike(params, plain, own, oracle)


def test_what_comes_back_goes_on() -> None:
    """Also where its state was given up meanwhile, with the values it has."""
    params, plain = made()
    own, oracle = optimizers(params, plain)
    step(0, params, plain, own, oracle)
    gone = [optimizer.param_groups[0]["params"].pop(0) for optimizer in (own, oracle)]
    step(1, params, plain, own, oracle)
    own.param_groups[0]["params"].insert(0, gone[0])
    oracle.param_groups[0]["params"].insert(0, gone[1])
    step(2, params, plain, own, oracle)
    assert_alike(params, plain, own, oracle)
    for optimizer, param in zip((own, oracle), gone, strict=True):
        optimizer.param_groups[0]["params"].pop(0)
        optimizer.state.pop(param)
    step(3, params, plain, own, oracle)
    assert len(own._masters) == NUM_PARAMS - 2
    with torch.no_grad():
        plain[0].copy_(params[0].dequantize(dtype=torch.float32))
    own.param_groups[0]["params"].insert(0, gone[0])
    oracle.param_groups[0]["params"].insert(0, gone[1])
    step(4, params, plain, own, oracle)
    assert_alike(params, plain, own, oracle)


def test_a_group_may_be_added_after_state_was_loaded() -> None:
    """What was loaded stays, hyperparameters that were changed too."""
    params, plain = made()
    own, oracle = optimizers(params, plain)
    step(0, params, plain, own, oracle)
    twins, others = made()
    other, its = optimizers(twins, others)
    step(9, twins, others, other, its)
    for saved, target in ((own, other), (oracle, its)):
        target.load_state_dict(saved.state_dict())
        target.param_groups[0]["lr"] = 0.3
    with torch.no_grad():
        for target, source in zip((*twins, *others), (*params, *plain), strict=True):
            target.copy_(source)
    other.add_param_group({"params": twins[3:]})
    its.add_param_group({"params": others[3:]})
    step(1, twins, others, other, its)
    assert_alike(twins, others, other, its)


def test_a_group_that_the_wrapped_optimizer_refuses_is_not_added() -> None:
    class Picky(torch.optim.SGD):
        def add_param_group(self, param_group: dict) -> None:
            if param_group.get("lr") == 0.5:
                raise ValueError("lr of a half")
            super().add_param_group(param_group)

    params, _ = made()
    own = optim.MasterWeights(params[:1], lambda given: Picky(given, lr=0.1))
    with pytest.raises(ValueError, match="lr of a half"):
        own.add_param_group({"params": params[1:], "lr": 0.5})
    assert len(own.param_groups) == 1
    own.add_param_group({"params": params[1:], "lr": 0.25})
    params[0].grad = torch.ones(SHAPE, dtype=params[0].dtype)
    own.step()
    assert [group["lr"] for group in own.wrapped.param_groups] == [0.1, 0.25]
