"""What a rank holds of a quantized parameter whose whole values are known."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from te_dist.grouped.grouped_tensor import GroupedTensor
from te_dist.grouped.storage import quantize
from te_dist.tensor import QuantizedStorage, QuantizedTensor
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_part, local_tensor


def place_whole(param: Any, whole: Tensor) -> None:
    """Puts this rank's part of plain values into `param`; quantized as the whole is, where it is quantized.

    Args:
        param: plain or quantized, or a DTensor of either.
        whole: plain, of the shape of `param`, on its device; kept where `param` keeps what it was quantized from.
    """
    local = local_tensor(param)
    if not isinstance(local, QuantizedTensor):
        if local.numel():  # where there is nothing, the shape may be another
            local.copy_(local_part(whole, param) if isinstance(param, DTensor) else whole)
        return
    initial = whole.to("cpu", copy=True) if local.keep_initial else None
    local.storage.copy_(quantized_part(whole, param, initial=initial))


def first_member(param: Any) -> int:
    """Which member of the whole group is the first on this rank."""
    if not isinstance(param, DTensor) or not local_tensor(param).shape[0]:
        return 0
    (chunk,) = param.__create_chunk_list__()
    return chunk.offsets[0]


def quantized_part(whole: Tensor, param: Any, *, initial: Tensor | None = None) -> QuantizedStorage:
    """The part that this rank holds of `param`: of the whole values quantized at once, so that cuts change no byte.

    Args:
        whole: plain, of the shape of `param`.
        param: a quantized tensor, or a DTensor of one.
        initial: what to remember as the values at initialization, as `whole`.
    """
    local = local_tensor(param)
    region, is_group = local.storage.region, isinstance(local, GroupedTensor)
    storage = quantize(whole, local.format) if is_group else storages.quantize(whole, local.format)
    if initial is not None:
        storage.initial = initial.view(storage.shape)
    if is_group:
        storage = storage.narrow(0, first_member(param), local.storage.shape[0])
    if region == storage.region:
        return storage
    rows = storage.narrow(storage.matrix_dim, region.rows.start, len(region.rows))
    return rows.narrow(storage.matrix_dim + 1, region.cols.start, len(region.cols))
