"""Experts over several ranks: what arrives, what comes back, what is dropped; biases over a mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_dist import testing
from te_dist.nn.moe import Routed, Routing, TopKRouter, permute, unpermute, update_expert_biases
from te_dist.nn.moe.dispatch import AllToAllDispatcher, Arrived, Dispatcher, LocalDispatcher, fill_slots
from te_dist.nn.moe.tokens import TokenDispatcher
from te_dist.testing import assert_bitwise

TOKENS, COPIES, EXPERTS, HIDDEN = 12, 3, 8, 16
PARTS = {1: [12], 2: [9, 3], 4: [5, 0, 6, 1]}  # tokens of each rank: unequal ones, and none at all


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Routed, Tensor]:
    """(rows, routing, gradient) of all tokens; expert 6 is chosen by nobody. Whole numbers: sums are exact."""
    generator = torch.Generator().manual_seed(3)
    experts = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:COPIES] for _ in range(TOKENS)])
    experts += experts >= 6  # noqa: PLR2004
    probabilities = torch.randint(1, 5, (TOKENS, COPIES), generator=generator) / 4
    x, grad = torch.randint(-4, 5, (2, TOKENS, HIDDEN), generator=generator).to(dtype)
    return x, Routed(probabilities, experts), grad


def expert_work(arrived: Arrived, first_expert: int) -> Tensor:
    """Sums of what an expert's stand-in makes of rows: (expert + 1) * probability * row; junk behind the last one."""
    rows = permute(arrived.rows, arrived.by_expert)
    counts = arrived.by_expert.counts
    factors = torch.full((rows.shape[0],), torch.nan, device=rows.device)
    numbers = torch.arange(len(counts), device=rows.device).repeat_interleave(counts) + first_expert + 1
    factors[: len(numbers)] = numbers.float()
    return unpermute(rows * (factors * arrived.probabilities).to(rows.dtype)[:, None], arrived.by_expert)


def run(dispatcher: Dispatcher, first_expert: int, part: slice) -> tuple[Tensor, ...]:
    """(output, gradients of rows and probabilities) of the tokens in `part`."""
    device = testing.device() if dist.is_initialized() else "cpu"
    x, routed, grad = inputs()
    x = x[part].to(device).requires_grad_()
    probabilities = routed.probabilities[part].to(device).requires_grad_()
    arrived = dispatcher.dispatch(x, Routed(probabilities, routed.experts[part].to(device)))
    out = dispatcher.combine(expert_work(arrived, first_expert), arrived)
    out.backward(grad[part].to(device))
    return out.detach().cpu(), x.grad.cpu(), probabilities.grad.cpu()


def own_part(rank: int, world: int) -> slice:
    begin = sum(PARTS[world][:rank])
    return slice(begin, begin + PARTS[world][rank])


def dispatcher_of(world: int, how: str | int | None) -> AllToAllDispatcher:
    """Of copies into so many slots, or of tokens."""
    mesh = testing.mesh((world,), ("ep",))
    return TokenDispatcher(EXPERTS, mesh) if how == "tokens" else AllToAllDispatcher(EXPERTS, mesh, capacity=how)


def dispatched(rank: int, world: int, how: str | int | None) -> tuple[tuple[Tensor, ...], int]:
    dispatcher = dispatcher_of(world, how)
    return run(dispatcher, rank * dispatcher.num_local_experts, own_part(rank, world)), dispatcher.num_host_syncs


@pytest.mark.parametrize("how", [None, TOKENS * COPIES, "tokens"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_experts_over_ranks_give_what_one_rank_gives(ranks: Callable, world: int, how: str | int | None) -> None:
    want = run(LocalDispatcher(EXPERTS), 0, slice(None))
    results = ranks(world).run(dispatched, how)
    for name, of_ranks, whole in zip(
        ("out", "x", "probabilities"), zip(*(r for r, _ in results), strict=True), want, strict=True
    ):
        assert_bitwise(torch.cat(of_ranks), whole, name)
    assert [syncs for _, syncs in results] == [int(not isinstance(how, int))] * world


def arrived_rows(rank: int, world: int, how: str | None) -> list[list[list[float]]]:
    dispatcher = dispatcher_of(world, how)
    x, routed, _ = inputs()
    part = own_part(rank, world)
    experts = routed.experts[part].to(testing.device()).T.contiguous().T  # in any layout
    moved = Routed(routed.probabilities[part].to(testing.device()), experts)
    arrived = dispatcher.dispatch(x[part].to(testing.device()), moved)
    return [rows.tolist() for rows in arrived.rows[arrived.by_expert.index].split(arrived.by_expert.counts.tolist())]


@pytest.mark.parametrize("how", [None, "tokens"])
def test_an_expert_sees_tokens_in_the_order_of_one_rank(ranks: Callable, how: str | None) -> None:
    x, routed, _ = inputs()
    local = LocalDispatcher(EXPERTS).dispatch(x, routed)
    want = [rows.tolist() for rows in x[local.by_expert.index].split(local.by_expert.counts.tolist())]
    assert [rows for of_rank in ranks(4).run(arrived_rows, how) for rows in of_rank] == want


def own_experts(rank: int) -> Tensor:
    """Choices of the tokens of a rank: several times sixteen copies come to each."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(67 + rank, EXPERTS, generator=generator).argsort(1)[:, :COPIES]


def tail(rank: int, world: int) -> tuple[int, Tensor, Tensor]:
    dispatcher = AllToAllDispatcher(EXPERTS, testing.mesh((world,), ("ep",)))
    experts, device = own_experts(rank), testing.device()
    x = torch.ones(len(experts), HIDDEN, device=device)
    probabilities = torch.ones(experts.shape, device=device)
    arrived = dispatcher.dispatch(x, Routed(probabilities, experts.to(device)))
    return len(arrived.rows), arrived.rows[arrived.by_expert.index].cpu(), arrived.probabilities.cpu()


def test_steps_have_few_numbers_of_rows(ranks: Callable) -> None:
    world = 2
    experts = torch.cat([own_experts(rank) for rank in range(world)]).flatten()
    for rank, (num_rows, sorted_rows, probabilities) in enumerate(ranks(world).run(tail)):
        came = int((experts // (EXPERTS // world) == rank).sum())
        assert 128 <= came < 256, "between two powers of two"  # noqa: PLR2004
        assert came <= num_rows < came + 8, "at most one row for sixteen more"
        assert num_rows % 8 == 0
        for values in (sorted_rows[:, 0], probabilities):
            assert_bitwise(values, (torch.arange(num_rows) < came).float(), "ones, and zeros behind them")


def dropped(rank: int, world: int, capacity: int) -> tuple[tuple[Tensor, ...], int]:
    dispatcher = AllToAllDispatcher(EXPERTS, testing.mesh((world,), ("ep",)), capacity=capacity)
    result = run(dispatcher, rank * dispatcher.num_local_experts, own_part(rank, world))
    _, routed, _ = inputs()
    part = own_part(rank, world)
    x = torch.zeros(part.stop - part.start, HIDDEN, device=testing.device())
    moved = Routed(*(t[part].to(testing.device()) for t in routed))
    return result, int(dispatcher.dispatch(x, moved).dropped)


def test_what_has_no_slot_adds_nothing_and_is_counted(ranks: Callable) -> None:
    world, capacity, (x, routed, grad) = 2, 4, inputs()
    for rank, (got, count) in enumerate(ranks(world).run(dropped, capacity)):
        part = own_part(rank, world)
        slots, kept = [capacity] * world, torch.zeros_like(routed.experts[part])
        for copy in range(COPIES):  # first choices of all tokens come first
            for token, expert in enumerate(routed.experts[part, copy].tolist()):
                owner = expert // (EXPERTS // world)
                kept[token, copy] = slots[owner] > 0
                slots[owner] -= 1
        factors = (routed.experts[part] + 1) * routed.probabilities[part] * kept
        assert count == int((kept == 0).sum()) > 0
        # Zeros may differ in sign.
        assert_bitwise(got[0] + 0.0, (x[part] * factors.sum(1)[:, None]).bfloat16() + 0.0, "out")
        assert_bitwise(got[1] + 0.0, (grad[part] * factors.sum(1)[:, None]).bfloat16() + 0.0, "x")
        of_values = (grad[part].float() * x[part]).sum(1)[:, None] * (routed.experts[part] + 1) * kept
        assert_bitwise(got[2] + 0.0, of_values + 0.0, "probabilities")


def test_slots_are_filled_by_expert() -> None:
    _, routed, _ = inputs()
    found = fill_slots(routed.experts, 2, EXPERTS // 2, capacity=5)
    for owner, of_owner in enumerate(found.choices.split(5)):
        count = int(found.counts.view(2, -1)[owner].sum())
        assert count == 5
        experts = routed.experts.flatten()[of_owner]
        assert experts.tolist() == sorted(experts.tolist())
        assert set((experts // (EXPERTS // 2)).tolist()) == {owner}


def wrong(rank: int, world: int) -> list[str]:
    messages = []
    line = testing.mesh((world,), ("ep",))
    turned = DeviceMesh(testing.device().type, list(reversed(range(world))))
    for count, mesh, capacity in ((EXPERTS + 1, line, None), (EXPERTS, line, 0), (EXPERTS, turned, None)):
        with pytest.raises(ValueError) as error:
            AllToAllDispatcher(count, mesh, capacity=capacity)
        messages.append(str(error.value))
    return messages


def test_experts_that_do_not_divide_are_named_on_every_rank(ranks: Callable) -> None:
    (first, second, third), other = ranks(2).run(wrong)
    assert first.startswith("num_experts: got 9 over 2 ranks")
    assert second.startswith("capacity: got 0")
    assert third == "mesh: got ranks [1, 0], wanted them in rising order, as their group has them"
    assert other == [first, second, third]


def updated(rank: int, world: int) -> tuple[Tensor, int]:
    mesh = testing.mesh((world,), ("dp",))
    routers = torch.nn.ModuleList(TopKRouter(4, Routing(n, 1, bias_update_rate=0.5)) for n in (2, 3)).to(
        testing.device()
    )
    routers[0].tokens_per_expert.copy_(torch.tensor([[5.0, 1.0], [1.0, 9.0]])[rank])
    routers[1].tokens_per_expert.copy_(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])[rank])
    calls = []
    reduce, dist.all_reduce = dist.all_reduce, lambda *args, **kw: (calls.append(1), reduce(*args, **kw))
    try:
        assert update_expert_biases(routers, mesh=mesh) == 2
    finally:
        dist.all_reduce = reduce
    assert not routers[0].tokens_per_expert.any()
    return torch.cat([router.expert_bias for router in routers]).cpu(), len(calls)


def test_biases_move_by_the_choices_of_all_ranks_in_one_reduction(ranks: Callable) -> None:
    for bias, num_reductions in ranks(2).run(updated):
        assert bias.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]
        assert num_reductions == 1
