"""Every private PyTorch API that te_dist touches. Other modules import these names from here and nowhere else.

`IMPORTED` lists what this module passes on, `ATTRIBUTES` the private attributes of public classes that are used in
place. Each entry says why there is no public way, and which members and parameters are relied on.
`tests/test_torch_private.py` fails when one of them moves; `TESTED` are the versions under which it passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl as disabled_torch_function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved_versions
from torch.distributed import _composable_state, distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "ATTRIBUTES",
    "IMPORTED",
    "TESTED",
    "Private",
    "TorchDispatchMode",
    "call_when_backward_ends",
    "copy_each",
    "current_cuda_stream",
    "disabled_torch_function",
    "gather_end_to_end",
    "in_backward",
    "is_dispatch_watched",
    "is_gathered",
    "is_mutable",
    "is_traceable_wrapper_subclass",
    "preserved_versions",
    "process_group",
    "reshards_between_passes",
    "scaled_mm",
    "sharded_of",
    "return_and_correct_aliasing",
    "tree_leaves",
    "tree_map_only",
]

TESTED = ("2.11", "2.13")


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; a recomputed forward pass is."""
    return torch._C._current_graph_task_id() != -1


def process_group(name: str) -> dist.ProcessGroup:
    """The group that functional collectives know by `name`."""
    return distributed_c10d._resolve_process_group(name)


def call_when_backward_ends(callback: Callable[[], None]) -> None:
    """Runs `callback` at the end of the backward pass that this thread is inside of."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies every source into its target, in a number of kernels that does not depend on theirs."""
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def current_cuda_stream(device: int) -> int:
    """Handle of the current stream of a CUDA device."""
    return torch._C._cuda_getCurrentRawStream(device)


def is_dispatch_watched() -> bool:
    """Whether a mode of this thread sees every op, as compilers and trackers have it."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_mutable(op: Any) -> bool:
    """Whether an op of torch (an OpOverload) writes into an argument."""
    return op._schema.is_mutable


def scaled_mm(
    a: Tensor, b: Tensor, *, scales: tuple[Tensor, Tensor], bias: Tensor | None, fast: bool, out: Tensor
) -> None:
    """`a` (m, k) times `b` (k, n), of FP8 codes with one f32 scale each, plus `bias` (n,) of the type of `out` (m, n).

    Args:
        a: contiguous.
        b: the transpose of a contiguous matrix.
        fast: accumulate in the tensor cores' own precision, below that of fp32.
    """
    if out.is_meta:
        return  # torch has no fake of the variant that writes into `out`
    torch._scaled_mm(a, b, *scales, bias, None, out.dtype, fast, out=out)


def reshards_between_passes(unit: nn.Module) -> bool:
    """Whether an FSDP2 unit frees its parameters after forward and after backward; settled at the first forward."""
    state = unit._get_fsdp_state()
    if state._is_root is None and state._auto_reshard_after_forward:
        return False  # gathered by hand before any forward: it may turn out to be the root, which keeps them
    return all(g._reshard_after_forward and g.reshard_after_backward for g in _parameter_groups(unit))


def is_gathered(tensor: Tensor) -> bool:
    """Whether FSDP2 gathered this parameter, or the DTensor whose local part it is, for passes of the unit it is in."""
    return sharded_of(tensor) is not None


def sharded_of(tensor: Tensor) -> Tensor | None:
    """The sharded parameter that FSDP2 gathered this one, or the DTensor whose local part it is, from; else None."""
    same = [found for found in (tensor, tensor._base) if found is not None]
    for unit in list(_composable_state._module_state_mapping):
        if isinstance(unit, FSDPModule):
            for group in _parameter_groups(unit):
                for param in group.fsdp_params:
                    whole = getattr(param, "_unsharded_param", None)
                    known = whole, getattr(whole, "_local_tensor", whole)
                    if any(found is each for found in same for each in known):
                        return param.sharded_param
    return None


def gather_end_to_end(unit: nn.Module, kind: type[Tensor]) -> None:
    """Has FSDP2 lay wires of parameters of class `kind` that it shards along other dimensions than 0 end to end.

    It would lay them side by side along that dimension, as if a wire were the shard. Wires of parameters that have a
    gather of their own are bytes of any number.
    """
    for group in _parameter_groups(unit):
        for param in group.fsdp_params:
            if param.fsdp_placement.dim != 0 and isinstance(param._sharded_local_tensor, kind):
                param.padded_sharded_param_size = _EndToEnd(param.padded_sharded_param_size)


def _parameter_groups(unit: nn.Module) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class _EndToEnd(tuple):
    """A size that equals that of the shard; as a list it is that of one line, of as many elements as there are."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, _Rest(-1), *(1,) * (len(self) - 2)))


class _Rest(int):
    """The extent that `view` finds by itself; so are multiples of it."""

    def __mul__(self, other: int) -> _Rest:
        return self


@dataclass(frozen=True)
class Private:
    """One private API.

    Attributes:
        path: where torch keeps it.
        why: what it is used for, and why nothing public serves.
        name: under which this module exports it; empty for entries of `ATTRIBUTES`.
        members: attributes of it, or of its instances, that are used.
        parameters: names of its first parameters, in the order in which they are passed.
        needs_cuda: whether only a torch built for CUDA has it.
    """

    path: str
    why: str
    name: str = ""
    members: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    needs_cuda: bool = False


IMPORTED = (
    Private(
        "torch._C._disabled_torch_function_impl",
        "`__torch_function__` of a subclass on which dispatch alone decides; torch documents it for subclass authors",
        name="disabled_torch_function",
    ),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees every op of a block (counters, storage tracker); the module is private, the class is documented",
        name="TorchDispatchMode",
        members=("__torch_dispatch__",),
    ),
    Private(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "tells tensors that are made of inner tensors from plain ones; FSDP2 and torch.compile ask the same question",
        name="is_traceable_wrapper_subclass",
        parameters=("t",),
    ),
    Private(
        "torch.utils._python_dispatch.return_and_correct_aliasing",
        "view and in-place ops of a wrapper subclass must alias as the schema says, or autograd is wrong in silence",
        name="return_and_correct_aliasing",
        parameters=("func", "args", "kwargs", "out"),
    ),
    Private(
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "bytes that are gathered again are those that autograd saved; FSDP2 says so of its own buffers the same way",
        name="preserved_versions",
        parameters=("tensors",),
    ),
    Private(
        "torch.utils._pytree.tree_leaves",
        "finds the tensors in the arguments of an op; torch has no public tree functions",
        name="tree_leaves",
        parameters=("tree", "is_leaf"),
    ),
    Private(
        "torch.utils._pytree.tree_map_only",
        "replaces the tensors in the arguments of an op; torch has no public tree functions",
        name="tree_map_only",
        parameters=("type_or_types_or_pred", "func", "tree"),
    ),
)

ATTRIBUTES = (
    Private(
        "torch.nn.Module._forward_pre_hooks",
        "whether somebody sees what a module is given; there is a public way to add a hook, none to ask for any",
    ),
    Private("torch.nn.Module._forward_hooks", "the same of those who see what it is given and returns"),
    Private(
        "torch._C._len_torch_dispatch_stack",
        "whether ops are being watched, asked on every pass; the public class tells of no mode but its own",
    ),
    Private(
        "torch._ops.OpOverload._schema",
        "whether an op writes into its arguments; torch.library hands schemas in only",
    ),
    Private(
        "torch._scaled_mm",
        "cuBLASLt's FP8 GEMM into a given output; `torch.nn.functional.scaled_mm` allocates its own",
    ),
    Private(
        "torch._C._cuda_getCurrentRawStream",
        "the stream's handle in a tenth of the time that torch.cuda.current_stream takes; Triton asks the same way",
        needs_cuda=True,
    ),
    Private(
        "torch._C._current_graph_task_id",
        "tells a gather in backward from one in forward; FSDP2 does not hand the phase to its hooks",
    ),
    Private(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "whether a unit reshards after forward is settled at its first forward only; nothing public says",
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
        "FSDP2 takes wires of extension tensors for shards where it cuts another dimension than 0; the size by which "
        "it lays them out is kept here alone",
        members=(
            *("padded_sharded_param_size", "fsdp_placement", "_sharded_local_tensor", "_unsharded_param"),
            "sharded_param",
        ),
    ),
    Private(
        "torch.distributed._composable_state._module_state_mapping",
        "finds the units of FSDP2, and by `FSDPParam._unsharded_param` what they gathered: in forward a gathered "
        "parameter looks like any other, and what writes its `.grad` by hand is lost",
    ),
    Private(
        "torch.Tensor._make_wrapper_subclass",
        "the only constructor of a tensor without storage of its own",
    ),
    Private(
        "torch.distributed.tensor.DTensor._local_tensor",
        "the local shard without the autograd edge that `to_local` adds; FSDP2 reads hooks on it",
    ),
    Private(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "the end of a backward pass, when all of its amaxes are known; hooks of tensors see single gradients only",
    ),
    Private(
        "torch.Tensor._base",
        "tells views of a parameter, which offloading must not copy; views carry no public link to what they view",
    ),
    Private(
        "torch.Tensor._version",
        "tells that a saved tensor was written since; autograd asks the same where no hooks stand in",
    ),
    Private(
        "torch.distributed.distributed_c10d._resolve_process_group",
        "DTensor hands a gather the name of its group only; nothing public finds the group",
    ),
    Private(
        "torch.nn.Module._parameters",
        "puts a tensor in the place of a parameter for one forward pass; `setattr` takes parameters only",
    ),
    Private(
        "torch.nn.Module._apply",
        "keeps fp32 scales fp32 under `model.bfloat16()`; the public conversions give a module no say",
    ),
    Private(
        "torch._foreach_copy_",
        "copies many tensors in a fixed number of kernels; torch.optim uses it so",
    ),
)
