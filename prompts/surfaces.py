"""Surfaces: ways to write the same evidence as a list, sentences or code; an answer always follows a space."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class Surface:
    """One way to write observations; each has the form item, link, mark.

    Attributes:
        opening: The form of a mark in the lead-in, with {nth} and {mark}.
        between, close: Between the marks of the lead-in, and after them.
        link, gap: Between an item and its mark; between observations.
        remark: The form of a sentence about the process, with {}.
        capital: Whether the lead-in begins with a capital letter.
    """

    opening: str
    between: str
    close: str
    link: str
    gap: str
    remark: str = "{} "
    capital: bool = False

    def lead(self, marks: Sequence[str]) -> str:
        """The lead-in, which names every mark, so that the answers are known before any evidence."""
        named = [self.opening.format(nth=nth, mark=mark) for nth, mark in zip(ORDINALS, marks, strict=False)]
        text = self.between.join(named) + self.close
        return text[0].upper() + text[1:] if self.capital else text

    def prompt(self, statement: str, marks: Sequence[str], items: Sequence[str], seen: Sequence[str]) -> str:
        """The lead-in, the observations and the queried item: there is one more item than marks."""
        remark = self.remark.format(statement) if statement else ""
        shown = [f"{item}{self.link} {mark}" for item, mark in zip(items, seen, strict=False)]
        return f"{remark}{self.lead(marks)} {self.gap.join([*shown, f'{items[-1]}{self.link}'])}"


SURFACES = {
    "list": Surface("{nth}: {mark}", ", ", ".", ":", ", ", capital=True),
    "sentences": Surface("The {nth} is {mark}.", " ", "", " is", ". "),
    "code": Surface("{nth} = {mark};", " ", "", " =", "; ", remark="/* {} */ "),
}
_LINKS = "|".join(sorted({re.escape(surface.link) for surface in SURFACES.values()}))
# The end of a list: its last item, and its mark if one follows.
QUESTION = re.compile(rf"\S+(?:{_LINKS})(?: \S+)?$")
