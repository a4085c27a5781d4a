"""Every format in every situation of FSDP2; `docs/fsdp2.md` has the table of what is recorded."""

from __future__ import annotations

import pytest

from te_dist.catalog import FORMATS
from tests.distributed.matrix.cells import GREEN, SITUATIONS, entry, recorded, states


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(ranks, name: str) -> None:
    which = SITUATIONS[name]
    if not which.is_here:
        pytest.skip(f"needs torch {which.since[0]}.{which.since[1]}")
    found = entry(which, states(which, ranks(which.world)))
    assert found == recorded().get(name), "record the states: python -m tests.distributed.matrix; then make docs"


def test_what_is_recorded_is_there() -> None:
    assert list(recorded()) == list(SITUATIONS), "run python -m tests.distributed.matrix; then make docs"
    for name, which in recorded().items():
        assert list(which["cells"]) == list(FORMATS), f"{name} lacks formats"
        assert GREEN in which["cells"].values() or len(set(which["cells"].values())) == 1, name
