"""State that is moved out of the way between steps: nothing keeps it, and training goes on to the bit."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from te_dist import optim
from te_dist.optim import moving
from te_dist.testing import assert_bitwise
from tests.optim.test_loaded_weights import model, train

Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused": lambda module: optim.FusedAdam(module.parameters(), lr=0.1),
    "compact": lambda module: optim.FusedAdam(
        module.parameters(), lr=0.1, exp_avg_dtype=torch.uint8, store_param_remainders=True
    ),
    "wrapped": lambda module: optim.MasterWeights(module.parameters(), lambda own: torch.optim.AdamW(own, lr=0.1)),
    "momentum": lambda module: optim.MasterWeights(
        module.parameters(), lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)
    ),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_model = pytest.mark.parametrize("name", ["block", "plain"])


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is one device here: what is moved is copied all the same."""
    monkeypatch.setattr(moving._Copies, "_copy", lambda _, tensor: tensor.clone())
    yield


class Twins:
    """Two trainings alike, of which the state of one is moved."""

    def __init__(self, make: Make, name: str = "block") -> None:
        self.module, self.other = (model(name, 0) for _ in range(2))
        self.optimizer, self.its_optimizer = make(self.module), make(self.other)

    def train(self, steps: int) -> None:
        train(self.module, self.optimizer, steps)
        train(self.other, self.its_optimizer, steps)

    def assert_alike(self) -> None:
        """After one more step, codes and state."""
        self.train(1)
        for got, want in zip(self.module.parameters(), self.other.parameters(), strict=True):
            assert_bitwise(got, want, "weight")
            for name, value in self.its_optimizer.state[want].items():
                assert_bitwise(self.optimizer.state[got][name], value, name)


@every_optimizer
@every_model
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.filterwarnings("error")
def test_training_goes_on_as_if_nothing_had_been_moved(make: Make, name: str, steps: int) -> None:
    twins = Twins(make, name)
    twins.train(steps)
    twins.optimizer.move_state("cpu")
    twins.assert_alike()
    twins.optimizer.move_state("cpu")
    twins.optimizer.move_state()
    twins.assert_alike()


@every_optimizer
@every_model
def test_nothing_keeps_what_was_moved(make: Make, name: str) -> None:
    module = model(name, 0)
    optimizer = make(module)
    train(module, optimizer, 2)
    kept = [weakref.ref(value) for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    optimizer.move_state("cpu")
    assert kept
    assert not any(value() is not None for value in kept)


@every_optimizer
@every_model
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_go_on_from_state_that_was_moved(make: Make, name: str, copied: Callable) -> None:
    twins = Twins(make, name)
    twins.train(2)
    twins.optimizer.move_state("cpu")
    twins.module, twins.optimizer = copied((twins.module, twins.optimizer))
    twins.assert_alike()


@every_optimizer
def test_state_that_was_moved_is_saved_as_it_is(make: Make) -> None:
    twins = Twins(make)
    twins.train(2)
    twins.optimizer.move_state("cpu")
    saved, wanted = twins.optimizer.state_dict()["state"], twins.its_optimizer.state_dict()["state"]
    for number, state in wanted.items():
        for name, value in state.items():
            assert_bitwise(saved[number][name], value, name)


@every_optimizer
@every_model
@pytest.mark.parametrize("when", ["before", "after"])
def test_state_that_is_loaded_is_moved_as_any(make: Make, name: str, when: str) -> None:
    twins = Twins(make, name)
    twins.train(2)
    saved = copy.deepcopy((twins.module.state_dict(), twins.optimizer.state_dict()))
    train(twins.module, twins.optimizer, 1)
    if when == "before":
        twins.optimizer.move_state("cpu")
    twins.optimizer.load_state_dict(saved[1])
    if when == "after":
        twins.optimizer.move_state("cpu")
    twins.module.load_state_dict(saved[0])
    twins.assert_alike()


@every_optimizer
def test_what_changes_a_weight_in_place_after_state_is_back_changes_its_master(make: Make) -> None:
    twins = Twins(make)
    twins.train(2)
    twins.optimizer.move_state("cpu")
    twins.optimizer.move_state()
    with torch.no_grad():
        for module in (twins.module, twins.other):
            for weight in module.parameters():
                weight.mul_(0.75)
    twins.assert_alike()


@every_optimizer
@pytest.mark.parametrize("comes_back", [False, True])
def test_parameters_may_be_added_while_state_is_away(make: Make, comes_back: bool) -> None:
    twins = Twins(make)
    twins.train(2)
    twins.optimizer.move_state("cpu")
    if comes_back:
        twins.optimizer.move_state()
    for optimizer in (twins.optimizer, twins.its_optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    twins.assert_alike()


@pytest.mark.parametrize("name", ["block", "plain"])
def test_an_optimizer_that_keeps_its_list_of_parameters_goes_on(name: str) -> None:
    losses = []
    for moves in (False, True):
        module = model(name, 0)
        optimizer = optim.MasterWeights(module.parameters(), lambda own: torch.optim.LBFGS(own, lr=0.1, max_iter=4))

        def closure(module: nn.Module = module, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(16, 64, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            return loss

        found = []
        for step in range(4):
            if moves and step == 2:
                optimizer.move_state("cpu")
            found.append(float(optimizer.step(closure).detach()))
        losses.append(found)
    assert losses[1] == losses[0]
    assert losses[1][3] < losses[1][2] < losses[1][0]


@every_optimizer
def test_state_stays_where_a_graph_has_a_step(make: Make) -> None:
    optimizer = make(model("block", 0))
    optimizer._captured.append(object())
    with pytest.raises(RuntimeError, match="move_state: got an optimizer whose step was captured"):
        optimizer.move_state("cpu")
