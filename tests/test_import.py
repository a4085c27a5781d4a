"""What `import te_dist` says where it cannot work."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("path", sorted(Path(__file__).with_name("gpu").glob("test_*.py")), ids=lambda path: path.stem)
def test_files_of_the_gpu_suite_can_be_read(path: Path) -> None:
    importlib.import_module(f"tests.gpu.{path.stem}")


def test_sources_without_what_is_compiled_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "te_dist")
    monkeypatch.setitem(sys.modules, "te_dist._C", None)  # a module that is not to be found
    with pytest.raises(ImportError, match="holds the sources of te_dist and nothing compiled: leave the folder"):
        importlib.import_module("te_dist")


def test_names_of_transformer_engine_lead_to_those_here() -> None:
    te = importlib.import_module("te_dist")
    with pytest.raises(AttributeError, match=r"TransformerEngine's fp8_autocast take te_dist.autocast\(recipe=...\)"):
        te.fp8_autocast  # noqa: B018
    with pytest.raises(AttributeError, match="module 'te_dist' has no attribute 'nothing'$"):
        te.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"TransformerEngine's TransformerLayer take a module of your own"):
        te.TransformerLayer  # noqa: B018


def test_what_names_of_transformer_engine_lead_to_is_there() -> None:
    te = importlib.import_module("te_dist")
    for name, here in te._OF_TRANSFORMER_ENGINE.items():
        assert not hasattr(te, name), f"{name} is here itself"
        paths = re.findall(r"\b(?:te_dist|torch)(?:\.\w+)+", here)
        assert paths or here.startswith("nothing: "), name
        for path in paths:
            resolve(path)


def resolve(path: str) -> object:
    """What a dotted path leads to, submodules that nobody has imported included."""
    root, *names = path.split(".")
    found = importlib.import_module(root)
    for number, name in enumerate(names, 1):
        if not hasattr(found, name):
            importlib.import_module(".".join([root, *names[:number]]))
        found = getattr(found, name)
    return found
