"""The list of every private PyTorch API that `te_dist._torch_private` touches.

`IMPORTED` lists what that module passes on, `ATTRIBUTES` the private attributes of public classes that are used in
place. Each entry says why there is no public way, and which members and parameters are relied on.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        "torch._C._are_functorch_transforms_active",
        "whether an autograd Function is applied inside of torch.func; the public `apply` asks it in the same way",
        name="are_transforms_active",
    ),
    Private(
        "torch._C._disabled_torch_function_impl",
        "`__torch_function__` of a subclass on which dispatch alone decides; torch documents it for subclass authors",
        name="disabled_torch_function",
    ),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees every op of a block (counters, storage tracker); the module is private, the class is documented",
        name="TorchDispatchMode",
        members=("__torch_dispatch__", "_should_skip_dynamo"),
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
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "`DTensor.from_local` moves the local tensor to the mesh's devices, where FSDP2 may keep shards on the CPU",
        name="DTensorSpec",
        parameters=("mesh", "placements", "tensor_meta"),
    ),
    Private(
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "the shape, strides and type of the whole in a DTensorSpec",
        name="TensorMeta",
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
        "torch.nn.Module._forward_pre_hooks_with_kwargs",
        "which hooks take keywords, by keys that are chosen: torch's own are numbers, by which graphs are guarded",
    ),
    Private("torch.nn.Module._forward_hooks_always_called", "the same of hooks that run where a pass raises"),
    Private("torch.nn.Module._backward_hooks", "the same of those who see gradients"),
    Private("torch.nn.Module._backward_pre_hooks", "the same of those who see gradients of outputs"),
    Private("torch.nn.modules.module._has_any_global_hook", "the same of those who see all modules"),
    Private(
        "torch.Tensor._backward_hooks", "whether somebody sees the gradient of a weight that another is to replace"
    ),
    Private("torch.Tensor._post_accumulate_grad_hooks", "the same of those who see it once it is added"),
    Private(
        "torch.nn.Module._compiled_call_impl",
        "whether `Module.compile` compiles a module by itself, so that what it is given ends at a graph",
    ),
    Private(
        "torch._C._len_torch_dispatch_stack",
        "whether ops are being watched, asked on every pass; the public class tells of no mode but its own",
    ),
    Private(
        "torch._C._will_engine_execute_node",
        "whether a backward pass wants the gradient of a weight that is written beside autograd; `needs_input_grad` of "
        "a Function does not know what `torch.autograd.grad` was asked for",
    ),
    Private(
        "torch._C._FunctionBase._raw_saved_tensors",
        "which hook gives back what an autograd Function saved, asked for the text of an error; the public tensors do "
        "not say where they come from, and torch before `SavedTensor.unpack_hook` does not either",
    ),
    Private(
        "torch._C._is_any_autocast_enabled",
        "whether autocast is on at all, asked on every pass; the public question needs the type of a device",
    ),
    Private(
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
        "whether a graph may break (`one_graph`): what is quantized between layers is none of what a graph gives back; "
        "the public questions are whether one is traced, or exported",
    ),
    Private(
        "torch._ops.OpOverload._schema",
        "whether an op writes into its arguments; torch.library hands schemas in only",
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
            "padded_sharded_param_size",
            "fsdp_placement",
            "sharded_param",
            "mp_policy",
            "offload_to_cpu",
            "_module_info",
            "_sharded_local_tensor",
            "_unsharded_param",
        ),
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        "which parameters are gathered together, over which ranks and in which dtype: what a plan of bytes is made of; "
        "and whether they are gathered at this moment, and an end to that",
        members=(
            "fsdp_params",
            "mesh_info",
            "is_sharded",
            "_to_sharded",
            "unshard_in_backward",
            "_reshard_after_forward",
            "reshard_after_backward",
        ),
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
        "which unit is the root, which ones are gathered ahead, and whether a backward pass has still to end; there "
        "are public ways to say so, none to ask",
        members=(
            "_is_root",
            "_modules",
            "_auto_reshard_after_forward",
            "_states_to_forward_prefetch",
            "_states_to_backward_prefetch",
            "_state_ctx",
        ),
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext",
        "whether FSDP2 still waits for the end of a backward pass, which an exception has ended",
        members=("post_backward_final_callback_queued",),
    ),
    Private(
        "torch.distributed.tensor._collective_utils.mesh_broadcast",
        "whether DTensor copies a tensor that every rank has; to the op, which is told nothing else, a broadcast of "
        "what the first rank alone has looks alike",
        parameters=("tensor", "mesh", "mesh_dim"),
    ),
    Private(
        "torch.distributed.tensor.placement_types._StridedShard._split_tensor",
        "where DTensor joins parts that do not lie side by side, which elsewhere become values; no op says what for",
        parameters=("self", "tensor", "num_chunks"),
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather",
        "hands all parameters of a unit to a collective in one buffer; the custom collectives that FSDP2 takes see the "
        "buffer only, and bytes are counted by parameter",
        parameters=("fsdp_params", "group"),
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
        "the same for gradients, of which only some parameters may have one",
        parameters=("fsdp_params", "unsharded_grads", "reduce_scatter_group"),
    ),
    Private(
        "torch.testing._internal.distributed.fake_pg",
        "the backend without other ranks, by which a model is sharded as one rank of many would have it; torch's own "
        "documentation points at it, and keeps it here",
    ),
    Private(
        "torch.distributed._composable_state._module_state_mapping",
        "finds the units of FSDP2, and by `FSDPParam._unsharded_param` what they gathered: in forward a gathered "
        "parameter looks like any other, and what writes its `.grad` by hand is lost",
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
        "whether DistributedDataParallel reduces gradients at the end of the coming backward pass, by which those that "
        "are written by hand are missed; the modules inside of it are not told",
    ),
    Private(
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "part of the pickle in which DCP says what lies where; who reads it without running code lists what is in it",
    ),
    Private(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "the same: in which file a tensor lies",
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
    Private(
        "torch._foreach_zero_",
        "fills many tensors with zeros in a fixed number of kernels; torch.optim uses it so",
    ),
)
