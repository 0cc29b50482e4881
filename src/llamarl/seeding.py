"""Seeds that depend on what is drawn, never on when or where it is drawn.

A sample's seed comes from (run seed, prompt index, sample index), so it is the same whatever else shares its batch,
whichever rank holds it, and after a resume.
"""

from __future__ import annotations

__all__ = ["derive_seed"]

_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(*parts: int) -> int:
    """Mix non-negative integers into one 64-bit seed (splitmix64, Steele et al. 2014, chained over the parts).

    Raises:
        ValueError: A part is negative.
    """
    state = 0
    for part in parts:
        if part < 0:
            raise ValueError(f"seed parts must be >= 0, got {part} in {parts}")
        state = _splitmix64(state ^ _splitmix64(part & _MASK))
    return state
