"""Offloading on streams: the same bits, less device memory, in any order in which copies and kernels happen to run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_dist import offload
from te_dist.catalog import FORMATS
from te_dist.formats import Region
from te_dist.offload.activations import Session, policy
from te_dist.offload.host import pool_of
from te_dist.tensor import QuantizedTensor, empty
from te_dist.testing import assert_bitwise

pytestmark = pytest.mark.gpu
LAYERS, ROWS, WIDTH = 24, 8192, 1024  # each layer saves 48 MiB
SIZE = 1 << 26  # numbers of a tensor whose copy takes milliseconds


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda().bfloat16()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)


def train(net: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """(gradients, peak of device memory above what is there before)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    net(x).float().square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    return grads, peak


def test_tensors_of_every_device_are_parked_unless_one_is_named():
    for device, parked in ((None, 2), ("cuda", 1), ("cpu", 1)):
        with offload.activations(min_bytes=0, device=device) as statistics:
            outs = [torch.ones(512, device=d, requires_grad=True).exp() for d in ("cpu", "cuda")]
        assert statistics.parked == parked * 2048
        for out in outs:
            out.sum().backward()


@pytest.mark.parametrize("window", ["16MiB", "256MiB"])
def test_results_are_bitwise_the_same_and_memory_is_less(net, x, window):
    want, plain_peak = train(net, x)
    for _ in range(5):  # pinned memory is used again from the second step on
        with offload.activations(window=window) as statistics:
            got, peak = train(net, x)
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b, "gradient")
        assert statistics.live == 0
        assert peak < plain_peak - statistics.parked / 2 or window == "256MiB"
    assert statistics.parked > LAYERS * 2 * x.nbytes
    assert pool_of(torch.empty(0, device="cuda").device).reserved < 2 * statistics.parked


def test_pinned_memory_does_not_grow_with_steps(net, x):
    reserved = []
    for _ in range(4):
        with offload.activations():
            train(net, x)
        reserved.append(pool_of(torch.empty(0, device="cuda").device).reserved)
    assert len(set(reserved[1:])) == 1
    assert torch.empty(0).is_pinned() is False


@pytest.mark.parametrize("late", ["producer", "consumer"])
def test_copies_wait_for_kernels_and_kernels_for_copies(late):
    """A long kernel on the compute stream before the tensor is written, or before memory is used again."""
    for _ in range(20):
        a = torch.randn(1 << 20, device="cuda", requires_grad=True)
        with offload.activations(window=0):
            if late == "producer":
                torch.cuda._sleep(20_000_000)
            y = (a * 1.5).exp()
            loss = (y * y).sum()
            if late == "consumer":
                torch.cuda._sleep(20_000_000)
            del y
            for _ in range(4):
                torch.full((1 << 20,), float("nan"), device="cuda")
        loss.backward()
        y = (a.detach() * 1.5).exp()
        assert_bitwise(a.grad, 2 * y * y * 1.5, "gradient")


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_tensors_come_back_on_their_device(name):
    format, region = FORMATS[name], Region.whole(2048, 2048)
    storage = empty(format, region, dtype=torch.bfloat16, device="cuda", fields=format.canonical.fields)
    for buffer in storage.buffers.values():
        buffer.view(torch.uint8).random_(0, 255)
    want = QuantizedTensor(storage, region.shape)
    seen: list[Tensor] = []

    def look(saved: Tensor) -> Tensor:
        seen.append(saved)
        return saved

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, one: Tensor, kept: Tensor) -> Tensor:
            ctx.save_for_backward(kept)
            return one.clone()

        @staticmethod
        def backward(ctx, grad: Tensor):
            look(ctx.saved_tensors[0])
            return grad, None

    with offload.activations(window=0) as statistics:
        y = Keep.apply(torch.ones(1, device="cuda", requires_grad=True), want)
    y.backward()
    assert statistics.parked == storage.nbytes()
    for field in format.canonical.fields:
        assert seen[0].storage.buffers[field.name].device == storage.device
        assert_bitwise(seen[0].storage.buffers[field.name], storage.buffers[field.name], field.name)


def test_what_was_saved_last_stays_and_the_rest_comes_back_as_backward_begins():
    size = 4 << 20
    first, second, third = (torch.full((size,), value, dtype=torch.uint8, device="cuda") for value in (1, 2, 3))
    where = first.data_ptr(), second.data_ptr()
    session = Session(policy(2 * size, 0, size * 3 // 2), None)
    packed = [session.pack(tensor) for tensor in (first, second, third)]
    units = [leaf.unit for saved in packed[:2] for leaf in saved.leaves]
    assert [unit.source is None for unit in units] == [True, False]
    assert session.unpack(packed[2]) is third
    assert session.statistics.restored == size, "the first is on its way before it is asked for"
    back = [session.unpack(saved) for saved in packed[1::-1]]
    assert (back[0].data_ptr() == where[1]) and (back[1].data_ptr() != where[0])
    for tensor, value in zip(back, (2, 1), strict=True):
        assert (tensor == value).all()


def spoil() -> None:
    """Writes NaN to device memory that is free on the current stream."""
    held = [torch.full((SIZE,), float("nan"), device="cuda") for _ in range(4)]
    held.clear()


def test_memory_is_let_go_on_the_stream_that_it_was_saved_on():
    """What is saved on another stream pushes it out of the window."""
    other = torch.cuda.Stream()
    a, small = torch.randn(SIZE, device="cuda", requires_grad=True), torch.ones(1024, device="cuda", requires_grad=True)
    want = 2 * (a.detach() * 1.5).exp() ** 2 * 1.5
    for _ in range(5):
        a.grad = None
        torch.cuda.synchronize()
        with offload.activations(min_bytes=0, window=1):
            y = (a * 1.5).exp()
            loss = (y * y).sum()
            del y
            with torch.cuda.stream(other):
                beside = small.exp().exp()
            spoil()
        loss.backward()
        beside.sum().backward()
        assert_bitwise(a.grad, want, "gradient")


def test_memory_fetched_ahead_on_one_stream_is_not_reused_while_another_reads_it():
    other = torch.cuda.Stream()
    session = Session(policy(None, 0, 2 * SIZE * 4), None)
    for _ in range(5):
        first, second = (torch.full((SIZE,), value, device="cuda") for value in (1.0, 2.0))
        packed = [session.pack(first), session.pack(second)]
        units = [leaf.unit for saved in packed for leaf in saved.leaves]
        for unit in units:
            unit.let_go()
        del first, second, units
        session.unpack(packed[1])  # fetches the other ahead, on this stream
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            back = session.unpack(packed[0])
            torch.cuda._sleep(20_000_000)
            total = back.sum()
        del back, packed
        spoil()
        torch.cuda.synchronize()
        assert total.item() == SIZE
