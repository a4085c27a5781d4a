"""Home directories in the paths of a configuration."""

from __future__ import annotations

import os

from te_dist.launch.errors import require

HOME = "~"


def expanded(path: str, what: str) -> str:
    """A path whose `~` or `~name` at the beginning is a home directory; nothing else is expanded.

    Args:
        what: key of the configuration that has it.

    Raises:
        JobError: no home directory of that name is known.
    """
    found = os.path.expanduser(path)
    require(
        found != path or not path.startswith(HOME),
        what,
        got=f"{path!r}, which begins with no home directory that is known here",
        wanted="~ or ~name of a user, or another path",
        remedy="correct it, or write ./~ where a name begins so",
    )
    return found


def split(path: str) -> tuple[str, str]:
    """The home directory that a path begins with, and the rest of it; "" and the path where it does not."""
    rest = path[len(path.partition(os.sep)[0]) :] if path.startswith(HOME) else path
    found = os.path.expanduser(path)
    return found[: len(found) - len(rest)], rest
