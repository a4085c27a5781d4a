"""LayerNormLinear: a norm and the linear map behind it, as one module."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from te_dist.elsewhere import refuse
from te_dist.nn.norms import NormedModule
from te_dist.nn.options import REFUSED_IN_FORWARD, LayerNormLinearOptions, NoOptions, read, spells_out
from te_dist.nn.site import LinearSite


class LayerNormLinear(NormedModule):
    """`y = norm(x) weight^T + bias`. See `NormedModule` for the norm and `Linear` for the rest.

    Attributes:
        weight: (out_features, in_features), plain or quantized.
        bias: (out_features,) or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @spells_out(LayerNormLinearOptions)
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, **options: Unpack[LayerNormLinearOptions]
    ) -> None:
        """See `te_dist.nn.options.LayerNormLinearOptions` for the keywords; raises as `Linear` does."""
        known = read(dict(options), LayerNormLinearOptions, "LayerNormLinear")
        super().__init__(in_features, known)
        self.in_features = in_features
        self.out_features = out_features
        self.return_bias: bool = known.get("return_bias", False)
        self.gemm = LinearSite(in_features, out_features, name=self.name)
        self._add_linear(self.gemm, ("weight", "bias" if bias else None), known.get("init_method"))

    @spells_out(NoOptions)
    def forward(self, inp: Tensor, **refused: Unpack[NoOptions]) -> Any:
        """(..., out_features) of `inp` (..., in_features); a tuple with `return_bias`, `return_layernorm_output`."""
        if refused:
            refuse(refused, REFUSED_IN_FORWARD, name="LayerNormLinear.forward")
        normalized = self._normalize(inp)
        if self.return_bias:
            return self._output(self.gemm(normalized, self.weight), self.bias, normalized=normalized)
        return self._output(self.gemm(normalized, self.weight, self.bias), normalized=normalized)

    def _made_with(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.normalization}"
