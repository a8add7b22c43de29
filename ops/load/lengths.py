"""Distributions of lengths in tokens, and their notation.

Light to import: the command line reads and writes them with it.
"""

import math
from random import Random
from typing import Any, Final, NamedTuple

from headwater.engines.traits import Text

NOTATIONS: Final = {"uniform": "LOW,HIGH", "normal": "MEAN,DEVIATION", "lognormal": "MEAN,SIGMA"}
"""The numbers of each kind besides a constant. SIGMA is the standard deviation of the logarithm."""

FORMS: Final = "N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEAN,SIGMA"


class Lengths(NamedTuple):
    """A distribution of whole numbers: "constant" with one number, or a kind of `NOTATIONS` with two."""

    kind: str
    numbers: tuple[float, ...]

    def draw(self, random: Random, low: int = 1) -> int:
        """A length, at least `low`."""
        one, *other = self.numbers
        if self.kind == "uniform":
            return max(low, random.randint(round(one), round(other[0])))
        if self.kind == "normal":
            return max(low, round(random.gauss(one, other[0])))
        if self.kind == "lognormal":
            sigma = other[0]
            return max(low, round(random.lognormvariate(math.log(one) - sigma**2 / 2, sigma)))
        return max(low, round(one))

    def __str__(self) -> str:
        """Return the distribution as the command line spells it."""
        numbers = ",".join(f"{number:g}" for number in self.numbers)
        return numbers if self.kind == "constant" else f"{self.kind}:{numbers}"


def read_lengths(text: str) -> Lengths:
    """A distribution from its notation. Raises `ValueError`."""
    kind, colon, rest = text.strip().rpartition(":")
    kind = kind if colon else "constant"
    wrong = f"{text!r} is none of {FORMS}"
    if kind not in (*NOTATIONS, "constant"):
        raise ValueError(wrong)
    try:
        numbers = tuple(map(float, rest.split(",")))
    except ValueError:
        raise ValueError(wrong) from None
    if len(numbers) != (1 if kind == "constant" else 2) or not all(map(math.isfinite, numbers)):
        raise ValueError(wrong)
    if numbers[0] < 1 or min(numbers) < 0:
        raise ValueError(f"{text!r}: a length is at least 1, and a deviation at least 0")
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise ValueError(f"{text!r}: the second number is less than the first")
    return Lengths(kind, numbers)


LENGTHS: Final = Text(read_lengths, str, "DIST", Any)


def constant(length: int) -> Lengths:
    """The same length always."""
    return Lengths("constant", (float(length),))
