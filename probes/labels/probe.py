"""The label probe: a user's label read from chosen sites and layers, with controls and confounds removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from llmgeom.claims import Null, cut, declared, estimate
from llmgeom.plan import subset_of
from llmgeom.probe import Batch, Capture, Needs, ProbeInput, Site, Unavailable, UserError
from llmgeom.probes.labels import results
from llmgeom.probes.labels.confounds import bag_of_tokens, confound, design as confounds_of
from llmgeom.probes.labels.positions import LAST, Position, at_ends, pooled
from llmgeom.probes.labels.target import Target, Wanted, read_target, read_weights, transferred
from llmgeom.probes.shared.nulls import SHUFFLED, UNTRAINED, permutation_null
from llmgeom.result import Estimate
from llmgeom.stats import label_estimators, ridge_probe
from llmgeom.stats.label_scores import METRICS, bounds, chance, classified, coded, moved, require_orders
from llmgeom.stats.nested_probe import (
    Design,
    HeldOut,
    Place,
    deletions,
    direction,
    held_out,
    interval,
    stratified_folds,
)
from llmgeom.stats.resampling import Interval, band, interval_ends, student_quantile

PERMUTATIONS = {"ridge": 199, "means": 199, "logistic": 79, "pls": 79}  # the last two are iterative: 199 take minutes
PERMUTED, NO_CONTEXT, BAG = "labels in another order", "no context", "bag of tokens"
BEYOND = ", beyond every control"  # of the declared claim; what a run holds fixed stands before it
LEFT_IN = "this model, confounds left in"
WHERE = "where: "  # a fact of a result: at which layers of a site the label is readable
SHOWN = 5  # prompts with the largest residuals
CLAIMS = declared(results.PROBE)


@dataclass(frozen=True)
class LabelProbe:
    """A probe that reads one label from the activations of each prompt.

    Attributes:
        target: the column of the label.
        kind: the kind of label; "auto" decides by its values.
        sites: the sites from which it is read.
        layers: the layers; None for all.
        given: confounds to remove.
        estimator: the estimator of the label.
        transfer: a column; each of its values is also predicted from the others.
        positions: prompt positions: "last", "mean", or a place from the end, e.g. -2.
        weight: a column of numbers above 0; a prompt counts as that many equal prompts.
    """

    target: str
    kind: Wanted = "auto"
    sites: tuple[Site, ...] = (Site.RESIDUAL,)
    layers: tuple[int, ...] | None = None
    given: tuple[str, ...] = ()
    estimator: label_estimators.Name = "ridge"
    transfer: str | None = None
    positions: tuple[Position, ...] = (LAST,)
    weight: str | None = None

    def checked(self, batch: Batch) -> Target:
        """The label of these prompts, checked as far as possible without a model.

        Raises UserError: a column cannot be used, or a transfer cannot be measured.
        """
        target = read_target(batch, self.target, self.kind)
        if self.estimator == "logistic" and target.kind == "number":
            raise UserError(f"--estimator logistic: column {self.target!r} is a number; give ridge or means")
        if self.weight is not None:
            read_weights(batch, self.weight)
        if self.transfer is not None:
            transferred(batch, target, self.transfer)
        return target

    def check(self, batch: Batch, seed: int) -> None:
        """Check before a model loads that each class has enough clusters, also in the subset that controls read.

        Raises UserError as `checked`, and for a class with too few clusters.
        """
        target = self.checked(batch)
        folds(target, batch, seed)
        if (rows := subset_of(batch, seed)) is None:
            return
        few, same = batch.take(rows), replace(target, label=target.label[rows])
        try:
            folds(same, few, seed)
            if self.transfer is not None:
                transferred(few, same, self.transfer)
        except UserError as error:
            raise UserError(
                f"of {len(batch):,} prompts controls read {len(few):,}, drawn by --seed; of those {error}"
            ) from None

    def check_layers(self, layers: int) -> None:
        """Raises UserError for a layer that a site does not have in a model with this number of layers."""
        for site in self.sites:
            last = layers - (site is not Site.RESIDUAL)
            for layer in self.layers or ():
                if not 0 <= layer <= last:
                    raise UserError(f"--layers {layer}: {site.value} has layers 0 to {last}")

    @property
    def NEEDS(self) -> Needs:
        """The sites, in the model and in every control."""
        return Needs(frozenset(self.sites), all_prompts=True)

    def measure(self, data: ProbeInput) -> results.LabelResult:
        """The label at every layer, its controls, the claim, and the direction.

        Raises UserError: a label, confound or layer that cannot be used.
        """
        judged = _Measurement(self, data.null_subset)
        return judged.result(_Measurement(self, data) if data.subset is not None else None)

    def claim(self, data: ProbeInput) -> Estimate:
        """The estimate of the claim as in `measure`, without the curves; it takes half of the time on few prompts."""
        return _Measurement(self, data.null_subset).claim()

    def places(self, capture: Capture) -> dict[tuple[str, int], Place]:
        """(site, layer) -> loader of its activations, [prompt coordinate] float64.

        The site's name is "SITE POSITION" for positions other than the last. Raises UserError: a layer does not exist,
        or a prompt lacks the position.
        """
        places: dict[tuple[str, int], Place] = {}
        for position in self.positions:
            for site in self.sites:
                layers = capture.layers(site)
                self.check_layers(len(layers) - (site is Site.RESIDUAL))
                chosen = range(len(layers)) if self.layers is None else self.layers
                for layer in chosen:
                    name = site.value if position == LAST else f"{site.value} {position}"
                    places[name, layer] = partial(pooled, capture, layers, layer, position)
        return places

    def editable(self, capture: Capture) -> list[bool]:
        """[place] whether an edit reaches it: true for all but the residual stream after the last layer."""
        after = len(capture.layers(Site.RESIDUAL)) - 1 if Site.RESIDUAL in self.sites else 0
        return [not (name.startswith("residual") and layer == after) for name, layer in self.places(capture)]


def folds(target: Target, batch: Batch, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The fold of each row; then the folds within which permuted labels stay, or None if they move freely.

    Raises UserError: a class has too few clusters, or the labels have too few different orders.
    """
    fold = stratified_folds(target.kind, target.label, batch.cluster, seed)
    stratified = None if target.kind == "number" else fold
    require_orders(target.label, np.asarray(batch.cluster), stratified)
    return fold, stratified


class _Measurement:
    """One measurement: label, folds and confounds are the same for the model and every control."""

    def __init__(self, probe: LabelProbe, data: ProbeInput) -> None:
        self.probe, self.data = probe, data
        self.target: Target = probe.checked(data.capture.batch)
        self.final = at_ends(data.capture)
        self.label, self.clusters = self.target.label, np.asarray(data.capture.batch.cluster)
        weight = None if probe.weight is None else read_weights(data.capture.batch, probe.weight)
        self.truth = coded(self.target.kind, self.label, self.target.classes)
        self.fold, stratified = folds(self.target, data.capture.batch, data.seed)
        confounds = confounds_of(self.final, probe.given)
        if confounds is not None:
            self._check_left(confounds)
        self.design = Design(self.target.kind, self.truth, self.fold, confounds, probe.estimator, weight)
        self.places = probe.places(data.capture)
        orders = moved(self.label, self.clusters, PERMUTATIONS[probe.estimator], data.seed, stratified)
        self.own = held_out(self.design, list(self.places.values()), orders)
        if self.own.flat:
            removed = f" once {', '.join(probe.given)} are removed" * (confounds is not None)
            places = ", ".join(f"{site} {layer}" for site, layer in self.places)
            raise UserError(
                f"no activation differs between prompts{removed} ({places}): read other --sites, "
                "--layers or --positions, or name less in --given"
            )

    def _check_left(self, confounds: np.ndarray) -> None:
        """Raise UserError where the confounds determine the label: then nothing of it is left to read."""

        def left(columns: np.ndarray) -> bool:
            x = np.column_stack([np.ones(len(columns)), columns])
            missed = self.truth - x @ np.linalg.lstsq(x, self.truth, rcond=None)[0]
            return bool(np.square(missed).sum() > 1e-9 * np.square(self.truth - self.truth.mean(0)).sum())

        if left(confounds):
            return
        alone = [name for name in self.probe.given if not left(confound(self.final, name))]
        names = (alone or [" and ".join(self.probe.given)])[0]
        raise UserError(
            f"the label {self.target.name!r} is a function of {names}: the same {names} has the same label in every "
            f"prompt, so nothing is left to read once it is held fixed; give prompts in which they differ, or leave "
            f"{names} out of --given"
        )

    @cached_property
    def draws(self) -> dict[str, list[HeldOut]]:
        """The readings of each control with several draws."""
        return {
            name: [held_out(self.design, list(self.probe.places(capture).values())) for capture in captures]
            for name, captures in ((UNTRAINED, self.data.untrained), (SHUFFLED, self.data.shuffled))
            if captures
        }

    @cached_property  # not needed on all prompts: the claim uses the subset that controls read
    def single(self) -> dict[str, tuple[HeldOut, list[Place]]]:
        """The controls with one draw, each with its places."""
        controls = {}
        if self.data.no_context is not None:
            places = list(self.probe.places(self.data.no_context).values())
            controls[NO_CONTEXT] = (held_out(self.design, places), places)
        try:
            bag = bag_of_tokens(self.final)
        except Unavailable:
            return controls
        controls[BAG] = (held_out(self.design, [lambda: bag]), [lambda: bag])
        return controls

    # -- the estimates

    def claim(self) -> Estimate:
        """The score with confounds removed, compared with every control."""
        reading = self.own
        without = deletions(reading, list(self.places.values()), self.clusters)
        nulls = [permutation_null(PERMUTED, reading.value, reading.moved)]
        for name, (control, places) in self.single.items():
            lost = deletions(control, places, self.clusters)
            difference = interval(reading.value - control.value, without.less(lost), self.clusters)
            nulls.append(Null.paired(name, reading.value, control.value, difference))
        for name, draws in self.draws.items():
            nulls.append(Null.of(name, np.array([draw.value for draw in draws]), noisy=True))
        span = interval(reading.value, without, self.clusters)
        made = self.estimate("", reading.value, span, nulls)
        return replace(made, claim=made.claim.replace(BEYOND, f"{self.held_fixed}{BEYOND}"))

    @property
    def held_fixed(self) -> str:
        """The confounds that are removed, as a claim names them; of one without a column nothing is removed."""
        *names, last = [name for name in self.probe.given if confound(self.final, name).shape[1]] or [""]
        return f", given {', '.join(names)}{' and ' * bool(names)}{last}" if last else ""

    def alone(self, what: str, read: HeldOut | None = None) -> Estimate:
        """The score compared with permuted labels only; `read` is a reading with confounds left in."""
        reading = read or self.own
        without = deletions(reading, list(self.places.values()), self.clusters)
        span = interval(reading.value, without, self.clusters)
        null = permutation_null(PERMUTED, reading.value, self.own.moved)
        return self.estimate(what, reading.value, span, [null])

    def estimate(self, what: str, value: float, span: Interval, nulls: Sequence[Null]) -> Estimate:
        """A score with its controls; the interval and the control's range are cut to the range of scores."""
        counts = {"n": len(self.label), "clusters": len(set(self.clusters.tolist()))}
        uncut = estimate(CLAIMS[METRICS[self.target.kind] + what], value, span, nulls, **counts)
        return cut(uncut, *bounds(self.target.kind))

    # -- the parts

    def result(self, every: _Measurement | None) -> results.LabelResult:
        """The whole result; `every` is the measurement on all prompts, if the controls read a subset."""
        raw, estimates = self.own, [self.claim()]
        if self.design.confounds is not None:
            raw = held_out(replace(self.design, confounds=None), list(self.places.values()))
            estimates.append(self.alone(", confounds left in", raw))
        sites = dict.fromkeys(site for site, _ in self.places)
        prefix = {site: site.replace(" ", "_") for site in sites}
        parts: dict[str, results.Part] = {f"{prefix[site]}_": self.curve(site, raw) for site in sites}
        if every is not None:
            parts |= {f"{prefix[site]}_all_prompts_": every.plain_curve(site) for site in sites}
            estimates.append(every.alone(", all prompts"))
        explained, unexplained = self.explained()
        if explained is not None:
            parts["confound_"] = explained
        if self.probe.transfer is not None:
            parts["transfer_"] = self.transfer(self.probe.transfer)
        if self.target.classes:
            parts["confusion_"] = self.confusion()
        if self.truth.shape[1] == 1:
            parts[""] = self.direction()
        parts["probe_"], notes = (every or self).predictions()
        found = results.LabelResult.of(parts, (), (*self.summary(estimates), *unexplained, *notes))
        return replace(found, estimates=tuple(estimates), warnings=self.doubts())

    def curve(self, site: str, raw: HeldOut) -> results.SiteCurve:
        """Curve of one site with every control; `raw` is the reading with confounds left in."""
        plain, here = self.plain_curve(site), self.layers(site)
        lines = {LEFT_IN: raw.scores[here]} if self.design.confounds is not None else {}
        for name, draws in self.draws.items():
            lines[f"{name}, median of {len(draws)}"] = np.median([one.scores for one in draws], axis=0)[here]
        for name, (one, places) in self.single.items():
            lines[name] = one.scores[here] if len(places) == len(self.places) else np.full(len(here), one.value)
        tops = [plain.band, *(self.ends(draws, here) for draws in self.draws.values())]
        tops += [np.stack([line, line], 1) for name, line in lines.items() if name in self.single]
        band = np.stack([np.min(tops, 0)[:, 0], np.max(tops, 0)[:, 1]], 1)
        numbers = plain.ticks.get("layer") or range(len(here))
        place, errors = list(self.places).index(self.chosen()), self.own.errors.sum(1)[here]
        best = here.index(place) if place in here else int(errors.argmin())
        sentence = results.where(list(numbers), plain.score, plain.interval[:, 0], band[:, 1], best)
        return replace(
            plain,
            band=band,
            controls=np.array(list(lines.values())),
            ticks={**plain.ticks, "control": tuple(lines)},
            facts={f"{WHERE}{site}": sentence},
            notes=(f"{site}: {sentence}",),
        )

    @staticmethod
    def ends(draws: Sequence[HeldOut], here: Sequence[int]) -> np.ndarray:
        """[layer bound] the band of a control with several draws."""
        return np.array([band(np.array([draw.scores[i] for draw in draws])) for i in here])

    def plain_curve(self, site: str) -> results.SiteCurve:
        """Curve of one site with the band of permuted labels."""
        places, reading, here = list(self.places.values()), self.own, self.layers(site)
        without = [deletions(reading, places, self.clusters, i) for i in here]
        spans = [interval(reading.scores[i], lost, self.clusters) for i, lost in zip(here, without, strict=True)]
        return results.SiteCurve(
            score=reading.scores[here],
            interval=np.clip(interval_ends(spans), *bounds(self.target.kind)),
            band=np.array([band(reading.moved_at[i]) for i in here]),
            score_without=np.array([lost.without for lost in without]),
            controls=None,
            ticks={"layer": self.probe.layers} if self.probe.layers else {},
        )

    def layers(self, site: str) -> list[int]:
        """The places of one site."""
        return [i for i, (name, _) in enumerate(self.places) if name == site]

    def explained(self) -> tuple[results.Confounds | None, list[str]]:
        """The score of every confound alone, and a note for each confound without a column to remove."""
        scores, notes = {}, []
        for name in self.probe.given:
            columns = confound(self.final, name)
            if not columns.shape[1]:
                same = "all prompts have one value, or none is shared by 5"
                notes.append(f"confound {name}: {same}, so there is nothing to remove")
                continue
            read = ridge_probe.read(columns, self.truth, self.fold, weight=self.design.weight)
            scores[name] = self.design.score(read.prediction)
        if not scores:
            return None, notes
        level = np.full(len(scores), chance(self.target.kind, self.truth.shape[1]))
        score = np.array(list(scores.values()))
        return results.Confounds(score=score, chance=level, ticks={"confound": tuple(scores)}), notes

    def confusion(self) -> results.Confusion:
        """Confusion of true and predicted classes; for a binary label by the sign of the centred prediction."""
        classes, weight = self.target.classes, self.design.weights
        true = (self.label[:, None] == np.array(classes)).argmax(1)
        if self.target.kind == "binary":
            outside = [self.fold != held for held in range(int(self.fold.max()) + 1)]
            level = np.array([np.average(self.truth[rows, 0], weights=weight[rows]) for rows in outside])
            predicted = (self.own.prediction[:, 0] > level[self.fold]).astype(np.int64)
        else:
            predicted = classified(self.truth, self.own.prediction, self.fold, weight)
        count = np.zeros((len(classes), len(classes)))
        np.add.at(count, (true, predicted), weight)
        ticks = {"true_class": classes, "predicted_class": classes}
        return results.Confusion(share=count / count.sum(1, keepdims=True), ticks=ticks)

    def transfer(self, column: str) -> results.Transfer:
        """Scores with each value of a column held out in turn, instead of the folds."""
        values, fold = np.unique(transferred(self.data.capture.batch, self.target, column), return_inverse=True)
        away = held_out(replace(self.design, fold=fold), list(self.places.values()))
        score, within = (
            np.array([read.design.score(read.prediction, fold == i) for i in range(len(values))])
            for read in (away, self.own)
        )
        return results.Transfer(score=score, within=within, ticks={"value": tuple(values.tolist())})

    def chosen(self) -> tuple[str, int]:
        """The place of the direction: the place that most folds chose, if an edit reaches it.

        Else it is the editable place with the least error in the inner folds; if no place is editable, the place that
        most folds chose.
        """
        place, editable = int(np.bincount(self.own.chosen).argmax()), np.array(self.probe.editable(self.data.capture))
        if not editable[place] and editable.any():
            place = int(np.where(editable, self.own.errors.sum(1), np.inf).argmin())
        return list(self.places)[place]

    def direction(self) -> results.Direction:
        """The direction at the chosen place, fitted to all prompts."""
        site, layer = self.chosen()
        x = self.places[site, layer]()
        weights = direction(x, self.truth[:, 0], self.fold, self.design.confounds, self.design.weight)
        length = np.linalg.norm(weights)
        unit = weights / length if length > 0 else weights
        return results.Direction(
            direction=unit,
            spread=np.array((x @ unit).std()),
            ticks={"place": (site.partition(" ")[0], layer), "position": (site.partition(" ")[2] or LAST,)},
        )

    def predictions(self) -> tuple[results.Predictions, list[str]]:
        """Held-out predictions; notes name the prompts with the largest residuals."""
        if self.truth.shape[1] == 1:
            prediction = self.own.prediction[:, 0]
            residual = self.truth[:, 0] - prediction
        else:
            own_class = np.arange(len(self.truth)), self.truth.argmax(1)
            prediction = self.own.prediction[own_class]
            residual = 1 - prediction
        worst = np.argsort(-np.abs(residual), kind="stable")[:SHOWN]
        listed = ", ".join(f"prompt {row} ({self.label[row]}: {prediction[row]:.2f})" for row in worst)
        return results.Predictions(prediction=prediction, residual=residual), [f"largest residuals: {listed}"]

    def summary(self, estimates: Sequence[Estimate]) -> list[str]:
        """Notes on the label and the places from which it was read."""
        kind, classes = self.target.kind, self.target.classes
        count = ", ".join(f"{int((self.label == name).sum())} {name}" for name in classes)
        where = ", ".join(f"{site} {layer}" for site, layer in (list(self.places)[i] for i in self.own.chosen))
        confounds = ", ".join(self.probe.given) or "nothing"
        positive = f"; {classes[1]!r} is the positive value" if kind == "binary" else ""
        weighted, w = "", self.design.weights
        if self.probe.weight is not None:
            weighted = f"; weighted by {self.probe.weight!r}, as precise as {w.sum() ** 2 / (w @ w):.0f} equal prompts"
        selectivity, judged = self.own.value - np.median(self.own.moved), estimates[0]
        lost = judged.deletions  # the interval itself may be cut
        half = student_quantile(lost.units) * lost.error if lost else 0.0
        reach = judged.margin - judged.centre + 1.28 / 1.96 * half
        return [
            f"label {self.target.name!r}: {kind}" + (f" ({count}{positive})" if classes else "") + weighted,
            f"given {confounds}; place chosen in each fold: {where}",
            f"selectivity, the score minus that of permuted labels: {selectivity:.2f}",
            # 90 % power needs z_.9 = 1.28 errors beyond the hurdle; the interval's half width is 1.96 (derived here).
            f"found with 90 % power here: a score that is {reach:.2f} above the strongest control",
        ]

    def doubts(self) -> tuple[str, ...]:
        """Reasons to doubt the verdict."""
        rows = len(self.label)
        if self.data.no_context is None:
            return (f"the control {NO_CONTEXT!r} is not available for this model",)
        if rows > len(set(self.clusters.tolist())) and len(set(self.fold.tolist())) < ridge_probe.FOLDS:
            return ("few clusters: some folds are empty",)
        return ()
