"""Does the last token's attention narrow from the first layer to the last, beyond what length and sinks would do?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmgeom.capture import Capture, Site
from llmgeom.claims import Null, headline, layer_band
from llmgeom.errors import Refused
from llmgeom.information import bits
from llmgeom.result import Figure, Headline, quantity
from llmgeom.result import Result as Base
from llmgeom.scan import Needs, View
from llmgeom.stats import jackknife

NEEDS = Needs(sites=frozenset({Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST, Site.ATTENTION_REST}))
LEAST_TOKENS = 3  # below, the row without its first token has nothing to spread over
FOCUSING, SINK = 0.30, 0.10  # smallest effects of interest, fractions


@dataclass(frozen=True)
class Result(Base):
    """Entropy of the final query's attention by layer and head, how much it falls with depth, and the sink's share."""

    TITLE = "Attention focus"
    MEANING = (
        "Focusing is the share of attention entropy lost between the first and the last layer: 0 means no "
        "narrowing, 1 means that the last layer looks at a single token, negative values mean that attention spreads. "
        "Above both nulls, the narrowing was learnt and depends on what the prompt says; without the first token, it "
        "is "
        "not the work of an attention sink."
    )
    COMPUTED = (
        "For each head, the entropy in bits of the softmax weights of the final query, over log2 of the number of "
        "tokens it can see, averaged over heads afterwards and then over prompts. Focusing = 1 - last layer / first "
        "layer. The second form drops the weight on the first token and renormalises (over log2 of one token fewer). "
        "Intervals are jackknifed over templates."
    )
    NULL = "The same model re-initialised, and the same prompts with all but the last token shuffled: beat both."
    FAILURE_MODES = (
        "A sink on the first token lowers entropy with no evidence gathered. Under a sliding window a query sees fewer "
        "tokens than the log2 assumes. Induction and previous-token heads are sharp at any depth, so the mean over "
        "heads "
        "can hide both; see the heat map. First and last layer only: read the curve."
    )

    entropy: np.ndarray = quantity("layer head", "bits", "attention entropy of the final query", Figure("heatmap"))
    normalised: np.ndarray = quantity(
        "layer", "fraction of log2 T", "attention entropy, mean over heads", Figure("curve", band="normalised_null")
    )
    normalised_null: np.ndarray = quantity("layer bound", "fraction of log2 T", "null band of the attention entropy")
    rest: np.ndarray = quantity(
        "layer", "fraction of log2 (T-1)", "the same without the first token", Figure("curve", band="rest_null")
    )
    rest_null: np.ndarray = quantity("layer bound", "fraction of log2 (T-1)", "null band without the first token")
    first: np.ndarray = quantity("layer head", "fraction", "weight on the first token", Figure("heatmap"))
    headlines: tuple[Headline, ...]
    warnings: tuple[str, ...] = ()


def measure(view: View) -> Result:
    """Entropy maps, curves and focusing with nulls. Raises Refused where too few prompts are long enough."""
    seen = view.capture.position.numpy() + 1
    long = seen >= LEAST_TOKENS
    if long.sum() < 5:
        raise Refused(f"{long.sum()} prompts have {LEAST_TOKENS} tokens or more; attention focus needs at least 5")
    units, seen = view.units[long], seen[long]
    warnings = ()
    if not long.all():
        warnings = (f"{int((~long).sum())} prompts of fewer than {LEAST_TOKENS} tokens were left out",)
    main = _curves(view.capture, long, seen)
    nulls = {
        "re-initialised": [_curves(twin, long, seen) for twin in view.twins],
        "shuffled prompts": [_curves(other, long, seen) for other in view.shuffled],
    }

    def band(name: str) -> np.ndarray:
        # A narrowing layer has less entropy than its null: the lower end decides.
        return layer_band({key: np.array([c[name].mean(1) for c in null]) for key, null in nulls.items()}, "lower")

    statistics = (
        ("focusing", lambda c, rows: _focusing(c["all"], rows), FOCUSING),
        ("focusing without the first token", lambda c, rows: _focusing(c["rest"], rows), FOCUSING),
        ("weight on the first token", lambda c, rows: float(c["first"][-1, rows].mean()), SINK),
    )
    every = np.arange(len(seen))
    headlines = []
    for name, statistic, effect in statistics:
        value = statistic(main, every)
        draws = {key: np.array([statistic(c, every) for c in null]) for key, null in nulls.items()}
        headlines.append(
            headline(
                name,
                value,
                "fraction",
                jackknife(lambda rows, f=statistic: f(main, rows), every, units),
                [Null.of(key, value, null) for key, null in draws.items()],
                n=len(every),
                units=len(set(units)),
                effect=effect,
            )
        )
    return Result(
        entropy=bits(_mean(view.capture, Site.ATTENTION_ENTROPY, long)),
        normalised=main["all"].mean(1),
        normalised_null=band("all"),
        rest=main["rest"].mean(1),
        rest_null=band("rest"),
        first=_mean(view.capture, Site.ATTENTION_FIRST, long),
        headlines=tuple(headlines),
        warnings=warnings,
    )


def _curves(capture: Capture, long: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """[layer row]: entropy over log2 T and over log2 (T - 1) without the first token, and the first token's weight."""

    def over_heads(site: Site) -> np.ndarray:
        return np.stack([layer.double().numpy()[long].mean(1) for layer in capture.layers(site)])

    return {
        "all": bits(over_heads(Site.ATTENTION_ENTROPY)) / np.log2(seen),
        "rest": bits(over_heads(Site.ATTENTION_REST)) / np.log2(seen - 1),
        "first": over_heads(Site.ATTENTION_FIRST),
    }


def _focusing(curve: np.ndarray, rows: np.ndarray) -> float:
    """1 - H(last layer) / H(first layer), means over `rows`; fraction."""
    first, last = curve[0, rows].mean(), curve[-1, rows].mean()
    if first <= 0:
        raise Refused("the first layer's attention has no entropy: there is nothing to narrow")
    return float(1 - last / first)


def _mean(capture: Capture, site: Site, long: np.ndarray) -> np.ndarray:
    """[layer head], mean over prompts."""
    return np.stack([layer.double().numpy()[long].mean(0) for layer in capture.layers(site)])
