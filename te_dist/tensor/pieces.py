"""What DTensor joins of parts that do not lie side by side, on its way to places that are cut twice.

[Note: Parts in pieces]
FSDP2 cuts what tensor or expert parallelism has cut along the same dimension: its rank i holds the i-th piece of every
part. DTensor places a whole along the dimension of FSDP2 first (`_StridedShard`): it joins the i-th pieces of all
parts, sends them to rank i, and takes them apart there for the ranks that hold the parts. Joined pieces are no
rectangle of a matrix and have no scales in common, so that they stay quantized tensors, one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from te_dist._torch_private import disabled_torch_function, is_joining_pieces
from te_dist.tensor.parts import note_beside
from te_dist.tensor.quantized_tensor import OpTable, QuantizedTensor

aten = torch.ops.aten

OPS = OpTable()


class InPieces(torch.Tensor):
    """Parts of quantized tensors one behind the other, for as long as DTensor sends them about.

    Attributes:
        pieces: quantized; each knows what it was cut from.
        along: the dimension along which they follow each other.
    """

    pieces: list[QuantizedTensor]
    along: int

    def __new__(cls, pieces: Sequence[QuantizedTensor], along: int) -> Self:
        first = pieces[0]
        shape = list(first.shape)
        shape[along] = sum(piece.shape[along] for piece in pieces)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)

    def __init__(self, pieces: Sequence[QuantizedTensor], along: int) -> None:
        self.pieces, self.along = list(pieces), along

    def dequantize(self) -> Tensor:
        """Plain tensor of the same shape and dtype."""
        return torch.cat([piece.decoded() for piece in self.pieces], self.along)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({list(self.shape)}, {self.pieces})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return OPS.call(func, args, kwargs or {})

    __torch_function__: Any = disabled_torch_function


def joined(tensors: Sequence[Any], dim: int) -> InPieces | None:
    """The pieces of a place that is cut twice, where DTensor joins these; None for any other tensors to be joined."""
    if not all(isinstance(tensor, QuantizedTensor) and tensor.storage.cut is not None for tensor in tensors):
        return None
    return InPieces(tensors, dim % tensors[0].dim()) if is_joining_pieces() else None


@OPS.implements(aten.detach.default, aten.alias.default, aten.clone.default, aten.empty_like.default)
def _each_piece(func: Any, args: Any, kwargs: Any) -> InPieces:
    """The same op on every piece."""
    return InPieces([func(piece, *args[1:], **kwargs) for piece in args[0].pieces], args[0].along)


@OPS.implements(torch.ops.c10d.scatter_.default)
def _scatter(func: Any, args: Any, kwargs: Any) -> tuple[list[InPieces], Any]:
    """To each rank its own, piece by piece."""
    outputs, inputs, *rest = args
    work = None
    for index, piece in enumerate(outputs[0].pieces):
        sent = [[tensor.pieces[index] for tensor in inputs[0]]] if inputs else []
        _, work = func([piece], sent, *rest)
    return outputs, work


@OPS.implements(aten.split.Tensor, aten.chunk.default)
def _split(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor] | list[InPieces]:
    """Equally many whole pieces for each of the ranks that hold the parts."""
    tensor, wanted, dim = (*args, kwargs.get("dim", 0))[:3]
    pieces, length = tensor.pieces, tensor.shape[tensor.along]
    number = wanted if func is aten.chunk.default else -(-length // wanted)
    each, rest = divmod(len(pieces), number)
    runs = [pieces[start : start + each] for start in range(0, len(pieces), each or 1)]
    lengths = [sum(piece.shape[tensor.along] for piece in run) for run in runs]
    if dim % tensor.dim() != tensor.along or rest or len(set(lengths)) > 1:
        raise NotImplementedError(
            f"a quantized tensor of {tuple(tensor.shape)} in {len(pieces)} pieces along dim {tensor.along} is taken "
            f"apart between them, got {number} parts along dim {dim}; distribute .dequantize() of the whole instead"
        )
    for beside in zip(*runs, strict=True):
        note_beside([piece.storage for piece in beside])
    return [InPieces(run, tensor.along) if each > 1 else run[0] for run in runs]
