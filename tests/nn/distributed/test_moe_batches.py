"""Batches that travel to all ranks: the bits of tokens that travel once, no waiting with a capacity, fewer lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import te_dist as te
from te_dist import testing
from te_dist.nn.moe import Routed
from te_dist.nn.moe.batches import BatchDispatcher
from te_dist.nn.moe.dispatch import AllToAllDispatcher, LocalDispatcher
from te_dist.testing import assert_bitwise
from tests.nn.distributed.test_moe import COPIES, EXPERTS, HIDDEN, TOKENS, inputs, run
from tests.nn.distributed.test_moe_block import RECIPES, build, tokens
from tests.nn.distributed.test_moe_tokens import ROUTING

AMPLE = TOKENS * COPIES  # slots, more than there are copies


def own_part(rank: int, world: int) -> slice:
    size = TOKENS // world
    return slice(rank * size, (rank + 1) * size)


def dispatcher_of(world: int, capacity: int | None) -> BatchDispatcher:
    return BatchDispatcher(EXPERTS, testing.mesh((world,), ("ep",)), capacity=capacity)


def dispatched(rank: int, world: int, capacity: int | None) -> tuple[tuple[Tensor, ...], list[int]]:
    """What `run` gives the second time; how often it waited the first time, and then."""
    dispatcher, waited = dispatcher_of(world, capacity), []
    for _ in range(2):
        found = run(dispatcher, rank * dispatcher.num_local_experts, own_part(rank, world))
        waited.append(dispatcher.num_host_syncs - sum(waited))
    return found, waited


@pytest.mark.parametrize("capacity", [None, AMPLE])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_experts_over_ranks_give_what_one_rank_gives(ranks: Callable, world: int, capacity: int | None) -> None:
    want = run(LocalDispatcher(EXPERTS), 0, slice(None))
    results = ranks(world).run(dispatched, capacity)
    for name, of_ranks, whole in zip(
        ("out", "x", "probabilities"), zip(*(r for r, _ in results), strict=True), want, strict=True
    ):
        assert_bitwise(torch.cat(of_ranks), whole, name)
    for _, waited in results:
        assert waited == ([2, 1] if capacity is None else [1, 0]), "ranks compare a new number of tokens once"


def passed(rank: int, world: int, name: str, ways: list[dict[str, Any]]) -> list[list[Tensor]]:
    """(output, gradients of tokens, of the router and of experts), each way."""
    made_by, mesh = RECIPES[name], testing.mesh((1, world), ("edp", "ep"))
    x, results = tokens().chunk(world)[rank].to(testing.device()), []
    for how in ways:
        model = build(made_by, mesh, routing=ROUTING, **how)
        asking = x.clone().requires_grad_()
        with te.autocast(enabled=made_by is not None, recipe=made_by):
            out = model(asking)
        out.backward(x.flip(0))
        grads = [model.moe.router.weight.grad, *(param.grad for param in model.moe.experts.parameters())]
        results.append([each.cpu() for each in (out.detach(), asking.grad, *(grad.to_local() for grad in grads))])
    return results


@pytest.mark.parametrize("payload", ["plain", "quantized"])
@pytest.mark.parametrize(("world", "name"), [(2, "bf16"), (2, "block"), (4, "block"), (2, "mxfp8")])
def test_bits_are_those_of_tokens_that_travel_once(ranks: Callable, world: int, name: str, payload: str) -> None:
    how = {"payload": payload}
    ways = [{"travels": "tokens", **how}, {"travels": "batches", **how}, {"travels": "batches", "capacity": 256, **how}]
    for want, *others in ranks(world).run(passed, name, ways):
        for way, got in zip(ways[1:], others, strict=True):
            for index, (a, b) in enumerate(zip(got, want, strict=True)):
                assert_bitwise(a, b, f"result {index} of {way}")


def dropped(rank: int, world: int, capacity: int) -> tuple[tuple[Tensor, ...], int]:
    dispatcher, part = dispatcher_of(world, capacity), own_part(rank, world)
    _, routed, _ = inputs()
    x = torch.zeros(part.stop - part.start, HIDDEN, device=testing.device())
    arrived = dispatcher.dispatch(x, Routed(*(t[part].to(testing.device()) for t in routed)))
    return run(dispatcher, rank * dispatcher.num_local_experts, part), int(arrived.dropped)


def test_what_a_rank_has_no_room_for_adds_nothing_and_is_counted(ranks: Callable) -> None:
    world, capacity, (x, routed, grad) = 2, 7, inputs()
    owners = routed.experts // (EXPERTS // world)
    kept, room = torch.zeros_like(routed.experts), [capacity * world] * world
    for copy in range(COPIES):  # first choices of all tokens come first
        for token, owner in enumerate(owners[:, copy].tolist()):
            kept[token, copy] = room[owner] > 0
            room[owner] -= 1
    factors = ((routed.experts + 1) * routed.probabilities * kept).sum(1)[:, None]
    of_values = (grad.float() * x).sum(1)[:, None] * (routed.experts + 1) * kept
    results = ranks(world).run(dropped, capacity)
    for name, of_ranks, want in zip(
        ("out", "x", "probabilities"),
        zip(*(found for found, _ in results), strict=True),
        ((x * factors).bfloat16(), (grad * factors).bfloat16(), of_values),
        strict=True,
    ):
        assert_bitwise(torch.cat(of_ranks) + 0.0, want + 0.0, name)  # zeros may differ in sign
    for rank, (_, lost) in enumerate(results):
        assert lost == int(((kept == 0) & (owners == rank)).sum())
    assert sum(lost for _, lost in results) > 0


def uneven(rank: int, world: int) -> str:
    with pytest.raises(ValueError) as error:
        run(dispatcher_of(world, None), 0, slice(0, TOKENS - rank))
    return str(error.value)


def test_batches_of_unlike_sizes_are_refused_on_every_rank(ranks: Callable) -> None:
    for rank, message in enumerate(ranks(2).run(uneven)):
        assert f"got {TOKENS - rank} tokens on this rank and [12, 11] on all" in message


def kept_to_itself(rank: int, world: int, capacity: int) -> list[int]:
    """Copies that are lost in batches, and in as many slots, where tokens choose experts of their rank."""
    mesh, device = testing.mesh((world,), ("ep",)), testing.device()
    local = EXPERTS // world
    experts = torch.arange(local, device=device)[:COPIES].expand(TOKENS, -1) + rank * local
    routed = Routed(torch.ones(experts.shape, device=device), experts)
    x = torch.zeros(TOKENS, HIDDEN, device=device)
    kinds = BatchDispatcher, AllToAllDispatcher
    return [int(kind(EXPERTS, mesh, capacity=capacity).dispatch(x, routed).dropped) for kind in kinds]


def test_room_that_one_rank_does_not_take_is_there_for_others(ranks: Callable) -> None:
    copies = TOKENS * COPIES
    for of_batches, of_slots in ranks(2).run(kept_to_itself, copies // 2):
        assert (of_batches, of_slots) == (0, copies // 2)
