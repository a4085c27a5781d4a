"""In how many bits FusedAdam keeps what it knows of a parameter.

[Note: Fewer bits]
What has fewer bits than fp32 is rounded by chance, up with a probability of the distance from the value below. Rounded
to nearest, a second moment would never decay: with beta2 = 0.999 a step changes it by a thousandth, bf16 has steps of a
256th. Chances follow from the seed, the number of the parameter among those of the optimizer, its step, and the place
of an element in the whole parameter: they do not depend on devices, nor on how it is cut.

Moments in bytes are e4m3 codes with one f32 scale for each 128 values of a row, so that cuts between rows leave blocks
whole. The second moment is kept as its root: squares would need twice the exponents that e4m3 has, and a root above 0
never becomes 0, because steps are divided by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from te_dist.kernels.multi_adam import MOMENT_BLOCK, CompactPlace
from te_dist.ops.multi_adam import MOMENT_CODES
from te_dist.optim import masters
from te_dist.optim.masters import MASTER, Held
from te_dist.tensor import placement
from te_dist.tensor.placement import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
REMAINDER = "master_remainder"
_F32, _BF16, _F16, _BYTES = torch.float32, torch.bfloat16, torch.float16, torch.uint8
_FLOATS = (_F32, _BF16, _F16)


@dataclass(frozen=True)
class Precision:
    """Types of masters and moments.

    Attributes:
        master: f32 or bf16, of masters; None where 16-bit parameters have none (quantized ones have fp32 masters then).
        exp_avg, exp_avg_sq: f32, bf16, or bytes (`torch.uint8`, as TransformerEngine has it, or `torch.float8_e4m3fn`).
        remainders: bf16 parameters are the upper halves of their masters; only the lower ones are kept, as bytes.
        by_chance: bf16 parameters without masters are rounded so.
        seed: of chances.

    Raises:
        ValueError: there is no such combination.
    """

    master: torch.dtype | None
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    remainders: bool
    by_chance: bool
    seed: int

    def __post_init__(self) -> None:
        for name in MOMENTS:
            if getattr(self, name) in MOMENT_CODES:
                object.__setattr__(self, name, _BYTES)
            if getattr(self, name) not in (_F32, _BF16, _BYTES):
                raise ValueError(
                    f"{name}_dtype: got {getattr(self, name)}, wanted float32, bfloat16, or {MOMENT_CODES[0]} or "
                    f"{MOMENT_CODES[1]} for codes with scales; float16 is too narrow for moments"
                )
        if self.master not in (None, _F32, _BF16):
            raise ValueError(
                f"master_weight_dtype: got {self.master}, wanted float32, or bfloat16, which is rounded by chance"
            )
        if self.remainders and self.master != _F32:
            raise ValueError(
                f"store_param_remainders keeps the lower halves of fp32 masters, got {self._masters}; pass "
                "master_weights=True and master_weight_dtype=torch.float32"
            )
        if self.by_chance and self.master == _F32:
            raise ValueError(
                f"stochastic_rounding is for parameters without fp32 masters, got {self._masters}; pass "
                "master_weights=False"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: got {self.seed}, wanted 0 to 2^64 - 1")

    @property
    def _masters(self) -> str:
        return "no masters" if self.master is None else f"masters of {self.master}"

    def check(self, param: Tensor) -> None:
        """Raises ValueError, alike on every rank, where a parameter cannot be kept so.

        Frozen ones may be of any type.
        """
        if param.requires_grad and not masters.is_quantized(param):
            check_kernels_take(local_tensor(param))
        if not masters.is_quantized(param) and self._is_rounded(param) and param.dtype != _BF16:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} would be rounded by chance: got {param.dtype}, wanted "
                "bfloat16; give it an fp32 master (master_weights=True, master_weight_dtype=torch.float32), or pass "
                "stochastic_rounding=False"
            )
        cut = _smallest_cut(param) if any(self._type(name, param) == _BYTES for name in MOMENTS) else 0
        if cut % MOMENT_BLOCK:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is cut into {cut} columns, wanted a multiple of "
                f"{MOMENT_BLOCK}, which share a scale of moments in bytes; pass exp_avg_dtype and exp_avg_sq_dtype "
                "bfloat16 or float32"
            )

    def dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """Types of the state of a parameter by name, in the order in which it is made."""
        found: dict[str, torch.dtype] = {"step": _F32}
        for name in MOMENTS:
            found[name] = self._type(name, param)
            if found[name] == _BYTES:
                found[f"{name}_scale"] = _F32
        if masters.is_quantized(param):
            found[MASTER] = self.master or _F32
        elif self.remainders and param.dtype == _BF16:
            found[REMAINDER] = _BYTES
        elif self.master == _F32 and param.dtype != _F32:
            found[MASTER] = _F32
        return found

    def initial_state(self, param: Tensor) -> dict[str, Tensor]:
        """Before the first step."""
        local, state = local_tensor(param), {}
        for name, dtype in self.dtypes(param).items():
            if name == "step":
                state[name] = torch.zeros((), dtype=dtype, device=param.device)
            elif name == MASTER:
                state[name] = self.initial_master(param)
            else:
                shape, own = (_state_shape(name, each) for each in (param.shape, local.shape))
                zeros = torch.zeros(own, dtype=dtype, device=param.device)
                state[name] = masters.shaped_like(param, zeros, shape=shape)
        return state

    def initial_master(self, param: Tensor) -> Tensor:
        """Of the values before quantization where they are kept, else of those that a parameter has."""
        return masters.shaped_like(param, masters.initial_master(param).to(self.dtypes(param)[MASTER]))

    def check_state(self, param: Tensor, state: Mapping[str, Any], *, grad: Tensor | None = None) -> None:
        """Raises ValueError where state of a parameter is not of the types, shapes and cuts of `initial_state`, on its
        device, or its gradient is not of its shape: kernels trust addresses.

        Args:
            grad: of this rank's part.
        """
        local = local_tensor(param)
        for name, dtype in self.dtypes(param).items():
            is_step, value = name == "step", state.get(name)
            whole, own = (torch.Size(()) if is_step else _state_shape(name, each.shape) for each in (param, local))
            over = () if is_step else placement.spread(param)
            wanted = _Made(dtype, whole, own, param.device, over, is_contiguous=True)
            got = _Made.of(value) if isinstance(value, Tensor) else type(value).__name__
            if got != wanted:
                raise ValueError(
                    f"{name} of a parameter of shape {tuple(param.shape)}: got on this rank {got}, wanted {wanted}; "
                    "load the state of this parameter as it is cut here (te_dist.checkpoints and "
                    "torch.distributed.checkpoint cut it anew), or begin anew by optimizer.state.pop(parameter)"
                )
        if grad is not None and grad.shape != local.shape:
            raise ValueError(
                f"gradient of a parameter of shape {tuple(param.shape)}: got {tuple(grad.shape)} on this rank, wanted "
                f"{tuple(local.shape)}; set it to None after the parameter was resized"
            )

    def place(self, held: Held, number: int) -> CompactPlace | None:
        """Of parameter number `number`: None where all is fp32, or rounded to nearest as a parameter may be."""
        state = {name: local_tensor(tensor) for name, tensor in held.state.items()}
        value = state.get(MASTER, held.local)
        by_chance = (
            value.dtype == _BF16 and REMAINDER not in state and (MASTER in state or self._is_rounded(held.param))
        )
        scales, remainder = (state.get("exp_avg_scale"), state.get("exp_avg_sq_scale")), state.get(REMAINDER)
        if all(state[name].dtype == _F32 for name in MOMENTS) and remainder is None and not by_chance:
            return None
        cols = value.shape[-1] if scales[0] is not None or scales[1] is not None else value.numel()
        shape = (value.numel() // cols if cols else 0, cols)
        return CompactPlace(*scales, remainder, by_chance, shape, (self.seed, number, *_noise_place(held.param)))

    def _is_rounded(self, param: Tensor) -> bool:
        """Whether a parameter that is not quantized is its own master, and rounded by chance."""
        return param.dtype != _F32 and (self.by_chance or self.master == _BF16)

    def _type(self, name: str, param: Tensor) -> torch.dtype:
        """Of a moment: that of a vector, which cuts go through anywhere, has no blocks."""
        dtype = getattr(self, name)
        return _F32 if dtype == _BYTES and param.dim() < 2 else dtype


class _Made(NamedTuple):
    """What this rank has of a tensor of state, and of what whole it is a part; see `placement.spread`."""

    dtype: torch.dtype
    whole: torch.Size
    shape: torch.Size
    device: torch.device
    spread: tuple[tuple[Placement, tuple[int, ...]], ...]
    is_contiguous: bool

    @staticmethod
    def of(tensor: Tensor) -> _Made:
        own = local_tensor(tensor)
        over = placement.spread(tensor)
        return _Made(tensor.dtype, tensor.shape, own.shape, tensor.device, over, own.is_contiguous())

    def __str__(self) -> str:
        order = "" if self.is_contiguous else ", not contiguous"
        cuts = [f"{cut} over ranks {list(ranks)}" for cut, ranks in self.spread]
        part = f", a part of {tuple(self.whole)} by {' and '.join(cuts)}" if cuts else ""
        return f"{self.dtype} of shape {tuple(self.shape)} on {self.device}{order}{part}"


def check_kernels_take(values: Tensor) -> None:
    """Raises ValueError where no kernel updates values of this type or order."""
    if not (values.is_contiguous() and values.dtype in _FLOATS):
        raise ValueError(
            f"a parameter of shape {tuple(values.shape)}: got {values.dtype} with strides {values.stride()}, wanted "
            "float32, bfloat16 or float16 and contiguous; convert it before the optimizer is made"
        )


def _state_shape(name: str, shape: torch.Size) -> torch.Size:
    """Of the state of a parameter of this shape, or of a part of it: cut as that is."""
    if name.endswith("_scale"):
        return torch.Size((*shape[:-1], -(-shape[-1] // MOMENT_BLOCK)))
    # NOTE: no int16, which neither gloo nor NCCL sends.
    return torch.Size((*shape, 2)) if name == REMAINDER else shape


def _smallest_cut(param: Tensor) -> int:
    """Columns of a part, where there is a cut between columns; else 0."""
    if not isinstance(param, DTensor):
        return 0
    cols, last = param.shape[-1], param.dim() - 1
    sizes = [param.device_mesh.size(mesh_dim) for mesh_dim, dim in placement.cuts(param.placements) if dim == last]
    for size in sizes:
        cols = -(-cols // size)
    return cols if sizes else 0


def _noise_place(param: Tensor) -> tuple[int, int, int]:
    """(place of the first element in the whole, elements of a row of this part, and of the whole)."""
    if not isinstance(param, DTensor):
        return 0, param.numel(), param.numel()
    start, cut = placement.local_start(param), {dim for _, dim in placement.cuts(param.placements) if dim}
    if len(cut) > 1:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is cut along dimensions {sorted(cut)}, wanted one beside the "
            "first: keep it in fp32"
        )
    (dim,) = cut or {0}
    strides = [math.prod(param.shape[d + 1 :]) for d in range(param.dim())]
    width, pitch = math.prod(local_tensor(param).shape[dim:]), math.prod(param.shape[dim:])
    origin = sum(first * stride for first, stride in zip(start, strides, strict=True))
    return (origin, width, width) if dim == 0 else (origin, width, pitch)


def check_convertible(got: torch.dtype, wanted: torch.dtype, param: Tensor, *, name: str) -> None:
    """Raises ValueError where one of the types of some state is of codes and the other of values."""
    if got != wanted and not (got in _FLOATS and wanted in _FLOATS):
        raise ValueError(
            f"{name} of a parameter of shape {tuple(param.shape)}: got {got}, wanted {wanted}; make the "
            "optimizer with the types it was saved with"
        )


def as_loaded(value: Any, wanted: torch.dtype, param: Tensor, *, name: str) -> Any:
    """State that was saved and passed `check_convertible`, in the type it is kept in here, and as a DTensor where the
    parameter is one: this rank's part may come alone, copies by any mesh."""
    if not isinstance(value, Tensor):
        return value
    # NOTE: a count that two optimizers shared would be raised twice, and masters are weights; torch's helpers hand out
    # what they were given.
    value = value.to(param.device, wanted, copy=not value.dim() or name in (MASTER, REMAINDER))
    if name == "step":
        return value.view(()) if value.numel() == 1 else value
    whole, own = (_state_shape(name, each.shape) for each in (param, local_tensor(param)))
    if not placement.is_same_part(value, param, whole=whole, own=own):
        return value
    return masters.shaped_like(param, local_tensor(value).contiguous(), shape=whole)
