"""Plain weights of groups that are kept quantized between calls: as the host says, or as a flag on the device does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from te_dist.formats import Direction, Group, Partition
from te_dist.grouped import GroupedStorage
from te_dist.grouped import storage as groups
from te_dist.nn.grouped_weights import shape_of, stacked
from te_dist.ops.multi_tensor import Batch
from te_dist.quantizers import Quantizer
from te_dist.scaling.agreement import PartsQuantization

FLAGS = (torch.bool, torch.int32, torch.float32)


class _Place(NamedTuple):
    """Where the values of a plain tensor lie. A DTensor's local part is another tensor in every pass, in one place."""

    memory: StorageWeakRef
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(weight: Tensor) -> _Place:
        memory = StorageWeakRef(weight.untyped_storage())
        return _Place(memory, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)


class _Kept(NamedTuple):
    """Weights quantized for several calls: how, from where, how often these were written, and what came of it."""

    quantizer: Quantizer
    places: tuple[_Place, ...]
    versions: tuple[int, ...]
    stack: GroupedStorage


class WeightCache:
    """What a map keeps of its plain weights, quantized in both directions.

    [Note: Weights kept by a flag]
    Whether a call quantizes may be said in device memory, so that one CUDA graph serves the first of several micro
    batches and the others. The host does not know what was decided: kept bytes are taken, however old they are. The
    first call for weights that lie where they lie quantizes whatever the flag says, so that there is something to keep;
    it cannot be captured. Buffers that a graph was captured with live as long as the map. A backward pass reads the
    buffers as they are then: one that is older than a change of the weights is refused.

    Args:
        label: of the map, for messages.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._kept: _Kept | None = None
        self._flagged: FlaggedWeights | None = None
        self._captured: list[FlaggedWeights] = []

    def __reduce__(self) -> Any:
        """Copies have weights of their own."""
        return WeightCache, (self._label,)

    def forget(self) -> None:
        """Keeps nothing, but for graphs."""
        self._kept = self._flagged = None

    def by_host(self, weights: Sequence[Tensor], quantizer: Quantizer, *, is_first: bool) -> GroupedStorage:
        """The weights quantized now, where this is the first of several calls; else as they were in that.

        Raises:
            RuntimeError: there was no first call, or the weights or the quantizer have changed since.
        """
        found = quantizer, tuple(map(_Place.of, weights)), tuple(weight._version for weight in weights)
        if is_first:
            stack = stacked([weight.detach() for weight in weights], quantizer, *Direction)
            self._kept = _Kept(*found, stack)
        elif self._kept is None or self._kept[:3] != found:
            raise RuntimeError(
                f"{self._label}: is_first_microbatch=False takes the weights as an earlier call quantized them, and "
                f"{'there was none' if self._kept is None else 'they, or the recipe, have changed since'}; call it "
                "with True first"
            )
        return self._kept.stack

    def by_flag(self, weights: Sequence[Tensor], quantizer: Quantizer, flag: Tensor) -> FlaggedWeights:
        """The weights quantized now, where `flag` is not set; else as they were. See [Note: Weights kept by a flag].

        Raises:
            NotImplementedError: no flag turns off what this quantizer does.
            RuntimeError: a CUDA graph is being captured, and there is nothing to keep.
            ValueError: the flag is none.
        """
        check_flag(flag, weights[0].device, self._label)
        known = quantizer, tuple(map(_Place.of, weights))
        captures = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if self._flagged is None or self._flagged.known != known:
            if captures:
                raise RuntimeError(
                    f"{self._label}: skip_weight_quantization: there are no quantized weights that a graph could keep; "
                    "run a pass with these weights and this recipe before it is captured"
                )
            self._flagged = None
            with torch.inference_mode(False):  # training writes into what an evaluation came upon first
                self._flagged = FlaggedWeights(weights, known, label=self._label)
            flag = torch.zeros_like(flag)
        if captures and self._flagged not in self._captured:
            self._captured.append(self._flagged)
        self._flagged.update(weights, flag)
        return self._flagged


class FlaggedWeights:
    """Weights quantized into buffers that stay where they are. See [Note: Weights kept by a flag].

    Attributes:
        known: by what and from where they are quantized.
        stack: all groups.
    """

    def __init__(self, weights: Sequence[Tensor], known: tuple[Quantizer, tuple[_Place, ...]], *, label: str) -> None:
        """Raises NotImplementedError where no flag turns off what the quantizer does."""
        first, quantizer = weights[0].detach(), known[0]
        format, group = quantizer.declare(first.dtype), Group.whole(*shape_of(weights))
        for direction in format.directions:
            format[direction].codec.check(group.region)
        self.known, self._label = known, label
        self.stack = groups.empty(format, group, dtype=first.dtype, device=first.device)
        self._noop = torch.zeros(1, dtype=torch.int32, device=first.device)
        matrices = first.unbind() if first.dim() == 3 else weights  # noqa: PLR2004
        parts = [
            (member, matrix.detach(), Partition.of([member.region]))
            for member, matrix in zip(self.stack.members, matrices, strict=True)
        ]
        self._parts = PartsQuantization(parts, (), noop=self._noop)
        if not quantizer.writes_by_format or not self._parts.obeys_noop:
            raise NotImplementedError(
                f"{label}: skip_weight_quantization: no flag turns off how {quantizer} quantizes weights "
                f"({first.dtype}, strides {first.stride()}): it may draw no random numbers, agree with no other rank, "
                "read no values that it has rounded, and wants contiguous weights; take is_first_microbatch instead"
            )
        self._readers = Batch([[reader] for reader in self._parts.readers if reader is not None], self._noop)
        self._versions: tuple[int, ...] = ()
        self._age = 0

    def update(self, weights: Sequence[Tensor], flag: Tensor) -> None:
        """Quantizes the weights, unless `flag` is set on the device."""
        torch.ne(flag.detach().view(1), 0, out=self._noop)
        self._parts.begin()
        self._readers.run()
        self._parts.finish()
        versions = tuple(weight._version for weight in weights)
        self._age += versions != self._versions
        self._versions = versions

    def guard(self, out: Tensor) -> None:
        """Lets the backward pass of `out` raise where other weights may have been quantized into the buffers since."""
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(partial(self._check_age, self._age))

    def _check_age(self, age: int, gradients: Any) -> None:
        if age != self._age:
            raise RuntimeError(
                f"{self._label}: the weights have changed, and may have been quantized anew, since the forward pass of "
                "this backward pass; run backward before the next forward pass, or leave skip_weight_quantization out"
            )


def check_flag(flag: Tensor, device: torch.device, label: str) -> None:
    """Raises ValueError for what is no `skip_weight_quantization`."""
    if not isinstance(flag, Tensor):
        raise ValueError(
            f"{label}: skip_weight_quantization: got {flag!r}, wanted a tensor of one element in the memory of the "
            "device; what the host knows is said by is_first_microbatch"
        )
    if flag.numel() != 1 or flag.dtype not in FLAGS or flag.device != device:
        raise ValueError(
            f"{label}: skip_weight_quantization: got {flag.dtype} of {tuple(flag.shape)} on {flag.device}, wanted one "
            f"element of {', '.join(map(str, FLAGS))} on {device}"
        )
