"""Modules with options, sizes and recipes drawn by a seed: combinations that nobody thought of."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import te_dist as te
from te_dist.nn.moe import MoE, Routing
from te_dist.recipe import Recipe
from tests.nn.recipes import CASES

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "MoE")
RECIPES: dict[str, Recipe | None] = {"none": None} | {name: case.recipe for name, case in CASES.items()}
ROWS = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 160, 255, 257, 300)
FEATURES = (16, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136, 144, 160, 192, 208, 256, 272, 320, 384)
OF_GROUPS = (64, 128, 192, 256)  # which all recipes take
DTYPES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("gelu", "swiglu", "relu", "srelu", "geglu", "silu", "qgelu", "reglu")


@dataclass
class Drawn:
    """A module and the pass that it makes.

    Attributes:
        kind: of module.
        recipe: by name, of `autocast`, and of the weights where these are quantized.
        sizes: features of input and output.
        lead: dimensions in front of the rows.
        amp: whether torch's autocast is on.
        strided: whether the input lies otherwise.
        wants: whether input and parameters have gradients.
        options: of the module.
        splits: rows of each group; a mixture has none.
    """

    kind: str
    recipe: str
    quantized: bool
    dtype: torch.dtype
    input_dtype: torch.dtype
    sizes: tuple[int, int]
    rows: int
    lead: tuple[int, ...]
    amp: bool
    checkpoint: bool
    strided: bool
    wants: tuple[bool, bool]
    options: dict[str, Any] = field(default_factory=dict)
    splits: list[int] = field(default_factory=list)
    routing: Routing | None = None

    @property
    def made_by(self) -> Recipe | None:
        """The recipe."""
        return RECIPES[self.recipe]

    def build(self, device: str) -> nn.Module:
        """The same values on every device. Raises as the module does, of what does not go together."""
        torch.manual_seed(0)
        quantized = self.quantized and self.made_by is not None
        common = dict(params_dtype=self.dtype, **self.options)
        with te.quantized_model_init(enabled=quantized, recipe=self.made_by if quantized else None):
            if self.routing is not None:
                module: nn.Module = MoE(*self.sizes, self.routing, **common)
            elif self.kind == "GroupedLinear":
                module = te.GroupedLinear(len(self.splits), *self.sizes, **common)
            else:
                module = getattr(te, self.kind)(*self.sizes, **common)
        module = module.to(device)
        return module if self.wants[1] else module.requires_grad_(False)

    def run(self, module: nn.Module, device: str) -> dict[str, Tensor]:
        """Outputs and gradients of one pass, by name."""
        generator = torch.Generator().manual_seed(1)
        lead = () if self.kind == "GroupedLinear" else self.lead
        x = torch.randn(*lead, self.rows, self.sizes[0], generator=generator).to(self.input_dtype).to(device)
        if self.strided:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        x.requires_grad_(self.wants[0])
        given = (x, torch.tensor(self.splits, device=device)) if self.kind == "GroupedLinear" else (x,)
        module.zero_grad()
        with (
            torch.autocast(device, dtype=torch.bfloat16, enabled=self.amp),
            te.autocast(enabled=self.made_by is not None, recipe=self.made_by),
        ):
            out = te.checkpoint(module, *given) if self.checkpoint else module(*given)
        outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None]
        trained = [each for each in outs if each.requires_grad]
        grads = [torch.randn(each.shape, generator=generator).to(each.dtype).to(device) for each in trained]
        if trained:
            torch.autograd.backward(trained, grads)
        found = {f"output {i}": each.detach() for i, each in enumerate(outs)} | {"input": x.grad}
        found |= {name: param.grad for name, param in module.named_parameters()}
        return {name: value for name, value in found.items() if value is not None}


def draw(seed: int) -> Drawn:
    """What belongs to a seed."""
    random = Random(seed)
    kind = random.choice(KINDS)

    def chance(part: float) -> bool:
        return random.random() < part

    features = OF_GROUPS if kind in ("GroupedLinear", "MoE") and chance(0.7) else FEATURES
    dtype = random.choice(DTYPES)
    drawn = Drawn(
        kind=kind,
        recipe=random.choice(list(RECIPES)),
        quantized=chance(0.5),
        dtype=dtype,
        input_dtype=dtype if chance(0.85) else random.choice(DTYPES),
        sizes=(random.choice(features), random.choice(features)),
        rows=random.choice(ROWS),
        lead=(random.choice((1, 2, 3)),) if chance(0.3) else (),
        amp=chance(0.1),
        checkpoint=chance(0.2),
        strided=chance(0.2),
        wants=(chance(0.85), chance(0.9)),
    )
    options = drawn.options
    if kind == "MoE":
        experts = random.choice((2, 4, 8, 16, 32))
        groups = random.choice((1, 1, 2))
        drawn.routing = Routing(
            experts,
            random.randint(1, min(4, experts)),
            random.choice(("softmax", "sigmoid")),
            normalizes=chance(0.6),
            aux_loss_coefficient=random.choice((0.0, 0.01)),
            bias_update_rate=random.choice((0.0, 0.01)),
            num_groups=groups,
            top_groups=groups,
        )
        options.update(shared_ffn_hidden_size=random.choice((0, 0, 64)), save_original_input=chance(0.25))
        return drawn
    options["bias"] = chance(0.5)
    if kind == "GroupedLinear":
        cuts = sorted(random.randint(0, drawn.rows) for _ in range(random.choice((1, 2, 3, 5, 8, 16))))
        drawn.splits = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
        options.update(single_grouped_weight=chance(0.6), save_original_input=chance(0.25))
        options["single_grouped_bias"] = options["bias"] and chance(0.5)
    if kind.startswith("LayerNorm"):
        options.update(normalization=random.choice(("LayerNorm", "RMSNorm")), zero_centered_gamma=chance(0.3))
        options["return_layernorm_output"] = chance(0.2)
    if kind == "LayerNormMLP":
        options["activation"] = random.choice(ACTIVATIONS)
    return drawn
