"""The noise is pinned: a change of it changes every seeded sample that anybody has."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_workers.noise import gumbel_noise, noise_bits

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def definition(seed: int, position: int, token: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    key = mix(mix(seed + gamma & MASK) + (position + 1) * gamma & MASK)
    return mix(key + (token + 1) * gamma & MASK)


def bits(seed: int, position: int, num_tokens: int) -> list[int]:
    found = noise_bits(torch.tensor([seed]), torch.tensor([position]), num_tokens)[0]
    return [value & MASK for value in found.tolist()]


def test_splitmix64_gives_its_published_outputs() -> None:
    """The first outputs of SplitMix64 from seed 1234567, as Rosetta Code lists them."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix(1234567 + index * gamma & MASK) for index in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_bits_are_those_of_the_definition() -> None:
    for seed, position in [(0, 0), (1, 0), (0, 1), (42, 1000), (2**63 - 1, 2**24)]:
        assert bits(seed, position, 5) == [definition(seed, position, token) for token in range(5)]


def test_golden_bits() -> None:
    assert bits(42, 7, 3) == [0x020A28ED9E2B2BC4, 0x17E03160B6345C52, 0xB6F12C62A4F9E4F3]


def test_rows_do_not_depend_on_each_other() -> None:
    seeds, positions = torch.arange(37), torch.arange(37) * 3
    together = gumbel_noise(seeds, positions, 501)
    for row in range(37):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 501)[0], together[row])


def test_gumbel_noise_is_finite_and_has_its_moments() -> None:
    noise = gumbel_noise(torch.arange(100), torch.zeros(100, dtype=torch.int64), 10_000).numpy()
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.005
    assert abs(noise.var() - np.pi**2 / 6) < 0.01


def test_uniform_in_every_byte_and_across_neighbours() -> None:
    """Chi-square over 256 cells, 10 sigma wide: over tokens, over positions, over seeds."""
    many = torch.arange(100_000)
    zeros = torch.zeros_like(many)
    for column in (
        noise_bits(zeros[:1], zeros[:1], 100_000)[0],
        noise_bits(zeros, many, 1)[:, 0],
        noise_bits(many, zeros, 1)[:, 0],
    ):
        for shift in range(0, 64, 8):
            counts = np.bincount((column.numpy() >> shift) & 255, minlength=256)
            statistic = ((counts - 100_000 / 256) ** 2 / (100_000 / 256)).sum()
            assert abs(statistic - 255) < 10 * np.sqrt(2 * 255), f"{shift=} {statistic=}"
