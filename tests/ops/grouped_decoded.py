"""Operands of decoded products in groups, and their values in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist.codecs.reference import decode_mxfp8
from te_dist.codecs.reference.casts import e2m1_decode, float8_decode
from te_dist.kernels.gemm_staged import GRAINS
from te_dist.ops.gemm_decoded import Coded

KINDS = ("e4m3", "e5m2", "e2m1")


class DecodedOperand:
    """Random codes (kept, summed) with scale bytes near 1, and what they stand for.

    Attributes:
        coded: as ops take it.
        values: float64 (kept, summed), without the factor.
        factors: float64, one for each group.
    """

    def __init__(  # noqa: PLR0913  (each is one property of the operand)
        self,
        kept: int,
        summed: int,
        kind: str,
        *,
        seed: int,
        groups: int,
        turned: bool = False,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

        blocks = -(-summed // GRAINS[kind])
        if kind == "e2m1":
            codes, scale = draw(0, 256, kept, summed // 2), draw(0x28, 0x48, kept, blocks)
            digits = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
            of_scale = float8_decode(scale, "e4m3").double()
            values = e2m1_decode(digits).double() * of_scale.repeat_interleave(16, 1)[:, :summed]
        else:
            codes, scale = draw(0, 256, kept, summed) & 0xBF, draw(122, 132, kept, blocks)
            values = decode_mxfp8(codes, scale, (1, 32), (0, 0), kind).double()
        factor = torch.rand(groups, 1, generator=generator) + 0.5
        self.values, self.factors = values.to(device), factor.double().to(device)
        lay = (lambda x: x.t().contiguous().to(device).t()) if turned else (lambda x: x.to(device))
        self.coded = Coded(lay(codes), kind, lay(scale), (1, GRAINS[kind]), factor=factor.to(device), constant=0.25)

    def factor(self, group: int) -> Tensor:
        """What a group's values are multiplied by."""
        return 0.25 * self.factors[group]


def with_room(operand: Coded) -> Coded:
    """The same with lines of scales in whole words, whose padding is NaN."""
    scale = operand.scale
    plane = torch.full((scale.shape[0], -(-scale.shape[1] // 4) * 4), 255, dtype=torch.uint8, device=scale.device)
    plane[:, : scale.shape[1]] = scale
    return operand._replace(scale=plane[:, : scale.shape[1]])
