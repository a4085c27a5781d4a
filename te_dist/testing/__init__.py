"""What the tests of te_dist share: worker processes, bitwise comparison, a tracker of allocated bytes."""

from te_dist.testing.asserts import assert_bitwise, full_tensor
from te_dist.testing.memory import Allocation, StorageTracker
from te_dist.testing.pool import RankError, WorkerPool, pool
from te_dist.testing.worker import device, mesh

__all__ = [
    "Allocation",
    "RankError",
    "StorageTracker",
    "WorkerPool",
    "assert_bitwise",
    "device",
    "full_tensor",
    "mesh",
    "pool",
]
