"""What would be lost, cut off or mixed on its way into a model, or out of it, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_dist as te
from te_dist import checkpoints, fsdp2, optim
from te_dist.checkpoints import CheckpointError, conversion
from te_dist.recipe import Float8BlockScaling
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, device, full_tensor, mesh

SIZE = 128
READS: dict[str, Callable[[nn.Module, Path], object]] = {
    "load": lambda model, path: checkpoints.load(path / "checkpoint", model=model),
    "import": lambda model, path: checkpoints.import_safetensors(model, path / "weights"),
}


def store(model: nn.Module, path: Path) -> None:
    """In both ways."""
    checkpoints.save(path / "checkpoint", model=model)
    checkpoints.export_safetensors(model, path / "weights")


class Held(nn.Module):
    """Buffers with these values, on the CPU."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value.clone())


# -- state that is none of a module ------------------------------------------------------------------------------------


class Counting(Held):
    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


class Casting(Held):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value.double() for name, value in super().state_dict(*args, **kwargs).items()}


def hooked() -> nn.Module:
    module = nn.Linear(2, 2, bias=False)

    def copy(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight"] = module.weight.clone()

    module.register_state_dict_post_hook(copy)
    return module


@pytest.mark.parametrize("make", [lambda: Counting(a=torch.zeros(2)), lambda: Casting(a=torch.zeros(2)), hooked])
def test_state_that_would_not_be_loaded_is_refused(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make()
    checkpoints.export_safetensors(model, tmp_path / "weights")
    want, found = model.state_dict(), load_file(tmp_path / "weights" / "model.safetensors")
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert_bitwise(found[name], value, name)
    for call in (
        lambda: checkpoints.save(tmp_path / "a", model=model),
        lambda: checkpoints.import_safetensors(model, tmp_path / "weights"),
    ):
        with pytest.raises(CheckpointError, match="no parameter or buffer: .*; what `get_extra_state`"):
            call()


def test_state_without_elements_is_no_loss(tmp_path: Path) -> None:
    class Empty(Held):
        def get_extra_state(self) -> Tensor:
            return torch.empty(0, dtype=torch.uint8)

        def set_extra_state(self, state: Any) -> None:
            pass

    store(Empty(a=torch.ones(2)), tmp_path)
    for reads in READS.values():
        model = Empty(a=torch.zeros(2))
        reads(model, tmp_path)
        assert_bitwise(model.a, torch.ones(2), "a")


def test_views_of_parameters_are_filled(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.both = nn.Parameter(torch.full((4,), value))
            self.register_state_dict_post_hook(self._split)

        @staticmethod
        def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            del state[prefix + "both"]
            state[prefix + "first"], state[prefix + "last"] = module.both[:2], module.both[2:]

    checkpoints.save(tmp_path / "a", model=Halves(3.0))
    model = Halves(0.0)
    checkpoints.load(tmp_path / "a", model=model)
    assert_bitwise(model.both, torch.full((4,), 3.0), "both")


def test_names_that_differ_by_a_wrapper_alone_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.add_module("a", nn.Linear(2, 2))
    model.a.add_module("_orig_mod", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"but for wrappers: a\.weight; a\.bias; a\._orig_mod\.weight"):
        checkpoints.save(tmp_path / "a", model=model)


# -- values that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float32, torch.int8),
        (torch.float32, torch.bool),
        (torch.int64, torch.int8),
        (torch.complex64, torch.int32),
    ],
)
def test_whole_numbers_take_their_own_type(saved: torch.dtype, wanted: torch.dtype, reads: str, tmp_path: Path) -> None:
    store(Held(n=torch.tensor([2.5, 300.0, -1.5]).to(saved)), tmp_path)
    model = Held(n=torch.zeros(3, dtype=wanted))
    with pytest.raises(CheckpointError, match=f"n has dtype {str(saved)[6:]}, wanted {str(wanted)[6:]}"):
        READS[reads](model, tmp_path)
    assert not model.n.any()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_moments_of_another_type_than_the_optimizer_makes_are_refused(kind: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoints.save(tmp_path / "a", model=model, optimizer=optimizer)
    narrow = nn.Linear(4, 4).bfloat16()
    with pytest.raises(CheckpointError, match="is none of that format; load without optimizer="):
        checkpoints.load(tmp_path / "a", model=narrow, optimizer=kind(narrow.parameters()))
    checkpoints.load(tmp_path / "a", model=narrow)
    assert_bitwise(narrow.weight, model.weight.bfloat16(), "weight")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_moments_of_another_type_are_read_where_the_optimizer_takes_them(kind: Any, tmp_path: Path) -> None:
    model, narrow = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
    optimizer, own = (kind(each.parameters(), lr=1e-2, momentum=0.9) for each in (model, narrow))
    stepped(optimizer, list(model.parameters()), 1)
    checkpoints.save(tmp_path / "a", model=model, optimizer=optimizer)
    checkpoints.load(tmp_path / "a", model=narrow, optimizer=own)
    for key, value in optimizer.state[model.weight].items():
        assert_bitwise(own.state[narrow.weight][key], value, key)
    stepped(own, list(narrow.parameters()), 1)


# -- several that fill one ---------------------------------------------------------------------------------------------


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
    assert (
        torch.equal(tied.b.weight.detach(), model.a.weight.detach().dequantize() if saved else model.a.weight.detach())
        or wanted
    )
    assert float((tied.b.weight.detach() - 1.0).abs().max()) > 0.5


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


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], times: int) -> None:
    for _ in range(times):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()


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


# -- what leaves a model -----------------------------------------------------------------------------------------------


def test_whole_values_have_memory_of_their_own() -> None:
    model = nn.Linear(2, 2)
    state = checkpoints.high_precision_state_dict(model)
    want = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        model.weight.fill_(9.0)
    for name, value in state.items():
        assert_bitwise(value, want[name], name)


def test_parameters_in_one_memory_are_exported(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(4.0))
    model.b = nn.Parameter(model.a.data)
    checkpoints.export_safetensors(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert_bitwise(found["a"], model.a, "a")
    assert_bitwise(found["b"], model.a, "b")


def drifted(rank: int, world: int, path: Path, kind: str) -> None:
    """Copies of one tensor that are not alike any more: what the first rank has is written."""
    if kind == "replicated":
        model: nn.Module = nn.Module()
        value = torch.full((2,), 2.0, device=device())
        model.weight = nn.Parameter(distribute_tensor(value, mesh((world,), ("dp",)), [Replicate()]))
    else:
        torch.manual_seed(0)
        model = te.Linear(SIZE, SIZE, bias=False, device=device())
        fsdp2.fully_shard(model, mesh=mesh((2, world // 2), ("replicate", "shard")))
    if rank >= world // 2:
        local = local_tensor(model.weight).detach()
        local.copy_(torch.nextafter(local, torch.zeros_like(local)))
    want = full_tensor(model.weight).cpu() if rank == 0 else full_tensor(model.weight)
    found = checkpoints.high_precision_state_dict(model)
    checkpoints.export_safetensors(model, path)
    if rank == 0:
        assert_bitwise(found["weight"], want, "whole")
        assert_bitwise(load_file(path / "model.safetensors")["weight"], want, "exported")


@pytest.mark.parametrize(("kind", "world"), [("replicated", 2), ("sharded", 4)])
def test_copies_that_drifted_apart_are_not_mixed(kind: str, world: int, ranks, tmp_path: Path) -> None:
    ranks(world).run(drifted, tmp_path, kind)


def narrow(dtype: torch.dtype) -> nn.Module:
    """Of the columns of the second map, which ranks share, one has none; of its rows FSDP2 cuts those."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 1, bias=False), nn.Linear(1, 3, bias=False)).to(device(), dtype)
    over = mesh((2, 2), ("dp", "tp"))
    parallelize_module(model, over["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for unit in (model[0], model):
        torch_fully_shard(unit, mesh=over["dp"])
    return model


def read_into_nothing(rank: int, world: int, path: Path) -> None:
    want = [local_tensor(param).detach().clone() for param in narrow(torch.float32).parameters()]
    store(narrow(torch.float32), path)
    for reads, dtype in (("load", torch.bfloat16), ("import", torch.float32)):
        model = narrow(dtype)
        for param in model.parameters():
            local_tensor(param).detach().zero_()
        READS[reads](model, path)
        for param, value in zip(model.parameters(), want, strict=True):
            assert_bitwise(local_tensor(param), value.to(dtype), reads)


def test_ranks_without_a_part_read_none(ranks, tmp_path: Path) -> None:
    ranks(4).run(read_into_nothing, tmp_path)


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
    checkpoints.load(path, model=model) if rank else checkpoints.load(path, model=model)
    assert_bitwise(model.b.weight, want, "weight")


def test_ranks_may_know_some_names_of_a_tie(ranks, tmp_path: Path) -> None:
    ranks(2).run(some_of_the_ties, tmp_path / "a")


def fails_on_one(rank: int, world: int, path: Path, reads: str) -> str:
    torch.manual_seed(0)
    store(nn.Linear(4, 4).to(device()), path)

    def failing(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    kept = conversion.place_whole
    if rank == 1:
        conversion.place_whole = failing
    try:
        READS[reads](nn.Linear(4, 4).to(device(), torch.bfloat16), path)
    except CheckpointError as error:
        return str(error)
    finally:
        conversion.place_whole = kept
    return ""


@pytest.mark.parametrize("reads", READS)
def test_what_one_rank_cannot_read_all_raise(reads: str, ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(fails_on_one, tmp_path, reads):
        assert "rank 1: OSError" in message


def test_files_of_others_with_both_names_of_a_tied_weight_are_read(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, SIZE)
    save_file({"a.weight": weight, "b.weight": weight.clone()}, tmp_path / "model.safetensors")
    model = Pair(tied=True)
    checkpoints.import_safetensors(model, tmp_path)
    assert_bitwise(model.b.weight, weight, "weight")
