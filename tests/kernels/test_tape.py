"""Tapes: what a function did is done again on other tensors, or not recorded at all."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_dist.kernels import runtime, tape
from te_dist.kernels.spec import Layout, Spec
from te_dist.kernels.tape import Tapes
from te_dist.ops._taped import taped
from te_dist.ops.source import Gathered, Source, SwiGlu
from te_dist.tensor import collectives

COPY = Spec("", "Copy", Layout("src:P out:P bytes:q"))


class CopyKernel:
    """A kernel that copies bytes in host memory, and counts."""

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, device: int, stream: int, grid: Any, parameters: bytes) -> None:
        self.launches += 1
        src, out, count = struct.unpack("@PPq", parameters)
        ctypes.memmove(out, src, count)


class Program:
    """What te_dist._C.cuda.Program does, with kernels like this one."""

    def __init__(self, steps: list[tuple[Any, ...]], places: list[int]) -> None:
        self.steps, self.places = steps, places

    def run(self, device: int, stream: int, tensors: list[Tensor]) -> None:
        addresses = [tensors[place].data_ptr() for place in self.places]
        for kernel, grid, parameters, patches in self.steps:
            patched = bytearray(parameters)
            for place, slot, offset, _ in patches:
                struct.pack_into("@P", patched, place, addresses[slot] + offset)
            kernel.launch(device, stream, grid, bytes(patched))


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> CopyKernel:
    """CPU tensors are recorded, and launches go to this kernel."""
    copies = CopyKernel()
    monkeypatch.setattr(tape, "is_recordable", lambda tensor: not tape.is_dispatch_watched())
    monkeypatch.setattr(tape, "Program", Program)
    monkeypatch.setattr(tape, "ALIGNMENT", 64)  # that of all CPU tensors
    monkeypatch.setitem(runtime._loaded, (COPY, -1), copies)
    for module in (runtime, tape):
        monkeypatch.setattr(module, "current_cuda_stream", lambda device: 0)
    return copies


def copied(src: Tensor, offset: int = 0) -> Tensor:
    """The values of `src` from `offset` on, by a launch."""
    out = torch.empty(src.numel() - offset)
    runtime.launch(COPY, out, (1, 1), (src.data_ptr() + 4 * offset, out.data_ptr(), out.nbytes))
    return out


class Map(NamedTuple):
    """In the place of a tensor map: the address that is in it."""

    address: int

    def encoded(self) -> bytes:
        return struct.pack("@P120x", self.address)


class Counted:
    """A function of tensors, run through tapes; counts the times that it ran itself."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function, self.tapes, self.runs = function, Tapes(), 0

    def __call__(self, *tensors: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        def run() -> tuple[tuple[Tensor, ...], str]:
            self.runs += 1
            return self.function(*tensors), "rest"

        with torch.no_grad():
            results, rest = self.tapes.run(key, tensors, run)
        assert rest == "rest"
        return results


class Reshaped(torch.autograd.Function):
    """A matrix as rows of another shape, which autograd takes for no view, by tapes."""

    tapes = Tapes()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        def run() -> tuple[tuple[Tensor, ...], None]:
            return (torch.ops.aten._unsafe_view(x + 1, (2, 4, 8)),), None

        return Reshaped.tapes.run(None, (x,), run)[0][0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(8, 8)


@pytest.mark.usefixtures("kernel")
def test_what_is_played_can_be_changed_in_place_as_what_ran() -> None:
    for _ in range(4):  # run, recorded, played
        x = torch.randn(8, 8, requires_grad=True)
        out = Reshaped.apply(x)
        out.add_(1)
        assert torch.equal(out.detach(), (x.detach() + 1 + 1).view(2, 4, 8))
        assert not out._is_view()


def test_launches_are_repeated_with_other_addresses(kernel: CopyKernel) -> None:
    counted = Counted(lambda x: (copied(copied(x), 4), copied(x)))
    for count in (1, 2, 3):
        x = torch.randn(64)
        tail, whole = counted(x)
        assert torch.equal(tail, x[4:])
        assert torch.equal(whole, x)
        assert (counted.runs, kernel.launches) == (min(count, 2), 3 * count)


def test_tensor_maps_are_made_for_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class CopyOfMapped(CopyKernel):
        def launch(self, device: int, stream: int, grid: Any, parameters: bytes) -> None:
            src, out, count = struct.unpack("@P120xPq", parameters[:144])
            super().launch(device, stream, grid, struct.pack("@PPq", src, out, count))

    spec = Spec("", "CopyOfMapped", Layout("src:T out:P bytes:q"))
    monkeypatch.setitem(runtime._loaded, (spec, -1), CopyOfMapped())

    def function(x: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(x)
        runtime.launch(spec, out, (1, 1), (Map(x.data_ptr()), out.data_ptr(), out.nbytes))
        return (out,)

    counted = Counted(function)
    for _ in range(3):
        x = torch.randn(64)
        assert torch.equal(counted(x)[0], x)
    assert counted.runs == 2


def test_ops_of_torch_are_repeated_and_those_without_effect_are_not() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        torch.cat([x, x])
        y = copied(x.detach()).view(8, 8).t() @ w
        y.add_(0.5)
        torch._foreach_add_([y], 0.5)  # which returns nothing
        return torch.cat([y, y[:2]]), x.unsqueeze(0)

    counted = Counted(function)
    for _ in range(3):
        x, w = torch.randn(64), torch.randn(8, 8)
        both, view = counted(x, w)
        y = x.view(8, 8).t() @ w + 0.5 + 0.5
        assert torch.equal(both, torch.cat([y, y[:2]]))
        assert view.data_ptr() == x.data_ptr()
    (steps,) = (made.steps for made in counted.tapes._tapes.values() if made)
    assert counted.runs == 2
    assert sum(getattr(step, "op", None) is torch.cat for step in steps) == 1


@pytest.fixture
def group() -> Iterator[Any]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_are_called_again(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    its = collectives._all_gather

    def gather(out: Tensor, x: Tensor, *, group: Any) -> None:
        assert group is dist.group.WORLD
        sent.append(x.data_ptr())
        its(out, x, group=group)
        out.mul_(torch.tensor(2.0))  # a tensor from elsewhere: what is done in here is not looked at

    monkeypatch.setattr(collectives, "_all_gather", gather)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        gathered = collectives.all_gather(copied(x), group)
        collectives.maximum_(gathered, group)
        return copied(gathered), copied(x)

    counted = Counted(function)
    for count in (1, 2, 3):
        x = torch.randn(64)
        doubled, same = counted(x)
        assert torch.equal(doubled, 2 * x)
        assert torch.equal(same, x)
        assert (counted.runs, len(sent)) == (min(count, 2), count)
        assert sent[-1] not in (x.data_ptr(), 0)


def test_other_collectives_are_not_recorded(group: Any) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        out = copied(x)
        dist.all_reduce(out, group=group)
        return (out,)

    counted = Counted(function)
    for _ in range(3):
        counted(torch.randn(64))
    assert counted.runs == 3


def test_what_only_launches_use_is_allocated_together() -> None:
    counted = Counted(lambda x: (copied(copied(copied(x), 8), 8), copied(x) + 1))
    for _ in range(3):
        x = torch.randn(64)
        tail, raised = counted(x)
        assert torch.equal(tail, x[16:])
        assert torch.equal(raised, x + 1)
    (made,) = counted.tapes._tapes.values()
    sizes = [tuple(step.shape) for step in made.steps if isinstance(step, tape._Allocation)]
    assert sizes == [(1024,), (48,), (64,)]


@pytest.mark.parametrize(
    "other", [torch.randn(65), torch.randn(64, dtype=torch.float64), torch.randn(128)[::2], torch.randn(65)[1:]]
)
def test_tensors_that_lie_otherwise_have_a_tape_of_their_own(other: Tensor) -> None:
    counted = Counted(lambda x: (x + 1,))
    base = torch.randn(64)
    for x in (base, other) * 3:
        assert torch.equal(counted(x)[0], x + 1)
    assert counted.runs == 4
    counted(base, key="another")
    assert counted.runs == 5


def test_what_cannot_be_repeated_runs_in_the_ordinary_way() -> None:
    stranger = torch.randn(64)
    cases: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
        "an address from elsewhere": lambda x: (copied(stranger),),
        "a tensor from elsewhere": lambda x: (x + stranger,),
        "an output from elsewhere": lambda x: (stranger,),
        "a value": lambda x: (x * x.sum().item(),),
        "an op of others": lambda x: (torch.ops.te_test.twice(x),),
        "an empty tensor": lambda x: (x, torch.empty(0)),
    }
    with torch.library._scoped_library("te_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        for name, function in cases.items():
            counted = Counted(function)
            for _ in range(3):
                x = torch.randn(64)
                for got, want in zip(counted(x), function(x), strict=True):
                    assert torch.equal(got, want), name
            assert counted.runs == 3, name


def test_a_tensor_that_is_freed_is_not_recorded() -> None:
    tapes, src, freed = Tapes(), torch.randn(8), torch.empty(8)
    freed.untyped_storage().resize_(0)
    for _ in range(2):
        tapes.run("copy", (src, freed), lambda: ((copied(src),), None))
    ((_, found),) = tapes._tapes.items()
    assert found is None


def test_tensors_in_one_place_are_not_recorded() -> None:
    counted = Counted(lambda x, y: (copied(x), copied(y)))
    whole = torch.randn(96)
    for _ in range(3):
        first, second = counted(whole[:64], whole[32:])
        assert torch.equal(first, whole[:64])
        assert torch.equal(second, whole[32:])
    assert counted.runs == 3


def test_autocast_of_the_moment_does_not_matter() -> None:
    counted = Counted(lambda x: (x @ x,))
    x = torch.randn(8, 8)
    for _ in range(2):
        (want,) = counted(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(counted(x)[0], want)


class Issued:
    """An op that copies what it is given from an offset on; counts the times that it ran itself."""

    def __init__(self) -> None:
        self.runs = 0
        self.op = taped(self._copy)

    def _copy(
        self, x: Tensor | Source, *, out: Tensor, offset: int = 0, tile: Any = (), noop: Tensor | None = None
    ) -> None:
        self.runs += 1
        if out.numel() != x.shape[0] * x.shape[1] - offset:
            raise ValueError(f"out: got {out.numel()} values")
        tensor = x.x if isinstance(x, Source) else x
        runtime.launch(COPY, out, (1, 1), (tensor.data_ptr() + 4 * offset, out.data_ptr(), out.nbytes))


def test_an_op_is_issued_again_with_other_tensors(kernel: CopyKernel) -> None:
    issued = Issued()
    for count in (1, 2, 3):
        x, out = torch.randn(8, 8), torch.empty(60)
        issued.op(x, out=out, offset=4, tile=[1, 128])
        assert torch.equal(out, x.flatten()[4:])
        assert (issued.runs, kernel.launches) == (min(count, 2), count)


def test_an_op_that_is_called_otherwise_runs_itself() -> None:
    issued, x, out, one = Issued(), torch.randn(8, 16), torch.empty(128), torch.ones(1)
    half, index = torch.empty(64), torch.zeros(8, dtype=torch.int64)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (x, {"out": out}),
        (x, {"out": torch.empty(124), "offset": 4}),
        (x, {"out": torch.empty(124), "offset": 4, "tile": (1, 128)}),
        (x, {"out": torch.empty(124), "offset": 4, "tile": (128, 128)}),
        (x, {"out": out, "noop": None}),
        (x, {"out": out, "noop": one}),
        (x.view(16, 8), {"out": out}),
        (SwiGlu(x), {"out": half}),
        (SwiGlu(x, torch.ones(8)), {"out": half}),
        (Gathered(x, index), {"out": out}),
    ]
    for _ in range(3):
        for given, keywords in calls:
            keywords["out"].fill_(-1)
            issued.op(given, **keywords)
            start, end = keywords.get("offset", 0), keywords["out"].numel()
            assert torch.equal(keywords["out"], x.flatten()[start : start + end])
    assert issued.runs == 2 * len(calls)


def test_an_op_of_other_classes_of_tensors_runs_itself() -> None:
    class Other(Tensor):
        pass

    issued, out = Issued(), torch.empty(64)
    for given in (torch.randn(8, 8).as_subclass(Other), SwiGlu(torch.randn(8, 8).as_subclass(Other))):
        issued.runs = 0
        for _ in range(3):
            issued.op(given, out=out if isinstance(given, Tensor) else out[:32])
        assert issued.runs == 3


def test_what_an_op_refuses_it_refuses_again(kernel: CopyKernel) -> None:
    issued = Issued()
    for _ in range(2):
        with pytest.raises(ValueError, match="got 7 values"):
            issued.op(torch.randn(8, 8), out=torch.empty(7))
    assert kernel.launches == 0


def runs_of(counted: Counted, length: int, calls: int) -> int:
    """How often the function runs itself in calls with tensors of one length."""
    counted.runs = 0
    for _ in range(calls):
        assert counted(torch.zeros(length))[0].shape == (length,)
    return counted.runs


def test_what_was_recorded_last_is_kept() -> None:
    counted = Counted(lambda x: (x + 1,))
    for length in range(1, 2 * tape._MAX_TAPES):
        runs_of(counted, length, 3)
    assert len(counted.tapes._tapes) == tape._MAX_TAPES
    assert all(runs_of(counted, length, 1) == 0 for length in range(tape._MAX_TAPES, 2 * tape._MAX_TAPES))
    assert runs_of(counted, 1, 1) == 1


def test_what_is_played_is_kept() -> None:
    counted = Counted(lambda x: (x + 1,))
    runs_of(counted, 1, 2)
    for length in range(2, 5 * tape._MAX_TAPES):
        runs_of(counted, length, 3)
        assert runs_of(counted, 1, 1) == 0
    assert len(counted.tapes._tapes) == tape._MAX_TAPES


def test_what_does_not_come_again_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[Tensor, ...]] = []

    class Recorder(tape._Recorder):
        def __init__(self, tensors: tuple[Tensor, ...]) -> None:
            recorded.append(tensors)
            super().__init__(tensors)

    monkeypatch.setattr(tape, "_Recorder", Recorder)
    counted, often = Counted(lambda x: (x + 1,)), torch.zeros(1)
    for length in range(2, 3 * tape._MAX_TAPES):
        counted(torch.zeros(length))
        counted(often)
    assert [len(x) for (x,) in recorded] == [1]
    assert (len(counted.tapes._tapes), len(counted.tapes._runs)) == (1, tape._MAX_TAPES)
    assert counted.runs == 3 * tape._MAX_TAPES - 2 + 2


def test_what_is_like_what_came_again_is_recorded_the_first_time() -> None:
    counted = Counted(lambda x: (x + 1,))
    runs = [runs_of(counted, length, 3) for length in range(1, 2 * tape._LATEST)]
    assert runs == [2] * tape._LATEST + [1] * (tape._LATEST - 1)
    # As many as were played in vain end it.
    lengths = range(100, 100 + 3 * tape._LATEST)
    assert [runs_of(counted, length, 1) for length in lengths] == [1] * len(lengths)
    recorded = [length in {shape_of(place) for place in counted.tapes._tapes} for length in lengths]
    wasted = sum(recorded)
    assert recorded == [True] * wasted + [False] * (len(lengths) - wasted)
    assert 0 < wasted < tape._LATEST


def shape_of(place: Any) -> int:
    """The length of the one tensor, of one dimension, that a place in tapes is of."""
    return struct.unpack("@q", place[0][-16:-8])[0]


def test_what_comes_twice_and_never_again_is_soon_not_recorded() -> None:
    counted = Counted(lambda x: (x + 1,))
    for length in range(1, 4 * tape._LATEST):
        assert runs_of(counted, length, 2) == 2
    assert len(counted.tapes._tapes) == tape._LATEST
    assert runs_of(counted, 1000, tape._RARELY + 5) == tape._RARELY + 1


def test_what_cannot_be_recorded_is_not_tried_for_ever() -> None:
    elsewhere = torch.ones(())
    counted = Counted(lambda x: (x + elsewhere,))
    for length in range(1, 4 * tape._LATEST):
        runs_of(counted, length, 2)
    assert list(counted.tapes._tapes.values()) == [None] * tape._LATEST


def test_tensors_that_overlap_leave_others_their_tapes() -> None:
    counted = Counted(lambda x, y: (x + y,))
    same = torch.randn(64)
    for _ in range(3):
        assert torch.equal(counted(same, same)[0], same + same)
    assert not counted.tapes._tapes
    for _ in range(4):
        x, y = torch.randn(2, 64)
        x, y = x.clone(), y.clone()
        assert torch.equal(counted(x, y)[0], x + y)
    (made,) = counted.tapes._tapes.values()
    assert made is not None and made.was_played
