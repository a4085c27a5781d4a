"""LayerNormMLP: a norm, a linear map, an activation and a linear map, as one module."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from te_dist.elsewhere import refuse
from te_dist.nn import activations
from te_dist.nn.gated import in_turn
from te_dist.nn.norms import NormedModule
from te_dist.nn.options import REFUSED_IN_FORWARD, LayerNormMLPOptions, NoOptions, read, spells_out
from te_dist.nn.site import LinearSite


class LayerNormMLP(NormedModule):
    """`y = f(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias`.

    Inside of `autocast`, "swiglu" is computed in fp32 on the way into the quantizer of `fc2`, rounded once; in eager
    mode its gradient on the way into that of `fc1`, where that reads once what it quantizes.

    Attributes:
        fc1_weight: (ffn_hidden_size, hidden_size), of twice as many rows with a gated activation.
        fc1_bias: as many as its rows, or None.
        fc2_weight: (hidden_size, ffn_hidden_size).
        fc2_bias: (hidden_size,) or None.
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    @spells_out(LayerNormMLPOptions)
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, *, bias: bool = True, **options: Unpack[LayerNormMLPOptions]
    ) -> None:
        """See `te_dist.nn.options.LayerNormMLPOptions` for the keywords.

        Raises:
            ValueError: as `Linear` does, and for an unknown activation.
        """
        known = read(dict(options), LayerNormMLPOptions, "LayerNormMLP")
        super().__init__(hidden_size, known)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.return_bias: bool = known.get("return_bias", False)
        self.activation = known.get("activation", "gelu")
        width = ffn_hidden_size * (2 if activations.find(self.activation).is_gated else 1)
        prefix = f"{self.name}." if self.name else ""
        self.fc1 = LinearSite(hidden_size, width, name=f"{prefix}fc1")
        self.fc2 = LinearSite(ffn_hidden_size, hidden_size, name=f"{prefix}fc2")
        first = known.get("init_method")
        self._add_linear(self.fc1, ("fc1_weight", "fc1_bias" if bias else None), first)
        second = known.get("output_layer_init_method") or first
        self._add_linear(self.fc2, ("fc2_weight", "fc2_bias" if bias else None), second)

    @spells_out(NoOptions)
    def forward(self, inp: Tensor, **refused: Unpack[NoOptions]) -> Any:
        """(..., hidden_size) of `inp` of that shape; a tuple with `return_bias`, `return_layernorm_output`."""
        if refused:
            refuse(refused, REFUSED_IN_FORWARD, name="LayerNormMLP.forward")
        normalized = self._normalize(inp)
        first = self.fc1, self.fc1_weight, self.fc1_bias
        second = self.fc2, self.fc2_weight, None if self.return_bias else self.fc2_bias
        out = in_turn(first, second, normalized, activation=self.activation)
        return self._output(out, *((self.fc2_bias,) if self.return_bias else ()), normalized=normalized)

    def _made_with(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}, {self.activation}, {self.normalization}"
