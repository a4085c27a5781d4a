"""Examples of docs/kernels.md and the first one of docs/recipes.md run as they are printed, and its table is true."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import te_dist as te
from te_dist import catalog, recipe

DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_sources_and_products() -> None:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    given = {"grad": x[:, :128].contiguous(), "gamma": x[0], "probability": x[:, 0].contiguous()}
    names = {"te": te, "torch": torch, "x": x, "weight": x[:64], "index": torch.arange(128) // 2, **given}
    for example in examples("kernels.md"):
        exec(example, names)  # one page, read from top to bottom
    assert names["tokens"].shape == (128, 256) and names["bias_grad"].shape == (256,)
    want = x @ x[:64].t()
    assert (names["y"] - want).norm() < 0.15 * want.norm()


def test_linear_maps() -> None:
    names = {"x": torch.randn(8, 512)}
    exec(examples("recipes.md")[0], names)
    assert all(param.grad is not None for param in names["model"].parameters())


def test_formats_of_quantized_weights() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \|$", (DOCS / "recipes.md").read_text(), flags=re.MULTILINE)
    made = {}
    for name, _ in rows:
        with te.quantized_model_init(recipe=getattr(recipe, name)()):
            made[name] = catalog.name_of(te.Linear(256, 256).weight.format)
    assert len(rows) == 5 and dict(rows) == made
