"""What experts compute: SwiGLU between two linear maps, for each group of rows, and as one dense part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from te_dist._torch_private import is_watched
from te_dist.context import autocast_of_torch, current_autocast
from te_dist.nn import rehearsal
from te_dist.nn.fronts import hands_over
from te_dist.nn.gated import in_turn
from te_dist.nn.group_fronts import GATHERED, SUMMED, WEIGHTED_SWIGLU
from te_dist.nn.group_tables import group_table
from te_dist.nn.grouped_linear import GroupedLinear
from te_dist.nn.grouped_products import Given
from te_dist.nn.grouped_site import NO_HISTORIES, PLAIN, GroupedSite
from te_dist.nn.module import QuantizedModule
from te_dist.nn.moe.dispatch import Arrived
from te_dist.nn.moe.permutation import permute_probabilities, sort_by_expert
from te_dist.nn.options import LinearOptions, read, spells_out
from te_dist.nn.site import LinearSite
from te_dist.quantizers import Quantizer
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor


class ExpertOptions(LinearOptions, total=False):
    """Further keywords of experts.

    save_original_input: both maps keep their inputs as they are, which others keep too (the tokens before they are
        copied, the gates and ups), and quantize them once more in backward: one more read of each, no codes kept.
    """

    save_original_input: bool


class GroupedMLP(nn.Module):
    """Experts, each `fc2(probability * silu(gate) * up)`, gates and ups by `fc1`, for rows sorted by expert, and sums.

    Rows are gathered on the way into `fc1`, and gradients of sums of rows on their way back into `fc2`. SwiGLU and the
    probability are computed in fp32 on the way into the quantizer of `fc2`, rounded once; their gradients, in one pass,
    on the way back into that of `fc1` where it reads once what it quantizes. No host reads how many rows an expert has.

    The two maps are parts of one computation: hooks on `fc1` or `fc2` never run, and FSDP2 wraps the whole.

    Attributes:
        fc1: its `weight` (num_experts, 2 ffn_hidden_size, hidden_size), gates first.
        fc2: its `weight` (num_experts, hidden_size, ffn_hidden_size).
    """

    divided_by: Any = None  # what divides gradients on their way here from other ranks; see [Note: Divided gradients]

    fc1: GroupedLinear
    fc2: GroupedLinear

    @spells_out(ExpertOptions)
    def __init__(
        self, num_experts: int, hidden_size: int, ffn_hidden_size: int, **options: Unpack[ExpertOptions]
    ) -> None:
        """See `ExpertOptions` for the keywords; raises as `GroupedLinear` does, and ValueError for `return_bias`."""
        super().__init__()
        known = read(dict(options), ExpertOptions, "GroupedMLP")
        _refuse_bias(known, "GroupedMLP")
        name = known.pop("name", None)
        self.save_original_input: bool = known.pop("save_original_input", False)
        for part, sizes in (("fc1", (hidden_size, 2 * ffn_hidden_size)), ("fc2", (ffn_hidden_size, hidden_size))):
            own = {**known, "name": f"{name}.{part}" if name else part}
            self.register_module(
                part, GroupedLinear(num_experts, *sizes, bias=False, single_grouped_weight=True, **own)
            )

    def forward(
        self,
        rows: Tensor,
        arrived: Arrived,
        *,
        is_first_microbatch: bool | None = None,
        skip_weight_quantization: Tensor | None = None,
    ) -> Tensor:
        """(S, hidden_size): sums, in fp32 and rounded once, of what experts make of the copies of each row.

        Args:
            rows: those of `arrived`, plain or quantized; they stand alone so that FSDP2 sees them.
            arrived: how copies of them are sorted, and the probabilities of these.
            is_first_microbatch: as of `GroupedLinear`, of both maps.
            skip_weight_quantization: the same.

        Raises:
            ValueError: `fc1` or `fc2` alone was wrapped by FSDP2.
        """
        maps = tuple((fc.gemm, _weight_of(fc)) for fc in (self.fc1, self.fc2))
        given = Given(
            table_of(arrived),
            PLAIN,
            saves_original=self.save_original_input,
            is_first=is_first_microbatch,
            skip=skip_weight_quantization,
        )
        return multiply(maps, rows, arrived, given=given)

    def input_quantizer(self, x: Tensor) -> Quantizer | None:
        """What `fc1` quantizes its input by at this moment; None outside of `autocast`."""
        plan = self.fc1.gemm.plan(x, local_tensor(self.fc1.weight))
        return None if plan is None else plan.input

    def is_traceable(self, x: Tensor) -> bool:
        """Whether a graph holds what is made of `x`, and nothing watches it."""
        return not is_watched(self) and are_traceable(
            (self.fc1.gemm, self.fc1.weight), (self.fc2.gemm, self.fc2.weight), x=x
        )

    def check_histories(self) -> None:
        """Raises ValueError where the recipe of `autocast` keeps histories that experts of several ranks cannot."""
        recipe = current_autocast().recipe
        if recipe is not None:
            for fc in (self.fc1, self.fc2):
                fc.gemm.check_ranks(recipe)

    def rehearse(self, dtype: torch.dtype | None) -> None:
        """See `rehearsal.rehearse`."""
        rehearsal.rehearse(TwoEach(self, self.fc1.num_gemms, GroupedMLP.forward), dtype, groups=self.fc1.num_gemms)

    def cut(self, mesh: DeviceMesh) -> None:
        """Leaves this rank its experts. Every rank of `mesh` has all of them.

        Raises:
            ValueError: weights that are cut already, gradients that are added to `main_grad`, or histories of delayed
                scaling; on every rank alike, before anything is changed.
        """
        for module in (self.fc1, self.fc2):
            _check_cut(module, mesh)
        for module in (self.fc1, self.fc2):
            whole, values = module.weight, module.weight.data
            cut = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
            weight = nn.Parameter(cut, requires_grad=whole.requires_grad)
            vars(weight).update({key: value for key, value in vars(whole).items() if key not in vars(values)})
            module.register_parameter("weight", weight)
            module.num_gemms = module.gemm.num_groups = module.num_gemms // mesh.size()
            module.gemm.num_ranks = mesh.size()
            module.gemm.scaling = None  # a history for each expert here, made when it is asked for


def table_of(arrived: Arrived) -> Tensor:
    """The group table of sorted rows."""
    index, _, _, counts = arrived.by_expert
    return group_table(counts, index.shape[0]).tensor


def are_traceable(*maps: tuple[GroupedSite, Tensor], x: Tensor) -> bool:
    """Whether a graph holds what these make of `x`, see [Note: Compiled linear maps]."""
    return all([site.plan_in_graph(x, weight, multiplies=True) is not None for site, weight in maps])


def multiply(maps: tuple[tuple[GroupedSite, Tensor], ...], rows: Tensor, arrived: Arrived, *, given: Given) -> Tensor:
    """What `GroupedMLP.forward` gives, by two maps and their weights: to gates and ups, and from what comes of them."""
    rows = autocast_of_torch(rows)
    index, _, positions, _ = arrived.by_expert
    (fc1, first), (fc2, second) = maps
    copies, beside, reading, front, values = (index, positions), (), given, WEIGHTED_SWIGLU, None
    if not isinstance(rows, QuantizedTensor):
        rows, beside, reading = rows.contiguous(), copies, given._replace(front=GATHERED)
    probabilities = arrived.probabilities
    # A gradient of probabilities alone is no gradient of rows.
    if hands_over(fc1, fc2, GroupedSite) and (rows.requires_grad or first.requires_grad):
        handing = reading._replace(hands_to=front)
        hidden, values = fc1(rows, [first], beside=beside, behind=[probabilities], given=handing)
    else:
        hidden = fc1(rows, [first], beside=beside, given=reading)
    if values is not None:
        front, probabilities = front.handed(), probabilities.detach()
    summed = given._replace(front=front, epilogue=SUMMED)
    return fc2(hidden, [second], beside=[probabilities], behind=copies, values=values, given=summed)


def _weight_of(fc: GroupedLinear) -> Tensor:
    """(num_gemms, N, K), what this rank has of it."""
    weight = fc.weight.to_local() if isinstance(fc.weight, DTensor) else fc.weight
    wanted = (fc.num_gemms, fc.out_features, fc.in_features)
    if weight.shape != wanted and not weight.is_meta:  # kernels are rehearsed on shards
        raise ValueError(
            f"{fc.name}: got a weight of {tuple(weight.shape)}, wanted {wanted}: FSDP2 gathers what it wraps, in the "
            "forward pass of that, and experts do not call fc1 and fc2; wrap experts, not fc1 or fc2"
        )
    return weight


def _check_cut(fc: GroupedLinear, mesh: DeviceMesh) -> None:
    if isinstance(fc.weight, DTensor):
        raise ValueError(
            f"{fc.name}: the weight is a DTensor over {fc.weight.device_mesh} already; apply ExpertParallel once, and "
            "before fully_shard"
        )
    if fc.gemm.fuses_wgrad:
        raise ValueError(
            f"{fc.name}: fuse_wgrad_accumulation is for weights that are no DTensors, which ExpertParallel makes of "
            "them; leave it out when MoE is made"
        )
    if fc.gemm.scaling is not None and mesh.size() > 1:
        raise ValueError(f"{fc.name}: made for, or run with, delayed scaling, whose histories it holds; {NO_HISTORIES}")


class TwoEach(nn.Module):
    """Experts of rows of which each goes to two of them.

    Args:
        experts: which hold the weights.
        num_experts: of this rank.
        compute: what they make of rows, and of how these arrived.
    """

    def __init__(self, experts: Any, num_experts: int, compute: Callable[[Any, Tensor, Arrived], Tensor]) -> None:
        super().__init__()
        self.experts = experts
        self.num_experts = num_experts
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden_size) of `x` of that shape."""
        by_expert = sort_by_expert(torch.empty(x.shape[0], 2, dtype=torch.int64, device=x.device), self.num_experts)
        probabilities = torch.empty(x.shape[0], 2, dtype=torch.float32, device=x.device, requires_grad=True)
        return self.compute(self.experts, x, Arrived(x, by_expert, permute_probabilities(probabilities, by_expert)))


class SwiGluMLP(QuantizedModule):
    """`y = (silu(gate) * up) fc2_weight^T`, gates and ups being `x fc1_weight^T`.

    Attributes:
        fc1_weight: (2 ffn_hidden_size, hidden_size), gates first.
        fc2_weight: (hidden_size, ffn_hidden_size).
    """

    fc1_weight: nn.Parameter
    fc2_weight: nn.Parameter

    @spells_out(LinearOptions)
    def __init__(self, hidden_size: int, ffn_hidden_size: int, **options: Unpack[LinearOptions]) -> None:
        """See `LinearOptions` for the keywords; raises as `Linear` does, and ValueError for `return_bias`."""
        known = read(dict(options), LinearOptions, "SwiGluMLP")
        _refuse_bias(known, "SwiGluMLP")
        super().__init__(known)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        prefix = f"{self.name}." if self.name else ""
        self.fc1 = LinearSite(hidden_size, 2 * ffn_hidden_size, name=f"{prefix}fc1")
        self.fc2 = LinearSite(ffn_hidden_size, hidden_size, name=f"{prefix}fc2")
        self._add_linear(self.fc1, ("fc1_weight", None), known.get("init_method"))
        self._add_linear(self.fc2, ("fc2_weight", None), known.get("init_method"))

    def forward(self, inp: Tensor) -> Tensor:
        """(..., hidden_size) of `inp` of that shape."""
        first, second = (self.fc1, self.fc1_weight, None), (self.fc2, self.fc2_weight, None)
        return in_turn(first, second, inp, activation="swiglu")

    def _made_with(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}"


def _refuse_bias(options: Mapping[str, Any], module: str) -> None:
    if options.get("return_bias"):
        raise ValueError(f"{module}: return_bias=True is not supported: its maps have no bias; leave it out")
