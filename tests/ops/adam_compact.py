"""Adam with state in fewer bytes: the definition, in plain torch, and cases of every kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from te_dist.codecs.reference import float8_cast, float8_decode, philox4x32
from te_dist.codecs.reference.f32 import quotient
from te_dist.kernels.multi_adam import CompactPlace
from te_dist.ops.multi_adam import AdamRule, Adapted

BLOCK, LARGEST, SMALLEST = 128, 448.0, 2.0**-110
WORD = 0xFFFFFFFF
F32, BF16, F16, BYTES = torch.float32, torch.bfloat16, torch.float16, torch.uint8


def words_of(noise: tuple[int, ...], step: int, count: int) -> Tensor:
    """int64 (count,): the random 32 bits of every element."""
    seed, number, origin, width, pitch = noise
    index = torch.arange(count)
    place = origin + index // width * pitch + index % width
    quad, zero = place // 4, torch.zeros_like(place)
    counters = torch.stack((quad & WORD, quad >> 32, zero + step, zero + number), -1)
    blocks = philox4x32(counters, torch.tensor((seed & WORD, seed >> 32)))
    return blocks.gather(1, (place % 4)[:, None])[:, 0]


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).long() & WORD


def floats(codes: Tensor) -> Tensor:
    codes = codes & WORD
    return torch.where(codes >= 2**31, codes - 2**32, codes).to(torch.int32).view(torch.float32)


def to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """By chance: the upper half of the bits, after 16 random ones are added."""
    return floats(((bits(values) + noise) >> 16) << 16).to(BF16)


def to_e4m3(values: Tensor, noise: Tensor) -> Tensor:
    """u8. By chance, between the two neighbours in e4m3."""
    magnitude = values.abs().clamp(max=LARGEST).double()
    exponent = torch.floor(torch.log2(magnitude.clamp(min=2.0**-6)))
    spacing = torch.exp2(exponent - 3)
    steps = torch.floor(magnitude / spacing + noise.double() / 65536)
    # Below 2^-6 the sum is one of fp32.
    low = torch.floor((magnitude.float() * 512.0 + noise.float() * 2.0**-16).double())
    found = torch.where(magnitude < 2.0**-6, low * 2.0**-9, steps * spacing)
    return float8_cast(torch.copysign(found.float(), values), "e4m3")


def blocks(values: Tensor) -> list[Tensor]:
    """Views of the blocks of every row."""
    return [block for row in values for block in row.split(BLOCK)]


def encode(values: Tensor, noise: Tensor, root: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a moment (rows, cols)."""
    codes, scales = torch.empty_like(values, dtype=BYTES), []
    kept = root_of(values) if root else values
    for out, own, drawn in zip(blocks(codes), blocks(kept), blocks(noise), strict=True):
        amax = own.abs().max()
        is_there = bool(amax >= SMALLEST)
        inverse = quotient(LARGEST, amax) if is_there else torch.zeros(())
        scales.append(quotient(amax, LARGEST) if is_there else torch.zeros(()))
        found = to_e4m3(own * inverse, drawn)
        out.copy_(torch.where((found == 0) & (own > 0) & is_there, 1, found.int()).to(BYTES) if root else found)
    return codes, torch.stack(scales)


def decode(codes: Tensor, scales: Tensor, root: bool) -> Tensor:
    values = float8_decode(codes, "e4m3")
    for out, scale in zip(blocks(values), scales, strict=True):
        out.mul_(scale)
    return values * values if root else values


def root_of(values: Tensor) -> Tensor:
    """Rounded once; torch's in fp32 is not."""
    return values.double().sqrt().float()


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        result, base, exponent = result * base if exponent & 1 else result, base * base, exponent >> 1
    return result


def updated(rule: AdamRule, step: int, grad: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """fp32 (value, exp_avg, exp_avg_sq) after step number `step`, as csrc/numerics/adam.h has it."""
    value, first, second = state
    c1 = 1.0 - power(rule.beta1, step) if rule.corrected else 1.0
    c2 = math.sqrt(1.0 - power(rule.beta2, step)) if rule.corrected else 1.0
    f32 = lambda number: torch.tensor(number, dtype=F32)  # noqa: E731
    if rule.decoupled:
        value = value - f32(rule.lr * rule.weight_decay) * value
    else:
        grad = grad + f32(rule.weight_decay) * value
    first = f32(rule.beta1) * first + f32(1.0 - rule.beta1) * grad
    second = f32(rule.beta2) * second + f32(1.0 - rule.beta2) * grad * grad
    denominator = root_of(second) * f32(1.0 / c2) + f32(rule.eps)
    return value - f32(rule.lr / c1) * first / denominator, first, second


@dataclass(frozen=True)
class Kind:
    """What is kept how: types of value and moments, and whether the value is rounded by chance or has a remainder."""

    value: torch.dtype = F32
    first: torch.dtype = F32
    second: torch.dtype = F32
    keep: str = "nearest"
    grad: torch.dtype = BF16
    copy: torch.dtype | None = None

    def __str__(self) -> str:
        names = [str(t)[6:] for t in (self.value, self.first, self.second, self.grad, self.copy)]
        return " ".join((names[0], self.keep, *names[1:]))


KINDS = (
    Kind(first=BF16, second=BF16),
    Kind(first=BYTES, second=BYTES, copy=BF16),
    Kind(first=BYTES, second=F32, grad=F32, copy=F16),
    Kind(first=F32, second=BYTES, grad=F16),
    Kind(first=BF16, second=BYTES),
    Kind(BF16, keep="remainder"),
    Kind(BF16, BYTES, BYTES, keep="remainder", grad=F32),
    Kind(BF16, keep="stochastic"),
    Kind(BF16, BF16, BF16, keep="stochastic"),
    Kind(BF16, BYTES, BF16),
    Kind(F16, BF16, BYTES),
)


def random(shape: tuple[int, int], seed: int, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 4, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def made(kind: Kind, shape: tuple[int, int], noise: tuple[int, ...]) -> Adapted:
    """State before the first step."""
    count = shape[0] * -(-shape[1] // BLOCK)
    scales = [torch.zeros(count) if t == BYTES else None for t in (kind.first, kind.second)]
    remainder = random(shape, 7).mul(1000).to(torch.int16) if kind.keep == "remainder" else None
    place = CompactPlace(*scales, remainder, kind.keep == "stochastic", shape, noise)
    moments = (torch.zeros(shape, dtype=t) for t in (kind.first, kind.second))
    copy = None if kind.copy is None else torch.zeros(shape, dtype=kind.copy)
    return Adapted(random(shape, 1, kind.value), *moments, torch.zeros(()), copy, place=place)


def twin(each: Adapted) -> Adapted:
    """The same in other memory."""
    copies = [t if t is None else t.clone() for t in (*each.tensors, *each.place[:3])]
    return Adapted(*copies[:5], place=each.place._replace(**dict(zip(CompactPlace._fields, copies[5:], strict=False))))


def tensors(each: Adapted) -> Iterator[tuple[str, Tensor]]:
    """All that a step writes."""
    named = zip(("value", "exp_avg", "exp_avg_sq", "step", "copy"), each.tensors, strict=True)
    more = zip(CompactPlace._fields[:3], each.place[:3], strict=True)
    return ((name, tensor) for name, tensor in (*named, *more) if tensor is not None)


def define(each: Adapted, rule: AdamRule, grad: Tensor) -> None:
    """One step, by the definition."""
    place, step = each.place, int(each.step) + 1
    each.step.fill_(step)
    words = words_of(place.noise, step, grad.numel()).view(grad.shape)
    low, high, value_noise = words & 0xFFFF, words >> 16, (words * 0x9E3779B1 & WORD) >> 16
    value = each.value.float()
    if place.remainder is not None:
        value = floats(bits(value) + place.remainder.long())
    moments = (each.exp_avg, place.exp_avg_scale, False), (each.exp_avg_sq, place.exp_avg_sq_scale, True)
    before = [m.float() if s is None else decode(m, s, root) for m, s, root in moments]
    value, *after = updated(rule, step, grad.float(), (value, *before))
    for (moment, scale, root), values, noise in zip(moments, after, (low, high), strict=True):
        if scale is not None:
            codes, scales = encode(values, noise, root)
            moment.copy_(codes), scale.copy_(scales)
        else:
            moment.copy_(to_bf16(values, noise) if moment.dtype == BF16 else values)
    if place.remainder is not None:
        code = (bits(value) + 0x8000) >> 16
        each.value.copy_(floats(code << 16).to(BF16))
        place.remainder.copy_((bits(value) - (code << 16)).to(torch.int16))
    else:
        each.value.copy_(to_bf16(value, value_noise) if place.by_chance else value)
    if each.copy is not None:
        each.copy.copy_(value)
