"""Numbers as text: in words, as an ordinal, with commas, as a fraction in lowest terms."""

from __future__ import annotations

import math

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def word(n: int) -> str:
    """The cardinal in words, 0 to 999: word(42) is 'forty-two'."""
    if not 0 <= n <= 999:
        raise ValueError(f"word({n}): expected 0 to 999")
    if n < 20:
        return _SMALL[n]
    if n < 100:
        return _TENS[n // 10 - 2] + (f"-{_SMALL[n % 10]}" if n % 10 else "")
    return f"{_SMALL[n // 100]} hundred" + (f" and {word(n % 100)}" if n % 100 else "")


def ordinal(n: int) -> str:
    """The ordinal in figures: ordinal(22) is '22nd'."""
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def commas(n: int) -> str:
    """Thousands separated by commas: commas(12000) is '12,000'."""
    return f"{n:,}"


def cents(n: int) -> str:
    """A hundredth of n with two decimals: cents(1250) is '12.50'."""
    return f"{n // 100}.{n % 100:02d}"


def tenths(n: int) -> str:
    """A tenth of n with one decimal: tenths(35) is '3.5'."""
    return f"{n // 10}.{n % 10}"


def frac(a: int, b: int) -> str:
    """a / b in lowest terms: frac(6, 8) is '3/4', frac(6, 3) is '2'."""
    shared = math.gcd(a, b)
    return str(a // shared) if b == shared else f"{a // shared}/{b // shared}"


def binary(n: int) -> str:
    """The binary digits: binary(6) is '110'."""
    return f"{n:b}"


def least_factor(n: int) -> int:
    """The least divisor of n >= 2 above 1; n itself exactly when n is prime."""
    return next((d for d in range(2, math.isqrt(n) + 1) if n % d == 0), n)


_OWN = (word, ordinal, commas, cents, tenths, frac, binary, least_factor)
_BUILT_IN = (abs, max, min, str, math.gcd, math.lcm, math.comb, math.factorial, math.isqrt)
KNOWN = {function.__name__: function for function in (*_OWN, *_BUILT_IN)}
