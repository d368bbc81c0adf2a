"""The label probe: a user's label read from chosen sites and layers, with controls and confounds removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from llmgeom.claims import Null, cut, declared, estimate
from llmgeom.plan import subset_of
from llmgeom.probe import (
    MOST_PROMPTS,
    SHUFFLED,
    UNTRAINED,
    Batch,
    Capture,
    Needs,
    ProbeInput,
    Site,
    Unavailable,
    UserError,
)
from llmgeom.probes.labels.inputs import (
    LAST,
    Position,
    Target,
    Wanted,
    bag_of_tokens,
    confound,
    design as confounds_of,
    pooled,
    read_target,
    transferred,
)
from llmgeom.probes.shared.nulls import permutation_null
from llmgeom.result import SENTENCE, Estimate, Figure, Labelled, Result, labelled, line, read_texts
from llmgeom.stats import ridge_probe
from llmgeom.stats.label_scores import METRICS, bounds, chance, classified, coded, few_orders, moved
from llmgeom.stats.nested_probe import (
    Design,
    HeldOut,
    Place,
    by_number,
    deletions,
    divisions,
    held_out,
    interval,
    log_odds,
    stratified_folds,
    weights,
)
from llmgeom.stats.resampling import Deletions, Interval, band, interval_ends

PROBE, TITLE = "label", "Label probe"
PERMUTATIONS = 199
PERMUTED, NO_CONTEXT, BAG = "labels in another order", "no context", "bag of tokens"
BEYOND = ", beyond every control"  # of the declared claim; what a run holds fixed stands before it
LEFT_IN = "this model, confounds left in"
WHERE = "where: "  # a fact of a result: at which layers of a site the label is readable
SHOWN = 5  # prompts with the largest residuals
CLAIMS = declared(PROBE)


@dataclass(frozen=True)
class LabelProbe:
    """A probe that reads one label from the activations of each prompt.

    Attributes:
        target: the column of the label.
        kind: the kind of label; "auto" decides by its values.
        sites: the sites from which it is read.
        layers: the layers; None for all.
        given: confounds to remove.
        transfer: a column; each of its values is also predicted from the others.
        positions: prompt positions: "last", "mean", or a place from the end, e.g. -2.
    """

    target: str
    kind: Wanted = "auto"
    sites: tuple[Site, ...] = (Site.RESIDUAL,)
    layers: tuple[int, ...] | None = None
    given: tuple[str, ...] = ()
    transfer: str | None = None
    positions: tuple[Position, ...] = (LAST,)

    def checked(self, batch: Batch) -> Target:
        """The label of these prompts, checked as far as possible without a model.

        Raises UserError: a column cannot be used, or a transfer cannot be measured.
        """
        target = read_target(batch, self.target, self.kind)
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

    @property
    def NEEDS(self) -> Needs:
        """The sites, in the model and in every control."""
        return Needs(frozenset(self.sites), control_prompts=MOST_PROMPTS)

    def measure(self, data: ProbeInput) -> Result:
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
                have = [number for _, number in layers.keys]  # of a hybrid not all: attention is in some layers alone
                for layer in have if self.layers is None else self.layers:
                    if layer not in have:
                        there = f"0 to {have[-1]}" if have == [*range(len(have))] else ", ".join(map(str, have))
                        raise UserError(f"--layers {layer}: {site.value} has layers {there}")
                    name = site.value if position == LAST else f"{site.value} {position}"
                    places[name, layer] = partial(pooled, capture, layers, have.index(layer), position)
        return places


def folds(target: Target, batch: Batch, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The fold of each row; then the folds within which permuted labels stay, or None if they move freely.

    Raises UserError: a class has too few clusters, or the labels have too few different orders.
    """
    fold = stratified_folds(target.kind, target.label, batch.cluster, seed)
    stratified = None if target.kind == "number" else fold
    if why := few_orders(target.label, np.asarray(batch.cluster), stratified):
        raise UserError(why)
    return fold, stratified


class _Measurement:
    """One measurement: label, folds and confounds are the same for the model and every control."""

    def __init__(self, probe: LabelProbe, data: ProbeInput) -> None:
        self.probe, self.data = probe, data
        self.target: Target = probe.checked(data.capture.batch)
        # The final position of each prompt, without activations, for confounds and the bag of tokens.
        ends, rows = data.capture.lengths - 1, torch.arange(len(data.capture.lengths))
        self.final = replace(data.capture, prompt=rows, position=ends, tensors={})
        self.label, self.clusters = self.target.label, np.asarray(data.capture.batch.cluster)
        self.truth = coded(self.target.kind, self.label, self.target.classes)
        self.fold, stratified = folds(self.target, data.capture.batch, data.seed)
        confounds = confounds_of(self.final, probe.given, self.target.name, self.truth)
        self.design = Design(self.target.kind, self.truth, self.fold, confounds)
        self.places = probe.places(data.capture)
        self.loaders = list(self.places.values())
        orders = moved(self.label, self.clusters, PERMUTATIONS, data.seed, stratified)
        self.own = held_out(self.design, self.loaders, orders)
        if self.own.flat:
            removed = f" once {', '.join(probe.given)} are removed" * (confounds is not None)
            places = ", ".join(f"{site} {layer}" for site, layer in self.places)
            raise UserError(
                f"no activation differs between prompts{removed} ({places}): read other --sites, "
                "--layers or --positions, or name less in --given"
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
        controls: dict[str, list[Place]] = {}
        if self.data.no_context is not None:
            controls[NO_CONTEXT] = list(self.probe.places(self.data.no_context).values())
        try:
            bag = bag_of_tokens(self.final)
            controls[BAG] = [lambda: bag]
        except Unavailable:
            pass
        return {name: (held_out(self.design, places), places) for name, places in controls.items()}

    # -- the estimates

    def claim(self) -> Estimate:
        """The score with confounds removed, compared with every control."""
        without = self.lost(self.own)
        nulls = [permutation_null(PERMUTED, self.own.value, self.own.moved)]
        for name, (control, places) in self.single.items():
            lost = deletions(control, places, self.clusters)
            difference = interval(self.own.value - control.value, without.less(lost), self.clusters)
            nulls.append(Null.paired(name, self.own.value, control.value, difference))
        for name, draws in self.draws.items():
            nulls.append(Null.of(name, np.array([draw.value for draw in draws]), noisy=True))
        span = interval(self.own.value, without, self.clusters)
        made = self.estimate("", self.own.value, span, nulls)
        # Of a confound without a column nothing is removed.
        *names, last = [name for name in self.probe.given if confound(self.final, name).shape[1]] or [""]
        fixed = f", given {', '.join(names)}{' and ' * bool(names)}{last}" if last else ""
        if self.untested is None:
            return made.saying(made.claim.replace(BEYOND, f"{fixed}{BEYOND}"))
        named = " and ".join(null.name for null in nulls)  # the usual controls are not there
        return made.saying(f"{made.claim.partition(BEYOND)[0]}{fixed}, beyond {named}.")

    @cached_property
    def untested(self) -> str | None:
        """Controls that stored activations do not come with; None for a model's."""
        if self.probe.sites:
            return None
        return "untrained copies, " * (not self.data.untrained) + "shuffled prompts, no context, bag of tokens"

    def alone(self, what: str, reading: HeldOut) -> Estimate:
        """The score of a reading compared with permuted labels only."""
        null = permutation_null(PERMUTED, reading.value, self.own.moved)
        return self.estimate(what, reading.value, interval(reading.value, self.lost(reading), self.clusters), [null])

    def lost(self, reading: HeldOut, place: int | None = None) -> Deletions:
        """The score of a reading without each group of clusters."""
        return deletions(reading, self.loaders, self.clusters, place)

    def estimate(self, what: str, value: float, span: Interval, nulls: Sequence[Null]) -> Estimate:
        """A score with its controls; the interval and the control's range are cut to the range of scores."""
        counts = {"n": len(self.label), "clusters": len(set(self.clusters.tolist()))}
        uncut = estimate(CLAIMS[METRICS[self.target.kind] + what], value, span, nulls, **counts)
        return cut(uncut, *bounds(self.target.kind))

    # -- the parts

    def result(self, every: _Measurement | None) -> Result:
        """The whole result; `every` is the measurement on all prompts, if the controls read a subset."""
        raw, estimates, score = self.own, [self.claim()], METRICS[self.target.kind]
        if self.design.confounds is not None:
            raw = held_out(replace(self.design, confounds=None), self.loaders)
            estimates.append(self.alone(", confounds left in", raw))
        if every is not None:
            estimates.append(every.alone(", all prompts", every.own))
        sites = list(dict.fromkeys(site for site, _ in self.places))
        shown: dict[str, Labelled | None] = {}
        layers_of = {site: tuple(layer for name, layer in self.places if name == site) for site in sites}
        ticks: dict[str, tuple] = {}
        if self.probe.layers or any(numbers != tuple(range(len(numbers))) for numbers in layers_of.values()):
            ticks["layer"], *others = set(layers_of.values())
            if others:
                raise UserError(
                    f"{' and '.join(sites)} lie in different layers: give --layers that all have, or one site"
                )
        facts: dict[str, str] = {}

        def curve(part: str, of: _Measurement, site: str, band: np.ndarray, lines: Sequence[np.ndarray]) -> np.ndarray:
            here, said = of.at(site), part.replace("_", " ")
            without = [of.lost(of.own, i) for i in here]
            spans = [interval(of.own.scores[i], lost, of.clusters) for i, lost in zip(here, without, strict=True)]
            figure = Figure("curve", f"{part}_band", f"{part}_interval", f"{part}_controls" * bool(lines))
            held = f"{said}: held-out score, the confounds of --given removed"
            over = f"{said}: 95 % interval over clusters, layer by layer"
            ends = f"{said}: from the lowest to the highest end of the controls' 95 % bands"
            groups = "layer way group" if of is self else "layer way_of_all group_of_all"
            lost = [each.without for each in without]
            around = np.clip(interval_ends(spans), *bounds(of.target.kind))
            controls = labelled(lines, "control layer", score, f"{said}: the same probe of each control")
            shown[f"{part}_score"] = labelled(of.own.scores[here], "layer", score, held, figure)
            shown[f"{part}_interval"] = labelled(around, "layer bound", score, over)
            shown[f"{part}_band"] = labelled(band, "layer bound", score, ends)
            shown[f"{part}_score_without"] = labelled(
                lost, groups, score, f"{said}: score without each group of clusters"
            )
            shown[f"{part}_controls"] = controls if lines else None
            return around[:, 0]

        for site in sites:
            lines, here = self.lines(site, raw), self.at(site)
            of_draws = [np.array([draw.scores[here] for draw in draws]).T for draws in self.draws.values()]
            tops = [self.permuted(site), *(np.array([*map(band, by_layer)]) for by_layer in of_draws)]
            tops += [np.stack([own, own], 1) for name, own in lines.items() if name in self.single]
            controls = np.stack([np.min(tops, 0)[:, 0], np.max(tops, 0)[:, 1]], 1)
            low = curve(site.replace(" ", "_"), self, site, controls, list(lines.values()))
            ticks["control"] = tuple(lines)
            place, errors = self.chosen_place, self.own.errors.sum(1)[here]
            best = here.index(place) if place in here else int(errors.argmin())
            facts[f"{WHERE}{site}"] = where(layers_of[site], self.own.scores[here], low, controls[:, 1], best)
        each = [f"{site}: {facts[f'{WHERE}{site}']}" for site in sites]
        at = "; ".join(f"in {site} {facts[f'{WHERE}{site}']}" for site in sites)
        facts[SENTENCE] = f"“{self.target.name}” is readable {at if len(sites) > 1 else facts[f'{WHERE}{sites[0]}']}"
        if every is not None:
            for site in sites:
                curve(f"{site.replace(' ', '_')}_all_prompts", every, site, every.permuted(site), [])
        alone, unexplained = self.explained()
        if alone:
            what = "confound: held-out score of a probe that reads this confound alone"
            shown |= line("confound_score", [*alone.values()], "confound", score, what, beside="confound_chance")
            level = np.full(len(alone), chance(self.target.kind, self.truth.shape[1]))
            what = "confound: score of predictions that know nothing"
            ticks["confound"], shown["confound_chance"] = tuple(alone), labelled(level, "confound", score, what)
        if self.probe.transfer is not None:
            ticks["value"], away, within = self.transfer(self.probe.transfer)
            what = "transfer: score on the prompts of each value, of a probe fitted to the other values"
            shown |= line("transfer_score", away, "value", score, what, beside="transfer_within")
            what = "transfer: score on the same prompts with folds over all values"
            shown["transfer_within"] = labelled(within, "value", score, what)
        of_parts = self.design, self.label, self.clusters, self.loaders, self.chosen_place, self.data.seed
        parts, scores = by_number(*of_parts)
        if len(parts) > 1:
            ticks["rows"], figure = parts, Figure("curve", interval="by_number_range")
            what = "held-out score at the direction's place with fewer prompts, mean over draws of whole clusters"
            shown["by_number_score"] = labelled(scores.mean(1), "rows", score, what, figure)
            ends, what = np.stack([scores.min(1), scores.max(1)], 1), "least and largest over the draws"
            shown["by_number_range"] = labelled(ends, "rows bound", score, what)
        predictions, farthest = (every or self).predictions()
        shown |= self.fitted() | predictions
        ticks |= dict.fromkeys(("true_class", "predicted_class") if self.target.classes else (), self.target.classes)
        site, layer = self.chosen
        ticks |= {"place": (site.partition(" ")[0], layer), "position": (site.partition(" ")[2] or LAST,)}
        missing = [f"not tested: {self.untested}; the label may be in the words alone"] if self.untested else []
        if self.untested is None and self.data.no_context is None:
            missing = [f"the control {NO_CONTEXT!r} is not available for this model"]
        notes = (*each, *self.summary(), *unexplained, farthest)
        present = {name: one for name, one in shown.items() if one is not None}
        if odd := [name for name, (_, array) in present.items() if not np.isfinite(array).all()]:
            raise ValueError(f"{odd[0]} is not finite")  # no NaN travels
        return Result(  # not Result.of: the residual stream has one layer more than other sites
            TITLE,
            **read_texts(__name__)[TITLE],
            estimates=tuple(estimates),
            quantities={name: declared for name, (declared, _) in present.items()},
            arrays={name: array for name, (_, array) in present.items()},
            warnings=tuple(missing),
            notes=notes,
            ticks=ticks,
            facts=facts,
        )

    def fitted(self) -> dict[str, Labelled | None]:
        """The probe at the chosen place, fitted to all prompts: weights, log odds, direction; and the confusion."""
        x, confounds, classes = self.places[self.chosen](), self.design.confounds, self.target.classes
        found, intercept = weights(x, self.truth, self.fold, confounds)
        what = "ridge weights, fitted to all prompts"
        shown = {"weights": labelled(found, "column dimension", "label per activation", what)}
        shown["intercept"] = labelled(intercept, "column", "label", "prediction where all activations are 0")
        if self.truth.shape[1] == 1:
            unit, what = found[0] / (np.linalg.norm(found[0]) or 1.0), "direction along which the label grows"
            shown["direction"] = labelled(unit, "dimension", "unit length", what)
            what = "standard deviation of the activations along it"
            shown["spread"] = labelled((x @ unit).std(), "", "activation", what)
        if classes:
            odds, what = log_odds(x, self.truth, self.fold, confounds), "a, b: log odds of a class, a prediction + b"
            shown["log_odds"] = labelled(odds, "column coefficient", "nats", what)
            count, (true, predicted) = np.zeros((len(classes), len(classes))), self.classes
            np.add.at(count, (true, predicted), 1)
            share, axes = count / count.sum(1, keepdims=True), "true_class predicted_class"
            what = "confusion: share of the prompts of each class that are predicted as each class, held out"
            shown["confusion_share"] = labelled(share, axes, "fraction", what, Figure("heatmap"))
        return shown

    def at(self, site: str) -> list[int]:
        """The places of one site."""
        return [i for i, (name, _) in enumerate(self.places) if name == site]

    def permuted(self, site: str) -> np.ndarray:
        """[layer bound] the band of permuted labels."""
        return np.array([band(self.own.moved_at[i]) for i in self.at(site)])

    def lines(self, site: str, raw: HeldOut) -> dict[str, np.ndarray]:
        """[layer] the score of each control; `raw` is the reading with confounds left in."""
        here = self.at(site)
        lines = {LEFT_IN: raw.scores[here]} if self.design.confounds is not None else {}
        for name, draws in self.draws.items():
            lines[f"{name}, median of {len(draws)}"] = np.median([one.scores for one in draws], axis=0)[here]
        for name, (one, places) in self.single.items():
            lines[name] = one.scores[here] if len(places) == len(self.places) else np.full(len(here), one.value)
        return lines

    def explained(self) -> tuple[dict[str, float], list[str]]:
        """The score of every confound alone, and a note for each confound without a column to remove."""
        scores, notes = {}, []
        for name in self.probe.given:
            columns = confound(self.final, name)
            if columns.shape[1]:
                scores[name] = self.design.score(ridge_probe.read(columns, self.truth, self.fold).prediction)
            else:
                same = "all prompts have one value, or none is shared by 5"
                notes.append(f"confound {name}: {same}, so there is nothing to remove")
        return scores, notes

    @property
    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """[row] the true and the predicted class, by index; of a binary label by the sign of the centred prediction."""
        true = (self.label[:, None] == np.array(self.target.classes)).argmax(1)
        if self.target.kind != "binary":
            return true, classified(self.truth, self.own.prediction, self.fold)
        level = np.array([self.truth[self.fold != held, 0].mean() for held in range(int(self.fold.max()) + 1)])
        return true, (self.own.prediction[:, 0] > level[self.fold]).astype(np.int64)

    def transfer(self, column: str) -> tuple[tuple, list[float], list[float]]:
        """The values of a column, and scores of each: with each value held out in turn, and with the folds."""
        values, fold = np.unique(transferred(self.data.capture.batch, self.target, column), return_inverse=True)
        away = held_out(replace(self.design, fold=fold), self.loaders)
        score, within = (
            [read.design.score(read.prediction, fold == i) for i in range(len(values))] for read in (away, self.own)
        )
        return tuple(values.tolist()), score, within

    @cached_property
    def chosen_place(self) -> int:
        """The index of the direction's place: the place that most folds chose, if an edit reaches it.

        Else it is the editable place with the least error in the inner folds; if no place is editable, the place that
        most folds chose. An edit reaches all but the residual stream after the last layer.
        """
        after = len(self.data.capture.layers(Site.RESIDUAL)) - 1 if Site.RESIDUAL in self.probe.sites else 0
        editable = np.array([not (name.startswith("residual") and layer == after) for name, layer in self.places])
        place = int(np.bincount(self.own.chosen).argmax())
        if not editable[place] and editable.any():
            place = int(np.where(editable, self.own.errors.sum(1), np.inf).argmin())
        return place

    @property
    def chosen(self) -> tuple[str, int]:
        """The site and layer of the direction."""
        return list(self.places)[self.chosen_place]

    def predictions(self) -> tuple[dict[str, Labelled | None], str]:
        """Held-out prediction (of several classes that of the prompt's own), residual and class of each prompt; and the
        prompts with the largest residuals, in words."""
        prediction, residual = self.own.prediction[:, 0], self.truth[:, 0] - self.own.prediction[:, 0]
        if self.truth.shape[1] > 1:
            prediction = self.own.prediction[np.arange(len(self.truth)), self.truth.argmax(1)]
            residual = 1 - prediction
        shown = {
            "probe_prediction": labelled(prediction, "prompt", "label", "probe: held-out prediction of each prompt"),
            "probe_residual": labelled(residual, "prompt", "label", "probe: label minus its held-out prediction"),
        }
        if self.target.classes:
            said = "probe: predicted class of each prompt, held out"
            shown["probe_class"] = labelled(self.classes[1], "prompt", "index", said)
        worst = np.argsort(-np.abs(residual), kind="stable")[:SHOWN]
        listed = ", ".join(f"prompt {row} ({self.label[row]}: {prediction[row]:.2f})" for row in worst)
        return shown, f"largest residuals: {listed}"

    def summary(self) -> list[str]:
        """Notes on the label and the places from which it was read."""
        kind, classes = self.target.kind, self.target.classes
        count = ", ".join(f"{int((self.label == name).sum())} {name}" for name in classes)
        read_at = ", ".join(f"{site} {layer}" for site, layer in (list(self.places)[i] for i in self.own.chosen))
        positive = f"; {classes[1]!r} is the positive value" if kind == "binary" else ""
        selectivity = self.own.value - np.median(self.own.moved)
        others = divisions(self.design, self.label, self.clusters, self.loaders, self.data.seed)
        return [
            f"label {self.target.name!r}: {kind}" + (f" ({count}{positive})" if classes else ""),
            f"given {', '.join(self.probe.given) or 'nothing'}; place chosen in each fold: {read_at}",
            f"selectivity, the score minus that of permuted labels: {selectivity:.2f}",
            f"with {len(others)} other divisions into folds the score is {min(others):.2f} to {max(others):.2f}",
        ]


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
    runs: list[list[int]] = []  # of neighbours among the layers that were read
    for layer in above:
        if runs and layers.index(layer) == layers.index(runs[-1][-1]) + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if len(runs) == 1 and above[-1] == layers[-1]:
        places = f"from layer {above[0]}"
    else:
        each = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
        places = f"in layer{'s' * (len(above) > 1)} {', '.join(each)}"
    return f"above every control's band {places}; {chosen}"
