"""Linear: a drop-in for `torch.nn.Linear` that multiplies in the formats of a recipe."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from te_dist.elsewhere import refuse
from te_dist.nn.module import QuantizedModule
from te_dist.nn.options import REFUSED_IN_FORWARD, LinearOptions, NoOptions, read, spells_out
from te_dist.nn.site import LinearSite


class Linear(QuantizedModule):
    """`y = x weight^T + bias`.

    What is multiplied in which format is said by the recipe of the surrounding `autocast`, see `LinearSite.forward`.

    Attributes:
        weight: (out_features, in_features), plain or quantized.
        bias: (out_features,) or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @spells_out(LinearOptions)
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, **options: Unpack[LinearOptions]
    ) -> None:
        """Takes `params_dtype`, `device`, `init_method`, `name`, `return_bias` and `fuse_wgrad_accumulation` as well.

        `te_dist.nn.options.LinearOptions` and `ModuleOptions` there say what they are.

        Raises:
            ValueError: a keyword of TransformerEngine that te_dist does not take; or, inside of
                `quantized_model_init`, features that do not fit the recipe.
        """
        known = read(dict(options), LinearOptions, "Linear")
        super().__init__(known)
        self.in_features = in_features
        self.out_features = out_features
        self.return_bias: bool = known.get("return_bias", False)
        self.gemm = LinearSite(in_features, out_features, name=self.name)
        self._add_linear(self.gemm, ("weight", "bias" if bias else None), known.get("init_method"))

    @spells_out(NoOptions)
    def forward(self, inp: Tensor, **refused: Unpack[NoOptions]) -> Tensor | tuple[Tensor, Tensor | None]:
        """(..., out_features) of `inp` (..., in_features), plain or quantized; with `return_bias` (that, the bias)."""
        if refused:
            refuse(refused, REFUSED_IN_FORWARD, name="Linear.forward")
        if self.return_bias:
            return self.gemm(inp, self.weight), self.bias
        return self.gemm(inp, self.weight, self.bias)

    def _made_with(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
