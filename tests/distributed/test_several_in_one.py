"""Several saved tensors that fill one of a model, tied names or experts in one parameter: alike, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import te_dist as te
from te_dist import checkpoints, optim
from te_dist.checkpoints import CheckpointError
from te_dist.recipe import Float8BlockScaling
from te_dist.testing import assert_bitwise, device
from tests.distributed.test_loaded_or_refused import READS, SIZE, stepped, store


class Pair(nn.Module):
    """Two maps, tied or not, named in this order."""

    def __init__(self, *, tied: bool, names: str = "ab", quantized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=quantized, recipe=Float8BlockScaling()):
            maps = [te.Linear(SIZE, SIZE, bias=False) for _ in names]
        if tied:
            maps[1].weight = maps[0].weight
        for name, each in zip(names, maps, strict=True):
            self.add_module(name, each)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("reads", READS)
def test_other_values_under_tied_names_are_refused(reads: str, quantized: bool, tmp_path: Path) -> None:
    store(Pair(tied=False), tmp_path)
    model = Pair(tied=True, quantized=quantized)
    before = model.a.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"a\.weight and b\.weight hold different values"):
        READS[reads](model, tmp_path)
    assert torch.equal(model.a.weight, before)


@pytest.mark.parametrize(("saved", "wanted"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("reads", READS)
def test_equal_values_under_tied_names_are_read(reads: str, saved: bool, wanted: bool, tmp_path: Path) -> None:
    model = Pair(tied=False, quantized=saved)
    with torch.no_grad():
        model.b.weight.copy_(model.a.weight)
    store(model, tmp_path)
    tied = Pair(tied=True, quantized=wanted)
    with torch.no_grad():
        tied.a.weight.fill_(1.0)
    READS[reads](tied, tmp_path)
    x = torch.eye(SIZE)
    with torch.no_grad(), te.autocast(enabled=False):
        got, want = tied.b(x), model.a(x)
    if saved == wanted:
        assert_bitwise(got, want, "values")
    else:  # the same, quantized
        torch.testing.assert_close(got, want, rtol=0.1, atol=1e-3)


class InOneMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = nn.Parameter(self.a.weight.data)


class Apart(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, add: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(2, 2, bias=False) for _ in range(2))
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight.bfloat16())
            self.a.weight.copy_(self.b.weight)
            self.b.weight += add
        self.b.to(dtype)


@pytest.mark.parametrize("reads", READS)
def test_parameters_in_one_memory_take_the_same_values_alone(reads: str, tmp_path: Path) -> None:
    store(Apart(add=1.0), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"a\.weight and b\.weight hold different values"):
        READS[reads](InOneMemory(), tmp_path / "other")
    saved, model = InOneMemory(), InOneMemory()
    store(saved, tmp_path / "same")
    READS[reads](model, tmp_path / "same")
    assert_bitwise(model.b.weight, saved.a.weight, "weight")


@pytest.mark.parametrize("reads", READS)
def test_equal_values_of_other_types_are_read_under_tied_names(reads: str, tmp_path: Path) -> None:
    saved, model = Apart(torch.bfloat16), InOneMemory()
    store(saved, tmp_path)
    READS[reads](model, tmp_path)
    assert_bitwise(model.a.weight, saved.a.weight, "weight")


@pytest.mark.parametrize("quantized", [False, True])
def test_experts_that_modules_share_are_packed(quantized: bool, tmp_path: Path) -> None:
    def shared(*, single: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        with te.quantized_model_init(enabled=quantized, recipe=Float8BlockScaling()):
            model.a = te.GroupedLinear(4, SIZE, SIZE, bias=False, single_grouped_weight=single)
        model.b = model.a
        return model

    saved, model = shared(single=False), shared(single=True)
    checkpoints.save(tmp_path / "a", model=saved)
    with torch.no_grad():
        model.a.weight.zero_()
    checkpoints.load(tmp_path / "a", model=model)
    for i in range(4):
        assert torch.equal(model.b.weight[i].detach(), saved.a.get_parameter(f"weight{i}").detach())


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("reads", READS)
def test_packed_experts_that_differ_are_not_read_into_one(reads: str, quantized: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": False}
    with te.quantized_model_init(enabled=quantized, recipe=Float8BlockScaling()):
        saved = te.GroupedLinear(2, SIZE, SIZE, single_grouped_weight=True, **options)
        model = te.GroupedLinear(2, SIZE, SIZE, single_grouped_weight=False, **options)
    model.weight1 = model.weight0
    store(saved, tmp_path)
    with pytest.raises(CheckpointError, match="weight0 and weight1 hold different values"):
        READS[reads](model, tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.FusedAdam])
def test_state_of_a_tied_parameter_is_found_under_either_name(kind: Any, tmp_path: Path) -> None:
    saved, loaded = Pair(tied=True), Pair(tied=True, names="ba")
    first, second = kind(saved.parameters()), kind(loaded.parameters())
    saved.a(torch.ones(1, SIZE)).sum().backward()
    first.step()
    checkpoints.save(tmp_path / "a", model=saved, optimizer=first)
    checkpoints.load(tmp_path / "a", model=loaded, optimizer=second)
    assert_bitwise(second.state[loaded.a.weight]["exp_avg"], first.state[saved.a.weight]["exp_avg"], "moments")


EXPERTS = 3


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(EXPERTS):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.full((2, 4), float(i))))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 2, 4))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.FusedAdam])
@pytest.mark.parametrize("apart", ["first", "last", "steps", "groups", ""])
def test_experts_whose_state_differs_are_not_read_as_one(kind: Any, apart: str, tmp_path: Path) -> None:
    saved, model = Separate(), Packed()
    params = list(saved.parameters())
    groups = [{"params": params[:1]}, {"params": params[1:]}] if apart == "groups" else params
    optimizer = kind(groups, lr=1e-2)
    trained = {"first": params[1:], "last": params[:-1], "steps": params[:-1]}.get(apart, params)
    stepped(optimizer, trained, 1)
    if apart == "steps":
        stepped(optimizer, params, 1)
    checkpoints.save(tmp_path / "a", model=saved, optimizer=optimizer)
    every = [model.weight]
    own = kind([{"params": every}, {"params": [nn.Parameter(torch.zeros(0))]}] if apart == "groups" else every, lr=1e-2)
    if apart == "groups":
        model.rest = own.param_groups[1]["params"][0]
    if not apart:
        checkpoints.load(tmp_path / "a", model=model, optimizer=own)
        want = torch.stack([optimizer.state[param]["exp_avg"] for param in params])
        assert_bitwise(own.state[model.weight]["exp_avg"], want, "moments")
        return
    with pytest.raises(CheckpointError, match="in the saved optimizer differ|has other state, or groups"):
        checkpoints.load(tmp_path / "a", model=model, optimizer=own)
    assert not model.weight.any()


def test_names_of_parameters_stay_those_of_the_model(tmp_path: Path) -> None:
    saved, model = Separate(), Packed()
    optimizer = torch.optim.AdamW(saved.named_parameters())
    stepped(optimizer, list(saved.parameters()), 1)
    checkpoints.save(tmp_path / "a", model=saved, optimizer=optimizer)
    own = torch.optim.AdamW(model.named_parameters())
    checkpoints.load(tmp_path / "a", model=model, optimizer=own)
    assert own.param_groups[0]["param_names"] == ["weight"]


def test_short_names_are_found_in_their_keys(tmp_path: Path) -> None:
    """`e` is in `model`, too."""
    saved, model = nn.Module(), nn.Module()
    for i in range(2):
        saved.register_parameter(f"e{i}", nn.Parameter(torch.full((3,), float(i + 1))))
    model.e = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    checkpoints.save(tmp_path / "a", model=saved)
    checkpoints.load(tmp_path / "a", model=model)
    assert_bitwise(model.e, torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.bfloat16), "e")


def some_of_the_ties(rank: int, world: int, path: Path) -> None:
    """Each rank has other names of a tensor that the first one has tied."""
    torch.manual_seed(0)
    model = Pair(tied=True).to(device())
    if rank:
        del model.a
    checkpoints.save(path, model=model)
    want = model.b.weight.detach().clone()
    with torch.no_grad():
        model.b.weight.zero_()
    checkpoints.load(path, model=model)
    assert_bitwise(model.b.weight, want, "weight")


def test_ranks_may_know_some_names_of_a_tie(ranks, tmp_path: Path) -> None:
    ranks(2).run(some_of_the_ties, tmp_path / "a")


def test_files_of_others_with_both_names_of_a_tied_weight_are_read(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, SIZE)
    save_file({"a.weight": weight, "b.weight": weight.clone()}, tmp_path / "model.safetensors")
    model = Pair(tied=True)
    checkpoints.import_safetensors(model, tmp_path)
    assert_bitwise(model.b.weight, weight, "weight")
