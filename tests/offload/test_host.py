"""Laws of the host pool: blocks never overlap, hold what was written, and leave one free range per slab behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
