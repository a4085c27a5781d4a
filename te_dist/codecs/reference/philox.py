"""Philox4x32-10, the counter-based random bits of stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_BYTES = 16  # per counter


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four 32-bit words for every counter.

    Args:
        counter: int64 (n, 4), four words, the least significant first.
        key: int64 (2,), two words.

    Returns:
        int64 (n, 4), words from 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_ROUNDS):
        # the product of two words wraps modulo 2^64 in int64: its bits are right, and masking drops the sign
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


def philox_bytes(rng_state: Tensor, count: int) -> Tensor:
    """`count` random bytes (u8). Byte i is byte i % 16, little endian, of the words for counter offset + i // 16.

    Args:
        rng_state: int64 (2,): seed, the 64-bit key, and offset, added to the 64-bit counter; upper counter words are 0.
        count: number of bytes.
    """
    seed, offset = rng_state.cpu().unbind()
    low = offset + torch.arange(-(-count // _BYTES))
    zero = torch.zeros_like(low)
    counter = torch.stack((low & _WORD, low >> 32 & _WORD, zero, zero), -1)
    words = philox4x32(counter, torch.stack((seed & _WORD, seed >> 32 & _WORD)))
    octets = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], -1)
    return octets.flatten()[:count].to(torch.uint8)
