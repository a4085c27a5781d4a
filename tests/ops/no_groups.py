"""Every op on groups, with none: nothing is written but what all groups together have."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops.gemm_decoded import Coded

FP8 = ("e4m3", "e4m3")


class NoGroups:
    """Outputs are threes before, on one device; each method checks them."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.table = self.threes(4, 1, dtype=torch.int32)
        for dtype, are_sizes in ((torch.int64, False), (torch.int32, True)):
            self.table.fill_(3)
            ops.group_table(self.threes(0, dtype=dtype), rows=300, out=self.table, are_sizes=are_sizes)
            assert self.table.tolist() == [[0]] * 4

    def threes(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, 3, dtype=dtype, device=self.device)

    def codes(self, *shape: int) -> Tensor:
        return self.threes(*shape, dtype=torch.uint8)

    def coded(self, kept: int, summed: int) -> Coded:
        return Coded(self.codes(kept, summed), "e4m3", self.codes(kept, summed // 32), (1, 32))

    def check_products(self) -> None:
        """Of rows."""
        out, codes, scale = self.threes(300, 64), (self.codes(300, 128), self.codes(0, 128)), self.threes(1)
        place = dict(table=self.table, bias=None, row_factor=self.threes(300), accumulate=False, out=out)
        halves = [self.threes(extent, 64, dtype=torch.bfloat16) for extent in (300, 0)]
        for summed_dim in (0, 1):
            ops.grouped_gemm_half(*halves, summed_dim=summed_dim, **place)
        ops.grouped_gemm_float8_tensor(codes[0], scale, codes[1], self.threes(0), fp8=FP8, fast=True, **place)
        for tile, scales in (((1, 128), self.threes(0, 64)), ((128, 128), self.threes(0, 4))):
            runs = self.threes(1, 300)
            ops.grouped_gemm_float8_block(codes[0], runs, codes[1], scales, summed_dim=1, b_tile=tile, fp8=FP8, **place)
        ops.grouped_gemm_decoded(self.coded(300, 128), self.coded(0, 128), **place)
        assert (out == 3).all()

    def check_sums(self) -> None:
        """Products that sum over rows, whose output has no rows."""
        a, b = self.codes(64, 384), self.codes(48, 384)
        for accumulate in (False, True):
            place = dict(table=self.table, accumulate=accumulate, out=self.threes(0, 48))
            halves = [self.threes(300, extent, dtype=torch.bfloat16) for extent in (64, 48)]
            ops.grouped_wgrad_half(*halves, **place)
            ops.grouped_wgrad_float8_tensor(a, self.threes(1), b, self.threes(0), fp8=FP8, **place)
            ops.grouped_wgrad_float8_block(a, self.threes(3, 64), b, self.threes(3, 48), fp8=FP8, **place)
            ops.grouped_wgrad_decoded(self.coded(64, 384), self.coded(48, 384), **place)

    def check_quantizers(self) -> None:
        """One scale for all groups is written, those of each are none."""
        x, row_data, col_data = self.threes(300, 64), self.codes(300, 64), self.codes(64, 0)
        place = dict(table=self.table, row_data=row_data)
        for count in (0, 1):
            for op, given, rule in (
                (ops.grouped_quantize_float8_tensor, 4.0, {}),
                (ops.grouped_quantize_float8_current, 112.0, dict(pow2=False, eps=0.0)),
            ):
                scales = dict(row_scale=self.threes(count), col_scale=self.threes(count))
                op(x, self.threes(count).fill_(given), fp8="e4m3", col_data=col_data, **rule, **scales, **place)
                assert all((scale == 0.25).all() for scale in scales.values())
        runs = dict(row_tile=(1, 128), row_scale=self.threes(1, 300), col_tile=(128, 1), col_scale=self.threes(0, 64))
        ops.grouped_quantize_float8_block(x, fp8="e4m3", pow2=True, eps=0.0, col_data=col_data, **runs, **place)
        runs = dict(row_tile=(1, 32), row_scale=self.codes(300, 2), col_tile=(32, 1), col_scale=self.codes(0, 64))
        ops.grouped_quantize_mxfp8(x, fp8="e4m3", col_data=self.codes(0, 64), **runs, **place)
        runs = dict(row_tile=(1, 16), row_scale=self.codes(300, 4), col_tile=(16, 1), col_scale=self.codes(64, 0))
        runs |= dict(row_tensor_amax=self.threes(1), col_tensor_amax=self.threes(0), row_data=self.codes(300, 32))
        rule = dict(e4m3_max=448, four_over_six="none", rng_state=None)
        ops.grouped_quantize_nvfp4(x, table=self.table, col_data=col_data, **rule, **runs)
        assert all((codes == 3).all() for codes in (row_data, runs["row_data"], runs["row_scale"]))

    def check_amaxes(self) -> None:
        """The amax of no rows is zero; rows of no group become zeros."""
        x, outs = self.threes(300, 64), [self.threes(1) for _ in range(3)]
        ops.grouped_amax(x, table=self.table, out=outs[0])
        ops.grouped_direction_amax(x, table=self.table, row_amax=outs[1], col_amax=outs[2])
        ops.grouped_amax(x, table=self.table, out=self.threes(0))
        ops.group_sums(self.threes(3, 64), table=self.table, out=self.threes(0, 64))
        ops.clear_rest(x, table=self.table)
        assert all((tensor == 0).all() for tensor in (x, *outs))

    def check(self) -> None:
        """All of them."""
        self.check_products()
        self.check_sums()
        self.check_quantizers()
        self.check_amaxes()
