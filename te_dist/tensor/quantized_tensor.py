"""QuantizedTensor: a `torch.Tensor` that stands for the values of a `QuantizedStorage`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, Self
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from te_dist._torch_private import disabled_torch_function, tree_leaves
from te_dist.formats import Direction, Format
from te_dist.tensor import filling, writes
from te_dist.tensor import storage as storages
from te_dist.tensor.parts import check_writable
from te_dist.tensor.storage import QuantizedStorage
from te_dist.tensor.untyped import TENSOR


class _Torch(threading.local):
    """Inside of its block torch's own methods ask for addresses, by which they tell how a tensor is made."""

    depth = 0

    @property
    def asks(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def mode_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """A block in or out of inference mode, wherever the tensor was made.

    NOTE: what is made in inference mode cannot be a view of a tensor from outside; FSDP2 views its shards there.
    """
    mode = tensor.is_inference()
    return _AS_IT_IS if mode == torch.is_inference_mode_enabled() else torch.inference_mode(mode)


def check_shape(x: Tensor, target: Tensor) -> None:
    """Raises ValueError where values that are to be quantized into a tensor have another shape."""
    if x.shape != target.shape:
        raise ValueError(
            f"quantized into a tensor of shape {tuple(target.shape)}: got values of shape {tuple(x.shape)}, wanted the "
            "same; expand or view them"
        )


def count_writes(*tensors: Tensor) -> None:
    """Has autograd see what was written into buffers: backward passes that saved the tensors raise."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


_TORCH = _Torch()
_AS_IT_IS = nullcontext()
_PROCESS = uuid4().hex


class QuantizedTensor(torch.Tensor):
    """A quantized tensor of nominal shape and dtype.

    The nominal shape lives on this wrapper only: views of it share one storage object and touch no buffer, so that
    bytes which are gathered, freed and refilled in place are seen by all of them. Buffers can be read as attributes
    by their field names.

    Attributes:
        storage: the buffers and their format.
        keep_initial: whether plain values that initialize it, or are copied into it or assigned to it, are kept
            (`storage.initial`) until it is written otherwise.
        matrix_dim: of its storages.
    """

    matrix_dim: ClassVar[int] = 0

    storage: QuantizedStorage
    keep_initial: bool = False

    def __new__(
        cls,
        storage: QuantizedStorage | QuantizedTensor,
        shape: Sequence[int] | None = None,
        *,
        requires_grad: bool = False,
    ) -> Self:
        if not isinstance(storage, QuantizedStorage):
            return cls.around(storage, shape, requires_grad=requires_grad)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            storage.shape if shape is None else shape,
            dtype=storage.dtype,
            device=storage.device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        storage: QuantizedStorage | QuantizedTensor,
        shape: Sequence[int] | None = None,
        *,
        requires_grad: bool = False,
    ) -> None:
        if isinstance(storage, QuantizedStorage):  # else see `around`
            self.storage = storage

    @classmethod
    def around(cls, given: Any, shape: Sequence[int] | None, *, requires_grad: bool) -> Self:
        """Of this class, around the storage of a quantized tensor, for whoever knows `type(weight)(tensor)` only.

        Raises:
            TypeError: it is something else, or a group where a matrix is wanted, or the other way round.
        """
        if not isinstance(given, QuantizedTensor) or given.storage.matrix_dim != cls.matrix_dim:
            what = type(given).__name__ + (f" of {tuple(given.shape)}" if isinstance(given, Tensor) else "")
            wanted = ("a matrix", "a group of matrices")[cls.matrix_dim]
            raise TypeError(
                f"{cls.__name__}: got {what}, wanted the storage of {wanted}, or a quantized tensor that has one; "
                "values are quantized into a weight there is (weight.copy_(values)), or by "
                "te_dist.tensor.quantize(values, format)"
            )
        shape = given.shape if shape is None else shape
        made = given.like(given.storage, shape) if type(given) is cls else cls(given.storage, shape)
        made.keep_initial = given.keep_initial
        made.requires_grad_(requires_grad)
        return made

    def like(self, storage: QuantizedStorage, shape: Sequence[int] | None = None) -> Self:
        """Another tensor of this class around `storage`."""
        with mode_of(self):
            return type(self)(storage, shape)

    def __getattr__(self, name: str) -> Tensor:
        storage = self.__dict__.get("storage")
        if storage is not None and storage.buffers.get(name) is not None:
            return storage.buffers[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def data_ptr(self) -> int:
        """Address of the first buffer: by addresses ordinary code tells parameters apart."""
        if _TORCH.asks:
            return 0  # torch's own word for a tensor that is made of others
        return next((buffer.data_ptr() for buffer in self.storage.buffers.values()), 0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _TORCH:
            return TENSOR.__reduce_ex__(self, protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        with _TORCH:
            return TENSOR.__deepcopy__(self, memo)

    @property
    def data(self) -> QuantizedTensor:  # type: ignore[override]
        """A view without autograd history. Assigning takes over another quantized tensor, or quantizes values."""
        return TENSOR.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, QuantizedTensor):
            if value.storage.matrix_dim != self.storage.matrix_dim:
                raise ValueError(
                    f"cannot assign a {type(value).__name__} to a {type(self).__name__}: one is a matrix, the other a "
                    "group of them; use copy_, which quantizes its values"
                )
            before = self.storage
            TENSOR.data.__set__(self, value)
            self.storage = value.storage  # pyright: ignore[reportIncompatibleMethodOverride]
            writes.put_back(self.storage, writes.noted_master(before), before.mastered)
        elif value.shape == self.shape:
            with torch.inference_mode(False), torch.no_grad():
                own = self.detach().clone()  # what shares the buffers of this keeps them, as it would a plain tensor's
                filling.load_values(own, value)
                self.data = own
        else:
            raise ValueError(
                f"cannot assign values of shape {tuple(value.shape)} to a quantized tensor of {tuple(self.shape)}"
            )

    @property
    def format(self) -> Format:
        """The declared format."""
        return self.storage.format

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """See `QuantizedStorage.update_usage`."""
        self.storage.update_usage(rowwise_usage, columnwise_usage)

    def dequantize(self, *, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """Plain tensor of the same shape in `dtype` (default: the nominal one).

        Its gradient is that of the values which this tensor stands for, as of any op on them.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _VALUES.apply(self, dtype, direction)
        return self.decoded(dtype, direction)

    def decoded(self, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """The same without a gradient, for whoever is below autograd."""
        return self.storage.dequantize(dtype, direction).view(self.shape)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raises: numpy has no such arrays. Values are asked for by `dequantize`."""
        raise self._no_array("numpy")

    def tolist(self) -> NoReturn:
        """Raises, as `numpy`."""
        raise self._no_array("tolist")

    def __dlpack__(self, **_: Any) -> NoReturn:
        """Raises, as `numpy`: what takes it would read memory that is not there."""
        raise self._no_array("__dlpack__")

    def _no_array(self, op: str) -> RuntimeError:
        return RuntimeError(
            f"{op} of a quantized tensor of {tuple(self.shape)}: got codes and scales in several buffers, wanted "
            f"values in one; call .dequantize().{op}(), or take the buffers (.storage.buffers)"
        )

    def share_memory_(self) -> QuantizedTensor:
        """Moves the buffers of a tensor on the CPU into memory that processes share, as torch has it."""
        for buffer in self.storage.buffers.values():
            TENSOR.share_memory_(buffer)
        return self

    def is_shared(self) -> bool:
        """Whether processes may share the buffers: those on a GPU always."""
        return all(TENSOR.is_shared(buffer) for buffer in self.storage.buffers.values())

    def quantize_(self, x: Tensor) -> QuantizedTensor:
        """Quantizes `x`, of the same shape, into the buffers of this tensor.

        Raises:
            ValueError: it has another shape, or a type that is not quantized.
            NotImplementedError: this is a part, and the whole would not see the values.
        """
        check_writable(self)
        check_shape(x, self)
        self.storage.quantize_(x)
        count_writes(self)
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        storage = self.storage
        place = storage.region, storage.dtype, storage.cut
        # NOTE: graphs are guarded by all of it, and hold what lasts (`traced.holds`).
        return list(storage.buffers), (type(self), storage.format, *place, storage.lasting_directions)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> QuantizedTensor:
        cls, format, region, dtype, cut, _ = context
        return cls(QuantizedStorage(format, dict(inner), region, dtype=dtype, cut=cut), outer_size)

    def _stable_hash_for_caching(self) -> str:
        """What torch's caches of compiled graphs know this tensor by: in this process only, whose plans graphs name."""
        parts = [(name, tuple(b.shape), b.stride(), b.dtype, b.device) for name, b in self.storage.buffers.items()]
        return repr((_PROCESS, self.__tensor_flatten__()[1], self.shape, self.requires_grad, parts))

    # -- the protocol of torch.distributed.checkpoint: see `tensor.filling` ----------------------------------------

    def __create_write_items__(self, name: str, whole: Tensor) -> list[WriteItem]:
        return filling.items_to_write(self, name, whole)

    @property
    def __create_chunk_list__(self) -> Callable[[], list[ChunkStorageMetadata]]:
        chunk = filling.chunk_to_read(self)
        if chunk is None:
            raise AttributeError("torch tells where this lies")
        return lambda: [chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> QuantizedTensor:
        return self.like(*filling.to_fill(self, index.fqn))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        fields = ", ".join(f"{n}: {str(b.dtype)[6:]}{list(b.shape)}" for n, b in self.storage.buffers.items())
        return f"{type(self).__name__}({list(self.shape)}, {str(self.dtype)[6:]}, {self.device}, {{{fields}}})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return OPS.call(func, args, kwargs or {})

    __torch_function__: Any = disabled_torch_function


class OpTable:
    """The aten ops a QuantizedTensor supports, filled by `tensor.aten`. Any other op raises with its name."""

    def __init__(self) -> None:
        self._handlers: dict[Any, Any] = {}

    def implements(self, *ops: Any) -> Any:
        """Decorator: registers a handler `fn(func, args, kwargs)` for `ops`; an op can have one only."""

        def register(fn: Any) -> Any:
            for op in ops:
                if op in self._handlers:
                    raise ValueError(f"{op} is implemented twice; remove one handler")
                self._handlers[op] = fn
            return fn

        return register

    def adopt(self, table: OpTable, *ops: Any) -> None:
        """Takes over the handlers that another table has for `ops`."""
        for op in ops:
            self.implements(op)(table._handlers[op])

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the handler of `func` returns; raises NotImplementedError where there is none."""
        handler = self._handlers.get(func)
        if handler is None:
            # In inference mode what is made of other ops comes as it is.
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            shapes = [tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, QuantizedTensor)]
            raise NotImplementedError(
                f"{func} is not defined on a quantized tensor: got {shapes}, as of a weight that is used as a plain "
                "matrix outside of its module, wanted plain tensors, or the product of the module (te_dist.Linear). "
                "Call .dequantize() where a copy in high precision is meant, or leave this map out of the plan of "
                'te_dist.convert ({"*.name": None, "*": recipe}); docs/tensor.md lists the supported ops'
            )
        return handler(func, args, kwargs)

    def names(self) -> dict[str, str]:
        """Name of every supported op -> first line of its handler's docstring."""
        return {str(op): (fn.__doc__ or "").split("\n")[0] for op, fn in self._handlers.items()}


OPS = OpTable()


def quantize(x: Tensor, format: Format) -> QuantizedTensor:
    """Quantizes a whole tensor of shape (..., K)."""
    return QuantizedTensor(storages.quantize(x, format), x.shape)


class _Values(torch.autograd.Function):
    """The values of a quantized tensor, plain."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype | None, direction: Direction | None) -> Tensor:
        ctx.dtype = tensor.dtype
        # No view to autograd, which would refuse writes into it.
        return torch.ops.aten._unsafe_view(tensor.storage.dequantize(dtype, direction), tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].to(ctx.dtype), None, None


_VALUES: Any = _Values
