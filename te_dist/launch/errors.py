"""The one kind of error a job ends with on purpose."""

from __future__ import annotations


class JobError(Exception):
    """A reason to end the job that its user can act on: printed as one line on every rank, without a traceback.

    Not a `ValueError`, which the command line parser would wrap into a text of its own.
    """

    def __init__(self, what: str, *, got: object, wanted: str, remedy: str) -> None:
        super().__init__(f"{what}: got {got}; wanted {wanted}; remedy: {remedy}")


def unwritable(run_dir: object, error: OSError) -> JobError:
    """What to raise where the run directory cannot be written."""
    return JobError(
        f"run directory {run_dir}",
        got=error,
        wanted="a directory to write in, with room",
        remedy="change run_dir, or make room there",
    )


def require(condition: bool, what: str, *, got: object, wanted: str, remedy: str) -> None:
    """Raises `JobError` unless `condition` holds."""
    if not condition:
        raise JobError(what, got=got, wanted=wanted, remedy=remedy)
