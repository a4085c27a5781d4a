"""Laws of spans and regions: which tiles a part of a matrix touches, and how it is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_dist.formats import WHOLE, Partition, Region, Span

spans = st.builds(Span, st.integers(0, 70), st.integers(0, 70))
extents = st.integers(1, 20)


@given(spans, extents)
def test_a_span_touches_the_blocks_its_elements_lie_in(span, block):
    touched = sorted({i // block for i in range(span.start, span.stop)})
    blocks = span.blocks(block)
    assert list(range(blocks.start, blocks.stop)) == touched


@given(spans)
def test_every_span_touches_the_one_block_that_is_the_whole(span):
    assert span.blocks(WHOLE) == Span(0, 1)


@given(spans, st.integers(1, 6), st.integers(1, 6))
def test_blocks_of_blocks_are_larger_blocks(span, small, factor):
    assert span.blocks(small).blocks(factor) == span.blocks(small * factor)


@given(spans, spans)
def test_a_span_contains_another_where_it_contains_every_boundary(span, part):
    expected = span.start <= part.start and part.stop <= span.stop
    assert span.contains(part) == expected
    assert span.contains(span)


@pytest.mark.parametrize("start, length", [(-1, 3), (2, -1)])
def test_a_span_before_the_start_or_of_negative_length_is_refused(start, length):
    with pytest.raises(ValueError, match=f"start={start}, length={length}"):
        Span(start, length)


def test_the_length_of_a_span_is_its_len():
    assert len(Span(5, 7)) == 7 and Span(5, 7).stop == 12


def test_a_region_knows_its_shape_and_origin():
    region = Region.whole(10, 20).narrow(0, 3, 4).narrow(1, 5, 6)
    assert region.shape == (4, 6)
    assert region.origin == (3, 5)
    assert region.blocks((2, 4)) == (Span(1, 3), Span(1, 2))
    assert region.blocks((1, WHOLE)) == (Span(3, 4), Span(0, 1))


@given(spans, spans, extents, extents)
def test_the_phase_is_the_place_of_the_first_element_in_its_block(rows, cols, m, k):
    region = Region(rows, cols)
    assert region.phase((m, k)) == (rows.start - rows.start // m * m, cols.start - cols.start // k * k)
    assert region.phase((WHOLE, k))[0] == 0


@given(st.data())
def test_a_part_of_a_part_is_a_part(data):
    region = Region.whole(30, 30).narrow(1, 4, 20)
    for dim in (0, 1, 0):
        extent = region.shape[dim]
        start = data.draw(st.integers(0, extent))
        length = data.draw(st.integers(0, extent - start))
        part = region.narrow(dim, start, length)
        assert part.origin[dim] == region.origin[dim] + start
        assert part.shape[dim] == length
        assert part.shape[1 - dim] == region.shape[1 - dim] and part.origin[1 - dim] == region.origin[1 - dim]
        region = part


@pytest.mark.parametrize("dim, start, length", [(0, 0, 5), (0, 3, 2), (1, 0, 7), (1, -1, 2), (0, -3, 1)])
def test_a_part_cannot_leave_its_region(dim, start, length):
    with pytest.raises(ValueError):
        Region.whole(10, 20).narrow(0, 2, 4).narrow(1, 5, 6).narrow(dim, start, length)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 15))
def test_chunks_are_those_of_torch_and_empty_ones_after_them(rows, num_chunks, origin):
    region = Region(Span(origin, rows), Span(2, 5))
    parts = region.chunk(num_chunks)
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(num_chunks)] if rows else []
    assert [len(part.rows) for part in parts] == chunks + [0] * (num_chunks - len(chunks))
    assert all(region.rows.contains(part.rows) and part.cols == region.cols for part in parts)
    covered = [row for part in parts for row in range(part.rows.start, part.rows.stop)]
    assert covered == list(range(origin, origin + rows))


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 5))
def test_chunks_of_units_never_cut_a_unit(units, unit, num_chunks):
    parts = Region.whole(units * unit, 3).chunk(num_chunks, unit)
    plain = Region.whole(units, 3).chunk(num_chunks)
    assert [part.rows for part in parts] == [Span(p.rows.start * unit, len(p.rows) * unit) for p in plain]


def test_rows_that_are_no_whole_number_of_units_cannot_be_chunked():
    with pytest.raises(ValueError, match="10 rows.*units of 4"):
        Region.whole(10, 3).chunk(2, 4)


def test_a_partition_is_what_rows_and_columns_are_cut_into():
    rows, cols = (Span(0, 3), Span(3, 2)), (Span(0, 4), Span(4, 4))
    grid = [Region(r, c) for r in rows for c in cols]
    assert Partition.of(grid) == Partition(rows, cols)
    assert Partition.of([grid[0]]) == Partition(rows[:1], cols[:1])
