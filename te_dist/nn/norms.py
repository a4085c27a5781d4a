"""Normalization, alone and in front of a linear map."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist.checkpoints.foreign import pass_over
from te_dist.fsdp2.check import local_part
from te_dist.nn.module import QuantizedModule
from te_dist.nn.options import InitMethod
from te_dist.tensor import placement

Kind = Literal["LayerNorm", "RMSNorm"]


def normalize(x: Tensor, kind: Kind, *, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`x` (..., K) normalized along its last dimension, in its dtype; computed in that of `weight` where it is wider.

    Args:
        kind: "LayerNorm" (mean and deviation, with `bias`) or "RMSNorm" (root mean square).
        weight: (K,), as it multiplies; `bias` (K,) or None.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    wide, weight = x.to(dtype), weight.to(dtype)
    if kind == "RMSNorm":
        return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(wide, weight.shape, weight, None if bias is None else bias.to(dtype), eps).to(x.dtype)


def _beside(x: Tensor, param: Tensor, label: str) -> Tensor:
    """A parameter of a norm as it meets `x`: a DTensor stays one beside a DTensor, which reduces its gradient.

    Raises:
        RuntimeError: it is a shard that FSDP2 has not gathered; or it is trained beside a plain `x`, and nobody sums
            its gradient; alike on all ranks.
    """
    if not isinstance(param, DTensor) or (isinstance(x, DTensor) and not placement.cuts(param.placements)):
        return param
    return local_part(label, param)


def _as_multiplied(x: Tensor, weight: Tensor, label: str, *, zero_centered: bool) -> Tensor:
    """The weight of a norm as it multiplies `x`; one that is stored less one is raised in fp32. Raises as `_beside`."""
    weight = _beside(x, weight, label)
    return weight.float() + 1.0 if zero_centered else weight


class _Norm(nn.Module):
    """A norm of its own. See `normalize`."""

    kind: Kind
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))
        has_bias = self.kind == "LayerNorm"
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if has_bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor) -> None:
        """Fills `tensor` with initial values of `name`."""
        tensor.fill_(1.0 if name == "weight" and not self.zero_centered_gamma else 0.0)

    def reset_parameters(self) -> None:
        """Starts as a plain norm."""
        for name, param in self.named_parameters(recurse=False):
            self.init_parameter(name, param)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """As torch does it; what TransformerEngine pickled of a norm is passed over."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        pass_over(state_dict, prefix, args[3])

    def forward(self, inp: Tensor) -> Tensor:
        """(..., normalized_shape) -> the same."""
        weight = _as_multiplied(inp, self.weight, self.kind, zero_centered=self.zero_centered_gamma)
        bias = None if self.bias is None else _beside(inp, self.bias, self.kind)
        return normalize(inp, self.kind, weight=weight, bias=bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """Subtracts the mean of each row, divides by its deviation, then scales and shifts the columns."""

    kind = "LayerNorm"


class RMSNorm(_Norm):
    """Divides each row by its root mean square, then scales the columns."""

    kind = "RMSNorm"


class NormedModule(QuantizedModule):
    """A module that normalizes its input before the first linear map.

    Attributes:
        layer_norm_weight: (features,).
        layer_norm_bias: (features,), with normalization="LayerNorm"; None with "RMSNorm".
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(self, features: int, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.normalization: Kind = options.get("normalization", "LayerNorm")
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f'normalization is "LayerNorm" or "RMSNorm", got {self.normalization!r}')
        self.eps: float = options.get("eps", 1e-5)
        self.zero_centered_gamma: bool = options.get("zero_centered_gamma", False)
        self.return_layernorm_output: bool = options.get("return_layernorm_output", False)
        start: InitMethod = nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_
        self._add_plain("layer_norm_weight", features, start)
        if self.normalization == "LayerNorm":
            self._add_plain("layer_norm_bias", features, nn.init.zeros_)
        else:
            self.register_parameter("layer_norm_bias", None)

    def _normalize(self, inp: Tensor) -> Tensor:
        label = self.name or type(self).__name__
        weight = _as_multiplied(inp, self.layer_norm_weight, label, zero_centered=self.zero_centered_gamma)
        bias = None if self.layer_norm_bias is None else _beside(inp, self.layer_norm_bias, label)
        if inp.shape[-1:] != weight.shape:
            raise ValueError(
                f"{label}: the input of shape {tuple(inp.shape)} has {inp.shape[-1]} columns, its norm takes "
                f"{weight.shape[0]}"
            )
        return normalize(inp, self.normalization, weight=weight, bias=bias, eps=self.eps)

    def _output(self, *values: Tensor | None, normalized: Tensor) -> Any:
        """The values asked for: a tuple where there are several."""
        wanted = [*values, normalized] if self.return_layernorm_output else [*values]
        return tuple(wanted) if len(wanted) > 1 else wanted[0]
