"""What would be lost, cut off or mixed on its way into a model, or out of it, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_dist as te
from te_dist import checkpoints, fsdp2
from te_dist.checkpoints import CheckpointError, conversion
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


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], times: int) -> None:
    for _ in range(times):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()


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


class Marked(nn.Parameter):
    """As those of other libraries, which mean something by their class."""


def test_parameters_of_other_classes_are_told_by_their_memory(tmp_path: Path) -> None:
    class Detached(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.w = Marked(torch.full((2,), value))

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: value.detach() for name, value in super().state_dict(*args, **kwargs).items()}

    model = Detached(0.0)
    checkpoints.save(tmp_path / "a", model=Detached(3.0))
    checkpoints.load(tmp_path / "a", model=model)
    assert_bitwise(model.w.data, torch.full((2,), 3.0), "w")


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


OF_ONE_TYPE = [getattr(torch.optim, name) for name in ("AdamW", "Adam", "Muon") if hasattr(torch.optim, name)]


@pytest.mark.parametrize("kind", OF_ONE_TYPE)
def test_moments_of_another_type_than_the_optimizer_makes_are_refused(kind: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = kind(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoints.save(tmp_path / "a", model=model, optimizer=optimizer)
    narrow = nn.Linear(4, 4, bias=False).bfloat16()
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
