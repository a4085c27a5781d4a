"""State of optimizers moved out of the way of a GPU: its memory is free, and training goes on to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import te_dist as te
from te_dist import fsdp2, optim, recipe
from te_dist._torch_private import pretended_ranks
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gpu

WIDTH, STEPS = 512, 3
MAKES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda module: optim.FusedAdam(module.parameters(), lr=0.1),
    "wrapped": lambda module: optim.MasterWeights(module.parameters(), lambda own: torch.optim.AdamW(own, lr=0.1)),
}
RECIPES = {"plain": None, "block": recipe.Float8BlockScaling(), "nvfp4": recipe.NVFP4BlockScaling()}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"bias": False, "device": "cuda", "params_dtype": torch.bfloat16}
    with te.quantized_model_init(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        return nn.Sequential(*(te.Linear(WIDTH, WIDTH, **options) for _ in range(2)))


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients that are those of any other training."""
    made = torch.Generator("cuda").manual_seed(1)
    for param in module.parameters():
        local = torch.randn(local_tensor(param).shape, generator=made, device="cuda").to(param.dtype)
        param.grad = (
            DTensor.from_local(local, param.device_mesh, param.placements) if isinstance(param, DTensor) else local
        )
    optimizer.step()


def sizes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of state by the kind of device, counts of steps aside."""
    found = {"cuda": 0, "cpu": 0}
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                found[local_tensor(value).device.type] += local_tensor(value).nbytes
    return found


def disturbed(module: nn.Module, optimizer: torch.optim.Optimizer, *, comes_back: bool) -> None:
    """Trains, with state away between steps. `comes_back`: before the next step, or by that."""
    train(module, optimizer)
    for _ in range(STEPS - 1):
        used, moves = torch.cuda.memory_allocated(), sizes(optimizer)["cuda"]
        assert moves
        optimizer.move_state("cpu")
        assert sizes(optimizer) == {"cuda": 0, "cpu": moves}
        assert torch.cuda.memory_allocated() <= used - moves
        if comes_back:
            optimizer.move_state()
            assert sizes(optimizer) == {"cuda": moves, "cpu": 0}
        train(module, optimizer)


def assert_alike(pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    (module, optimizer), (other, its_optimizer) = pairs
    for got, want in zip(module.parameters(), other.parameters(), strict=True):
        assert_bitwise(local_tensor(got.detach()), local_tensor(want.detach()), "weight")
        for name, value in its_optimizer.state[want].items():
            assert_bitwise(local_tensor(optimizer.state[got][name]), local_tensor(value), name)


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("name", RECIPES)
def test_state_that_is_away_leaves_its_memory(name: str, make: Callable, comes_back: bool) -> None:
    pairs = [(module, make(module)) for module in (model(name), model(name))]
    disturbed(*pairs[0], comes_back=comes_back)
    for _ in range(STEPS):
        train(*pairs[1])
    assert_alike(pairs)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("name", RECIPES)
def test_state_of_shards_is_moved_as_any(name: str, make: Callable) -> None:
    with pretended_ranks(2, 0):
        mesh = init_device_mesh("cuda", (2,))
        pairs = []
        for module in (model(name), model(name)):
            fsdp2.fully_shard(module, mesh=mesh)
            pairs.append((module, make(module)))
        disturbed(*pairs[0], comes_back=True)
        for _ in range(STEPS):
            train(*pairs[1])
        assert_alike(pairs)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_weight_that_is_changed_while_its_master_is_away_keeps_what_it_was_given(make: Callable) -> None:
    module = model("block")
    optimizer = make(module)
    train(module, optimizer)
    optimizer.move_state("cpu")
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(0.5)
    wanted: list[Tensor] = [weight.detach().dequantize(dtype=torch.float32) for weight in module.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 1e-30  # a rate of 0 would leave bytes alone, whatever masters are
    train(module, optimizer)
    for weight, values in zip(module.parameters(), wanted, strict=True):
        assert_bitwise(optimizer.state[weight]["master_param"], values, "master")
