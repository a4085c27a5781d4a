"""What ops read their matrix from: a tensor as it is, or what is computed from tensors on the way.

A source stands for a matrix in the dtype of its `x`, every value of which is computed in fp32 and rounded once. An op
that is given a source does byte for byte what it does with `evaluate(source)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from te_dist.formats.region import Pair
from te_dist.kernels.inputs import GATHERED
from te_dist.ops._checks import HIGH_PRECISION, check_matrix, check_output, check_packed, check_shape

PANEL = 128  # rows, or columns, whose sums are written together

Unsummed = tuple[Tensor, str, list[Tensor]]  # x, the source's name, the tensors beside
Read = tuple[Tensor, str, list[Tensor], Tensor | None, Tensor | None]  # these, panel sums, sums of rows


class Source:
    """Base of what stands for a matrix.

    Attributes:
        x: the tensor that it is computed from: fp32, bf16 or fp16; contiguous.
    """

    name: ClassVar[str]

    x: Tensor

    @property
    def shape(self) -> Pair:
        """(rows, cols) of the matrix it stands for."""
        rows, cols = self.x.shape
        return rows, cols

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix it stands for."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.x.device

    @property
    def beside(self) -> tuple[Tensor, ...]:
        """The other tensors that are read."""
        return ()

    @property
    def row_sums(self) -> Tensor | None:
        """Where sums go that are found of every row on the way, over panels of 128 columns."""
        return None

    def check(self) -> None:
        """Raises ValueError where the tensors do not fit each other."""
        check_matrix("x", self.x)


@dataclass(frozen=True)
class SwiGlu(Source):
    """silu(gate) * up, (rows, cols), of `x` (rows, 2 cols), which holds gates to the left and ups to the right.

    Attributes:
        probability: f32 (rows,), by which the rows are multiplied as well, as a mixture of experts weighs its tokens.
    """

    x: Tensor
    probability: Tensor | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return "swiglu" if self.probability is None else "weighted_swiglu"

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return () if self.probability is None else (self.probability,)

    @property
    def shape(self) -> Pair:
        rows, cols = self.x.shape
        return rows, cols // 2

    def check(self) -> None:
        super().check()
        _check_halves(self.x)
        _check_probability(self.probability, self.x)


@dataclass(frozen=True)
class SwiGluGradient(Source):
    """The gradient, (rows, 2 cols), of `SwiGlu(x, probability)` by `x`, given that by its values, `grad` (rows, cols).

    Attributes:
        row_sums: f32 (panels of 128 columns of `grad`, rows), is written beside a probability: grad * silu(gate) * up
            summed over the columns of each panel, by `panel_sums.column_sums` of which the gradient of the probability
            is found. Every 8 columns are summed from left to right; 16 such sums are folded in halves. Columns that the
            last panel lacks are +0. Ops that find amaxes alone do not sum.
    """

    x: Tensor
    grad: Tensor
    probability: Tensor | None = None
    row_sums: Tensor | None = None  # type: ignore[override]

    @property
    def name(self) -> str:  # type: ignore[override]
        return "swiglu_gradient" if self.probability is None else "weighted_swiglu_gradient"

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return (self.grad,) if self.probability is None else (self.grad, self.probability)

    def check(self) -> None:
        super().check()
        _check_halves(self.x)
        check_matrix("grad", self.grad, (self.x.dtype,))
        check_shape("grad", self.grad, (self.x.shape[0], self.x.shape[1] // 2))
        _check_probability(self.probability, self.x)
        if self.row_sums is not None:
            if self.probability is None:
                raise ValueError(
                    "row_sums: got no probability, of which they are the gradient; pass one, or no row_sums"
                )
            check_output("row_sums", self.row_sums, torch.float32, row_sums_shape(self.grad))


@dataclass(frozen=True)
class RmsNorm(Source):
    """x * rstd * gamma.

    Attributes:
        rstd: f32 (rows,), as `rms_rstd` writes it.
        gamma: (cols,), fp32, bf16 or fp16, contiguous.
        zero_centered: gamma is stored less one.
    """

    x: Tensor
    rstd: Tensor
    gamma: Tensor
    zero_centered: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return "zero_centered_rms_norm" if self.zero_centered else "rms_norm"

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return self.rstd, self.gamma

    def check(self) -> None:
        super().check()
        rows, cols = self.x.shape
        check_packed("rstd", self.rstd, (torch.float32,), (rows,))
        check_packed("gamma", self.gamma, HIGH_PRECISION, (cols,))


@dataclass(frozen=True)
class Gathered(Source):
    """Rows of another source, or of a tensor: row i is its row `index[i]`, or zeros where it has no row of that number.

    Attributes:
        of: what is gathered, without sums.
        index: int32 or int64 (rows,), contiguous.
    """

    of: Tensor | Source
    index: Tensor

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return flat_source(self.of)[0]

    @property
    def name(self) -> str:  # type: ignore[override]
        return GATHERED + flat_source(self.of)[1]

    @property
    def shape(self) -> Pair:
        return self.index.shape[0], self.of.shape[1]

    @property
    def beside(self) -> tuple[Tensor, ...]:
        return *flat_source(self.of)[2], self.index

    def check(self) -> None:
        check_source(self.of)
        if isinstance(self.of, Summed | Gathered) or (isinstance(self.of, Source) and self.of.row_sums is not None):
            raise ValueError(
                f"of: got {type(self.of).__name__}, wanted a tensor, or a source without sums; gather once, then sum"
            )
        check_packed("index", self.index, (torch.int32, torch.int64), (self.index.numel(),))


@dataclass(frozen=True)
class Summed(Source):
    """Another source, or a tensor, whose columns are summed in the pass that reads it, as `panel_sums` sums them.

    Ops that find amaxes alone do not sum.

    Attributes:
        of: what is summed.
        sums: f32, `sums_shape(of)`, is written.
    """

    of: Tensor | Source
    sums: Tensor

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return self.of.x if isinstance(self.of, Source) else self.of

    @property
    def shape(self) -> Pair:
        rows, cols = self.of.shape
        return rows, cols

    @property
    def row_sums(self) -> Tensor | None:
        return self.of.row_sums if isinstance(self.of, Source) else None

    def check(self) -> None:
        check_source(self.of)
        check_output("sums", self.sums, torch.float32, sums_shape(self.of))


def sums_shape(x: Tensor | Source) -> Pair:
    """(panels of 128 rows, cols)."""
    rows, cols = x.shape
    return -(-rows // PANEL), cols


def row_sums_shape(x: Tensor) -> Pair:
    """(panels of 128 columns, rows)."""
    rows, cols = x.shape
    return -(-cols // PANEL), rows


def unsummed(x: Tensor | Source) -> Tensor | Source:
    """The same without sums."""
    of = x.of if isinstance(x, Summed) else x
    return replace(of, row_sums=None) if isinstance(of, SwiGluGradient) and of.row_sums is not None else of


def check_source(x: Tensor | Source, phase: Pair = (0, 0)) -> None:
    """What every op with a source checks of it. `phase`: of its first element inside the first tile."""
    if not isinstance(x, Source):
        check_matrix("x", x)
        return
    x.check()
    offsets = {"sums": phase[0] if isinstance(x, Summed) else 0, "row_sums": 0 if x.row_sums is None else phase[1]}
    for name, offset in offsets.items():
        if offset:
            raise ValueError(f"{name}: got offset {offset} inside a tile, wanted whole tiles; sum the whole matrix")


def flat_source(x: Tensor | Source) -> Read:
    """(x, source, beside, panel sums, sums of rows), in the order of the schemas."""
    if isinstance(x, Summed):
        return *flat_source(x.of)[:3], x.sums, x.row_sums
    return (x.x, x.name, list(x.beside), None, x.row_sums) if isinstance(x, Source) else (x, "plain", [], None, None)


def _check_halves(x: Tensor) -> None:
    if x.shape[1] % 2:
        raise ValueError(f"x: got {x.shape[1]} columns, wanted an even number, gates and as many ups; concatenate both")


def _check_probability(probability: Tensor | None, x: Tensor) -> None:
    if probability is not None:
        check_packed("probability", probability, (torch.float32,), (x.shape[0],))
