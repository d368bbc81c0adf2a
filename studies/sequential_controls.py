"""Whether a run could stop drawing controls early without changing its words: sequential_controls.txt has all rows.

    python -m studies.sequential_controls [CLAIMS]

A run looks at its claims after 5 and after 10 of 20 draws, and would stop where every claim is settled. A claim has
three questions: is the control beaten, is the effect excluded, does the value lie on the other side. One is settled
where its corrected p is below `low`, the bound of Haybittle (1971) and Peto et al. (1976), or its own p above `high`:
futile. The words of both designs come from the same values and the same draws, by the functions that judge a scan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmgeom.claims import judge
from llmgeom.result import WORDS, Estimate, Measured
from studies.verdict_rates import EFFECTS, World

LOOKS = (5, 10)
BOUNDS = {"strict": (0.001, 0.25), "lenient": (0.01, 0.1)}
WORLDS = (World(75, claims=1), World(75, claims=8), World(75, claims=8, spread=0.05), World(640, claims=8))
TRUTHS = ("none", "exact", "twice", "mixed")


@dataclass(frozen=True)
class Rates:
    """Shares: of records that stop at a look; of claims that get each word, with 20 draws and with looks; of claims
    whose word changes because the record stopped."""

    stopped: float
    fixed: Mapping[str, float]
    looked: Mapping[str, float]
    changed: float


def settled(h: Estimate, low: float, high: float) -> bool:
    """Whether no question of a claim is still undecided."""
    questions = ((h.p, h.adjusted), (h.p_excluded, h.adjusted_excluded), (h.p_opposite, h.adjusted_opposite))
    return all(adjusted < low or p > high for p, adjusted in questions)


def judged(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """One record's claims with their words."""
    return judge({"toy": Measured("", "", "", "", "", tuple(estimates), {}, {})})["toy"].estimates


def rates(world: World, truth: str, records: int, low: float, high: float, seed: int = 0) -> Rates:
    """Simulate records under both designs; "mixed" draws the truth of each claim by itself."""
    rng = np.random.default_rng(seed)
    fixed, looked, stopped, changed = [], [], 0, 0
    for _ in range(records):
        chosen = [*EFFECTS.values()] if truth == "mixed" else [EFFECTS[truth]]
        seen = [world.seen(float(rng.choice(chosen)), rng) for _ in range(world.claims)]
        words = [h.verdict for h in judged([one.estimate(str(i)) for i, one in enumerate(seen)])]
        early = None
        for draws in LOOKS:
            now = judged([one.estimate(str(i), draws) for i, one in enumerate(seen)])
            if all(settled(h, low, high) for h in now):
                early = [h.verdict for h in now]
                break
        stopped += early is not None
        changed += sum(a != b for a, b in zip(words, early or words, strict=True))
        fixed += words
        looked += early or words
    shares = [{word: every.count(word) / len(every) for word in WORDS} for every in (fixed, looked)]
    return Rates(stopped / records, *shares, changed / len(fixed))


def lines(claims: int) -> Iterator[str]:
    """The table in Markdown, in per cent, of about `claims` claims a row."""
    words = ("holds", "ruled out", "opposite")
    heads = ("n", "claims", "spread", "effect", "rule", "records that stop")
    yield f"| {' | '.join(heads)} | {', '.join(words)}: 20 draws | with looks | changed |"
    yield "|" + "---|" * (len(heads) + 3)
    for world in WORLDS:
        for truth in TRUTHS:
            for rule, bounds in BOUNDS.items():
                found = rates(world, truth, max(claims // world.claims, 1), *bounds)
                both = [", ".join(f"{100 * of[word]:.1f}" for word in words) for of in (found.fixed, found.looked)]
                about = (world.clusters, world.claims, world.spread, truth, rule, f"{100 * found.stopped:.1f}")
                yield f"| {' | '.join(map(str, (*about, *both)))} | {100 * found.changed:.2f} |"


if __name__ == "__main__":
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 4000):
        print(line, flush=True)
