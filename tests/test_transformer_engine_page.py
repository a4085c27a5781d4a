"""What docs/transformer_engine.md says, by running it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist.checkpoints import foreign
from te_dist.testing import assert_bitwise
from tests.test_import import resolve

PAGE = Path(__file__).parents[1] / "docs" / "transformer_engine.md"
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign, "_has_warned", False)
    saved = nn.Sequential(te.LayerNormLinear(256, 512), te.Linear(512, 256))
    extra = {f"{index}._extra_state": torch.ones(8, dtype=torch.uint8) for index in range(2)}
    torch.save({**saved.state_dict(), **extra}, "te_model.pt")
    first, *others = [textwrap.dedent(code) for _, code in SNIPPET.findall(PAGE.read_text())]
    names: dict[str, Any] = {}
    loading, stepping = first.split("optimizer.step()")
    with pytest.warns(UserWarning, match="histories of delayed scaling, these start anew"):
        exec(loading, names)
    for name, weight in names["model"].named_parameters():
        if weight.dim() == 2:
            assert_bitwise(weight.get_high_precision_init_val(), saved.get_parameter(name).detach(), name)
    exec(f"optimizer.step(){stepping}", names)
    assert len(others) == 2
    for code in others:
        exec(code, names)
    weighed = names["probabilities"].sum(1)
    assert torch.isfinite(names["y"]).all() and names["y"].shape == (*weighed.shape, 256)


def test_names_of_the_tables_are_there() -> None:
    """In the last column: dotted ones of torch, and those of the package with `te_dist.` or without."""
    rows = [line.strip("| ").split(" | ")[-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    spans = {span for row in rows for span in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\([^`]*)?`", row)}
    assert len(spans) > 8
    for span in spans - {"weight.main_grad"}:
        resolve(span if span.startswith(("te_dist.", "torch.")) else f"te_dist.{span}")
