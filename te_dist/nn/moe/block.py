"""MoE: a feed-forward part of many experts, of which each token takes a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from te_dist._torch_private import in_backward
from te_dist.context import autocast_of_torch, current_autocast
from te_dist.nn.moe.batches import BatchDispatcher
from te_dist.nn.moe.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher, nothing
from te_dist.nn.moe.experts import ExpertOptions, GroupedMLP, SwiGluMLP
from te_dist.nn.moe.permutation import sort_by_expert
from te_dist.nn.moe.router import Routed, TopKRouter
from te_dist.nn.moe.routing import Routing
from te_dist.nn.moe.tokens import TokenDispatcher
from te_dist.nn.options import LinearOptions, read, spells_out
from te_dist.nn.traced import check_not_exported
from te_dist.tensor.tally import tally_on
from te_dist.tensor_parallel.styles import sum_gradients

Payload = Literal["plain", "quantized"]
Travels = Literal["copies", "tokens", "batches"]


class MoE(nn.Module):
    """`y = sum over the chosen experts of probability * fc2(silu(gate) * up)`, gates and ups by `fc1`.

    Attributes:
        router: chooses, see `TopKRouter`.
        experts: multiply, see `GroupedMLP`.
        shared_experts: what every token goes through besides, as one wide expert; or None.
        dispatcher: brings rows to experts; `ExpertParallel` replaces it.
        payload: "plain" or "quantized", see `ExpertParallel`.
        dropped: int64 scalar, copies of this rank's tokens (of batches: for experts of this rank) that found no slot in
            training passes since it was last set to zero; None unless there is a capacity. Each stands for one choice
            of one token that added nothing.
    """

    dropped: Tensor | None
    shared_experts: SwiGluMLP | None
    payload: Payload = "plain"

    @spells_out(ExpertOptions)
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        routing: Routing,
        *,
        shared_ffn_hidden_size: int = 0,
        **options: Unpack[ExpertOptions],
    ) -> None:
        """See `ExpertOptions` for the keywords, which are for the experts' maps.

        Args:
            hidden_size: H, of tokens.
            ffn_hidden_size: F, of each expert.
            routing: how experts are chosen.
            shared_ffn_hidden_size: F of the shared experts, all together; 0 for none.
            **options: see `te_dist.nn.moe.experts.ExpertOptions`, and `ModuleOptions` in `te_dist.nn.options`.

        Raises:
            TypeError: `routing` is none.
            ValueError: `return_bias`, or, inside of `quantized_model_init`, sizes that do not fit the recipe.
        """
        super().__init__()
        if not isinstance(routing, Routing):
            raise TypeError(f"MoE: routing: got {routing!r}, wanted a te_dist.nn.Routing(num_experts, ...)")
        known = read(dict(options), ExpertOptions, "MoE")
        name = known.pop("name", None) or ""
        prefix = f"{name}." if name else ""
        place = {key: known.get(key) for key in ("params_dtype", "device")}
        self.hidden_size = hidden_size
        self.router = TopKRouter(hidden_size, routing, **place)
        experts = {**known, "name": f"{prefix}experts"}
        self.experts = GroupedMLP(routing.num_experts, hidden_size, ffn_hidden_size, **experts)
        self.shared_experts = None
        if shared_ffn_hidden_size:
            shared = {key: value for key, value in known.items() if key in LinearOptions.__annotations__}
            shared["name"] = f"{prefix}shared_experts"
            self.shared_experts = SwiGluMLP(hidden_size, shared_ffn_hidden_size, **shared)
        self.dispatcher: Dispatcher = LocalDispatcher(routing.num_experts)
        self.dropped = None

    def reset_parameters(self) -> None:
        """Forgets what was dropped; parameters are those of the parts."""
        if self.dropped is not None:
            self.dropped.zero_()

    def forward(
        self,
        inp: Tensor,
        *,
        is_first_microbatch: bool | None = None,
        skip_weight_quantization: Tensor | None = None,
    ) -> Tensor:
        """(..., hidden_size) of `inp` of that shape.

        Args:
            inp: tokens.
            is_first_microbatch: whether plain weights of the experts are quantized now, and kept, or taken as they were
                kept, see `GroupedLinear.forward`. Those of shared experts are quantized in every call.
            skip_weight_quantization: the same, turned round and read on the device.

        Raises:
            ValueError: `inp` is of another width.
        """
        if inp.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"MoE: the input is (..., {self.hidden_size}), got shape {tuple(inp.shape)}")
        x = inp.reshape(-1, inp.shape[-1])
        routed = self.router(x)
        kept = {"is_first_microbatch": is_first_microbatch, "skip_weight_quantization": skip_weight_quantization}
        shared: list[Tensor] = []
        if torch.compiler.is_compiling() and not self._is_traceable(x, kept):
            out = self._outside_of_graphs(x, routed, **kept)
            self._share(x, shared)
        else:
            out = self._mix(x, routed, meanwhile=partial(self._share, x, shared), **kept)
        out = out + shared[0] if shared else out
        # No view to autograd, since FSDP2 warns of modules that return one.
        return out if out.shape == inp.shape else torch.ops.aten._unsafe_view(out, inp.shape)

    def take_parts(self, mesh: DeviceMesh) -> None:
        """From now on each rank of `mesh` has parts of the same sequences. See `ExpertParallel`."""
        self.router.parts = mesh
        for module in (self.router, self.shared_experts):
            if module is not None:
                sum_gradients(module, [name for name, _ in module.named_parameters(recurse=False)], mesh)

    def rehearse(self, dtype: torch.dtype | None) -> None:
        """Launches what sorts, among all ranks and on this one, see `rehearsal.rehearse`; whatever `dtype` is."""
        for number in self.dispatcher.sorts:
            sort_by_expert(torch.empty(1, 1, dtype=torch.int64, device="meta"), number)

    def _share(self, x: Tensor, found: list[Tensor]) -> None:
        """Adds to a list what the shared experts make of `x` (T, H), where there are any."""
        if self.shared_experts is not None:
            found.append(self.shared_experts(x))

    def _mix(self, x: Tensor, routed: Routed, *, meanwhile: Callable[[], None] = nothing, **kept: Any) -> Tensor:
        """(T, H): what the chosen experts make of every row of `x` (T, H).

        `meanwhile` is called while rows travel, see `Dispatcher.dispatch`; `kept`: keywords of `GroupedMLP.forward`.
        """
        x = autocast_of_torch(x)  # as rows travel
        self.experts.check_histories()  # on every rank, before it waits for others
        routed = self._asking_alike(routed)
        quantizer = self.experts.input_quantizer(x) if self.payload == "quantized" else None
        arrived = self.dispatcher.dispatch(x, routed, quantizer=quantizer, meanwhile=meanwhile)
        if arrived.dropped is not None and self.dropped is not None and self.training and not in_backward():
            self.dropped = tally_on(arrived.dropped.device, self.dropped)
            self.dropped += arrived.dropped
        return self.dispatcher.combine(self.experts(arrived.rows, arrived, **kept), arrived)

    def _is_traceable(self, x: Tensor, kept: dict[str, Any]) -> bool:
        """Whether a graph holds all of this: no rows travel, and experts keep nothing in Python and are not wrapped."""
        is_alone = not self.dispatcher.is_collective and all([value is None for value in kept.values()])
        return is_alone and self.experts.is_traceable(x)

    def _asking_alike(self, routed: Routed) -> Routed:
        """The same; where experts are trained, gradients are sent on every rank, whatever its tokens want."""
        probabilities = routed.probabilities
        if not self.dispatcher.is_collective or probabilities.requires_grad or not torch.is_grad_enabled():
            return routed
        trains = any(param.requires_grad for param in self.experts.parameters())
        return routed._replace(probabilities=probabilities.detach().requires_grad_(trains))

    @torch.compiler.disable(
        reason="rows of this mixture travel between ranks, or its experts are wrapped alone, or keep histories of "
        "delayed scaling or weights over microbatches in Python; leave out fullgraph=True: the router, shared experts "
        "and what surrounds a mixture are compiled"
    )
    def _outside_of_graphs(self, x: Tensor, routed: Routed, **kept: Any) -> Tensor:
        check_not_exported("MoE", current_autocast().recipe)
        return self._mix(x, routed, **kept)


class ExpertParallel(ParallelStyle):
    """Gives each rank of a mesh some of the experts of a `MoE`. See [Note: Expert parallelism].

        parallelize_module(model, mesh["ep"], {"blocks.*.feed_forward": ExpertParallel()})

    Gradients of experts' weights are means over the mesh, see [Note: Gradients of experts over ranks]; shard these over
    the other data-parallel ranks, the rest of the model over all.

    Beside tensor parallelism each rank has its part of the sequences, as it comes out of a `SequenceParallel` norm:

        parallelize_module(block, mesh["tp"], {"feed_forward": ExpertParallel(sequence_mesh=mesh["tp"])})

    Args:
        capacity: slots for rows that each rank has at every other; None for as many as rows want, at the price of one
            copy of sizes to the host per pass.
        payload: "quantized" sends tokens to experts as codes and scales, where a recipe quantizes; see [Note: Quantized
            payload].
        travels: "tokens" sends a token once to each rank that has experts of it, and sums back, instead of a copy for
            each expert: less is sent, and rounded otherwise, see [Note: Tokens that travel once]. Without a capacity.
            "batches" sends all tokens to all ranks, which have equally many: over few ranks hardly more, and nothing
            waits for sizes, see [Note: Batches that travel]. A capacity is shared by all that come to a rank.
        sequence_mesh: of those ranks of the mesh that have parts of the same sequences, and one loss. Gradients of
            experts, router and shared experts are then sums over them, the balancing loss is the mean of theirs. None:
            every rank has sequences of its own.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        payload: Payload = "plain",
        travels: Travels = "copies",
        sequence_mesh: DeviceMesh | None = None,
    ) -> None:
        """Raises ValueError for another payload, other travellers, or tokens with a capacity, TypeError for a capacity
        that is no number of rows."""
        super().__init__()
        if capacity is not None and not isinstance(capacity, int):
            raise TypeError(
                f"capacity: got {capacity!r}, wanted a number of rows, an int; of a factor f for T tokens with k "
                "choices over P ranks: math.ceil(f * T * k / P)"
            )
        if payload not in get_args(Payload):
            raise ValueError(f"payload: got {payload!r}, wanted one of {get_args(Payload)}")
        if travels not in get_args(Travels):
            raise ValueError(f"travels: got {travels!r}, wanted one of {get_args(Travels)}")
        if travels == "tokens" and capacity is not None:
            raise ValueError(
                f'travels: got "tokens" with capacity={capacity}, which is a number of copies; leave out either'
            )
        self.capacity = capacity
        self.payload: Payload = payload
        self.travels: Travels = travels
        self.sequence_mesh = sequence_mesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE):
            raise ValueError(f"ExpertParallel is for te_dist's MoE, got {type(module).__name__}")
        num_experts = module.router.routing.num_experts
        if self.travels == "tokens":
            dispatcher: AllToAllDispatcher = TokenDispatcher(num_experts, device_mesh)
        else:
            kind = BatchDispatcher if self.travels == "batches" else AllToAllDispatcher
            dispatcher = kind(num_experts, device_mesh, capacity=self.capacity)
        if self.sequence_mesh is not None:
            _check_parts(self.sequence_mesh, device_mesh)
        module.experts.cut(device_mesh)
        if self.sequence_mesh is not None:
            module.take_parts(self.sequence_mesh)
            dispatcher.num_parts = self.sequence_mesh.size()
            dispatcher.divide_by(None)
        module.dispatcher, module.payload = dispatcher, self.payload
        module.experts.divided_by = dispatcher
        if self.capacity is not None:
            device = module.router.weight.device
            module.dropped = torch.zeros((), dtype=torch.int64, device=device)
        return module


def _check_parts(sequence_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
    """Raises ValueError, on every rank alike, where not all ranks that have parts of a sequence share the experts."""
    if sequence_mesh.ndim != 1:
        raise ValueError(
            f"sequence_mesh: got {sequence_mesh.ndim} dimensions, wanted the one along which sequences are cut; pass "
            "mesh[name]"
        )
    parts, ranks = (dist.get_process_group_ranks(each.get_group()) for each in (sequence_mesh, mesh))
    if not set(parts) <= set(ranks):
        raise ValueError(
            f"sequence_mesh: got ranks {parts} with parts of a sequence, and experts over {ranks}; wanted the former "
            'among the latter, so that experts see all of a sequence: apply ExpertParallel over that mesh["tp"], or '
            "over one of more ranks, of which those are neighbours"
        )
