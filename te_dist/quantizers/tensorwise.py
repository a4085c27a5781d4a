"""Quantizers of FP8 with one scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_dist import catalog, codecs
from te_dist.formats import Format
from te_dist.ops.source import Source
from te_dist.quantizers.base import AgreeingQuantizer, Fp8Type, Quantizer, declared, fp8_name, with_eps
from te_dist.tensor import GroupedRows, QuantizedStorage, as_matrix


@dataclass
class Float8Quantizer(Quantizer):
    """A scale that is known beforehand, as delayed scaling keeps it.

    Attributes:
        scale: f32, one element; values are multiplied by it.
        amax: f32, one element, raised to the largest magnitude of what is quantized; None to leave that unrecorded.
        fp8_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
    """

    scale: Tensor
    amax: Tensor | None
    fp8_dtype: Fp8Type = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        self.declare(torch.bfloat16)
        for name, value in (("scale", self.scale), ("amax", self.scale if self.amax is None else self.amax)):
            if not isinstance(value, Tensor) or value.dtype != torch.float32:
                found = value.dtype if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"Float8Quantizer: {name} is an fp32 tensor of one element, got {found}; where no scale is known "
                    "Float8CurrentScalingQuantizer finds one"
                )

    def declare(self, dtype: torch.dtype) -> Format:
        return declared(catalog.float8_tensorwise, fp8=fp8_name(self.fp8_dtype), columnwise="transposed")

    @property
    def settles(self) -> bool:
        return True

    @property
    def takes_groups(self) -> bool:
        return type(self) is Float8Quantizer

    @property
    def reads_once(self) -> bool:
        return type(self) is Float8Quantizer

    def write(self, x: Tensor | Source, storage: QuantizedStorage) -> None:
        if self.scale.numel() != 1:
            raise ValueError(
                f"Float8Quantizer: scale has one element, got {self.scale.numel()}; groups alone have more"
            )
        matrix = as_matrix(x, storage.shape)
        directions = storage.directions
        planes = [codecs.Plane(storage.format[d], storage.stored(d)) for d in directions]
        planes[0].encoding.codec.encode_scaled(matrix, self.scale, planes, recorded=self.amax)

    def write_groups(self, x: Tensor | Source, rows: GroupedRows) -> None:
        """Scale and amax have one value for every group."""
        planes = [codecs.Plane(rows.format[d], rows.stored(d)) for d in rows.format.directions]
        codec = planes[0].encoding.codec
        matrix = as_matrix(x, rows.shape)
        scale, recorded = (None if each is None else each.view(-1) for each in (self.scale, self.amax))
        codec.encode_groups_scaled(matrix, scale, planes, table=rows.table, recorded=recorded)


@dataclass
class Float8CurrentScalingQuantizer(AgreeingQuantizer):
    """A scale found from the tensor itself.

    Attributes:
        fp8_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.
    """

    fp8_dtype: Fp8Type = torch.float8_e4m3fn
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        self.declare(torch.bfloat16)

    def declare(self, dtype: torch.dtype) -> Format:
        fp8, pow2 = fp8_name(self.fp8_dtype), self.force_pow_2_scales
        format = declared(catalog.float8_tensorwise, fp8=fp8, pow2=pow2, columnwise="transposed")
        return with_eps(format, self.amax_epsilon)

    @property
    def takes_groups(self) -> bool:
        return type(self) is Float8CurrentScalingQuantizer and not self.with_amax_reduction
