"""For every op of the table, arguments to call it with: by its schema, or written out where that says too little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_dist.tensor import QuantizedTensor

aten = torch.ops.aten

# What follows the tensor, where a value of the declared type would not do.
WRITTEN_OUT: dict[str, Any] = {
    "_softmax.default": lambda t: (0, False),
    "as_strided.default": lambda t: (list(t.shape), list(t.stride())),
    "bernoulli_.float": lambda t: (0.5,),
    "chunk.default": lambda t: (2, 0),
    "clamp.default": lambda t: (0.2, 1.0),
    "clamp_.default": lambda t: (0.2, 1.0),
    "constant_pad_nd.default": lambda t: ((0, 0, 0, 2),),
    "copy_.default": lambda t: (_other(t),),
    "embedding.default": lambda t: (torch.tensor([0, 2]),),
    "exponential_.default": lambda t: (2.0,),
    "expand.default": lambda t: ([1, *t.shape],),
    "fill_.Tensor": lambda t: (torch.tensor(0.5),),
    "flip.default": lambda t: ([0],),
    "gather.default": lambda t: (0, torch.zeros(1, t.shape[1], dtype=torch.long)),
    "index.Tensor": lambda t: ([torch.tensor([0, 1])],),
    "index_select.default": lambda t: (0, torch.tensor([0, 1])),
    "linalg_vector_norm.default": lambda t: (2,),
    "masked_fill_.Scalar": lambda t: (_mask(t), 0.5),
    "masked_fill_.Tensor": lambda t: (_mask(t), torch.tensor(0.5)),
    "masked_select.default": lambda t: (_mask(t),),
    "new_empty.default": lambda t: ([0, t.shape[1]],),
    "new_full.default": lambda t: ([3], 0.5),
    "new_ones.default": lambda t: ([3],),
    "new_zeros.default": lambda t: ([3],),
    "norm.ScalarOpt_dim": lambda t: (2, [0]),
    "permute.default": lambda t: ([1, 0],),
    "repeat.default": lambda t: ([2, 1],),
    "slice.Tensor": lambda t: (0, 0, 32),
    "split.Tensor": lambda t: (32, 0),
    "split_with_sizes.default": lambda t: ([32, t.shape[0] - 32], 0),
    "squeeze.dim": lambda t: (0,),
    "topk.default": lambda t: (3, 0),
    "transpose.int": lambda t: (0, 1),
    "view.default": lambda t: (list(t.shape),),
    "_unsafe_view.default": lambda t: (list(t.shape),),
    "_reshape_alias.default": lambda t: (list(t.shape), list(t.stride())),
}
BY_TYPE = {
    "number": 0.5,
    "int": 0,
    "float": 0.25,
    "bool": False,
    "List[int]": [0],
    "Optional[List[int]]": [0],
    "Optional[number]": 0.5,
}


# Ops whose first argument is not the tensor.
TENSOR_LATER: dict[str, Any] = {
    "_foreach_mul_.Tensor": lambda t: ([t], torch.tensor(0.5)),
    "cat.default": lambda t: ([t, _other(t)],),
    "lerp_.Scalar": lambda t: (_other(t), t, 0.5),
    "lerp_.Tensor": lambda t: (_other(t), t, _other(t)),
    "_foreach_lerp_.List": lambda t: ([_other(t)], [t], [_other(t)]),
    "_foreach_lerp_.Scalar": lambda t: ([_other(t)], [t], 0.5),
    "_foreach_lerp_.ScalarList": lambda t: ([_other(t)], [t], [0.5]),
    "select.int": lambda t: (t.view(2, -1, t.shape[1]), 0, 1),
    "stack.default": lambda t: ([t, _other(t)],),
    "where.ScalarOther": lambda t: (_mask(t), t, 0.5),
    "where.self": lambda t: (_mask(t), t, _other(t)),
}


def arguments(op: Any, tensor: Tensor) -> tuple[Any, ...]:
    """Arguments of an overload, with `tensor` (2-D, quantized or plain) where its values are expected."""
    name = f"{op.overloadpacket.__name__}.{op._overloadname}"
    if name in TENSOR_LATER:
        return TENSOR_LATER[name](tensor)
    if name in WRITTEN_OUT:
        return (tensor, *WRITTEN_OUT[name](tensor))
    return _by_schema(op, tensor)


def _by_schema(op: Any, tensor: Tensor) -> tuple[Any, ...]:
    """The tensor first, then plain tensors of its shape and plain values, up to the first argument with a default."""
    found: list[Any] = []
    for argument in op._schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(_other(tensor) if found else tensor)
        elif kind == "List[Tensor]":
            found.append([_other(tensor)] if found else [tensor])
        elif kind == "List[number]":
            found.append([0.5])
        else:
            found.append(BY_TYPE[kind])
    return tuple(found)


def plain(tree: Any) -> Any:
    """The same arguments with the values of every quantized tensor."""
    return torch.utils._pytree.tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, tree)


def _other(tensor: Tensor) -> Tensor:
    """A plain tensor of the shape of `tensor`, with other positive values."""
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(tensor.shape, generator=generator) + 0.5).to(tensor.dtype)


def _mask(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel()).view(tensor.shape) % 3 == 0
