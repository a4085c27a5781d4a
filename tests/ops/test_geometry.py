"""Ops that only move values: transpose and assemble, against plain torch."""

from __future__ import annotations

import pytest
import torch

from te_dist import ops
from te_dist.ops.assemble import Chunking
from te_dist.testing import assert_bitwise
from tests.codecs.kernel_inputs import every_level, pack
from tests.ops.assembled import CHUNKINGS, gathered_from, whole_of

DTYPES = {8: torch.uint8, 16: torch.bfloat16, 32: torch.float32}
SHAPES = [(1, 1), (16, 64), (64, 16), (128, 128), (130, 70), (7, 333), (1, 400), (300, 257), (0, 4), (4, 0)]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_transpose(shape, bits):
    src = torch.randint(-(2**15), 2**15, shape).to(DTYPES[bits])
    for level in every_level():
        out = torch.zeros(shape[::-1], dtype=DTYPES[bits])
        ops.transpose(src, bits=bits, out=out)
        assert_bitwise(out, src.t(), f"{bits} bits, {level}")


@pytest.mark.parametrize("shape", [(2, 2), (16, 64), (130, 70), (6, 334), (256, 512), (0, 4)])
def test_transpose_of_packed_values(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    for level in every_level():
        out = torch.zeros(shape[1], shape[0] // 2, dtype=torch.uint8)
        ops.transpose(pack(codes), bits=4, out=out)
        assert_bitwise(out, pack(codes.t()), level)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 130, 70), (0, 4, 4), (5, 2, 2)])
def test_transposes_of_several_matrices(shape, bits):
    dtype = DTYPES.get(bits, torch.uint8)
    src = torch.randint(-(2**15), 2**15, shape).to(dtype)
    out = torch.zeros((shape[0], 2 * shape[2], shape[1] // 2) if bits == 4 else (shape[0], *shape[:0:-1]), dtype=dtype)
    ops.transpose(src, bits=bits, out=out)
    for index, matrix in enumerate(src):
        alone = torch.zeros_like(out[index])
        ops.transpose(matrix, bits=bits, out=alone)
        assert_bitwise(out[index], alone, f"matrix {index}")


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("shape", [(64, 32), (3, 48, 80), (40, 70), (1, 1), (130, 300)])
def test_scales_of_squares_are_turned(shape, bits):
    """Lines that repeat each value along the other dimension, as both directions of a format keep them."""
    *matrices, rows, cols = shape
    square, padded = 16, 4
    tiles = torch.randint(0, 100, (*matrices, -(-rows // square), -(-cols // square))).to(DTYPES[bits])
    src = torch.nn.functional.pad(tiles.repeat_interleave(square, -2)[..., :rows, :], (0, 1))
    out = torch.full((*matrices, cols, tiles.shape[-2] + padded), 99).to(DTYPES[bits])
    ops.transpose(src, bits=bits, out=out, square=square)
    wanted = tiles.mT.repeat_interleave(square, -2)[..., :cols, :]
    assert_bitwise(out, torch.nn.functional.pad(wanted, (0, padded)), f"{bits} bits")


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("shape", [(16, 64), (130, 70), (2, 258), (3, 6, 10)])
def test_padding_of_lines_is_not_turned_and_becomes_zeros(shape, bits):
    *matrices, rows, cols = shape
    dtype, pack = DTYPES.get(bits, torch.uint8), 2 if bits == 4 else 1
    src = torch.randint(1, 100, (*matrices, rows, (cols + 6) // pack)).to(dtype)
    for level in every_level():
        out = torch.full((*matrices, cols, (rows + 4) // pack), 99).to(dtype)
        alone = torch.zeros((*matrices, cols, rows // pack), dtype=dtype)
        ops.transpose(src, bits=bits, out=out)
        ops.transpose(src[..., : cols // pack].contiguous(), bits=bits, out=alone)
        assert_bitwise(out[..., : rows // pack].contiguous(), alone, level)
        assert not out[..., rows // pack :].any()


@pytest.mark.parametrize(
    "out",
    [torch.zeros(2, 4, 5), torch.zeros(2, 6, 4).mT, torch.zeros(8, 6), torch.zeros(1, 5, 6), torch.zeros(2, 6, 6)],
)
def test_transposes_into_what_does_not_fit_are_refused(out):
    with pytest.raises(ValueError, match="out: got"):
        ops.transpose(torch.zeros(2, 6, 5 if out.is_contiguous() else 4), bits=32, out=out)


def test_a_matrix_is_not_turned_into_several():
    with pytest.raises(ValueError, match="out: got"):
        ops.transpose(torch.zeros(6, 5), bits=32, out=torch.zeros(1, 5, 6))


def test_transposing_twice_is_the_identity():
    src = torch.randn(700, 1030)  # large enough for threads
    once, twice = torch.empty(1030, 700), torch.empty(700, 1030)
    ops.transpose(src, bits=32, out=once)
    ops.transpose(once, bits=32, out=twice)
    assert_bitwise(twice, src, "twice transposed")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.bool])
def test_assembled_parts_make_the_matrix_they_were_cut_from(dtype):
    whole = torch.randint(0, 2, (90, 70)).to(dtype)
    cuts = [(0, 40, 0, 70), (40, 90, 0, 30), (40, 90, 30, 70), (90, 90, 0, 70)]
    wires = [whole[r0:r1, c0:c1] for r0, r1, c0, c1 in cuts]
    starts = dict(row_starts=[c[0] for c in cuts], col_starts=[c[2] for c in cuts])
    out = torch.zeros(90, 80, dtype=dtype)[:, :70]
    ops.assemble(wires, **starts, out=out)
    assert_bitwise(out, whole, "assembled")
    out.zero_()
    ops.assemble([wire.contiguous() for wire in wires], **starts, out=out)
    assert_bitwise(out, whole, "assembled from contiguous parts")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_chunks_that_ranks_gathered_make_the_whole(chunking, dim, dtype):
    whole = whole_of(chunking, dim, (3, 10), dtype)
    gathered = gathered_from(whole, chunking, dim, (8, 4, 1))
    out = torch.zeros(*whole.shape[:2], whole.shape[2] + 2, dtype=dtype)[..., : whole.shape[2]]
    ops.assemble_chunks(gathered, chunking, dim=dim, out=out)
    assert_bitwise(out, whole, "assembled")
    if dim:
        alone = gathered_from(whole[1], chunking, dim - 1, (0, 0, 0))
        ops.assemble_chunks(alone, chunking, dim=dim - 3, out=out[0])
        assert_bitwise(out[0], whole[1], "of one matrix")


@pytest.mark.parametrize(("phase", "length", "grain"), [(0, 5, 4), (3, 6, 4), (2, 1, 16), (0, 16, 16), (7, 9, 8)])
def test_the_most_values_that_a_chunk_has(phase, length, grain):
    for extent in range(40):
        chunking = Chunking(phase, extent, length, grain)
        values = (torch.arange(extent) + phase) // grain
        assert chunking.num_values == len(values.unique())
        assert chunking.most_values == max((len(rows.unique()) for rows in values.split(length)), default=0)
