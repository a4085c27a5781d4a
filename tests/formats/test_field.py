"""Declarations: extents, alignments, what is derivable, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_dist.formats import WHOLE, Direction, Encoding, Field, Format, Region, Span

U8, F32 = torch.uint8, torch.float32
MATRIX = Region.whole(10, 22)


@dataclass(frozen=True)
class Numerics:
    """A codec as formats see it: compared, and asked where it may be cut."""

    name: str = "numerics"
    cut: tuple[int, int] = (1, 1)

    def alignment(self, dim: int) -> int:
        return self.cut[dim]


def two_directions(row_tile=(4, 4), col_tile=(4, 4), codecs=(Numerics(), Numerics())) -> Format:
    return Format(
        Encoding(codecs[0], (Field("row_codes", U8), Field("row_scale", F32, (1, 4), tile=row_tile))),
        Encoding(codecs[1], (Field("col_codes", U8, order="km"), Field("col_scale", F32, (4, 1), tile=col_tile))),
    )


SHAPES = [
    # field, compact and allocated extents of a 10 x 22 matrix
    (Field("codes", U8), (10, 22), (10, 22)),
    (Field("codes", U8, order="km"), (22, 10), (22, 10)),
    (Field("codes", U8, pack=2), (10, 11), (10, 11)),
    (Field("codes", U8, order="km", pack=2), (22, 5), (22, 5)),
    (Field("codes", F32, (1, 4), pad=(8, 4)), (10, 6), (16, 8)),
    (Field("codes", F32, (1, 4), order="km", pad=(1, 4)), (6, 10), (6, 12)),
    (Field("codes", F32, (4, 4), pad=(1, 4)), (3, 6), (3, 8)),
    (Field("codes", F32, (4, 1), tile=(4, 4)), (3, 22), (3, 22)),
    (Field("codes", F32, (WHOLE, WHOLE)), (1, 1), (1, 1)),
    (Field("codes", F32, (1, WHOLE), order="km"), (1, 10), (1, 10)),
]


@pytest.mark.parametrize("field, compact, allocated", SHAPES)
def test_extents_of_a_field(field, compact, allocated):
    assert field.compact_shape(MATRIX) == compact
    assert field.shape(MATRIX) == allocated
    assert field.is_padded(MATRIX) == (compact != allocated)
    assert field.compact_bytes(MATRIX) == math.prod(compact) * field.dtype.itemsize


@pytest.mark.parametrize("field", [field for field, _, _ in SHAPES])
def test_extents_follow_from_the_number_of_rows_and_the_columns(field):
    for rows in (0, 1, 4, 7):
        for cols in (Span(0, 22), Span(2, 20)):
            assert field.shape_of(rows, cols) == field.shape(Region(Span(0, rows), cols))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_extents_of_a_part_count_the_blocks_it_touches(m0, m, k0, k):
    region = Region(Span(m0, m), Span(k0, k))
    rows = len({r // 4 for r in range(m0, m0 + m)})
    cols = len({c // 3 for c in range(k0, k0 + k)})
    assert Field("codes", U8, (4, 3)).compact_shape(region) == (rows, cols)
    assert Field("codes", U8, (4, 3), order="km").compact_shape(region) == (cols, rows)
    assert Field("codes", U8, (4, 3), pack=2).compact_shape(region) == (rows, (cols + 1) // 2)


def test_only_a_packed_dimension_asks_for_alignment():
    assert [Field("codes", U8).alignment(dim) for dim in (0, 1)] == [1, 1]
    assert [Field("codes", U8, (8, 8)).alignment(dim) for dim in (0, 1)] == [1, 1]
    assert [Field("codes", U8, pack=2).alignment(dim) for dim in (0, 1)] == [1, 2]
    assert [Field("codes", U8, order="km", pack=2).alignment(dim) for dim in (0, 1)] == [2, 1]
    assert [Field("codes", U8, (4, 8), pack=2).alignment(dim) for dim in (0, 1)] == [1, 16]


def test_a_value_of_the_whole_is_shared_by_shards():
    assert [Field("codes", F32, (1, WHOLE)).is_shared(dim) for dim in (0, 1)] == [False, True]


def test_bits_of_a_value():
    assert [Field("codes", U8, pack=2).bits, Field("codes", U8).bits, Field("codes", F32).bits] == [4, 8, 32]


@pytest.mark.parametrize("name", ["data", "shape", "grad", "T", "dtype", "layout"])
def test_a_name_that_would_shadow_one_of_a_tensor_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' would shadow"):
        Field(name, U8)


@pytest.mark.parametrize(
    "grain, tile", [((1, 4), (1, 6)), ((4, 4), (2, 4)), ((1, 1), (WHOLE, 1)), ((1, WHOLE), (1, 4))]
)
def test_a_tile_that_is_no_multiple_of_the_grain_is_refused(grain, tile):
    with pytest.raises(ValueError, match="no multiple of grain"):
        Field("codes", U8, grain, tile=tile)


@pytest.mark.parametrize("dtype, pack", [(U8, 4), (U8, 0), (F32, 2), (torch.int32, 2)])
def test_a_packing_that_nothing_can_unpack_is_refused(dtype, pack):
    with pytest.raises(ValueError, match="pack"):
        Field("codes", dtype, pack=pack)


def test_a_field_without_tile_is_constant_on_its_grain():
    assert Field("codes", U8, (2, 3)).tile == (2, 3)


def test_a_format_without_direction_is_refused():
    with pytest.raises(ValueError, match="neither"):
        Format()


def test_a_field_declared_in_two_ways_is_refused():
    row = Encoding(Numerics(), (Field("codes", U8),))
    col = Encoding(Numerics(), (Field("codes", U8, order="km"),))
    with pytest.raises(ValueError, match="'codes' is declared in two ways"):
        Format(row, col)


def test_a_field_of_both_directions_is_stored_once():
    shared = Field("amax_value", F32, (WHOLE, WHOLE))
    row, col = Field("row_codes", U8), Field("col_codes", U8, order="km")
    format = Format(Encoding(Numerics(), (row, shared)), Encoding(Numerics(), (col, shared)))
    assert format.fields == (row, shared, col)
    assert format.compact_bytes(MATRIX) == 220 + 4 + 220


def test_directions_of_a_format():
    both = two_directions()
    row = both.select(Direction.ROWWISE)
    assert both.directions == (Direction.ROWWISE, Direction.COLUMNWISE)
    assert row.directions == (Direction.ROWWISE,) and Direction.COLUMNWISE not in row
    assert row[Direction.ROWWISE] is both[Direction.ROWWISE]
    with pytest.raises(KeyError, match="columnwise"):
        row[Direction.COLUMNWISE]
    assert both.select(*both.directions) == both


DERIVABLE = [
    (two_directions(), True),
    (two_directions(row_tile=(1, 4), col_tile=(4, 1)), False),
    (two_directions(codecs=(Numerics(), Numerics("rotated"))), False),
    (two_directions().select(Direction.ROWWISE), False),
    (two_directions().select(Direction.COLUMNWISE), False),
]


@pytest.mark.parametrize("format, derivable", DERIVABLE)
def test_columnwise_is_derivable_where_codecs_and_tiles_are_equal(format, derivable):
    assert format.columnwise_is_derivable is derivable
    assert format.canonical == (format.select(Direction.ROWWISE) if derivable else format)
    assert format.canonical.canonical == format.canonical


def test_the_alignment_of_a_format_is_that_of_what_parts_hold():
    packed = Encoding(Numerics(cut=(3, 1)), (Field("row_codes", U8, pack=2),))
    other = Encoding(Numerics(cut=(3, 1)), (Field("col_codes", U8, order="km", pack=2),))
    assert [Format(packed).alignment(dim) for dim in (0, 1)] == [3, 2]
    assert [Format(None, other).alignment(dim) for dim in (0, 1)] == [6, 1]
    # columnwise is derived from rowwise, so that its packing along M binds nobody
    assert [Format(packed, other).alignment(dim) for dim in (0, 1)] == [3, 2]


def test_bytes_count_padding_only_where_it_is_allocated():
    format = Format(Encoding(Numerics(), (Field("codes", U8), Field("factor", F32, (1, 4), pad=(8, 4)))))
    assert format.compact_bytes(MATRIX) == 220 + 10 * 6 * 4
    assert format.allocated_bytes(MATRIX) == 220 + 16 * 8 * 4


def test_renaming_changes_names_alone():
    format = two_directions()
    renamed = format.renamed("weight_")
    assert [f.name for f in renamed.fields] == ["weight_" + f.name for f in format.fields]
    assert renamed.columnwise_is_derivable and renamed.directions == format.directions
    assert renamed.select(Direction.ROWWISE) == format.select(Direction.ROWWISE).renamed("weight_")


def test_formats_are_values():
    assert two_directions() == two_directions() and hash(two_directions()) == hash(two_directions())
    assert two_directions() != two_directions(row_tile=(1, 4))
