"""Offloading is invisible in the results, parks the declared bytes, and never copies a parameter."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from te_dist import offload
from te_dist.catalog import FORMATS
from te_dist.formats import Region
from te_dist.fsdp2 import QuantizedParameter
from te_dist.offload import Kept
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise

ROWS, COLS = 48, 144  # ragged in every tile but those of 16
every_format = pytest.mark.parametrize("name", FORMATS)


class Keep(torch.autograd.Function):
    """The identity on `x`, which saves `kept` and hands what it gets back to a list."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.seen.append(ctx.saved_tensors[0])
        return grad, None, None


class Net(nn.Module):
    """Views, outputs saved by their own node, a tensor saved by several, a buffer, a parameter's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        y = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return (torch.relu(y) @ self.out.weight.t() + torch.tanh(x[::2].repeat(2, 1, 1))).exp()


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net(x).sum().backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    return grads


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1))


def keep(saved: Tensor, **options) -> tuple[list[Tensor], offload.Statistics]:
    """Saves `saved` under offloading, runs backward, and gives what backward saw."""
    seen: list[Tensor] = []
    with offload.activations(min_bytes=0, **options) as statistics:
        y = Keep.apply(torch.ones(1, requires_grad=True), saved, seen)
    y.backward()
    return seen, statistics


@every_format
def test_quantized_tensor_is_parked_as_its_canonical_bytes(name):
    format, want = FORMATS[name], quantize(torch.randn(ROWS, COLS), FORMATS[name])
    (got,), statistics = keep(want)
    assert statistics.parked == statistics.restored == format.canonical.allocated_bytes(Region.whole(ROWS, COLS))
    assert (statistics.live, statistics.peak) == (0, statistics.parked)
    assert got.storage.directions == want.storage.directions
    for field in format.fields:
        assert got.storage.buffers[field.name] is not want.storage.buffers[field.name]
        assert_bitwise(got.storage.buffers[field.name], want.storage.buffers[field.name], field.name)


@every_format
def test_one_direction_is_parked_alone(name):
    whole = quantize(torch.randn(ROWS, COLS), FORMATS[name]).storage
    for direction in whole.directions:
        part = whole.select(direction)
        (got,), statistics = keep(QuantizedTensor(part, (ROWS, COLS)))
        assert statistics.parked == part.format.allocated_bytes(part.region)
        assert got.storage.directions == part.directions
        assert_bitwise(got, QuantizedTensor(part, (ROWS, COLS)), direction.value)


@pytest.mark.parametrize("options", [{}, {"budget": 4096}, {"budget": 0}, {"min_bytes": 2000}], ids=str)
def test_gradients_are_bitwise_those_without_it(net, x, options):
    want = gradients(net, x)
    with offload.activations(**{"min_bytes": 0} | options) as statistics:
        loss = net(x).sum()
    assert statistics.peak <= options.get("budget", statistics.peak)
    loss.backward()
    for (name, param), gradient in zip(net.named_parameters(), want, strict=True):
        assert_bitwise(param.grad, gradient, name)
    assert statistics.live == 0


def test_parked_tensors_leave_the_device_and_come_back_once(net, x):
    with offload.activations(min_bytes=0) as statistics:
        hidden = torch.sigmoid(net.qkv(x))
        storage, nbytes = weakref.ref(hidden.untyped_storage()), hidden.nbytes
        parts = hidden.chunk(3, dim=-1)
        loss = sum((part * part).sum() for part in parts)
        del hidden, parts
    assert storage() is None, "the graph still holds what was parked"
    assert statistics.live == nbytes + x.nbytes  # three views of one storage, saved six times, and the input
    loss.backward()
    assert (statistics.live, statistics.restored) == (0, nbytes + x.nbytes)


def test_a_small_view_of_a_large_storage_parks_only_itself():
    (got,), statistics = keep(torch.arange(4096.0)[1024:1056].view(4, 8).t())
    assert statistics.parked == 32 * 4
    assert got.stride() == (1, 8)
    assert_bitwise(got, torch.arange(1024.0, 1056).view(4, 8).t(), "view")


def quantized(value: float) -> QuantizedTensor:
    return quantize(torch.full((64, 128), value), FORMATS["float8_block_1d"])


def spread(value: float) -> DTensor:
    return DTensor.from_local(torch.full((8,), value), DeviceMesh.from_group(dist.group.WORLD, "cpu"), [Shard(0)])


MADE = {"plain": lambda value: torch.full((8,), value), "quantized": quantized, "spread": spread}
every_kind = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


@pytest.mark.usefixtures("mesh")
@every_kind
def test_contents_written_after_a_first_save_are_parked_again(make):
    x, seen = make(1.0), []
    with offload.activations(min_bytes=0) as statistics:
        first = Keep.apply(torch.ones(1, requires_grad=True), x, seen)
        parked = statistics.parked
        x.copy_(make(2.0))
        second = Keep.apply(torch.ones(1, requires_grad=True), x, seen)
    assert statistics.parked == 2 * parked > 0
    second.backward()
    got, want = (each.to_local() if isinstance(each, DTensor) else each for each in (seen[0], make(2.0)))
    assert_bitwise(got, want, "saved second")
    with pytest.raises(RuntimeError, match="was modified in place since"):
        first.backward()


def test_backward_can_run_twice(net, x):
    want = gradients(net, x)
    with offload.activations(min_bytes=0) as statistics:
        loss = net(x).sum()
    for retain_graph in (True, False):
        net.zero_grad()
        loss.backward(retain_graph=retain_graph)
        for param, gradient in zip(net.parameters(), want, strict=True):
            assert_bitwise(param.grad, gradient, "gradient")
    assert statistics.restored == statistics.parked


def test_a_dropped_graph_gives_its_host_bytes_back(net, x):
    with offload.activations(min_bytes=0) as statistics:
        loss = net(x).sum()
    assert statistics.live > 0
    del loss
    assert statistics.live == 0


def test_small_tensors_stay():
    _, statistics = keep(torch.ones(8))
    assert statistics.parked == 32
    with offload.activations(min_bytes=33) as statistics:
        y = Keep.apply(torch.ones(1, requires_grad=True), torch.ones(8), [])
    assert (statistics.parked, statistics.kept) == (0, {Kept.SMALL: 1})
    y.backward()


def test_a_group_counts_as_a_whole_against_the_budget():
    q = quantize(torch.randn(64, 128), FORMATS["float8_block_1d"])
    nbytes = q.format.allocated_bytes(q.storage.region)
    assert keep(q, budget=nbytes)[1].parked == nbytes
    assert keep(q, budget=nbytes - 1)[1].kept == {Kept.BUDGET: 1}


def test_the_budget_counts_all_blocks_of_the_process():
    x = torch.ones(1024)
    with offload.activations(budget=x.nbytes, min_bytes=0) as first:
        held = Keep.apply(torch.ones(1, requires_grad=True), x, [])
    assert keep(x.clone(), budget=x.nbytes)[1].kept == {Kept.BUDGET: 1}
    held.backward()
    assert first.live == 0
    assert keep(x.clone(), budget=x.nbytes)[1].parked == x.nbytes


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("budget", [0, None])
@every_kind
def test_modifying_a_saved_tensor_raises_whether_it_stayed_or_not(make, budget):
    x = make(1.0)
    with offload.activations(budget, min_bytes=0):
        y = Keep.apply(torch.ones(1, requires_grad=True), x, [])
    shape, view = tuple(x.shape), x.view(-1)
    del x
    view.zero_()
    with pytest.raises(RuntimeError, match=rf"shape {re.escape(str(shape))}, was modified in place since: it is at"):
        y.backward()


def test_writes_that_torch_is_told_not_to_count_do_not_raise():
    x, seen = torch.ones(8), []
    with offload.activations(min_bytes=0):
        y = Keep.apply(torch.ones(1, requires_grad=True), x, seen)
    x.data.add_(1)
    y.backward()
    assert_bitwise(seen[0], torch.ones(8), "saved")


def test_a_saved_output_makes_no_cycle():
    for budget in (None, 0):
        with offload.activations(budget, min_bytes=0):
            y = torch.ones(64, requires_grad=True).exp().exp()
            storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None, "only the garbage collector could free what the graph holds"


# -- parameters ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def views_of(weight: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        without_grad = weight.view(-1)
    return {"itself": weight, "view": weight.view(-1), "detached": weight.detach(), "view_no_grad": without_grad}


@pytest.mark.parametrize("trainable", [True, False])
def test_plain_parameters_and_views_of_them_stay(trainable):
    weight = nn.Parameter(torch.randn(16, 8), requires_grad=trainable)
    assert keep(weight)[1].kept == {Kept.PARAMETER: 1}  # what is known of its memory serves detached views
    views = views_of(weight) | {"t": weight.t(), "row": weight[3:9].t()[1:]}
    for name, view in views.items():
        assert keep(view)[1].kept == {Kept.PARAMETER: 1}, name


VIEWS = {
    "itself": lambda weight: weight,
    "t": lambda weight: weight.t(),
    "local": lambda weight: weight.to_local(),
    "local_t": lambda weight: weight.to_local().t(),
    "local_of_view": lambda weight: weight.view(8, 16).to_local()[1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_parameters_of_a_mesh_and_their_locals_stay(mesh, placement, view):
    weight = nn.Parameter(DTensor.from_local(torch.randn(16, 8), mesh, [placement]))
    assert keep(VIEWS[view](weight))[1].kept == {Kept.PARAMETER: 1}


@every_format
@pytest.mark.parametrize("trainable", [True, False])
def test_quantized_parameters_and_their_locals_stay(mesh, name, trainable):
    local = QuantizedParameter(quantize(torch.randn(ROWS, COLS), FORMATS[name]).storage, (ROWS, COLS))
    weight = nn.Parameter(local, requires_grad=trainable)
    spread = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), requires_grad=trainable)
    for view in (*views_of(weight).values(), spread, spread.to_local()):
        assert keep(view)[1].kept == {Kept.PARAMETER: 1}


def test_marked_tensors_stay_with_all_their_views():
    table = torch.randn(8, 8)
    offload.mark_not_offload(table)
    assert keep(table[2:])[1].kept == {Kept.PARAMETER: 1}
    assert keep(table.clone())[1].parked == table.nbytes


@every_format
def test_activations_of_a_mesh_are_parked_by_their_local_bytes(mesh, name):
    local = quantize(torch.randn(ROWS, COLS), FORMATS[name])
    want = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    (got,), statistics = keep(want)
    assert statistics.parked == local.format.canonical.allocated_bytes(local.storage.region)
    assert got.placements == want.placements
    assert_bitwise(got.to_local(), local, name)


def sparse_gradients(weight: Tensor) -> None:
    torch.sparse.mm(torch.eye(8).to_sparse(), weight).square().sum().backward()


def nested_gradients(weight: Tensor) -> None:
    rows = [torch.arange(8.0 * n).view(n, 8) / 64 for n in (3, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    y = torch.nn.functional.linear(x, weight)
    (torch.tanh(y) * torch.sigmoid(y)).values().sum().backward()


@pytest.mark.parametrize("passes", [sparse_gradients, nested_gradients])
def test_sparse_and_nested_tensors_stay(passes: Callable[[Tensor], None]) -> None:
    weights = [torch.eye(8).requires_grad_() for _ in range(2)]
    passes(weights[0])
    with offload.activations(min_bytes=0) as statistics:
        passes(weights[1])
    assert statistics.kept[Kept.FOREIGN]
    assert_bitwise(weights[1].grad, weights[0].grad, "gradient")


def test_sparse_tensors_may_be_marked() -> None:
    offload.mark_not_offload(torch.eye(8).to_sparse())
