"""Results of a label probe: curves over layers for each site, confounds, confusions and the direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmgeom.result import Combined, Figure, Measured, Result, quantity

PROBE = "label"
TITLE = "Label probe"


@dataclass(frozen=True)
class Part(Result):
    """A part of the section, without estimates."""

    TITLE = TITLE


@dataclass(frozen=True, kw_only=True)
class SiteCurve(Part):
    """Held-out score at every layer of one site, with or without controls."""

    score: np.ndarray = quantity(
        "layer",
        "score",
        "held-out score, the confounds of --given removed",
        Figure("curve", band="band", interval="interval", beside="controls"),
    )
    interval: np.ndarray = quantity("layer bound", "score", "95 % interval over clusters, layer by layer")
    band: np.ndarray = quantity(
        "layer bound", "score", "from the lowest to the highest end of the controls' 95 % bands"
    )
    score_without: np.ndarray = quantity("layer way group", "score", "score without each group of clusters")
    controls: np.ndarray | None = quantity("control layer", "score", "the same probe of each control")


def where(layers: Sequence[int], score: np.ndarray, low: np.ndarray, highest: np.ndarray, best: int) -> str:
    """At which layers a label is readable, in words.

    A layer counts where the lower end of the score's interval, `low` [layer], lies above the `highest` end of all
    controls there. "from layer 11" is said where every later layer counts, too. The best layer, the `best`-th of
    these, is the one that the inner folds chose, not the one with the highest score, which many may share.
    """
    above = [layer for layer, one in zip(layers, low > highest, strict=True) if one]
    chosen = f"best layer {layers[best]} ({score[best]:.2f})"
    if not above:
        return f"at no layer above every control's band; {chosen}"
    if len(above) == len(layers):
        return f"above every control's band at every layer read; {chosen}"
    last = layers.index(above[-1])
    first = next(i for i in range(last + 1) if [*layers[i : last + 1]] == [*above[-(last + 1 - i) :]])
    if above != [*layers[first : last + 1]]:
        places = f"in layers {', '.join(map(str, above))}"
    elif last == len(layers) - 1:
        places = f"from layer {above[0]}"
    else:
        places = f"in layers {above[0]} to {above[-1]}" if len(above) > 1 else f"in layer {above[0]}"
    return f"above every control's band {places}; {chosen}"


@dataclass(frozen=True, kw_only=True)
class Confounds(Part):
    """Score of each confound alone."""

    score: np.ndarray = quantity(
        "confound",
        "score",
        "held-out score of a probe that reads this confound alone",
        Figure("curve", beside="chance"),
    )
    chance: np.ndarray = quantity("confound", "score", "score of predictions that know nothing")


@dataclass(frozen=True, kw_only=True)
class Transfer(Part):
    """Score on each value of a column, predicted by a probe that was fitted to the other values."""

    score: np.ndarray = quantity(
        "value",
        "score",
        "score on the prompts of each value, of a probe fitted to the other values",
        Figure("curve", beside="within"),
    )
    within: np.ndarray = quantity("value", "score", "score on the same prompts with folds over all values")


@dataclass(frozen=True, kw_only=True)
class Confusion(Part):
    """Confusion of true classes and held-out predicted classes."""

    share: np.ndarray = quantity(
        "true_class predicted_class",
        "fraction",
        "share of the prompts of each class that are predicted as each class, held out",
        Figure("heatmap"),
    )


@dataclass(frozen=True, kw_only=True)
class Direction(Part):
    """The probe's direction in the activations, fitted to all prompts."""

    direction: np.ndarray = quantity("dimension", "unit length", "direction along which the label grows")
    spread: np.ndarray = quantity("", "activation", "standard deviation of the activations along it")


@dataclass(frozen=True, kw_only=True)
class Predictions(Part):
    """Held-out predictions of each prompt."""

    prediction: np.ndarray = quantity("prompt", "label", "held-out prediction of each prompt")
    residual: np.ndarray = quantity("prompt", "label", "label minus its held-out prediction")


@dataclass(frozen=True)
class LabelResult(Combined):
    """All parts of one label."""

    TITLE = TITLE

    def lowered(self) -> Measured:
        """All parts as plain data; a score is called by its name, e.g. AUROC."""
        lowered = super().lowered()
        unit = next((h.name.split(",")[0] for h in lowered.estimates), "score")
        quantities = {name: replace(q, unit=unit) if q.unit == "score" else q for name, q in lowered.quantities.items()}
        return replace(lowered, quantities=quantities)
