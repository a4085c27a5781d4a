"""TopKRouter: which experts a token goes to, and with which weight.

[Note: When choices are counted]
A training pass adds its choices to `tokens_per_expert`. A pass that runs again in backward (activation checkpointing)
does not: its choices were counted. An op asks which of the two it is, so that compiled passes ask in every run.
`update_expert_biases` moves the biases by what was counted since its last call, so it is called once a step, after
backward, when no pass is left to run again with the biases of the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_dist._torch_private import in_backward, sharded_of
from te_dist.fsdp2.check import not_gathered
from te_dist.nn import forgotten
from te_dist.nn.moe import routing as rules
from te_dist.nn.moe.decision import Asked, decide, rehearse
from te_dist.nn.moe.routing import Routing
from te_dist.nn.site import without_values
from te_dist.ops._library import LIBRARY, define_writing
from te_dist.tensor import placement
from te_dist.tensor.tally import Tallying, tally_on

INIT_STD = 0.02


def _add_choices(total: Tensor, counts: Tensor) -> None:
    if not in_backward():
        total.add_(counts)


define_writing("add_choices(Tensor(a!) total, Tensor counts) -> ()")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("add_choices", _add_choices, _device)
torch.library.register_fake("te_dist::add_choices", lambda total, counts: None, lib=LIBRARY)


class Routed(NamedTuple):
    """What a router decides for T tokens.

    Attributes:
        probabilities: f32 (T, k), weights of the experts' outputs; differentiable.
        experts: int64 (T, k), different ones in each row, of falling score.
    """

    probabilities: Tensor
    experts: Tensor


class TopKRouter(Tallying):
    """Chooses `top_k` of `num_experts` experts for each token by a linear map. Computed in fp32.

    Attributes:
        weight: (E, hidden_size).
        expert_bias: f32 (E,), see `routing.next_bias`; None without a `bias_update_rate`.
        tokens_per_expert: f32 (E,), choices since the last `update_expert_biases`; None without a bias.
        aux_loss_scale: by which the gradient of the balancing loss is multiplied, read in forward: what the loss itself
            is multiplied by before `backward`, one over the number of micro batches for instance.
        parts: mesh of ranks that have parts of the same sequences: the balancing loss is the mean of theirs; or None.
        last_aux_loss: scalar f32 without gradient, of the latest training pass; None before one or without that loss.
    """

    weight: nn.Parameter
    expert_bias: Tensor | None
    tokens_per_expert: Tensor | None
    last_aux_loss: Tensor | None
    _passes: int = 0  # that counted since the last `update_expert_biases`, but for compiled ones

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.routing = routing
        self.aux_loss_scale = 1.0
        self.parts: DeviceMesh | None = None
        self.last_aux_loss = None
        self.weight = nn.Parameter(torch.empty(routing.num_experts, hidden_size, dtype=params_dtype, device=device))
        bias = torch.empty(routing.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias if routing.bias_update_rate > 0 else None)
        self.tokens_per_expert = None if self.expert_bias is None else torch.zeros_like(bias)  # see tensor/tally.py
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A normal weight, no bias, nothing counted."""
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.clear_tally()

    def clear_tally(self) -> None:
        if self.tokens_per_expert is not None:
            self.tokens_per_expert.zero_()
            self._passes = 0

    def forward(self, x: Tensor) -> Routed:
        """Experts and probabilities for `x` (T, hidden_size).

        Raises:
            ValueError: `x` is no matrix of that width, or the weight is on the meta device.
            TypeError: `aux_loss_scale` is no number.
            RuntimeError: the weight is a shard that FSDP2 has not gathered.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(
                f"TopKRouter: got an input of shape {tuple(x.shape)}, wanted (tokens, {self.hidden_size}); flatten the "
                "dimensions in front"
            )
        weight = self.weight
        if isinstance(weight, DTensor):
            if placement.shape_everywhere(weight) != weight.shape and not weight.is_meta:
                raise not_gathered("TopKRouter", weight)
            weight = weight.to_local()
        if weight.is_meta and not x.is_meta:
            raise without_values("TopKRouter")
        has_loss = self.training and self.routing.aux_loss_coefficient > 0
        counts_choices = has_loss or (self.training and self.tokens_per_expert is not None)
        asked = Asked(self.routing, counts_choices, has_loss)
        scale = _check_scale(self.aux_loss_scale) / (1 if self.parts is None else self.parts.size())
        probabilities, experts, *found = decide(x, weight, self.expert_bias, asked=asked, scale=scale)
        if counts_choices and (total := self.counted(experts.device)) is not None:
            torch.ops.te_dist.add_choices(total, found[0])
            if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not in_backward():
                self._passes += 1
                forgotten.warn_of_biases(self._passes)
        if has_loss:
            self.last_aux_loss = found[1]
        return Routed(probabilities, experts)

    def rehearse(self, dtype: torch.dtype | None) -> None:
        """Launches what decides, see `rehearsal.rehearse`."""
        shape = self.routing.num_experts, self.hidden_size
        weight = torch.empty(shape, dtype=dtype or self.weight.dtype, device="meta")
        bias = None if self.expert_bias is None else torch.empty_like(self.expert_bias, device="meta")
        rehearse(weight, bias, self.routing)

    def counted(self, device: torch.device) -> Tensor | None:
        """`tokens_per_expert`, which is brought to `device`."""
        counts = self.tokens_per_expert
        if counts is not None and counts.device != device:
            counts = self.tokens_per_expert = tally_on(device, counts)
        return counts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves what it holds; `bfloat16()` and the like leave the bias in fp32."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != before.dtype:
            # NOTE: conversions ask whether a tensor is floating-point; the same bits as integers are moved only.
            self.expert_bias = fn(before.view(torch.int32)).view(torch.float32)
        return self

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.routing}"


def _check_scale(scale: object) -> float:
    if not isinstance(scale, Real):
        raise TypeError(f"aux_loss_scale: got {scale!r}, wanted a float, which forward reads; .item() of a tensor")
    return float(scale)


class _AttachLoss(torch.autograd.Function):
    """The first input; in backward the second one, a loss, gets a gradient of `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        dtype, device = ctx.like
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


def attach_loss(x: Tensor, loss: Tensor, *, scale: float = 1.0) -> Tensor:
    """`x`, whose backward pass also adds the gradients of `scale * loss`.

    Args:
        x: any tensor on the way to the loss of the model.
        loss: scalar.
    """
    return _AttachLoss.apply(x, loss, scale)


def scale_aux_losses(model: nn.Module, scale: float) -> int:
    """Sets `aux_loss_scale` of all routers of `model`: 1 / n where a step is n backward passes. Returns how many.

    Raises:
        TypeError: `scale` is no number.
    """
    number = _check_scale(scale)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        router.aux_loss_scale = number
    return len(routers)


@torch.no_grad()
def update_expert_biases(model: nn.Module, *, mesh: DeviceMesh | None = None) -> int:
    """Moves the biases of all routers of `model` by the choices counted since the last call. Collective.

    Choices of all routers are added up over the ranks in one reduction for each dimension of their mesh; nothing waits
    for the device.

    Args:
        model: with routers that have a `bias_update_rate`; others are left alone.
        mesh: the ranks whose tokens count together: those that share the batch. None: those over which the weight of a
            router is sharded, and those that have parts of the same sequences; this rank alone where it is not.

    Returns:
        How many routers were updated.

    Raises:
        ValueError: a router is shared by more ranks than those of `mesh`.
    """
    routers = [
        (router, bias, counts)
        for router in model.modules()
        if isinstance(router, TopKRouter)
        and (bias := router.expert_bias) is not None
        and (counts := router.counted(bias.device)) is not None
    ]
    together: dict[tuple[dist.ProcessGroup, ...], list[tuple[TopKRouter, Tensor, Tensor]]] = {}
    for each in routers:
        together.setdefault(_groups_that_count(each[0], mesh), []).append(each)
    for groups, counted in together.items():
        total = torch.cat([counts for _, _, counts in counted])
        for group in groups:
            dist.all_reduce(total, group=group)
        parts = total.split([counts.shape[0] for _, _, counts in counted])
        for (router, bias, counts), part in zip(counted, parts, strict=True):
            bias.copy_(rules.next_bias(bias, part, router.routing.bias_update_rate))
            counts.zero_()
            router._passes = 0
    return len(routers)


def _groups_that_count(router: TopKRouter, mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """Of ranks whose tokens count together, one for each dimension of their mesh. See `update_expert_biases`."""
    weight = sharded_of(router.weight)
    weight = router.weight if weight is None else weight
    known = [weight.device_mesh] if isinstance(weight, DTensor) else []
    if router.parts is not None and not any(torch.isin(router.parts.mesh, each.mesh).all() for each in known):
        known.append(router.parts)
    if mesh is None and not isinstance(weight, DTensor):
        forgotten.warn_of_mesh(sum(each.size() for each in known) or 1)
    if mesh is None:
        counted = known
    else:
        counted = [mesh]
        beyond = next((each for each in known if not torch.isin(each.mesh, mesh.mesh).all()), None)
        if beyond is not None:
            raise ValueError(
                f"update_expert_biases: got mesh={mesh}, and a router over {beyond}; wanted all of its ranks, on which "
                "biases would move apart; leave mesh out, or pass that of all that share the batch"
            )
    return tuple(each.get_group(dim) for each in counted for dim in range(each.ndim))
