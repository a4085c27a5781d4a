"""Laws of moving stored values, over many fields and cuts, also through tiles; compared bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from te_dist.formats import WHOLE, Field, Region, Span, geometry

U8, I32 = torch.uint8, torch.int32

FIELDS = [
    Field("plain", I32),
    Field("plain_km", I32, order="km"),
    Field("padded_km", I32, order="km", pad=(4, 8)),
    Field("nibbles", U8, pack=2),
    Field("nibbles_km", U8, order="km", pack=2, pad=(1, 4)),
    Field("square_tiles", I32, (4, 4), pad=(1, 4)),
    Field("row_tiles_km", I32, (1, 4), order="km", pad=(1, 4)),
    Field("col_tiles", I32, (4, 1)),
    Field("row_tiles_padded", I32, (1, 4), pad=(8, 4)),
    Field("repeated", I32, (1, 4), tile=(4, 4), pad=(8, 4)),
    Field("repeated_km", I32, (4, 1), order="km", tile=(4, 8)),
    Field("repeated_nibbles", U8, (1, 2), tile=(2, 2), pack=2),
    Field("whole_matrix", I32, (WHOLE, WHOLE)),
    Field("per_row", I32, (1, WHOLE)),
    Field("per_column_km", I32, (WHOLE, 1), order="km"),
]
fields = st.sampled_from(FIELDS)
of_every_field = settings(max_examples=4 * len(FIELDS))
by_field = pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)


def values_of(field: Field, region: Region, first: int = 1) -> torch.Tensor:
    """Values on the tile grid, all distinct where the type has room."""
    shape = tuple(len(span) for span in region.blocks(field.tile))
    values = torch.arange(first, first + shape[0] * shape[1], dtype=torch.int64).reshape(shape)
    return (values * 7 % 16 if field.pack == 2 else values).to(field.dtype)


def values_of_part(field: Field, values: torch.Tensor, region: Region, part: Region) -> torch.Tensor:
    """The values, of those of `region`, whose tiles `part` touches."""
    for dim, (whole, touched) in enumerate(zip(region.blocks(field.tile), part.blocks(field.tile), strict=True)):
        first = touched.start - whole.start if len(touched) else 0
        values = values.narrow(dim, first, len(touched))
    return values


def poisoned(field: Field, region: Region) -> torch.Tensor:
    return torch.full(field.shape(region), 0x5A, dtype=field.dtype)


def padding_of(field: Field, stored: torch.Tensor, region: Region) -> torch.Tensor:
    mask = torch.ones(stored.shape, dtype=torch.bool)
    outer, inner = field.compact_shape(region)
    mask[:outer, :inner] = False
    return stored[mask]


@st.composite
def regions(draw, field: Field, most: int = 14) -> Region:
    """A region, of a larger whole, that starts at whole stored bytes."""
    spans = []
    for dim in (0, 1):
        start = draw(st.integers(0, 9)) * field.alignment(dim)
        spans.append(Span(start, draw(st.integers(0, most))))
    return Region(*spans)


@st.composite
def cuts(draw, field: Field, region: Region, dim: int) -> list[Region]:
    """Parts of `region` along `dim`: uneven, some empty, never inside a stored byte."""
    extent, unit = region.shape[dim], field.alignment(dim)
    inner = sorted(draw(st.lists(st.integers(0, extent // unit), max_size=4)))
    edges = [0, *(i * unit for i in inner), extent]
    return [region.narrow(dim, a, b - a) for a, b in zip(edges, edges[1:], strict=False)]


@given(st.data(), fields)
@of_every_field
def test_what_is_stored_is_loaded(data, field):
    region = data.draw(regions(field))
    values = values_of(field, region)
    stored = geometry.store(field, values, region)
    assert stored.shape == field.shape(region) and stored.dtype == field.dtype
    assert torch.equal(geometry.load(field, stored, region), values)


@given(st.data(), fields)
@of_every_field
def test_padding_is_zero_also_in_a_used_buffer(data, field):
    region = data.draw(regions(field))
    fresh = geometry.store(field, values_of(field, region), region)
    used = poisoned(field, region)
    assert geometry.store(field, values_of(field, region), region, used) is used
    assert torch.equal(used, fresh)
    assert not padding_of(field, fresh, region).any()
    assert not padding_of(field, geometry.empty(field, region, device="cpu"), region).any()


@given(st.data(), fields)
@of_every_field
def test_a_wire_is_a_view_without_padding_from_which_all_is_rebuilt(data, field):
    region = data.draw(regions(field))
    stored = geometry.store(field, values_of(field, region), region)
    wire = geometry.compact(field, stored, region)
    assert wire.shape == field.compact_shape(region)
    assert wire.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    assert torch.equal(geometry.padded(field, wire.clone(), region), stored)
    assert torch.equal(geometry.padded(field, wire.clone(), region, poisoned(field, region)), stored)


@given(st.data(), fields)
@of_every_field
def test_a_part_of_what_is_stored_is_the_part_stored(data, field):
    region = data.draw(regions(field))
    values = values_of(field, region)
    stored = geometry.store(field, values, region)
    part = data.draw(st.sampled_from(data.draw(cuts(field, region, 0))))
    part = data.draw(st.sampled_from(data.draw(cuts(field, part, 1))))
    expected = geometry.store(field, values_of_part(field, values, region, part), part)
    assert torch.equal(geometry.narrow(field, stored, region, part), expected)
    out = poisoned(field, part)
    assert geometry.narrow(field, stored, region, part, out) is out
    assert torch.equal(out, expected)


@given(st.data(), fields)
@of_every_field
def test_a_part_owns_its_buffer(data, field):
    region = data.draw(regions(field))
    stored = geometry.store(field, values_of(field, region), region)
    part = geometry.narrow(field, stored, region, region)
    before = part.clone()
    stored.zero_()
    assert torch.equal(part, before)


@given(st.data(), fields)
@of_every_field
def test_a_part_of_a_part_is_that_part_of_the_whole(data, field):
    region = data.draw(regions(field))
    stored = geometry.store(field, values_of(field, region), region)
    outer = data.draw(st.sampled_from(data.draw(cuts(field, region, 1))))
    inner = data.draw(st.sampled_from(data.draw(cuts(field, outer, 0))))
    through = geometry.narrow(field, geometry.narrow(field, stored, region, outer), outer, inner)
    assert torch.equal(through, geometry.narrow(field, stored, region, inner))


@given(st.data(), fields, st.randoms(use_true_random=False))
@of_every_field
def test_parts_assemble_to_the_whole_in_any_order(data, field, random):
    region = data.draw(regions(field))
    stored = geometry.store(field, values_of(field, region), region)
    rows = data.draw(cuts(field, region, 0))
    parts = [part for row in rows for part in data.draw(cuts(field, row, 1))]
    random.shuffle(parts)
    wires = [geometry.compact(field, geometry.narrow(field, stored, region, part), part).clone() for part in parts]
    assert torch.equal(geometry.assemble(field, wires, parts, region), stored)
    out = poisoned(field, region)
    assert geometry.assemble(field, wires, parts, region, out) is out
    assert torch.equal(out, stored)


RELAYOUTS = [
    (Field("plain", I32), Field("plain_km", I32, order="km", pad=(4, 8))),
    (Field("nibbles", U8, pack=2), Field("nibbles_km", U8, order="km", pack=2, pad=(1, 4))),
    (Field("nibbles", U8, pack=2), Field("bytes", U8)),
    (Field("one_per_tile", I32, (4, 4)), Field("repeated", I32, (1, 4), tile=(4, 4), pad=(8, 4))),
    (Field("row", I32, (1, 4), tile=(4, 4), pad=(8, 4)), Field("col", I32, (4, 1), order="km", tile=(4, 4))),
    (Field("whole_matrix", I32, (WHOLE, WHOLE)), Field("whole_km", I32, (WHOLE, WHOLE), order="km", pad=(1, 4))),
]


@pytest.mark.parametrize("src, dst", [pair[::step] for pair in RELAYOUTS for step in (1, -1)])
@given(st.data())
@settings(max_examples=15)
def test_another_layout_holds_the_same_values(src, dst, data):
    region = data.draw(regions(src))
    assume(all(start % dst.alignment(dim) == 0 for dim, start in enumerate(region.origin)))
    values = values_of(min(src, dst, key=lambda field: field.bits), region).to(src.dtype)
    moved = geometry.relayout(src, dst, geometry.store(src, values, region), region)
    assert torch.equal(moved, geometry.store(dst, values, region))
    assert torch.equal(geometry.load(dst, moved, region), values)


def test_stored_order_by_hand():
    region = Region.whole(2, 3)
    values = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=U8)
    assert geometry.store(Field("mk", U8), values, region).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert geometry.store(Field("km", U8, order="km"), values, region).tolist() == [[1, 4], [2, 5], [3, 6]]
    km_nibbles = Field("km", U8, order="km", pack=2)
    assert geometry.store(km_nibbles, values, region).tolist() == [[0x41], [0x52], [0x63]]
    # the last byte of an odd row is half empty
    assert geometry.store(Field("mk", U8, pack=2), values, region).tolist() == [[0x21, 0x03], [0x54, 0x06]]
    padded = Field("mk", U8, order="km", pad=(4, 3))
    assert geometry.store(padded, values, region).tolist() == [[1, 4, 0], [2, 5, 0], [3, 6, 0], [0, 0, 0]]


def test_values_of_a_cut_tile_go_to_both_sides():
    field = Field("one_per_tile", I32, (4, 4))
    region = Region.whole(8, 4)
    stored = geometry.store(field, torch.tensor([[10], [20]], dtype=I32), region)
    upper, lower = region.narrow(0, 0, 6), region.narrow(0, 6, 2)
    assert geometry.narrow(field, stored, region, upper).tolist() == [[10], [20]]
    assert geometry.narrow(field, stored, region, lower).tolist() == [[20]]


@pytest.mark.parametrize("order, dim", [("mk", 1), ("km", 0)])
@pytest.mark.parametrize("start, length", [(1, 3), (0, 3), (1, 1), (3, 2)])
def test_a_cut_inside_a_stored_byte_is_refused(order, dim, start, length):
    field, region = Field("nibbles", U8, order=order, pack=2), Region.whole(5, 5)
    part = region.narrow(dim, start, length)
    stored = geometry.store(field, values_of(field, region), region)
    with pytest.raises(ValueError, match="nibbles.*inside a stored byte.*multiples of 2"):
        geometry.narrow(field, stored, region, part)
    with pytest.raises(ValueError, match="inside a stored byte"):
        wire = torch.zeros(field.compact_shape(part), dtype=U8)
        geometry.assemble(field, [wire], [part], region)


@pytest.mark.parametrize("order, dim", [("mk", 1), ("km", 0)])
def test_an_odd_end_and_an_empty_part_after_it_are_no_cuts(order, dim):
    field, region = Field("nibbles", U8, order=order, pack=2), Region.whole(5, 5)
    stored = geometry.store(field, values_of(field, region), region)
    parts = [region.narrow(dim, 0, 4), region.narrow(dim, 4, 1), region.narrow(dim, 5, 0)]
    wires = [geometry.narrow(field, stored, region, part) for part in parts]
    assert wires[-1].numel() == 0
    assert torch.equal(geometry.assemble(field, wires, parts, region), stored)


@st.composite
def row_shards(draw, field: Field, region: Region) -> list[Region]:
    """Row parts: as torch.chunk cuts, or anywhere."""
    if field.alignment(0) == 1 and draw(st.booleans()):
        return list(region.chunk(draw(st.integers(1, 5))))
    return draw(cuts(field, region, 0))


def laid_end_to_end(field: Field, stored: torch.Tensor, region: Region, parts: list[Region]) -> torch.Tensor:
    """All wires, each filled up to the longest with values that occur nowhere else."""
    wires = [geometry.compact(field, geometry.narrow(field, stored, region, part), part).flatten() for part in parts]
    longest = max(len(wire) for wire in wires)
    filler = torch.full((longest,), 0x7F, dtype=field.dtype)
    return torch.cat([torch.cat((wire, filler[len(wire) :])) for wire in wires])


@given(st.data(), fields)
@settings(max_examples=150)
def test_a_concatenation_is_claimed_only_where_wires_begin_with_the_stored_tensor(data, field):
    region = data.draw(regions(field))
    parts = data.draw(row_shards(field, region))
    stored = geometry.store(field, values_of(field, region, first=1000), region)
    joined = laid_end_to_end(field, stored, region, parts)
    begins = torch.equal(joined[: stored.numel()], stored.flatten())
    assert begins or not geometry.is_concatenation(field, parts, region)


@given(st.data(), st.sampled_from([f for f in FIELDS if f.order == "mk" and f.pack == 1]))
@settings(max_examples=150)
def test_a_concatenation_is_claimed_wherever_unpadded_rows_are_in_order(data, field):
    region = data.draw(regions(field))
    parts = data.draw(row_shards(field, region))
    assume(not field.is_padded(region) and len(region.rows))
    stored = geometry.store(field, values_of(field, region, first=1000), region)
    joined = laid_end_to_end(field, stored, region, parts)
    begins = torch.equal(joined[: stored.numel()], stored.flatten())
    assume(stored.numel())
    assert geometry.is_concatenation(field, parts, region) == begins
