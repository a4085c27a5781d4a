"""Laws of the host pool: blocks never overlap, hold what was written, and leave one free range per slab behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dist.offload import copies
from te_dist.offload.host import Block, HostPool, parse_bytes


class SmallPool(HostPool):
    """With slabs that a few blocks fill."""

    slab = 8192


def fill(block: Block, value: int) -> None:
    for piece in block.pieces:
        piece.fill_(value)


# A positive number takes that many bytes; a negative one drops the block at that place among those held.
steps = st.lists(st.integers(-4, 3 * 8192), max_size=40)


@given(steps)
@settings(max_examples=60)
def test_blocks_do_not_overlap_and_free_ranges_merge(sizes):
    pool, held = SmallPool(pinned=False), []
    for step, size in enumerate(sizes):
        if size < 0:
            held = held[: size - 1] + held[size:] if len(held) >= -size else held
        else:
            block = pool.take(size)
            assert sum(p.numel() for p in block.pieces) == size == block.nbytes
            fill(block, step)
            held.append((step, block))
            block = None
        assert all((piece == number).all() for number, each in held for piece in each.pieces)
        assert pool.live == sum(each.nbytes for _, each in held)
    held.clear()
    assert pool.live == 0
    assert pool._free == [(slab, 0, 8192) for slab in range(pool.reserved // 8192)]


def test_memory_is_used_again_before_more_is_made():
    calls = []
    pool = SmallPool(pinned=False, before_reuse=lambda: calls.append("reuse"))
    first, second = pool.take(5000), pool.take(5000)
    assert (len(second.pieces), pool.reserved, calls) == (2, 2 * 8192, [])
    address = first.pieces[0].data_ptr()
    del first
    third = pool.take(8000)
    assert (pool.reserved, calls) == (2 * 8192, ["reuse"])
    assert address in {piece.data_ptr() for piece in third.pieces}


def test_memory_that_comes_back_while_others_is_waited_for_is_waited_for_itself():
    calls, held = [], []

    def wait() -> None:
        calls.append(len(held))
        held.clear()

    pool = SmallPool(pinned=False, before_reuse=wait)
    first, second = pool.take(8192), pool.take(8192)
    address = second.pieces[0].data_ptr()
    held.append(second)
    del first, second
    third = pool.take(8192)
    assert (pool.reserved, calls) == (2 * 8192, [1])
    assert third.pieces[0].data_ptr() != address
    fourth = pool.take(8192)
    assert (pool.reserved, calls, fourth.pieces[0].data_ptr()) == (2 * 8192, [1, 0], address)


class SlowList(list):
    """Lets other threads run before anything is taken out."""

    def pop(self, *at: int):
        time.sleep(1e-4)
        return super().pop(*at)


def test_threads_take_and_drop_at_once():
    pool, errors = SmallPool(pinned=False), []
    pool._free = SlowList()

    def work(number: int) -> None:
        try:
            for step in range(30):
                blocks = [pool.take(1 + (number * 7919 + step * 104729 + k * 3571) % 9000) for k in range(3)]
                for block in blocks:
                    fill(block, number)
                assert pool.live
                assert all((piece == number).all() for block in blocks for piece in block.pieces)
        except Exception as error:  # also of what two threads have taken apart
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pool.live == 0
    assert pool._free == [(slab, 0, 8192) for slab in range(pool.reserved // 8192)]


def test_threads_that_come_first_together_get_the_same_copies(monkeypatch):
    made, start = [], threading.Barrier(4)

    class Slow(copies.Copies):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            time.sleep(0.05)  # other threads run meanwhile

    def work() -> None:
        start.wait()
        made.append(copies.copies_of(torch.device("cpu", 7)))

    monkeypatch.setattr(copies, "Copies", Slow)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(map(id, made))) == 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(0, 0), (17, 17), ("17", None), ("17B", 17), ("4KiB", 4096), ("3 MiB", 3 << 20), ("1.5GiB", 3 << 29)],
)
def test_sizes_are_numbers_or_text(text, nbytes):
    if nbytes is None:
        with pytest.raises(ValueError, match="write it as 1048576 or with one of"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["16GB", "GiB", "-1KiB", ".5GiB", "1e3B", -1, ""])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="for a number of bytes"):
        parse_bytes(text)
