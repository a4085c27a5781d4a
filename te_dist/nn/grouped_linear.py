"""GroupedLinear: a linear map for each group of rows, as the experts of a mixture are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from te_dist.context import autocast_of_torch
from te_dist.fsdp2.check import not_gathered
from te_dist.nn import rehearsal, splits
from te_dist.nn.buffers import check_buffer
from te_dist.nn.group_tables import GroupTable, group_table
from te_dist.nn.grouped_loading import take_either
from te_dist.nn.grouped_options import GroupedLinearOptions, check, local_sizes
from te_dist.nn.grouped_products import Given
from te_dist.nn.grouped_site import PLAIN, GroupedSite
from te_dist.nn.grouped_weights import apart, packed
from te_dist.nn.left_gradients import LeftGradients
from te_dist.nn.module import QuantizedModule, weight_of
from te_dist.nn.options import read, spells_out
from te_dist.nn.site import without_values
from te_dist.tensor import placement

Splits = Sequence[int] | Tensor | GroupTable


class GroupedLinear(QuantizedModule):
    """`y = x weight^T + bias` for each group of rows of `x`, by a weight and a bias of its own.

    What is multiplied in which format is said by the recipe of the surrounding `autocast`, as for `Linear`: every group
    is quantized as if it were alone. Inside of `quantized_model_init` the weights are quantized when they are made.

    Attributes:
        weight0, weight1, ...: (out_features, in_features) of each group; or `weight`, (num_gemms, out_features,
            in_features), with `single_grouped_weight`.
        bias0, bias1, ...: (out_features,); or `bias`, (num_gemms, out_features), with `single_grouped_bias`; None
            without a bias.
        weight_names: of the parameters that hold the weights, in the order of the groups.
        bias_names: of those that hold the biases; none without a bias.
    """

    weight: nn.Parameter  # with `single_grouped_weight`

    @spells_out(GroupedLinearOptions)
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        **options: Unpack[GroupedLinearOptions],
    ) -> None:
        """See `te_dist.nn.grouped_options.GroupedLinearOptions` for the keywords.

        Raises:
            ValueError: a keyword of TransformerEngine that te_dist does not take, keywords that do not go together; or,
                inside of `quantized_model_init`, features that do not fit the recipe.
            NotImplementedError: inside of `quantized_model_init`, there is no product in groups by the recipe.
        """
        known = read(dict(options), GroupedLinearOptions, "GroupedLinear")
        super().__init__(known)
        check(known, num_gemms, bias=bias)
        self.num_gemms = num_gemms
        self.in_features, self.out_features = local_sizes(known, in_features, out_features)
        self.parallel_mode = known.get("parallel_mode")
        self.use_bias = bias
        self.return_bias: bool = known.get("return_bias", False)
        self.single_grouped_weight: bool = known.get("single_grouped_weight", False)
        self.single_grouped_bias: bool = known.get("single_grouped_bias", False)
        self.delay_wgrad_compute: bool = known.get("delay_wgrad_compute", False)
        self.weight_names = _names("weight", num_gemms, is_one=self.single_grouped_weight)
        self.bias_names = _names("bias", num_gemms, is_one=self.single_grouped_bias) if bias else ()
        self._left = LeftGradients()
        self._wgrad_hooks: list[Callable[[], Any]] = []
        self.gemm = GroupedSite(num_gemms, self.in_features, self.out_features, name=self.name)
        self.gemm.fuses_wgrad = self._fuses_wgrad
        self.gemm.saves_original = known.get("save_original_input", False)
        self._make_parameters(known.get("init_method"))
        self.register_load_state_dict_post_hook(_pack_again)

    @property
    def bypasses_autograd(self) -> str | None:
        """See `QuantizedModule`."""
        return "delay_wgrad_compute" if self.delay_wgrad_compute else super().bypasses_autograd

    @property
    def weight_placement(self) -> Shard | None:
        """Which dimension of a parameter of weights `parallel_mode` cuts, as a placement of DTensor."""
        if self.parallel_mode is None:
            return None
        return Shard(int(self.single_grouped_weight) + (0 if self.parallel_mode == "column" else 1))

    def forward(
        self,
        inp: Tensor,
        m_splits: Splits,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        *,
        skip_weight_quantization: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """(..., out_features) of `inp` (..., in_features), whose rows come group by group.

        Args:
            inp: plain, or a QuantizedTensor: its rowwise direction is multiplied as it is; for the gradient of the
                weights, what it stands for is quantized columnwise, group by group.
            m_splits: rows of each group. A list, which is checked; or an int tensor (num_gemms,) on the device of
                `inp`, which on a GPU is never waited for: there a size below 0 is read as 0, and groups end at the last
                row; or a group table made of one (`nn.group_table`), for several modules.
            is_first_microbatch: True quantizes plain weights and keeps that for the calls with False that follow; a
                fused `main_grad` is overwritten, not added to. None quantizes in every call. A CUDA graph holds what
                it was captured with: capture one pass with True and one with False.
            out: (rows, out_features) in the dtype of `inp`, contiguous: where the output goes. Rows behind the last
                group are left as they are; without it, they are zeros.
            dgrad_out: (rows, in_features): the same for the gradient of `inp`.
            skip_weight_quantization: what `is_first_microbatch` says, turned round and read on the device, so that one
                CUDA graph serves all micro batches: one element, bool, int32 or fp32, on the device of `inp`. Inside of
                `autocast`, plain weights are quantized and kept where it is zero; else they are taken as they were last
                quantized, however old that is. The first call quantizes always. `main_grad` is added to.

        Returns:
            The output; with `return_bias`, (output without bias, the bias or the list of biases).

        Raises:
            ValueError: sizes that do not fit, or buffers that cannot be written; `delay_wgrad_compute`,
                `fuse_wgrad_accumulation`, `skip_weight_quantization` or, with plain weights, `is_first_microbatch`
                under FSDP2; `skip_weight_quantization` with quantized weights or with `is_first_microbatch`.
            NotImplementedError: a recipe whose quantization of weights no flag turns off.
            RuntimeError: sizes on the host, or `skip_weight_quantization` for the first time, while a CUDA graph is
                captured; `is_first_microbatch=False` where the weights or the recipe have changed.
        """
        weights, biases = self._local(self.weight_names), self._local(self.bias_names)
        self._check_input(inp, weights[0])
        x = autocast_of_torch(inp.flatten(0, -2) if inp.dim() != 2 else inp)  # noqa: PLR2004
        if out is not None:
            check_buffer("out", out, x, cols=self.out_features)
        if dgrad_out is not None:
            check_buffer("dgrad_out", dgrad_out, x, cols=self.in_features)
        if self.delay_wgrad_compute:
            self._check_leaves(weights)
        gemm, table = self.gemm, self._table(m_splits, x)
        given = Given(
            table,
            PLAIN,
            out=out,
            dgrad_out=dgrad_out,
            saves_original=gemm.saves_original,
            later=self._left if self.delay_wgrad_compute else None,
            is_first=is_first_microbatch,
            skip=skip_weight_quantization,
        )
        y = gemm(x, weights, given=given, biases=() if self.return_bias else biases)
        y = y if inp.dim() == 2 else y.unflatten(0, inp.shape[:-1])  # noqa: PLR2004
        return (y, (biases[0] if self.single_grouped_bias else biases) if biases else None) if self.return_bias else y

    def pack(self) -> None:
        """Lays parameters of each group into one buffer again, which products read without a copy.

        They are made so, and moved and loaded so. Nothing where they are sharded, or without values.
        """
        weights, biases = (
            [self._parameters[name] for name in names if name in self._parameters]
            for names in (self.weight_names, self.bias_names)
        )
        if not self.single_grouped_weight and len(weights) == self.num_gemms:
            self.gemm.one_buffer = packed(weights, self.gemm.one_buffer)
        if not self.single_grouped_bias and len(biases) == self.num_gemms:
            packed(biases, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._annotate()  # torch makes other parameters where those before are on the meta device
        self.gemm.kept.forget()
        self.pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the gradients that are left to compute are those of the original."""
        return self.__dict__ | {"_left": LeftGradients()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pack()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Adds what `backward_dw` calls once it has written gradients of weights, as TransformerEngine does.

        Hooks of autograd run in backward, before there are any.
        """
        self._wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Computes the gradients of the weights that `delay_wgrad_compute` has left; nothing where it has left none.

        Raises:
            RuntimeError: what such a gradient is computed of was written in place since, or there is no `main_grad` to
                add it to. It is left, and those behind it.
        """
        if self._left.compute(self.name or "GroupedLinear"):
            for hook in self._wgrad_hooks:
                hook()

    def discard_dw(self) -> None:
        """Gives up the gradients of the weights that `delay_wgrad_compute` has left: of a step that is not taken."""
        self._left.discard()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Takes weights and biases of all groups together, or one by one, whichever of the two this module has."""
        errors: list[str] = args[-1]
        for what, names in (("weight", self.weight_names), ("bias", self.bias_names)):
            each = _names(what, self.num_gemms, is_one=False)
            error = take_either(state_dict, prefix, what, names=names, each=each) if names else None
            errors += [error] if error else []
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def rehearse(self, dtype: torch.dtype | None) -> None:
        """See `rehearsal.rehearse`."""
        sizes = torch.empty(self.num_gemms, dtype=torch.int64, device="meta")
        rehearsal.rehearse(self, dtype, sizes, groups=self.num_gemms)

    def _made_with(self) -> str:
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_gemms={self.num_gemms}, {features}, bias={self.use_bias}"

    def _make_parameters(self, init_method: Callable[[Tensor], Any] | None) -> None:
        """Those of one kind lie in one buffer, also where there is one for each group."""
        uniform, shape = partial(nn.init.uniform_, a=-self._bound, b=self._bound), (self.num_gemms, self.out_features)
        weight = weight_of(
            self.gemm, self._values((*shape, self.in_features), self.weight_names, init_method or uniform)
        )
        weights = [weight]
        if not self.single_grouped_weight:
            weights, self.gemm.one_buffer = apart(weight)
        for name, parameter in zip(self.weight_names, weights, strict=True):
            self.register_parameter(name, parameter)
        self._annotate()
        if not self.use_bias:
            self.register_parameter("bias", None)
            return
        bias = nn.Parameter(self._values(shape, self.bias_names, uniform if init_method is None else nn.init.zeros_))
        biases = [bias] if self.single_grouped_bias else apart(bias)[0]
        for name, parameter in zip(self.bias_names, biases, strict=True):
            self.register_parameter(name, parameter)

    def _annotate(self) -> None:
        """Tells others what Megatron-LM asks of parameters of weights; their dimension that is cut is -1 for none."""
        dim = -1 if self.weight_placement is None else self.weight_placement.dim
        for name in self.weight_names:
            parameter: Any = self._parameters.get(name)
            if parameter is not None:
                parameter.tensor_model_parallel = dim >= 0
                parameter.partition_dim, parameter.partition_stride = dim, 1
                parameter.skip_backward_post_hook = self.delay_wgrad_compute

    def _values(self, shape: tuple[int, ...], names: Sequence[str], fill: Callable[[Tensor], Any]) -> Tensor:
        """Initial values of all groups, which parameters of these names are going to have."""
        self._fillers |= dict.fromkeys(names, partial(each_member, fill, dims=len(shape)))
        values = torch.empty(shape, dtype=self.params_dtype, device=self._device)
        self.init_parameter(names[0], values)
        return values

    @property
    def _bound(self) -> float:
        return 1 / math.sqrt(self.in_features) if self.in_features else 0.0

    def _local(self, names: Sequence[str]) -> list[Tensor]:
        """Parameters, or the local parts of those that are DTensors, which are all of these names or none."""
        held = self._parameters  # parametrizations and pruning leave attributes in their place
        parameters: list[Any] = [held[name] if name in held else getattr(self, name) for name in names]
        if not parameters or not isinstance(parameters[0], DTensor):
            return parameters
        if self.delay_wgrad_compute or self._fuses_wgrad:
            raise ValueError(
                f"{self.name or 'GroupedLinear'}: {names[0]} is a DTensor, which sees its gradient in backward only; "
                "leave out delay_wgrad_compute and fuse_wgrad_accumulation"
            )
        wanted = (self.num_gemms, self.out_features, self.in_features)[not self.single_grouped_weight :]
        is_checked = names is self.weight_names and not parameters[0].is_meta  # kernels are rehearsed on shards
        if is_checked and placement.shape_everywhere(parameters[0]) != wanted:
            raise not_gathered(self.name or "GroupedLinear", parameters[0])
        return [parameter.to_local() for parameter in parameters]

    def _check_leaves(self, weights: Sequence[Tensor]) -> None:
        """`backward_dw` writes into `.grad` of what it was given."""
        if torch.is_grad_enabled() and any(weight.requires_grad and not weight.is_leaf for weight in weights):
            raise ValueError(
                f"{self.name or 'GroupedLinear'}: got weights that were computed from others (torch.func, "
                "parametrizations), which delay_wgrad_compute would leave without a gradient; leave it out"
            )

    def _check_input(self, x: Tensor, weight: Tensor) -> None:
        label = self.name or "GroupedLinear"
        if x.dim() < 2 or x.shape[-1] != self.in_features:  # noqa: PLR2004
            raise ValueError(f"{label}: the input is (..., rows, {self.in_features}), got shape {tuple(x.shape)}")
        if weight.is_meta and not x.is_meta:
            raise without_values(label)

    def _table(self, m_splits: Splits, x: Tensor) -> Tensor:
        """The group table of the rows of `x`."""
        rows, label = x.shape[0], self.name or "GroupedLinear"
        if isinstance(m_splits, GroupTable):
            return self._checked(m_splits, x)
        if isinstance(m_splits, Tensor) and m_splits.device == x.device:
            if m_splits.shape != (self.num_gemms,) or m_splits.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{label}: m_splits is an int32 or int64 tensor of shape ({self.num_gemms},), got "
                    f"{m_splits.dtype} of {tuple(m_splits.shape)}"
                )
            table = group_table(m_splits.contiguous(), rows).tensor
            if x.is_cpu and torch.compiler.is_compiling():
                splits.check_in_graph(table, m_splits, rows, label=label)
            elif x.is_cpu:
                splits.check_sizes(m_splits.tolist(), rows, num_groups=self.num_gemms, label=label)
            return table
        if isinstance(m_splits, Tensor) and m_splits.device.type != "cpu":
            raise ValueError(f"{label}: m_splits is on {m_splits.device}, the input on {x.device}; move one of them")
        try:
            sizes = [operator.index(size) for size in m_splits]  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"{label}: m_splits is a list of whole numbers, an int tensor ({self.num_gemms},) or a group table of "
                f"one, got {m_splits!r}"
            ) from error
        splits.check_sizes(sizes, rows, num_groups=self.num_gemms, label=label)
        return group_table(_on_device(sizes, x.device), rows).tensor

    def _checked(self, table: GroupTable, x: Tensor) -> Tensor:
        """Of a table made by the caller: kernels read as far as it says."""
        num_groups = table.tensor.shape[1] - 1
        if (table.rows, num_groups, table.tensor.device) != (x.shape[0], self.num_gemms, x.device):
            raise ValueError(
                f"{self.name or 'GroupedLinear'}: the group table is of {num_groups} groups in {table.rows} rows on "
                f"{table.tensor.device}; wanted {self.num_gemms} groups in the {x.shape[0]} rows of the input on "
                f"{x.device}: make one by te_dist.nn.group_table(m_splits, rows)"
            )
        return table.tensor


def _pack_again(module: GroupedLinear, _: Any) -> None:
    """Behind `load_state_dict`, which may have assigned other parameters."""
    module.pack()


def _names(what: str, num: int, *, is_one: bool) -> tuple[str, ...]:
    return (what,) if is_one else tuple(f"{what}{number}" for number in range(num))


def each_member(fill: Callable[[Tensor], Any], tensor: Tensor, *, dims: int) -> None:
    """Fills every member of a tensor of so many dimensions, as if each were a parameter of its own; else the tensor."""
    for member in tensor if tensor.dim() == dims else (tensor,):
        fill(member)


def _on_device(sizes: list[int], device: torch.device) -> Tensor:
    """An int64 tensor of them, without waiting for the device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"m_splits={sizes} is on the host, and a CUDA graph would read it where it lay when it was captured; pass "
            "a tensor on the device"
        )
    tensor = torch.tensor(sizes, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
