"""A smoothed n-gram, the rival a small language model has to beat: interpolated Kneser-Ney over token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class KneserNey:
    """P(w | the order-1 tokens before it), interpolated Kneser-Ney with one discount an order. Make one with `fit`.

    p_k(w | u) = max(c(uw) - D, 0) / c(u.) + D N(u.) / c(u.) p_{k-1}(w | u'), and p_0 = 1 / vocabulary, where
    u        the k-1 tokens before w, and u' the same without its first; an unseen u leaves p_{k-1} alone,
    c        counts at the highest order; below it, the number of different tokens seen before the gram,
    c(u.)    their sum over w, and N(u.) the number of different w seen after u,
    D        n1 / (n1 + 2 n2), n1 and n2 the grams of that order counted once and twice (3/4 where either is 0).
    Kneser & Ney 1995, as interpolated by Chen & Goodman 1999.

    A text is preceded by order-1 separators and followed by one, so that nothing is learnt across texts.
    """

    order: int
    vocabulary: int
    separator: int
    levels: tuple[tuple[np.ndarray, ...], ...]

    @classmethod
    def fit(cls, texts: Texts, vocabulary: int, separator: int, order: int = 3) -> "KneserNey":
        empty = cls(order, vocabulary, separator, ())
        grams, counts = np.unique(empty._grams(texts), return_counts=True)
        levels = []
        for k in range(order, 0, -1):
            contexts, first = np.unique(grams // vocabulary, return_index=True)
            n1, n2 = (counts == 1).sum(), (counts == 2).sum()
            discount = n1 / (n1 + 2 * n2) if n1 and n2 else 0.75
            total, types = np.add.reduceat(counts, first), np.diff(np.append(first, len(grams)))
            levels.append((grams, counts, contexts, total, types, np.array(discount)))
            grams, counts = np.unique(grams % vocabulary ** (k - 1), return_counts=True)
        return cls(order, vocabulary, separator, tuple(levels))

    def nats(self, texts: Texts) -> np.ndarray:
        """-log P of every token and final separator, in order, in nats."""
        return -np.log(self._probability(self._grams(texts)))

    def _probability(self, grams: np.ndarray) -> np.ndarray:
        p = np.full(len(grams), 1 / self.vocabulary)
        for k, (known, counts, contexts, total, types, discount) in zip(
            range(1, self.order + 1), reversed(self.levels), strict=True
        ):
            gram = grams % self.vocabulary**k
            count, sum_, kinds = (
                _look_up(known, counts, gram),
                _look_up(contexts, total, gram // self.vocabulary),
                _look_up(contexts, types, gram // self.vocabulary),
            )
            seen = sum_ > 0
            here = (np.maximum(count - discount, 0) + discount * kinds * p) / np.where(seen, sum_, 1)
            p = np.where(seen, here, p)
        return p

    def _grams(self, texts: Texts) -> np.ndarray:
        """One code a predicted token: its order-1 predecessors and itself as digits in base `vocabulary`."""
        lead = self.order - 1
        padding = [self.separator] * lead
        flat = np.array([t for text in texts for t in (*padding, *text, self.separator)], dtype=np.int64)
        sizes = np.array([len(text) + 1 + lead for text in texts])
        code = np.zeros(len(flat) - lead, dtype=np.int64)
        for j in range(self.order):
            code = code * self.vocabulary + flat[j : len(flat) - lead + j]
        # A gram is kept where it ends in the text or its closing separator, not in the next text's padding.
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)[: len(code)]
        within = np.arange(len(code)) - starts
        return code[within < np.repeat(sizes, sizes)[: len(code)] - lead]


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[keys == wanted], 0 where there is none; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
