"""Base of modules whose weights are quantized when made: parameters, and how they are initialized."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from te_dist import catalog
from te_dist.checkpoints.foreign import pass_over
from te_dist.context import current_model_init
from te_dist.formats import Format, Group, Region
from te_dist.fsdp2.loading import ASSIGNS, quantize_assigned
from te_dist.fsdp2.parameter import GroupedParameter, QuantizedParameter, ShardedParameter
from te_dist.grouped import GroupedStorage
from te_dist.grouped import storage as groups
from te_dist.nn import rehearsal
from te_dist.nn.options import InitMethod
from te_dist.nn.site import LinearSite
from te_dist.ops._checks import HIGH_PRECISION
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor import storage as storages
from te_dist.tensor.parts import kept_on_cpu
from te_dist.tensor.placement import local_tensor


class QuantizedModule(nn.Module):
    """A module of linear maps.

    A weight made inside of `quantized_model_init` is a `QuantizedParameter` from birth, also on the meta device, so
    that nothing that wraps the module later has to replace it. It holds what cannot be derived: a columnwise direction
    that is a relayout of the rowwise one is made by those who read it.

    Attributes:
        params_dtype: nominal dtype of the parameters.
        name: for messages and for the roles that a `CustomRecipe` sees.
        quantized_weights: by name of a parameter that was given quantized, its format; see `fsdp2.check`.
        exchanged: the module that this one took the place of (`te_dist.convert`), with the same parameters, on the meta
            device; or empty.
    """

    quantized_weights: dict[str, Format]
    exchanged: tuple[nn.Module, ...] = ()

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.params_dtype: torch.dtype = options.get("params_dtype") or torch.get_default_dtype()
        self.name: str = options.get("name") or ""
        self._device = options.get("device")
        self._fuses_wgrad: bool = options.get("fuse_wgrad_accumulation", False)
        self._fillers: dict[str, Callable[[Tensor], Any]] = {}  # by name of a parameter, what initializes it

    @property
    def bypasses_autograd(self) -> str | None:
        """Name of the option by which gradients of weights are not returned to autograd; None where they are."""
        return "fuse_wgrad_accumulation" if self._fuses_wgrad else None

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor) -> None:
        """Fills `tensor`, plain and whole, with initial values of the parameter `name`."""
        self._fillers[name](tensor)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes all parameters in place; of sharded ones each rank its own part, as in torch.

        The values then depend on how the model is sharded, and scales that ranks share have to be agreed on
        (`fsdp2.settle`); `fsdp2.materialize` has neither drawback.
        """
        for name, param in self.named_parameters(recurse=False):
            local = local_tensor(param)
            values = torch.empty(local.shape, dtype=local.dtype, device=local.device)
            self.init_parameter(name, values)
            if not local.is_meta:
                local.copy_(values)

    def rehearse(self, dtype: torch.dtype | None) -> None:
        """See `rehearsal.rehearse`."""
        rehearsal.rehearse(self, dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch does it; notes those that are quantized."""
        super().register_parameter(name, param)
        local: Any = local_tensor(param)
        if isinstance(local, ShardedParameter):
            self.__dict__.setdefault("quantized_weights", {})[name] = local.format

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As torch does it, of quantized parameters too: torch exchanges those, without what is known of and done to
        them (attributes, hooks)."""
        held = dict(self._parameters)
        try:
            for name, param in held.items():
                if isinstance(param, ShardedParameter) and _moved(param, fn):
                    self._parameters[name] = None
            return super()._apply(fn, recurse)
        finally:
            self._parameters.update((name, param) for name, param in held.items() if self._parameters[name] is None)

    def extra_repr(self) -> str:
        """What this module is made with, and the formats of the weights that were given quantized."""
        formats = dict.fromkeys(map(catalog.name_of, self.__dict__.get("quantized_weights", {}).values()))
        return ", ".join(filter(None, (self._made_with(), *(f"format={name}" for name in formats))))

    def _made_with(self) -> str:
        """Arguments of the constructor, for people."""
        return ""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """As torch does it; what `assign=True` puts in the place of quantized parameters is quantized first, and
        histories that have no place yet are unexpected. What TransformerEngine pickled of a module is passed over."""
        self._warn_of_other_formats(state_dict, prefix)
        if local_metadata.get(ASSIGNS, False):
            quantize_assigned(self, state_dict, prefix)
        unexpected: list[str] = args[2]
        for name, site in self.named_children():
            homeless = [key for key in state_dict if key.startswith(f"{prefix}{name}.scaling.")]
            if homeless and isinstance(site, LinearSite) and site.scaling is None:
                unexpected += homeless
                warnings.warn(
                    "a state has histories of delayed scaling for which the model has no place yet; "
                    "te_dist.prepare(model, recipe) makes it, before a state is loaded",
                    stacklevel=2,
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        pass_over(state_dict, prefix, unexpected)

    def _warn_of_other_formats(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Where values that were rounded to codes of one format are rounded again to those of another."""
        for name, format in self.__dict__.get("quantized_weights", {}).items():
            given = local_tensor(state_dict.get(prefix + name))
            if isinstance(given, QuantizedTensor) and given.storage.format.canonical != format.canonical:
                warnings.warn(  # without the name: texts that differ are printed again
                    f"a state of {catalog.name_of(given.storage.format)} is loaded into {catalog.name_of(format)}: "
                    "what was rounded once is rounded again; load plain values, or a checkpoint of "
                    "te_dist.checkpoints, which goes by way of masters",
                    stacklevel=3,
                )

    def _add_linear(self, site: LinearSite, names: tuple[str, str | None], init_method: InitMethod | None) -> None:
        """Registers the parameters of a linear map under `names` (weight, bias)."""
        weight, bias = names
        site.fuses_wgrad = self._fuses_wgrad
        uniform = partial(_uniform, bound=1 / math.sqrt(site.in_features) if site.in_features else 0.0)
        self._fillers[weight] = init_method or uniform
        self.register_parameter(weight, self._make_weight(site, weight))
        if bias is None:
            self.register_parameter(weight.replace("weight", "bias"), None)
        else:
            self._add_plain(bias, site.out_features, uniform if init_method is None else nn.init.zeros_)

    def _add_plain(self, name: str, size: int | tuple[int, ...], filler: Callable[[Tensor], Any]) -> None:
        """Registers a vector, or several, in high precision."""
        self._fillers[name] = filler
        param = nn.Parameter(torch.empty(size, dtype=self.params_dtype, device=self._device))
        self.init_parameter(name, param.data)
        self.register_parameter(name, param)

    def _make_weight(self, site: LinearSite, name: str) -> nn.Parameter:
        """(out_features, in_features), initialized; quantized where `quantized_model_init` says so."""
        plain = torch.empty((site.out_features, site.in_features), dtype=self.params_dtype, device=self._device)
        self.init_parameter(name, plain)
        return weight_of(site, plain)


@torch.no_grad()
def _moved(param: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> bool:
    """Has a parameter and its gradient be what `fn` makes of them. False where torch makes another, on meta devices."""
    found = fn(param)
    if param.is_meta or found.is_meta:
        return False
    if found is not param:
        param.data = found
    if param.grad is not None:
        requires_grad = param.grad.requires_grad
        param.grad = fn(param.grad).requires_grad_(requires_grad)
    return True


def weight_of(site: LinearSite, plain: Tensor) -> nn.Parameter:
    """A weight of these values, (N, K) or (G, N, K); quantized where the surrounding `quantized_model_init` says so."""
    init = current_model_init()
    if init.recipe is None:
        return nn.Parameter(plain)
    rehearsal.expect(site, init.recipe)
    site.made_quantized = True
    if plain.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{site.name or 'weight'}: a weight of {plain.dtype} cannot be quantized; convert the model to float32, "
            "bfloat16 or float16 first"
        )
    format, kind = site.weight_format(init.recipe, plain), dict[str, Any](dtype=plain.dtype, device=plain.device)
    fields = format.canonical.fields
    storage: QuantizedStorage
    if plain.dim() == 3:  # noqa: PLR2004
        storage = groups.empty(format, Group.whole(*plain.shape), fields=fields, **kind)
    else:
        storage = storages.empty(format, Region.whole(*plain.shape), fields=fields, **kind)
    if not plain.is_meta:
        storage.quantize_(plain)
        storage.initial = kept_on_cpu(plain, f"{site.name or 'Linear'}: a weight") if init.keeps_initial else None
    if isinstance(storage, GroupedStorage):
        weight = GroupedParameter(storage, plain.shape)
    else:
        weight = QuantizedParameter(storage, plain.shape)
    weight.keep_initial = init.keeps_initial
    return nn.Parameter(weight)


def _uniform(tensor: Tensor, bound: float) -> None:
    nn.init.uniform_(tensor, -bound, bound)
