"""Overlap of two prompts, as a share of word trigrams, and a set that admits only sufficiently different prompts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

MOST = 0.6


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    """The runs of three words, without case; a word is a run of letters, digits or underscores. A shorter text is one
    run."""
    words = re.findall(r"\w+", text.lower())
    return frozenset(tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2)))


def overlap(a: str, b: str) -> float:
    """Shared trigrams / trigrams of the prompt with fewer (fraction, 0-1): 1 if one prompt begins with the other."""
    first, second = trigrams(a), trigrams(b)
    return len(first & second) / min(len(first), len(second))


class Distinct:
    """Prompts of which no two overlap by more than `MOST`."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Admit `text` and return True, or return False if it overlaps with an admitted one."""
        added = trigrams(text)
        shared = Counter(i for trigram in added for i in self._holders.get(trigram, ()))
        if any(n > MOST * min(len(added), self._sizes[i]) for i, n in shared.items()):
            return False
        for trigram in added:
            self._holders[trigram].append(len(self._sizes))
        self._sizes.append(len(added))
        return True
