"""FSDP2 over quantized parameters: sharded by rows, gathered in their own format."""

from te_dist.fsdp2.api import fully_shard, settle
from te_dist.fsdp2.materialize import materialize
from te_dist.fsdp2.parameter import GroupedParameter, QuantizedParameter, ShardedParameter
from te_dist.fsdp2.plan import KEPT, RECOMPUTED, RESHARDED, GatherPlan, GatherPolicy, Phase, plan_gather

__all__ = [
    "KEPT",
    "RECOMPUTED",
    "RESHARDED",
    "GatherPlan",
    "GatherPolicy",
    "GroupedParameter",
    "Phase",
    "QuantizedParameter",
    "ShardedParameter",
    "fully_shard",
    "materialize",
    "plan_gather",
    "settle",
]
