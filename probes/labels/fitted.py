"""A label probe as an object, with scikit-learn's conventions: fitted to texts through a model, or to activations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit
from sklearn.base import BaseEstimator
from sklearn.metrics import accuracy_score, r2_score

from llmgeom.batch import Batch
from llmgeom.columns import MESSAGES, spoken
from llmgeom.errors import UserError, brief
from llmgeom.probe import Model, Site
from llmgeom.probes.labels import activations
from llmgeom.probes.labels.inputs import pooled, queried, read_positions
from llmgeom.probes.labels.probe import PROBE, WHERE, LabelProbe
from llmgeom.record import Record
from llmgeom.run import run_probes
from llmgeom.verbs.reading import Reading, called

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure


class Probe(BaseEstimator):
    """A linear probe of a label: where it is readable, beyond which controls; then predictions, and a direction.

    `model.probe(texts, labels)` makes and fits one. `Probe().fit(x, labels)` takes activations, [row coordinate] or
    [row layer coordinate]. A probe can be cloned, and takes part in scikit-learn's cross-validation.

    Args:
        model: What reads texts; None for activations.
        site: "residual", "value", "key", "query", "z", "attn_out" or "mlp_out".
        layers: "all", one layer, or several, of which the folds choose one.
        position: "last", "mean", a place from the end, e.g. -2, or a part of a chat, e.g. "assistant-last"
            (`llmgeom probe --positions`).
        confounds: What is removed first: "length", "final_token".
        controls: Untrained copies, and shuffles of each text.
        seed: Of folds and controls.

    Attributes:
        classes_: The values of the label, sorted; empty for a number.
        coef_, intercept_: `x @ coef_.T + intercept_` is the log odds of the second class, or of each of several; the
            number itself. Ridge weights; the log odds by Platt scaling on held-out predictions.
        n_features_in_: Coordinates of the activations.
        layer: That most folds chose (0 is the input of the first).
        direction: [coordinate], of length 1: the second class, or the number, grows along it. None for several classes.
        intercept: `x @ direction + intercept` is `decision_function` over the length of `coef_`.
        spread: Standard deviation of the activations along the direction: a natural dose.
        record: Everything that was measured, with the verdict. curve: the score over layers with its bands.
    """

    def __init__(
        self,
        model: Model | None = None,
        site: str = "residual",
        layers: Any = "all",
        position: str | int = "last",
        confounds: Sequence[str] = ("length", "final_token"),
        controls: int = 5,
        seed: int = 0,
    ) -> None:
        self.model, self.site, self.layers, self.position = model, site, layers, position
        self.confounds, self.controls, self.seed = confounds, controls, seed

    def __sklearn_clone__(self) -> Probe:
        return type(self)(**self.get_params(deep=False))  # the model is shared, not copied

    def fit(self, X: Any, y: Sequence[Any], clusters: Sequence[Any] | None = None) -> Probe:
        """Measure and fit.

        Args:
            X: Texts (or chats, lists of messages with `role` and `content`), or activations.
            y: Two or more classes, at least 5 rows each, or numbers.
            clusters: Rows of one cluster (template, document, conversation) stay in one fold; by default each is one.

        Raises:
            UserError: Too few rows of a class; lengths that differ; texts without a model; numbers that are not finite.
        """
        labels = [getattr(label, "item", lambda label=label: label)() for label in y]
        stored = _numbers(X)
        X = stored if stored is not None else list(X)
        groups = list(range(len(X))) if clusters is None else list(clusters)
        if not len(X) == len(labels) == len(groups):
            raise UserError(f"{len(X)} rows, {len(labels)} labels and {len(groups)} clusters: expected as many of each")
        one = isinstance(self.layers, int | np.integer)
        chosen = None if isinstance(self.layers, str) else tuple([self.layers] if one else self.layers)
        (position,) = read_positions([str(self.position)])
        asked = LabelProbe(PROBE, "auto", (Site(self.site),), chosen, tuple(self.confounds), None, (position,))
        if stored is not None:
            batch = activations.batch_of(len(X), {PROBE: labels}, "activations", groups)
            x = activations.checked(stored, "activations")
            return self._take(activations.measure(x, (), batch, asked, self.seed))
        batch = self._read(X, {PROBE: tuple(labels)}, tuple(map(str, groups)))
        asked.check(batch, self.seed)
        facts = {"target": PROBE, "given": ",".join(asked.given) or "none", "positions": str(position)}
        record = run_probes(self._model, batch, {PROBE: asked}, controls=self.controls, seed=self.seed, facts=facts)
        return self._take(record)

    def decision_function(self, X: Any) -> np.ndarray:
        """[row] log odds of the second class, [row class] of each of several; the predicted number."""
        found = self._activations(X) @ self.coef_.T + self.intercept_
        return found[:, 0] if found.shape[1] == 1 else found

    def predict(self, X: Any) -> np.ndarray:
        """[row] the likeliest class, or the number."""
        decision = self.decision_function(X)
        if not len(self.classes_):
            return decision
        return self.classes_[(decision > 0).astype(int) if decision.ndim == 1 else decision.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """[row class] probabilities, by Platt scaling; of several classes one by one, then summing to 1.

        Raises UserError: the label is a number.
        """
        if not len(self.classes_):
            raise UserError("the label is a number: predict gives it; only classes have probabilities")
        p = expit(self.decision_function(X))
        return np.stack([1 - p, p], 1) if p.ndim == 1 else p / p.sum(1, keepdims=True)

    def score(self, X: Any, y: Sequence[Any]) -> float:
        """Accuracy of the classes; R2 of a number."""
        return float((accuracy_score if len(self.classes_) else r2_score)(list(y), self.predict(X)))

    def save(self, folder: str | os.PathLike) -> None:
        """Write record.json and arrays.safetensors, all that was measured; `load` reads them."""
        self.record.save(folder)

    @classmethod
    def load(cls, folder: str | os.PathLike, model: Model | None = None) -> Probe:
        """The probe of a folder that `save` or `llmgeom probe` wrote.

        Args:
            model: The model that it was fitted to, to predict texts. Without it a probe predicts activations.

        Raises:
            UserError: No such run; another model than the one that it was fitted to.
        """
        record = Record.load_one(folder)
        if PROBE not in record.results:
            raise UserError(f"{folder} holds no label probe: give a folder of `llmgeom probe --target`")
        theirs, facts = record.subject.get("weights"), record.facts
        if model is not None and theirs != (ours := model.facts["weights"]):
            raise UserError(f"{folder} was fitted to weights {str(theirs)[:12]}, and {model.name} has {str(ours)[:12]}")
        ticks, given = record.results[PROBE].ticks, facts.get("given", "none")
        (position,) = ticks["position"]
        site = ticks["place"][0] if ticks["place"][0] in [*Site] else "residual"
        options = {"layers": ticks.get("layer", "all"), "controls": facts.get("nulls", 0), "seed": facts["seed"]}
        confounds = () if given == "none" else tuple(given.split(","))
        return cls(model, site, position=position, confounds=confounds, **options)._take(record)

    def _take(self, record: Record) -> Probe:
        """The fitted attributes, from what was measured."""
        if PROBE in record.unmeasured:
            raise UserError(record.unmeasured[PROBE])
        measured, score = record.results[PROBE], record.results[PROBE].estimates[0]
        arrays, ticks = measured.arrays, measured.ticks
        place, self.layer = str(ticks["place"][0]), int(ticks["place"][1])
        position = str(ticks["position"][0])
        part = place if position == "last" else f"{place}_{position}"
        known = {str(cell): cell for cell in record.prompts[str(record.facts["target"])]}
        self.record, self.classes_ = record, np.array([known.get(name, name) for name in ticks.get("true_class", ())])
        slope, offset = arrays["log_odds"].T if len(self.classes_) else (np.ones(1), np.zeros(1))
        self.coef_ = slope[:, None] * arrays["weights"]
        self.intercept_ = slope * arrays["intercept"] + offset
        self.n_features_in_ = self.coef_.shape[1]
        self.direction = arrays.get("direction")
        self.spread = float(arrays["spread"]) if "spread" in arrays else None
        length = float(np.linalg.norm(self.coef_))
        self.intercept = float(self.intercept_[0]) / length if self.direction is not None and length else 0.0
        name, what = score.name.split(",")[0], f"{part}_{{}}".format
        values = {name: arrays[what("score")]}
        for ends in ("interval", "band"):
            values |= {f"{ends} {end}": arrays[what(ends)][:, i] for i, end in enumerate(("low", "high"))}
        where = measured.facts[f"{WHERE}{place}" if position == "last" else f"{WHERE}{place} {position}"]
        whose = called(self.model) if self.model else str(record.subject["name"])
        self.curve = Reading(
            title=f"{whose}, {len(record.prompts['text'])} labelled rows: {where}",
            coords={"layer": tuple(ticks.get("layer", range(len(values[name]))))},
            values=values,
            bands={"95 % interval": ("interval low", "interval high"), "controls": ("band low", "band high")},
            attrs={"where": where, "n": score.n, "verdict": score.verdict, "why": score.why},
        )
        return self

    @property
    def attrs(self) -> dict[str, Any]:
        """Where the label is readable, n, the verdict and why."""
        return dict(self.curve.attrs)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.curve[name]

    def plot(self) -> Figure:
        """The score over layers, with its interval and the band of all controls."""
        return self.curve.plot()

    def frame(self) -> DataFrame:
        """The same as a table."""
        return self.curve.frame()

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        return f"<{self.curve.title}>" if hasattr(self, "curve") else super().__repr__(N_CHAR_MAX)

    def _repr_html_(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  (a property in scikit-learn)
        return self.curve._repr_html_()

    @property
    def _model(self) -> Model:
        if self.model is None:
            raise UserError("this probe has no model to read texts with: give Probe(model, ...), or activations")
        return self.model

    def _read(self, X: Any, columns: dict[str, tuple], clusters: tuple[str, ...]) -> Batch:
        """Texts as the model reads them, with the probe's position queried."""
        source, texts = {"kind": "strings", "name": "labelled texts"}, X
        if isinstance(X, str):
            raise UserError(f"texts are {brief(X)}: expected a list of texts, of chats, or activations")
        if X and isinstance(X[0], list | tuple) and X[0] and isinstance(X[0][0], dict):
            texts = [spoken(chat, f"chat {i}") for i, chat in enumerate(X)]
            columns = columns | {MESSAGES: tuple(map(json.dumps, X))}
        batch = Batch(Batch.of(texts).inputs, clusters, source, columns=columns)
        return queried(self._model, batch, read_positions([str(self.position)]))

    def _activations(self, X: Any) -> np.ndarray:
        """[row coordinate] float64 at the probe's layer. Raises UserError: another width, or no such layer."""
        stored = _numbers(X)
        if stored is not None:
            x = activations.checked(stored, "activations")
            if 1 < x.shape[1] <= self.layer:
                raise UserError(
                    f"activations of {x.shape[1]} layers: this probe reads layer {self.layer}; give [row, coordinate] "
                    "of it, or all layers"
                )
            x = x[:, self.layer if x.shape[1] > 1 else 0].astype(np.float64)
        else:
            batch, model = self._read(X, {}, tuple(map(str, range(len(X))))), self._model
            kept = min(self.layer, len(model.blocks) - 1)  # what the last layer gives is kept with it
            capture = model.capture(batch, self.site, layers=kept)
            (position,) = read_positions([str(self.position)])
            x = pooled(capture, {self.layer: capture[self.site, self.layer]}, self.layer, position)
        if x.shape[1] != self.n_features_in_:
            raise UserError(f"activations of {x.shape[1]} coordinates: expected {self.n_features_in_}")
        return x


def _numbers(X: Any) -> np.ndarray | None:
    """Activations as an array; None for texts and token ids."""
    if hasattr(X, "detach"):
        X = X.detach().cpu().float().numpy()
    if not hasattr(X, "dtype") or not hasattr(X, "shape") or X.dtype.kind != "f":
        return None
    if X.ndim < 2:
        raise UserError(f"activations {brief(X)}: expected [row, coordinate] or [row, layer, coordinate]")
    return np.asarray(X)
