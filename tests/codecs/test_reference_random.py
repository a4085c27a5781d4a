"""Random bits, stochastic rounding and the Hadamard transform of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_dist.codecs import reference

WORD = 0xFFFFFFFF
PLAIN = {"e4m3_max": 448, "four_over_six": "none", "rng_state": None}

# --- random bits and stochastic rounding

KNOWN_ANSWERS = [
    # counter, key, words: philox4x32-10 of the known-answer file of Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, words):
    assert reference.philox4x32(torch.tensor([counter]), torch.tensor(key)).tolist() == [list(words)]


@pytest.mark.parametrize("seed, offset", [(0, 0), (-1, -1), (2**40 + 5, 2**32 - 1)])
def test_random_bytes_are_the_words_of_successive_counters_in_little_endian_order(seed, offset):
    actual = reference.philox_bytes(torch.tensor([seed, offset]), 37)
    expected = []
    for step in range(3):
        position = (offset + step) % 2**64
        counter = torch.tensor([[position & WORD, position >> 32, 0, 0]])
        words = reference.philox4x32(counter, torch.tensor([seed & WORD, (seed >> 32) & WORD]))
        expected += [byte for word in words[0].tolist() for byte in word.to_bytes(4, "little")]
    assert actual.dtype == torch.uint8 and actual.tolist() == expected[:37]
    assert reference.philox_bytes(torch.tensor([seed, offset]), 0).shape == (0,)


def test_zero_and_seed_zero_begin_with_the_known_answer():
    assert reference.philox_bytes(torch.tensor([0, 0]), 6).tolist() == [0xD5, 0xE8, 0x27, 0x66, 0x8D, 0xC5]


STOCHASTIC = [
    # y, random byte, code
    (0.25, 127, 0),  # 0.25 + 0.248 stays below 0.5
    (0.25, 128, 1),
    (0.5, 255, 1),  # a value of the grid never moves
    (1.75, 128, 4),
    (1.75, 127, 3),
    (2.5, 127, 4),
    (2.5, 128, 5),
    (3.25, 191, 5),
    (3.25, 192, 6),
    (3.99, 255, 6),
    (4.43359375, 200, 6),  # 6 - 2 * 200.5 / 256
    (4.43359375, 201, 7),
    (5.0, 127, 6),
    (5.0, 128, 7),
    (6.0, 255, 7),  # 7.99 is capped
    (-2.5, 128, 13),
    (-0.0, 255, 8),
]


@pytest.mark.parametrize("y, byte, code", STOCHASTIC)
def test_stochastic_rounding_adds_the_byte_and_rounds_down(y, byte, code):
    assert reference.e2m1_cast(torch.tensor([y]), torch.tensor([byte], dtype=torch.uint8)).tolist() == [code]


def test_the_byte_of_an_element_follows_its_place_in_the_matrix():
    x = torch.full((3, 10), 2.25)
    state = torch.tensor([7, 11])
    rule = PLAIN | {"rng_state": state}
    amaxes = (torch.tensor([[2688.0]]), torch.tensor([[6.0]]))
    codes, _ = reference.encode_nvfp4(x, (16, 16), (0, 0), *amaxes, **rule)
    expected = 4 + (reference.philox_bytes(state, 30) >= 192).to(torch.uint8)
    assert torch.equal(codes, expected.reshape(3, 10))
    assert set(codes.flatten().tolist()) == {4, 5}


def test_stochastic_rounding_keeps_the_mean():
    x = torch.full((256, 256), 2.3)
    x[0, 0] = 6.0
    codes, scale = reference.encode_nvfp4(x, (256, 256), **(PLAIN | {"rng_state": torch.tensor([3, 0])}))
    decoded = reference.decode_nvfp4(codes, scale, torch.tensor([[6.0]]), (256, 256), (0, 0), e4m3_max=448)
    # one rounding is off by at most 1, so that the mean of 65536 strays by less than 0.01 (five standard deviations)
    assert abs(decoded.mean().item() - 2.3) < 0.01


# --- Hadamard

SIGN_MASK = 0xD7E8
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def test_the_sign_mask_is_that_of_the_signs():
    assert sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0) == SIGN_MASK == 55272


@pytest.mark.parametrize("mask, signs", [(0, [1] * 16), (SIGN_MASK, SIGNS)])
def test_hadamard_is_the_signed_sylvester_matrix(mask, signs):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    # small integers: every sum is exact
    x = torch.randint(-8, 9, (48, 21), generator=torch.Generator().manual_seed(6)).bfloat16()
    signed = x.double().reshape(3, 16, 21) * torch.tensor(signs, dtype=torch.float64)[:, None]
    expected = torch.einsum("ij,gik->gjk", matrix, signed).mul(0.25).reshape(48, 21).bfloat16()
    assert torch.equal(reference.hadamard(x, mask), expected)


def test_hadamard_adds_in_f32_in_the_order_of_its_definition():
    # large elements that cancel: whether a small one survives depends on the order
    choices = torch.tensor([2.0**30, -(2.0**30), 1.0, -3.0, 0.0])
    x = choices[torch.randint(0, 5, (32, 50), generator=torch.Generator().manual_seed(7))].bfloat16()
    values = x.float().numpy().copy()
    for group in range(0, 32, 16):
        rows = values[group : group + 16]
        rows *= np.array(SIGNS, dtype=np.float32)[:, None]
        for stride in (1, 2, 4, 8):
            for i in range(16):
                if not i & stride:
                    a, b = rows[i].copy(), rows[i + stride].copy()
                    rows[i], rows[i + stride] = a + b, a - b
    assert torch.equal(reference.hadamard(x, SIGN_MASK), torch.from_numpy(values * np.float32(0.25)).bfloat16())


def test_hadamard_takes_empty_matrices_and_refuses_partial_groups():
    assert reference.hadamard(torch.empty(0, 5, dtype=torch.bfloat16), 0).shape == (0, 5)
    assert reference.hadamard(torch.empty(16, 0, dtype=torch.bfloat16), 0).shape == (16, 0)
    with pytest.raises(ValueError, match="got torch.bfloat16 and 8 rows"):
        reference.hadamard(torch.zeros(8, 5, dtype=torch.bfloat16), 0)
    with pytest.raises(ValueError, match="torch.float32"):
        reference.hadamard(torch.zeros(16, 5), 0)
