"""How often a sequential run ends early, and whether its words change: sequential_controls.txt has all rows.

    python -m studies.sequential_controls [CLAIMS [LIKELY ...]]

A run looks at its claims after 5 and after 10 of 20 draws of each control, and ends where `claims.settled` says that no
likely further draw changes a word. Both designs see the same values and the same draws, judged by the functions that
judge a scan. LIKELY is the level of the prediction intervals, by default that of `stats.controls`; the table has others
too, since it was chosen by them.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmgeom.claims import judge, settled
from llmgeom.result import WORDS, Estimate, Measured
from llmgeom.run import LOOKS
from llmgeom.stats import controls
from studies.verdict_rates import EFFECTS, World

WORLDS = (
    World(75, claims=1),
    *(World(75, claims=8, spread=spread) for spread in (0.05, 0.2, 0.6)),
    World(640, claims=8),
)
TRUTHS = ("none", "exact", "twice", "mixed")


@dataclass(frozen=True)
class Rates:
    """Shares: of records that end at a look; of claims that get each word, with 20 draws and with looks; of claims
    whose word changes because the record ended early. `draws`: mean over records."""

    ended: float
    draws: float
    fixed: Mapping[str, float]
    looked: Mapping[str, float]
    changed: float


def record(estimates: Sequence[Estimate]) -> dict[str, Measured]:
    """One record's claims, with their words."""
    return judge({"toy": Measured("", "", "", "", "", tuple(estimates), {}, {})})


def words(results: Mapping[str, Measured]) -> list[str]:
    """The word of each claim."""
    return [h.verdict for measured in results.values() for h in measured.estimates]


def rates(world: World, truth: str, records: int) -> Rates:
    """Simulate records under both designs; "mixed" draws the truth of each claim by itself."""
    rng = np.random.default_rng(0)
    effects = [*EFFECTS.values()] if truth == "mixed" else [EFFECTS[truth]]
    fixed, looked, ended, draws = [], [], 0, 0
    for _ in range(records):
        seen = [world.seen(float(rng.choice(effects)), rng) for _ in range(world.claims)]
        for drawn in (*LOOKS, world.draws):
            now = record([value.estimate(str(i), drawn) for i, value in enumerate(seen)])
            if settled(now, world.draws):
                break
        ended, draws = ended + (drawn < world.draws), draws + drawn
        looked += words(now)
        fixed += words(record([value.estimate(str(i)) for i, value in enumerate(seen)]))
    shares = [{word: every.count(word) / len(every) for word in WORDS} for every in (fixed, looked)]
    changed = sum(a != b for a, b in zip(fixed, looked, strict=True)) / len(fixed)
    return Rates(ended / records, draws / records, *shares, changed)


def lines(claims: int, levels: Sequence[float]) -> Iterator[str]:
    """The table in Markdown, in per cent, of about `claims` claims a row."""
    names = ("holds", "small", "ruled out", "opposite")
    heads = ("likely", "n", "claims", "spread", "effect", "records that end early", "draws")
    yield f"| {' | '.join(heads)} | {', '.join(names)}: 20 draws | with looks | changed |"
    yield "|" + "---|" * (len(heads) + 3)
    for level in levels:
        controls.LIKELY = level
        for world in WORLDS:
            for truth in TRUTHS:
                row = rates(world, truth, max(claims // world.claims, 1))
                both = [", ".join(f"{100 * shares[name]:.1f}" for name in names) for shares in (row.fixed, row.looked)]
                about = (level, world.clusters, world.claims, world.spread, truth, f"{100 * row.ended:.0f}")
                numbers = (*about, f"{row.draws:.1f}", *both, f"{100 * row.changed:.2f}")
                yield f"| {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":
    given = sys.argv[1:]
    for line in lines(int(given[0]) if given else 4000, [*map(float, given[1:])] or [controls.LIKELY]):
        print(line, flush=True)
