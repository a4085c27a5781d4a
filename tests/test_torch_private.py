"""Private PyTorch APIs are where te_dist expects them. A failure here names what a new torch has moved."""

import importlib
import inspect
from functools import reduce

import pytest
import torch

from te_dist import _torch_private as private

REMEDY = "find its successor and change te_dist/_torch_private.py, nothing else"
ENTRIES = (*private.IMPORTED, *private.ATTRIBUTES)


def resolve(path: str) -> object:
    """The object at a dotted path, importing as many leading parts as are modules."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], module)
    raise ModuleNotFoundError(path)


def has_member(owner: object, member: str) -> bool:
    """Whether a class, or its instances (by annotation or assignment in its source), carries `member`."""
    if hasattr(owner, member):
        return True
    return inspect.isclass(owner) and f"self.{member}" in inspect.getsource(owner)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.path)
def test_private_api_is_where_we_expect_it(entry: private.Private) -> None:
    if entry.needs_cuda and torch.version.cuda is None:
        pytest.skip("only in a torch built for CUDA")
    owner_path, _, attribute = entry.path.rpartition(".")
    owner = resolve(owner_path)
    assert has_member(owner, attribute) or attribute in getattr(owner, "__slots__", ()), (
        f"torch {torch.__version__} has no {entry.path} ({entry.why}); {REMEDY}"
    )


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.members], ids=lambda entry: entry.path)
def test_private_api_has_the_members_we_use(entry: private.Private) -> None:
    missing = [member for member in entry.members if not has_member(resolve(entry.path), member)]
    assert not missing, f"torch {torch.__version__}: {entry.path} lost {missing} ({entry.why}); {REMEDY}"


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.parameters], ids=lambda entry: entry.path)
def test_private_api_takes_the_parameters_we_pass(entry: private.Private) -> None:
    parameters = tuple(inspect.signature(resolve(entry.path)).parameters)
    assert parameters[: len(entry.parameters)] == entry.parameters, (
        f"torch {torch.__version__}: {entry.path} takes {parameters}, we pass {entry.parameters}; {REMEDY}"
    )


def test_what_is_exported_is_listed_and_the_other_way_round() -> None:
    listed = {entry.name: resolve(entry.path) for entry in private.IMPORTED}
    exported = {name: getattr(private, name) for name in private.__all__}
    ours = {"ATTRIBUTES", "IMPORTED", "TESTED", "Private"} | {
        name for name, value in exported.items() if getattr(value, "__module__", "") == private.__name__
    }
    assert listed == {name: value for name, value in exported.items() if name not in ours}


def test_every_entry_says_why() -> None:
    assert all(len(entry.why) > 20 for entry in ENTRIES)
