"""How close are gradients in each recipe to exact ones? Cosine per layer against the same model in float64.

    python -m benchmarks.gradients --out benchmarks/results/gradients.json

A loss within two percent can hide a wrong scale; a gradient cannot. One batch of random tokens through the
quickstart's decoder, with weights initialized alike; the reference is the bf16 model computed in float64, its rotary
tables in fp32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import te_dist as te
from benchmarks.environment import describe
from te_dist import fsdp2
from te_dist.launch import config_file
from te_dist.launch.config import Config, RecipeName
from te_dist.launch.model import Decoder, next_token_loss
from te_dist.launch.parallelize import RECIPES

ROOT = Path(__file__).parents[1]
PASSES = 3  # delayed scaling knows no magnitude in the first one; the last one counts


@dataclass(frozen=True)
class Options:
    """sequences, length: of the batch.  out: JSON file.  config: whose model is taken."""

    sequences: int = 4
    length: int = 256
    out: Path | None = None
    config: Path = ROOT / "launch" / "configs" / "quickstart.toml"


def main(options: Options) -> None:
    """Computes all gradients and prints the table."""
    config = config_file.read(options.config)
    torch.manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (options.sequences, options.length + 1))
    exact = gradients(config, "bf16", tokens, dtype=torch.float64)
    cosines = {}
    for recipe in get_args(RecipeName):
        got = gradients(config, recipe, tokens)
        cosines[recipe] = {name: _cosine(got[name], gradient) for name, gradient in exact.items()}
    _print(cosines)
    if options.out:
        options.out.write_text(json.dumps(describe() | {"cosine": cosines}, indent=2) + "\n")


def gradients(
    config: Config, recipe: RecipeName, tokens: Tensor, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Gradient of the loss by parameter, from a model of its own; in `dtype` where given."""
    precision = RECIPES[recipe]
    with te.quantized_model_init(enabled=precision is not None, recipe=precision), torch.device("meta"):
        model = Decoder(config.model)
    fsdp2.materialize(model, device="cpu", seed=config.seed)
    if dtype is not None:
        model.to(dtype)
    for _ in range(PASSES):
        model.zero_grad()
        with te.autocast(enabled=precision is not None, recipe=precision):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def _print(cosines: dict[str, dict[str, float]]) -> None:
    kinds = sorted({_kind(name) for by_name in cosines.values() for name in by_name})
    table = Table("smallest cosine of", *cosines)
    for kind in kinds:
        row = [min(value for name, value in by_name.items() if _kind(name) == kind) for by_name in cosines.values()]
        table.add_row(kind, *(f"{value:.5f}" for value in row))
    Console(width=160).print(table)


def _kind(name: str) -> str:
    """A parameter's name without its layer."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("blocks", "weight") and not part.isdigit())


if __name__ == "__main__":
    main(tyro.cli(Options))
