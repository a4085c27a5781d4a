"""Numbers of writes."""

from __future__ import annotations

import multiprocessing

from te_dist.tensor.writes import next_write


def test_processes_that_were_forked_have_numbers_of_their_own() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        theirs = {*pool.map(_number, range(2), chunksize=1), next_write()}
    assert len(theirs) == 3 and min(theirs) > 0


def _number(_: int) -> int:
    return next_write()
