"""A label probe in Python: where a label is readable in a model, and its direction at the best place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmgeom.batch import Prompts
from llmgeom.errors import UserError
from llmgeom.probe import Batch, Model
from llmgeom.probes.labels.probe import PROBE, WHERE, LabelProbe
from llmgeom.record import Record
from llmgeom.run import run_probes
from llmgeom.verbs.reading import Reading, called

SITE = "residual"


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedProbe(Reading):
    """A label's held-out score at every layer, with the band of its controls, and the probe at one layer.

    Attributes:
        subject: The model that it was fitted to, and reads.
        record: Everything that was measured, with the verdict.
        layer: The residual stream's layer that most folds chose (0 is the input of the first).
        direction: [d_model], of length 1: along it the second class, or the number, grows. None for several classes.
        intercept: `activations @ direction + intercept` is 0 half way between the means of the two classes, or at the
            mean of a number.
        classes: The values of the label; empty for a number.
        slope, level: Of a number: it is level + slope * decision.
    """

    subject: Model
    record: Record
    layer: int
    direction: np.ndarray | None
    intercept: float
    classes: tuple[Any, ...]
    slope: float = 1.0
    level: float = 0.0

    def decision_function(self, texts: Prompts) -> np.ndarray:
        """[text] how far each text's last token lies along the direction, from `intercept`.

        Raises UserError for a label of more than two classes, which has no direction.
        """
        if self.direction is None:
            raise UserError(f"a label of {len(self.classes)} classes has no one direction: probe two of them at a time")
        return _activations(self.subject, Batch.of(texts), self.layer) @ self.direction + self.intercept

    def predict(self, texts: Prompts) -> np.ndarray:
        """[text] the class of each text, or its number. Raises UserError as `decision_function`."""
        decision = self.decision_function(texts)
        return (
            np.array(self.classes)[(decision > 0).astype(int)] if self.classes else self.level + self.slope * decision
        )

    def __repr__(self) -> str:
        return f"<{self.title}>"


def fit(
    subject: Model,
    texts: Sequence[str],
    labels: Sequence[Any],
    clusters: Sequence[Any] | None,
    confounds: Sequence[str],
    controls: int,
    seed: int,
) -> FittedProbe:
    """See `Verbs.probe`."""
    texts, labels = list(texts), [getattr(label, "item", lambda label=label: label)() for label in labels]
    clusters = list(range(len(texts))) if clusters is None else list(clusters)
    if not len(texts) == len(labels) == len(clusters):
        raise UserError(
            f"{len(texts)} texts, {len(labels)} labels and {len(clusters)} clusters: expected as many of each"
        )
    source = {"kind": "strings", "name": "labelled texts"}
    batch = Batch(Batch.of(texts).inputs, tuple(map(str, clusters)), source, columns={PROBE: tuple(labels)})
    probe = LabelProbe(PROBE, given=tuple(confounds))
    probe.check(batch, seed)
    record = run_probes(subject, batch, {PROBE: probe}, controls=controls, seed=seed)
    if PROBE in record.unmeasured:
        raise UserError(record.unmeasured[PROBE])
    measured, target = record.results[PROBE], probe.checked(batch)
    score, arrays = measured.estimates[0], measured.arrays
    name = score.name.split(",")[0]
    curves = {name: arrays[f"{SITE}_score"]}
    for ends in ("interval", "band"):
        curves |= {f"{ends} {end}": arrays[f"{SITE}_{ends}"][:, i] for i, end in enumerate(("low", "high"))}
    attrs = {"where": measured.facts[f"{WHERE}{SITE}"], "n": score.n, "verdict": score.verdict, "why": score.why}
    direction, layer = arrays.get("direction"), int(np.argmax(curves[name]))
    known = {str(label): label for label in labels}
    classes = tuple(known.get(str(name), name) for name in target.classes)
    fitted: dict[str, Any] = {"direction": direction, "intercept": 0.0, "classes": classes}
    if direction is not None:
        layer = int(measured.ticks["place"][1])
        along, label = _activations(subject, batch, layer) @ direction, np.array(labels)
        if classes:
            fitted["intercept"] = -float(np.mean([along[label == value].mean() for value in classes]))
        else:
            fitted["intercept"] = -float(along.mean())
            slope, level = np.polyfit(along + fitted["intercept"], label.astype(float), 1)
            fitted |= {"slope": float(slope), "level": float(level)}
    return FittedProbe(
        title=f"{called(subject)}, {len(texts)} labelled texts: {attrs['where']}",
        coords={"layer": tuple(range(len(curves[name])))},
        values=curves,
        bands={"95 % interval": ("interval low", "interval high"), "controls": ("band low", "band high")},
        attrs=attrs,
        subject=subject,
        record=record,
        layer=layer,
        **fitted,
    )


def _activations(subject: Model, batch: Batch, layer: int) -> np.ndarray:
    """[text d_model] float64: the residual stream at the last token, before `layer`."""
    kept = min(layer, len(subject.blocks) - 1)  # what the last layer gives is kept with it
    return subject.capture(batch, SITE, layers=kept)[SITE, layer].double().numpy()
