"""Every private PyTorch API that te_dist touches. Other modules import these names from here and nowhere else.

`te_dist._torch_names` lists them: `IMPORTED` is what this module passes on, `ATTRIBUTES` are private attributes of
public classes that are used in place. `tests/test_torch_private.py` fails when one of them moves; `TESTED` are the
versions under which it passed.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved_versions
from torch.distributed import _composable_state, distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from te_dist._torch_names import ATTRIBUTES, IMPORTED, Private

__all__ = [
    "ATTRIBUTES",
    "IMPORTED",
    "TESTED",
    "DTensorSpec",
    "Managed",
    "Private",
    "QuickDispatchMode",
    "TensorMeta",
    "TorchDispatchMode",
    "applied",
    "are_transforms_active",
    "call_when_backward_ends",
    "copy_each",
    "current_cuda_stream",
    "disabled_torch_function",
    "free_gathered",
    "gather_end_to_end",
    "given_name",
    "in_backward",
    "in_ddp_forward",
    "is_autocast_anywhere",
    "is_dispatch_watched",
    "is_first_of_unit",
    "is_any_gathered",
    "is_joining_pieces",
    "is_mutable",
    "is_one_graph",
    "is_placing",
    "is_traceable_wrapper_subclass",
    "managed_parameters",
    "modules_of_unit",
    "number_of_backward",
    "preserved_versions",
    "prefetched_units",
    "pretended_ranks",
    "process_group",
    "reshards_between_passes",
    "sharded_like",
    "sharded_of",
    "ranks_of_unit",
    "return_and_correct_aliasing",
    "tree_leaves",
    "tree_map_only",
    "unpacks_by_checkpoint",
    "watched_collectives",
    "waits_for_backward",
    "zero_each",
]

TESTED = ("2.11", "2.13")
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
_MESH_BROADCAST = inspect.unwrap(_collective_utils.mesh_broadcast).__code__
_STRIDED_SPLIT = inspect.unwrap(_StridedShard._split_tensor).__code__
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and checkpoint_wrapper put into names


def given_name(name: str) -> str:
    """The name that the author of a model gave a module, a parameter or a buffer of it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; a recomputed forward pass is."""
    return torch._C._current_graph_task_id() != -1


def number_of_backward() -> int:
    """Of the backward pass that this thread is inside of: higher than those of passes that began before."""
    return torch._C._current_graph_task_id()


def in_ddp_forward() -> bool:
    """Whether this is inside of the forward pass of a DistributedDataParallel."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def process_group(name: str) -> dist.ProcessGroup:
    """The group that functional collectives know by `name`."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_one_graph() -> bool:
    """Whether the graph that this thread traces is not to break, by `fullgraph=True`."""
    return sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().one_graph


def is_executed(node: Any) -> bool:
    """Whether the backward pass that runs wants what is handed to `node`; `torch.autograd.grad` leaves others out."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what `torch.autograd.grad` was asked for itself; and where the pass is itself compiled
        return True


def call_when_backward_ends(callback: Callable[[], None]) -> None:
    """Runs `callback` at the end of the backward pass that this thread is inside of."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies every source into its target, in a number of kernels that does not depend on theirs."""
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def zero_each(targets: Sequence[Tensor]) -> None:
    """Fills every tensor with zeros, in a number of kernels that does not depend on theirs."""
    torch._foreach_zero_(list(targets))  # pyright: ignore[reportPrivateImportUsage]


def current_cuda_stream(device: int) -> int:
    """Handle of the current stream of a CUDA device."""
    return torch._C._cuda_getCurrentRawStream(device)


class QuickDispatchMode(TorchDispatchMode):
    """One for blocks that no compiler looks into: what guards it from those takes longer than what it does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_dispatch_watched() -> bool:
    """Whether a mode of this thread sees every op, as compilers and trackers have it."""
    return torch._C._len_torch_dispatch_stack() > 0


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`. Arguments are not searched for what ended transforms of torch.func left behind."""
    if torch.compiler.is_compiling() or are_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_watched(module: nn.Module) -> bool:
    """Whether more than its forward pass runs when `module` is called: its hooks, those of all modules, a compiler."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    is_compiled = module._compiled_call_impl is not None
    return any(hooks) or is_compiled or bool(torch.nn.modules.module._has_any_global_hook())


def unpacks_by_checkpoint(ctx: Any) -> bool | None:
    """Whether what an autograd Function saved is made by torch's checkpoint; None where torch does not say."""
    hooks = [getattr(each, "unpack_hook", NotImplemented) for each in getattr(ctx, "_raw_saved_tensors", ())]
    if not hooks or NotImplemented in hooks:
        return None
    return any(getattr(hook, "__module__", None) == checkpoint.__name__ for hook in hooks)


def is_autocast_anywhere() -> bool:
    """Whether torch's autocast is on in this thread, for any type of device."""
    return torch._C._is_any_autocast_enabled()


def is_placing() -> bool:
    """Whether this is called where DTensor sends copies of a tensor along a mesh, as `distribute_tensor` does."""
    return _is_inside(_MESH_BROADCAST)


def is_joining_pieces() -> bool:
    """Whether this is called where DTensor splits a tensor for a dimension that another one of a mesh cuts as well."""
    return _is_inside(_STRIDED_SPLIT)


def _is_inside(code: CodeType) -> bool:
    """Whether this thread is inside of a call of the function that has this code."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@cache
def is_mutable(op: Any) -> bool:
    """Whether an op of torch (an OpOverload) writes into an argument."""
    return op._schema.is_mutable


def reshards_between_passes(unit: nn.Module, *, inside: bool = False) -> bool:
    """Whether an FSDP2 unit frees its parameters after forward and after backward; settled at the first forward.

    Args:
        inside: whether another unit is known to be around it, so that it will not be the root.
    """
    state = _state(unit)
    if state._is_root is None and state._auto_reshard_after_forward and not inside:
        return False  # gathered by hand before any forward: it may turn out to be the root, which keeps them
    return all(g._reshard_after_forward and g.reshard_after_backward for g in _parameter_groups(unit))


@dataclass(frozen=True)
class Managed:
    """A parameter as FSDP2 manages it.

    Attributes:
        module, name: where it is.
        sharded: this rank's, a DTensor.
        num_shards, num_replicas: ranks over which it is cut, and over which the cuts are repeated.
        padded_numel: values of the largest shard.
        param_dtype, reduce_dtype: in which plain parameters are gathered, and gradients are reduced.
        group: number of the group of parameters, of the unit, with which it is gathered.
        is_cut_inside: whether another dimension than the first is cut.
        is_kept: whether it stays gathered after forward.
        is_left_in_backward: whether backward does without it.
        is_offloaded: whether the shard lies in host memory.
    """

    module: nn.Module
    name: str
    sharded: nn.Parameter
    num_shards: int
    num_replicas: int
    padded_numel: int
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    group: int
    is_cut_inside: bool
    is_kept: bool
    is_left_in_backward: bool
    is_offloaded: bool


def managed_parameters(unit: nn.Module, *, inside: bool = False) -> list[Managed]:
    """Those of one FSDP2 unit, in the order in which they are gathered.

    Args:
        inside: whether another unit is known to be around it, so that it will not be the root.
    """
    found, state = [], _state(unit)
    is_root = state._is_root or (state._is_root is None and not inside)
    for number, group in enumerate(_parameter_groups(unit)):
        mesh = group.mesh_info
        frees = group._reshard_after_forward and not (is_root and state._auto_reshard_after_forward)
        for param in group.fsdp_params:
            dtype, policy = param.sharded_param.dtype, param.mp_policy
            param_dtype = policy.param_dtype if policy.param_dtype and dtype.is_floating_point else dtype
            found.append(
                Managed(
                    *_place(param),
                    param.sharded_param,
                    getattr(mesh, "shard_mesh_size", 1),
                    getattr(mesh, "replicate_mesh_size", 1),
                    math.prod(tuple.__iter__(param.padded_sharded_param_size)),
                    param_dtype,
                    policy.reduce_dtype or param_dtype,
                    number,
                    param.fsdp_placement.dim != 0,
                    not frees,
                    not group.unshard_in_backward,
                    param.offload_to_cpu,
                )
            )
    return found


def modules_of_unit(unit: nn.Module) -> tuple[nn.Module, ...]:
    """Those that were wrapped by FSDP2 as one, with this one among them."""
    return tuple(_state(unit)._modules)


def ranks_of_unit(unit: nn.Module) -> set[int]:
    """Global ranks over which an FSDP2 unit shards or replicates parameters of its own; none where it has none."""
    return {rank for group in _parameter_groups(unit) for rank in group.mesh_info.mesh.mesh.flatten().tolist()}


def all_managed() -> Iterator[tuple[nn.Module, str]]:
    """Where every parameter is that FSDP2 has sharded in this process: its module, and its name there."""
    return (_place(param) for _, group in _units() for param in group.fsdp_params)


def prefetched_units(unit: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Units that were named to be gathered ahead when `unit` runs in forward, and in backward."""
    state = _state(unit)
    forward, backward = state._states_to_forward_prefetch, state._states_to_backward_prefetch
    return [each._modules[0] for each in forward], [each._modules[0] for each in backward]


def is_first_of_unit(unit: nn.Module) -> bool:
    """Whether it is the only one, or the first, of the modules that were wrapped together."""
    return _state(unit)._modules[0] is unit


@contextmanager
def watched_collectives(
    gathered: Callable[[nn.Module, str, int], None], reduced: Callable[[nn.Module, str, int, int], None]
) -> Iterator[None]:
    """Tells, inside the context, what every FSDP2 unit of this process hands to collectives, by parameter.

    Args:
        gathered: of each gather, takes module and name of a parameter and the bytes of its gathered shards.
        reduced: of each reduction of gradients, takes the same with the bytes that are reduced and scattered, and
            those that are reduced over replicas then.
    """
    home: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    gather, reduce, arguments = home.foreach_all_gather, home.foreach_reduce, inspect.signature(home.foreach_reduce)

    def foreach_all_gather(params: list[Any], group: dist.ProcessGroup, *rest: Any, **named: Any) -> Any:
        result = gather(params, group, *rest, **named)
        sizes = zip(result.param_all_gather_input_numels, result.param_all_gather_input_dtypes, strict=True)
        for param, (numels, dtypes) in zip(params, sizes, strict=True):
            sent = sum(n * dtype.itemsize for n, dtype in zip(numels, dtypes, strict=True))
            gathered(*_place(param), sent * group.size())
        return result

    def foreach_reduce(params: list[Any], grads: list[Tensor], *rest: Any, **named: Any) -> Any:
        given = arguments.bind(params, grads, *rest, **named).arguments
        scattered, replicas = given["reduce_scatter_group"], given["all_reduce_group"]
        num_shards = 1 if scattered is None else scattered.size()
        itemsize = (given["reduce_dtype"] or grads[0].dtype).itemsize
        shares = [
            (_place(param), _padded_numel(param, grad, num_shards) * itemsize)
            for param, grad in zip(params, grads, strict=True)
        ]
        over_replicas = replicas is not None and replicas.size() > 1 and given["all_reduce_grads"]
        result = reduce(params, grads, *rest, **named)
        assert result[0].nbytes == sum(share for _, share in shares), "FSDP2 reduces other bytes than gradients have"
        for place, share in shares:
            reduced(*place, share if num_shards > 1 else 0, share // num_shards if over_replicas else 0)
        return result

    home.foreach_all_gather, home.foreach_reduce = foreach_all_gather, foreach_reduce
    try:
        yield
    finally:
        home.foreach_all_gather, home.foreach_reduce = gather, reduce


@contextmanager
def pretended_ranks(world_size: int, rank: int) -> Iterator[None]:
    """A process group of `world_size` ranks of which there is this one alone: collectives return and move nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
    hook = sys.excepthook  # torch puts the rank before every line of an exception, once for each group it makes
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)  # type: ignore
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _place(param: Any) -> tuple[nn.Module, str]:
    return param._module_info.module, param._module_info.param_name


def _padded_numel(param: Any, grad: Tensor, num_shards: int) -> int:
    """Values of a gradient, filled up so that all ranks have equally many."""
    if param.fsdp_placement.dim != 0:
        return grad.numel()
    return -(-grad.shape[0] // num_shards) * num_shards * math.prod(grad.shape[1:])


def is_any_gathered(tensors: Sequence[Tensor]) -> bool:
    """Whether FSDP2 gathered one of these parameters, or the DTensor whose local part it is, for passes of its unit."""
    gathered = {id(each) for _, whole in _gathered_params() for each in whole if each is not None}
    return bool(gathered) and any(id(tensor) in gathered or id(tensor._base) in gathered for tensor in tensors)


def sharded_like(param: DTensor, local: Tensor, *, shape: Sequence[int] | None = None) -> DTensor:
    """`local`, on whichever device, as a tensor that is sharded as `param` is, without autograd.

    Args:
        param: also one whose shards lie on other devices than its mesh.
        local: this rank's part.
        shape: of the whole, where it is another than that of `param`.
    """
    whole = param if shape is None else torch.empty(tuple(shape), device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(param.device_mesh, tuple(param.placements), tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)


def sharded_of(tensor: Tensor) -> Tensor | None:
    """The sharded parameter that FSDP2 gathered this one, or the DTensor whose local part it is, from; else None."""
    param = _gathered(tensor)
    return None if param is None else param.sharded_param


def gathered_place(tensor: Tensor) -> tuple[nn.Module, str, int] | None:
    """Of a parameter that FSDP2 gathered: its module, its name there, and the dimension that is cut; else None."""
    param = _gathered(tensor)
    return None if param is None else (*_place(param), param.fsdp_placement.dim)


def waits_for_backward(params: Sequence[Tensor]) -> bool:
    """Whether FSDP2, outside of a backward pass, still waits for the end of one, which was to give these gradients."""
    ends = (found for found in _units() if _state(found[0])._state_ctx.post_backward_final_callback_queued)
    return not in_backward() and any(_has(group, params) for _, group in ends)


def free_gathered(params: Sequence[Tensor]) -> None:
    """Frees, outside of a backward pass, what FSDP2 gathered of units with one of these shards among their own."""
    for group in [g for _, g in _units() if not (in_backward() or g.is_sharded) and _has(g, params)]:
        group._to_sharded()  # `reshard` leaves alone what a forward pass had gathered that raised


def _has(group: Any, params: Sequence[Tensor]) -> bool:
    return not {id(param) for param in params}.isdisjoint(id(param.sharded_param) for param in group.fsdp_params)


def _gathered(tensor: Tensor) -> Any:
    """What FSDP2 keeps of the parameter that it gathered as `tensor`, or as a DTensor with this local part; or None."""
    same = {id(found) for found in (tensor, tensor._base) if found is not None}
    return next((param for param, whole in _gathered_params() if not same.isdisjoint(map(id, whole))), None)


def _gathered_params() -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """What FSDP2 keeps of each parameter; what it gathered it as, and the local part of that; None where it has not."""
    for _, group in _units():
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            yield param, (whole, getattr(whole, "_local_tensor", whole))


def gather_end_to_end(unit: nn.Module, kind: type[Tensor]) -> None:
    """Has FSDP2 lay wires of parameters of class `kind` that it shards along other dimensions than 0 end to end.

    It would lay them side by side along that dimension, as if a wire were the shard. Wires of parameters that have a
    gather of their own are bytes of any number.
    """
    for group in _parameter_groups(unit):
        for param in group.fsdp_params:
            if param.fsdp_placement.dim != 0 and isinstance(param._sharded_local_tensor, kind):
                param.padded_sharded_param_size = _EndToEnd(param.padded_sharded_param_size)


def _units() -> Iterator[tuple[FSDPModule, Any]]:
    """Every unit of FSDP2 in this process, with each group of its parameters."""
    units = (unit for unit in list(_composable_state._module_state_mapping) if isinstance(unit, FSDPModule))
    return ((unit, group) for unit in units for group in _parameter_groups(unit))


def _state(unit: Any) -> Any:
    return unit._get_fsdp_state()


def _parameter_groups(unit: Any) -> list[Any]:
    state = _state(unit)
    groups = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class _EndToEnd(tuple):
    """A size that equals that of the shard; as a list it is that of one line, of as many elements as there are."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, _Rest(-1), *(1,) * (len(self) - 2)))

    def numel(self) -> int:
        return math.prod(tuple.__iter__(self))


class _Rest(int):
    """The extent that `view` finds by itself; so are multiples of it."""

    def __mul__(self, other: int) -> _Rest:
        return self
