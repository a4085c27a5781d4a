"""FSDP2 over quantized parameters: sharded by rows, gathered in their own format."""

from te_dist.fsdp2.api import fully_shard, settle
from te_dist.fsdp2.check import check
from te_dist.fsdp2.count import CountedTraffic, count_traffic
from te_dist.fsdp2.footprint import Footprint, Unit, footprints, sent_per_step
from te_dist.fsdp2.materialize import materialize
from te_dist.fsdp2.parameter import GroupedParameter, QuantizedParameter, ShardedParameter
from te_dist.fsdp2.peak import Peak, peak_bytes
from te_dist.fsdp2.plan import KEPT, RECOMPUTED, RESHARDED, GatherPlan, GatherPolicy, Phase, plan_gather
from te_dist.tensor.traffic import Purpose

__all__ = [
    "KEPT",
    "RECOMPUTED",
    "RESHARDED",
    "CountedTraffic",
    "Footprint",
    "GatherPlan",
    "GatherPolicy",
    "GroupedParameter",
    "Peak",
    "Phase",
    "Purpose",
    "QuantizedParameter",
    "ShardedParameter",
    "Unit",
    "count_traffic",
    "footprints",
    "check",
    "fully_shard",
    "materialize",
    "peak_bytes",
    "plan_gather",
    "sent_per_step",
    "settle",
]
