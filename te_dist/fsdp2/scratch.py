"""What filling an unsharded parameter allocates for the time of it, found by filling one without memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from te_dist._torch_private import TorchDispatchMode, tree_leaves
from te_dist.formats import Format, geometry
from te_dist.fsdp2.plan import GatherPlan, Place, leading_and_region
from te_dist.fsdp2.unsharded import unsharded


@lru_cache(maxsize=8192)
def scratch_bytes(format: Format, plan: GatherPlan, place: Place, *, num_outputs: int) -> int:
    """Most bytes of temporary tensors while `plan` fills the parameter from the shard at `place`.

    Args:
        num_outputs: of the plan's wires, how many are delivered.
    """
    leading, region = leading_and_region(place)
    canonical = format.canonical.fields
    shard = {f.name: geometry.empty(f, region, device="meta", leading=leading) for f in canonical}
    gathered = [wire.nbytes * len(plan.parts) for wire in plan.wires[:num_outputs]]
    outputs = tuple(torch.empty(size, dtype=torch.uint8, device="meta") for size in gathered)
    whole = unsharded(format, plan.whole, dtype=torch.float32, home=torch.device("meta"))
    whole.allocate(format.fields)
    with _Temporaries() as temporaries:
        whole.fill(plan, outputs, shard)
    return temporaries.most


class _Temporaries(TorchDispatchMode):
    """Follows storages that are made inside of a block.

    Attributes:
        most: bytes of those that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._known = WeakIdKeyDictionary()  # UntypedStorage -> whether it was made here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._known.setdefault(tensor.untyped_storage(), False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._known.setdefault(tensor.untyped_storage(), True)
        self.most = max(self.most, sum(storage.nbytes() for storage, made in self._known.items() if made))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
