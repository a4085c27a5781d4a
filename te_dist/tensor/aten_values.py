"""The aten ops of a QuantizedTensor that go through its values, by explicit lists.

*Reading* ops dequantize what they are given and return plain tensors: they exist so that ordinary code (a norm in a
log line, an average of weights that is kept in high precision) runs. *Comparing* ops see what was quantized, where that
is kept and gradients are off: initializers draw again what lies outside of bounds. *Fresh* ops make plain tensors of
the nominal shape. *Writing* ops compute in high precision and quantize the result back. *Averaging* ops write into
plain tensors only. Products of matrices are in no list: they belong to the modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from te_dist._torch_private import tree_leaves, tree_map_only
from te_dist.tensor import pieces, rectangles, writes
from te_dist.tensor.parts import check_writable
from te_dist.tensor.quantized_tensor import OPS, QuantizedTensor

aten = torch.ops.aten

READING = """
_foreach_add.List _foreach_add.Scalar _foreach_div.List _foreach_div.Scalar _foreach_mul.List _foreach_mul.Scalar
_foreach_norm.Scalar _foreach_sub.List _foreach_sub.Scalar _local_scalar_dense.default _softmax.default abs.default
add.Scalar add.Tensor all.default all.dim allclose.default amax.default amin.default aminmax.default any.default
any.dim argmax.default argmin.default cat.default clamp.default count_nonzero.default cumsum.default dist.default
div.Scalar div.Tensor embedding.default eq.Scalar eq.Tensor exp.default flip.default gather.default histc.default
index.Tensor index_select.default isfinite.default isinf.default isnan.default lerp.Scalar lerp.Tensor
linalg_vector_norm.default log.default masked_select.default max.default max.dim maximum.default mean.default mean.dim
median.default min.default min.dim minimum.default mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg.default
nonzero.default norm.Scalar norm.ScalarOpt_dim pow.Tensor_Scalar pow.Tensor_Tensor prod.default reciprocal.default
repeat.default round.default rsqrt.default rsub.Scalar sgn.default sigmoid.default sign.default sort.default
sqrt.default square.default stack.default std.correction std.default sub.Scalar sub.Tensor sum.default
sum.dim_IntList tanh.default topk.default tril.default triu.default var.correction var.default
""".split()  # noqa: SIM905

COMPARING = """
ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor lt.Scalar lt.Tensor where.ScalarOther where.self
""".split()  # noqa: SIM905

FRESH = """
full_like.default new_full.default new_ones.default ones_like.default rand_like.default randn_like.default
zeros_like.default
""".split()  # noqa: SIM905

WRITING = """
add_.Scalar add_.Tensor addcdiv_.default addcmul_.default bernoulli_.float clamp_.default clamp_max_.default
clamp_min_.default div_.Scalar div_.Tensor exponential_.default fill_.Scalar fill_.Tensor log_.default
masked_fill_.Scalar masked_fill_.Tensor mul_.Scalar mul_.Tensor nan_to_num_.default neg_.default normal_.default
pow_.Scalar sqrt_.default sub_.Scalar sub_.Tensor trunc_.default uniform_.default zero_.default
""".split()  # noqa: SIM905

WRITING_LISTS = """
_foreach_add_.List _foreach_add_.Scalar _foreach_addcdiv_.Scalar _foreach_addcdiv_.ScalarList _foreach_addcmul_.Scalar
_foreach_clamp_max_.Scalar _foreach_clamp_min_.Scalar _foreach_copy_.default _foreach_div_.List _foreach_div_.Scalar
_foreach_mul_.List _foreach_mul_.Scalar _foreach_mul_.Tensor
_foreach_sub_.List _foreach_sub_.Scalar _foreach_zero_.default
""".split()  # noqa: SIM905

# By which torch before 2.13 makes a truncated normal: of a code that is rounded to 1 it is inf.
WRITING_KEPT = "erfinv_.default".split()  # noqa: SIM905

# Of those above, what adds tensors: by which averages and steps of one's own go on.
ADDING = """
add_.Tensor addcdiv_.default addcmul_.default sub_.Tensor _foreach_add_.List _foreach_addcdiv_.Scalar
_foreach_addcdiv_.ScalarList _foreach_addcmul_.Scalar _foreach_sub_.List
""".split()  # noqa: SIM905

# Of those, what asks for no values that were there before.
FILLING = """
bernoulli_.float exponential_.default fill_.Scalar fill_.Tensor normal_.default uniform_.default zero_.default
""".split()  # noqa: SIM905

AVERAGING = """
lerp_.Scalar lerp_.Tensor _foreach_lerp_.List _foreach_lerp_.Scalar _foreach_lerp_.ScalarList
""".split()  # noqa: SIM905


def overloads(names: Iterable[str]) -> list[Any]:
    """Overloads of this torch; an op that a version does not have needs no handler there."""
    found: list[Any] = []
    for name in names:
        packet, overload = name.split(".")
        if overload in getattr(getattr(aten, packet, None), "overloads", list)():
            found.append(getattr(getattr(aten, packet), overload))
    return found


_ADDING, FILLING_OPS = frozenset(overloads(ADDING)), frozenset(overloads(FILLING))


def _plain(tree: Any) -> Any:
    return tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, tree)


def _drawn(tree: Any) -> Any:
    return _plain(tree) if torch.is_grad_enabled() else tree_map_only(QuantizedTensor, _drawn_of, tree)


def _drawn_of(tensor: QuantizedTensor) -> Tensor:
    is_kept = _kept(tensor) is not None or tensor.storage.is_of_kept_group
    return written(tensor).to(tensor.dtype) if is_kept else tensor.dequantize()


@OPS.implements(*(op for op in overloads(READING) if op is not aten.cat.default))
def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """On the dequantized values; the result is a plain tensor."""
    return func(*_plain(args), **_plain(kwargs))


@OPS.implements(*overloads(COMPARING))
def _compare(func: Any, args: Any, kwargs: Any) -> Any:
    """On the values that were quantized, where these are kept and gradients off, or else the dequantized ones."""
    return func(*_drawn(args), **_drawn(kwargs))


@OPS.implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """On the dequantized values; what DTensor joins on its way to other ranks or from them stays bytes."""
    tensors, dim = (*args, kwargs.get("dim", 0))[:2]
    for joined in (rectangles.whole_of, pieces.joined):
        if (found := joined(tensors, dim)) is not None:
            return found
    return _read(func, args, kwargs)


@OPS.implements(*overloads(FRESH))
def _fresh(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A new plain tensor of the nominal shape and dtype (optimizer state, gradients)."""
    like = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs)


def written(target: QuantizedTensor) -> Tensor:
    """What an op that changes values of a quantized tensor writes into: a copy of the best values known. Those of the
    master that has them, in fp32; or what was quantized, where that is kept, not narrower; or else decoded ones. Of a
    member, those that its group knows."""
    member: Any = target.storage
    writes.decide(target.storage if member.owner is None else member.owner)
    if member.owner is not None and (best := member.best_values) is not None:
        return best.to(target.device, torch.float32, copy=True)
    if (master := writes.master_of(target.storage)) is not None:
        return master.to(torch.float32, copy=True).view(target.shape)
    if (kept := _kept(target)) is not None:
        return kept.to(target.device, torch.promote_types(kept.dtype, target.dtype), copy=True).view(target.shape)
    return target.decoded()


def _kept(target: QuantizedTensor) -> Tensor | None:
    """What was quantized, of a weight that keeps that."""
    return target.storage.initial if target.keep_initial else None


def write_back(target: QuantizedTensor, values: Tensor, *, begins: bool = False) -> None:
    """What became of `written`: quantized into place, and what it came from follows, or `begins` with these values."""
    storage = target.storage
    master, write = writes.master_of(storage), storage.mastered
    is_kept = _kept(target) is not None or (begins and target.keep_initial)
    target.quantize_(values)  # NOTE: the owner of a member takes note there
    if master is not None:
        writes.change(storage, master, values, write=write)
    elif is_kept:
        storage.note_initial(values)


def warn_of_sum(func: Any, target: Any, *others: Any) -> None:
    """Before tensors are added into quantized ones that have nothing else than codes: once for each line of code."""
    if func not in _ADDING or not any(isinstance(other, Tensor) and other.dim() for other in tree_leaves(others)):
        return  # NOTE: a number comes as a tensor without dimensions
    tensors = [each for each in tree_leaves(target) if isinstance(each, QuantizedTensor)]
    for each in tensors:
        writes.decide(each.storage)
    if any(writes.master_of(each.storage) is None and _kept(each) is None for each in tensors):
        warnings.warn(  # without the shape: texts that differ are printed again
            f"{func} rounds its result to the codes of a quantized tensor: a sum over many steps (an average, an "
            "optimizer of one's own) loses those smaller than the distance of two codes and stands still. Sum in plain "
            "tensors (value.detach() * 1.0) and copy_ the result; optimizers are in te_dist.optim",
            stacklevel=5,
        )


@OPS.implements(*overloads(WRITING))
def _write(func: Any, args: Any, kwargs: Any) -> Tensor:
    """In high precision, the result quantized back into place."""
    check_writable(args[0])
    warn_of_sum(func, *args)
    target, values = args[0], tree_map_only(QuantizedTensor, written, args[0])
    func(values, *_plain(args[1:]), **_plain(kwargs))
    if not isinstance(target, QuantizedTensor):
        return target.copy_(values)
    write_back(target, values, begins=func in FILLING_OPS)
    return target


@OPS.implements(*overloads(WRITING_KEPT))
def _write_kept(func: Any, args: Any, kwargs: Any) -> Tensor:
    """In high precision, the result quantized back into place; of values that are kept as they were quantized alone."""
    check_kept(func, args[0])
    return _write(func, args, kwargs)


def check_kept(func: Any, target: QuantizedTensor) -> None:
    """Raises NotImplementedError where `target` has nothing but rounded values."""
    if _kept(target) is None and not target.storage.is_of_kept_group:
        raise NotImplementedError(
            f"{func} of a quantized tensor of {tuple(target.shape)}: its values are rounded, and those that became 1 "
            "would become inf; make the weight in quantized_model_init(preserve_high_precision_init_val=True), or pass "
            "init_method, or fill it by another initializer"
        )


@OPS.implements(*overloads(WRITING_LISTS))
def _write_lists(func: Any, args: Any, kwargs: Any) -> None:
    """In high precision, every result of the list quantized back into place."""
    for target in args[0]:
        check_writable(target)
    warn_of_sum(func, *args)
    values = tree_map_only(QuantizedTensor, written, args[0])
    func(values, *_plain(args[1:]), **_plain(kwargs))
    for target, value in zip(args[0], values, strict=True):
        if isinstance(target, QuantizedTensor):
            write_back(target, value)  # NOTE: counted there; of lists autograd counts nothing


@OPS.implements(*overloads(AVERAGING))
def _average(func: Any, args: Any, kwargs: Any) -> Any:
    """Of quantized tensors into plain ones only; into quantized ones, where its steps would be lost, it is refused."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    targets = given["self"]
    for target in [targets] if isinstance(targets, Tensor) else targets:
        if isinstance(target, QuantizedTensor):
            raise RuntimeError(
                f"{func} would move a quantized tensor of shape {tuple(target.shape)} by a fraction of its distance to "
                "another: steps smaller than the distance of two codes are lost, and an average would stand still. "
                "Keep it in plain tensors (value.detach() * 1.0 of each parameter, in a module for AveragedModel), "
                "into which quantized ones may be averaged; docs/tensor.md has an example"
            )
    func(**_plain(given))
    return targets if func._schema.returns else None
