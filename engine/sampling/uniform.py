"""The random number behind one draw: a function of (seed, position) and of nothing else.

A stream that is resumed on another replica, in another batch or on another device therefore draws what it would
have drawn. SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) is a
hash of a counter, so its n-th output costs the same as its first. Plain integers: about a microsecond, and the
same bits everywhere.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 52 random bits for ``seed`` in [-2^63, 2^63) and ``position`` >= 0."""
    # The seed is mixed first: SplitMix64's own streams for seeds a multiple of gamma apart are shifted copies.
    start = _mix((seed ^ _GAMMA) & _MASK)
    # 52 bits and not 53: u x total then rounds to less than total for every double, so a draw never runs off the end.
    return (_mix((start + (position + 1) * _GAMMA) & _MASK) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which each input bit flips half of the output bits."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
