"""Records of two models on the same prompts, to be compared."""

import numpy as np

from llmgeom.record import Record
from llmgeom.result import Estimate, Quantity, Result
from llmgeom.stats import tests
from tests.made import made

RHO = "|rho| of PC1 and entropy"
PAIRED, SHARE = ("value_manifold", RHO), ("value_manifold", "PC1 share")


def head(name, value, half=0.1, clusters=30, **other) -> Estimate:
    given = dict(low=value - half, high=value + half, null="none", null_low=0.0, null_high=0.1, p=0.01, effect=0.3)
    return made(name, value, **(given | dict(n=2 * clusters, clusters=clusters) | other))


def record(scores, entropy, unit, *, name="a", estimates=(), subject=(), **changes) -> Record:
    """A record of a value manifold whose first metric is what its scores and entropies give."""
    value, span = abs(tests.spearman(scores[:, 0], entropy)), tests.correlation_interval(scores[:, 0], entropy, unit)
    rho = head(RHO, value, unit="|rho|", clusters=len(set(unit)), deletions=span.deletions)
    measured = Result(
        title="", meaning="", computed="", null="", failure_modes="",
        estimates=(rho, *estimates),
        quantities={"scores": Quantity(("prompt", "component"), "", "")},
        arrays={"scores": scores},
    )  # fmt: skip
    parts = {
        "results": {"value_manifold": measured},
        "unmeasured": {},
        "prompts": {
            "text": tuple(f"prompt {i}" for i in range(len(unit))),
            "template": tuple(map(str, unit)),
            "entropy": tuple(round(float(h), 6) for h in entropy),
            "tokens": (9,) * len(unit),
        },
        "subject": {"name": name, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_model": 32, **dict(subject)},
        "source": {"name": "math"},
        "facts": {"claims_hash": "c" * 64, "nulls": 20, "seed": 0},
    }
    return Record(**{**parts, **changes})


def two(rng, clusters=30, ours=0.6, theirs=0.6, alike=0.8, **changes) -> tuple[Record, Record]:
    """Two models on the same prompts, two a unit: a score that follows each one's own entropy, with noise that the
    models share in part, and that the prompts of a unit share in part."""
    unit = np.repeat(np.arange(clusters), 2)

    def drawn(columns=1):
        return np.sqrt(0.5) * (rng.normal(size=(clusters, columns))[unit] + rng.normal(size=(2 * clusters, columns)))

    def both():
        shared = drawn()
        return [np.sqrt(alike) * shared + np.sqrt(1 - alike) * drawn() for _ in range(2)]

    made = []
    for name, rho, entropy, noise in zip("ab", (ours, theirs), both(), both(), strict=True):
        place = rho * entropy + np.sqrt(1 - rho**2) * noise
        made.append(record(np.hstack([place, drawn()]), entropy[:, 0], unit, name=name, **changes))
    return tuple(made)


def rows(comparison) -> dict:
    return {(d.probe, d.metric): d for pair in comparison.pairs for d in pair.differences}
