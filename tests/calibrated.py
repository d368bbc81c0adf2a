"""A reading of the bench, made up."""

import numpy as np

from llmgeom.bench import readings as bench
from llmgeom.claims import Null, declared, estimate, judge
from llmgeom.result import Measured
from llmgeom.stats.resampling import Interval


def fabricated(good: bool, made: int = 0, **more):
    """A reading in which PC1's share follows inference, and focusing does not."""

    def plain(probe, name, value):
        claim = declared(probe)[name]
        draws = np.linspace(0.1, 0.2, 20)
        null = Null.of("untrained", draws, claim.side)
        h = estimate(claim, value, Interval(value - 0.01, value + 0.01, 0.95, ""), [null], n=100, clusters=100)
        judged = judge({probe: Measured("", "", "", "", "", (h,), {}, {})})
        return bench.plain(judged[probe].estimates[0])

    rng = np.random.default_rng(made)
    return {
        "n": bench.SIZE,
        "facts": {"model_type": "gpt2", "layers": 1, "d_model": 8, "parameters": 100},
        "kl": 0.001 if good else 0.5 + made / 1000,
        "skill": 0.99 if good else 0.0,
        "estimates": {
            "value_manifold": {
                "PC1 share": plain("value_manifold", "PC1 share", (0.6 if good else 0.1) + 0.05 * rng.random()),
                "PC1+PC2 share": plain("value_manifold", "PC1+PC2 share", 0.3 + 0.05 * rng.random()),
            }
        },
        "unmeasured": {"attention_focus": "the prompts are too short"},
        **more,
    }
