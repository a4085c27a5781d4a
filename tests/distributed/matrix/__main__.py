"""`python -m tests.distributed.matrix [NAME ...]` runs situations (all of them by default) and records their states."""

from __future__ import annotations

import json
import sys

from te_dist.testing import pool
from tests.distributed.matrix.cells import FILE, SITUATIONS, entry, recorded, states


def main(names: list[str]) -> None:
    """Writes the file; what needs a newer torch stays as it is recorded."""
    known = recorded()
    for name in names or SITUATIONS:
        which = SITUATIONS[name]
        if which.is_here:
            known[name] = entry(which, states(which, pool(which.world)))
            refused = [format for format, state in known[name]["cells"].items() if state != "green"]
            print(f"{name}: {f'refused: {refused}' if refused else 'green'}", flush=True)
    ordered = {name: known[name] for name in SITUATIONS if name in known}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
