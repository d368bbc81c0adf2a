"""Is a label's direction used? Edits along a direction that `llmgeom probe` saved, compared with equal random edits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from llmgeom.claims import declared
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.model.edits import POINTS, Point
from llmgeom.model.intervention import Effects, Location
from llmgeom.model.tokenizing import after_space
from llmgeom.plan import Plan
from llmgeom.probe import Batch, Model, ProbeInput, Site
from llmgeom.probes.interventions.axis import VARIANCE, Axis, Mode
from llmgeom.probes.interventions.axis_ablation import (
    DOSES,
    AxisProbe,
    dose_curve,
    dose_estimate,
    edit_doses,
    effect_of_means,
    joint_edits,
    kinds,
    on_halves,
)
from llmgeom.probes.interventions.halves import ESTIMATION, EVALUATION, Halves, Positions, check, halves
from llmgeom.probes.labels.directions import LAST, SavedDirection
from llmgeom.result import Estimate, Result, labelled

PROBE = "ablation_label"
KL, ODDS = "KL of the edit", "log-odds of the answers moved"


@dataclass(frozen=True, kw_only=True)
class LabelAxisProbe(AxisProbe):
    """A probe that edits one layer along a saved direction. Its controls are other edits of the same model.

    Attributes:
        vector: the direction, of length 1.
        target: the label. answers: its two answers, or ().
        pair: ids of the first tokens of the answers; () for the two likeliest tokens of each prompt.
        donors: for each prompt, another prompt whose component along the direction replaces its own; () for none.
    """

    vector: tuple[float, ...]
    point: Point
    target: str
    answers: tuple[str, ...]
    pair: tuple[int, ...]
    donors: tuple[int, ...]

    @property
    def site(self) -> Site:
        return Site(self.point)

    def effects(self, split: Halves) -> Effects:
        """As `edit_doses`, with scale and scale_odds, the effects of the mean, and share, of the variance."""
        (layer,) = self.layers
        location: Location = (self.point, layer)
        x, evaluated = (
            split.captures[half].layers(self.site)[layer].flatten(1).double() for half in (ESTIMATION, EVALUATION)
        )
        axis = Axis.along(x.numpy(), np.array(self.vector))
        if self.donors:
            axis = replace(axis, donor=axis.z(evaluated[list(self.donors)]))
        pair = torch.tensor([self.pair]).expand(len(split.evaluation), -1) if self.pair else None
        runner = split.runner(self.positions, pair)
        effects = edit_doses(runner, self.mode, *joint_edits({location: axis}, self.mode, self.controls, self.seed))
        lost = effect_of_means(runner, {location: axis})
        more = {"scale": lost["kl"], "scale_odds": lost["odds"], "share": axis.share}
        return effects | {name: np.array(value) for name, value in more.items()}

    def measure(self, data: ProbeInput) -> Result:
        """Estimates against the control edits. Raises UserError for few clusters."""
        effects, warnings, claims = data.observations, [], declared(PROBE)
        scale = {name: float(effects[key]) for name, key in ((KL, "scale"), (ODDS, "scale_odds"))}
        if not (complete := VARIANCE in kinds(effects, self.mode)):
            warnings.append(
                "no edit has the same variance: compared with edits of the same size alone, the result is a "
                "measurement and no claim"
            )
        if not self.answers:
            warnings.append("no --pair: log-odds are of the two likeliest tokens, not of the label's answers")
        claimed = {KL: complete, ODDS: complete and bool(self.answers)}
        for name in [name for name, possible in claimed.items() if possible and scale[name] <= claims[name].effect]:
            claimed[name] = False
            warnings.append(
                f"replacing the activations by their mean changes {scale[name]:.3g} bits, too little for '{name}' to "
                f"be tested at {claims[name].effect:g} bits: it is a measurement and no claim"
            )
        mode = f"mode {self.mode}" if not self.donors else "exchanged with a prompt of another value"
        answers = f"; answers {' and '.join(map(repr, self.answers))}" if self.answers else ""
        said, of_odds = "KL(clean || edited), mean over prompts", "|change of the log-odds of the two answers|"
        of_scale = "KL when the activations are replaced by their mean: what there is to lose"
        of_share = "of the standardised variance along the direction, estimation half"
        return Result.of(
            "Ablation of a label's direction",
            {
                **dose_curve(effects, self.mode, "kl", "bits", said, data.clusters),
                **dose_curve(effects, self.mode, "odds", "bits", f"{of_odds}, mean over prompts", data.clusters),
                "scale": labelled(scale[KL], "", "bits", of_scale),
                "share": labelled(effects["share"], "", "fraction", of_share),
            },
            __name__,
            estimates=tuple(
                dose_estimate(PROBE, name, effects, self.mode, outcome, data.clusters, claimed[name])
                for name, outcome in ((KL, "kl"), (ODDS, "odds"))
            ),
            ticks={"dose": DOSES[self.mode]},
            warnings=tuple(warnings),
            notes=(
                f"label {self.target!r}, {self.point} {self.layers[0]}, {mode}, {self.positions} positions{answers}",
            ),
        )


def question(
    subject: Model,
    batch: Batch,
    saved: SavedDirection,
    answers: tuple[str, ...] = (),
    *,
    mode: Mode | Literal["exchange"],
    positions: Positions,
    controls: int,
    seed: int,
    batch_tokens: int,
) -> Plan:
    """The question that edits a saved direction: scales from the estimation half, effects on the evaluation half.

    Mode "exchange" replaces each prompt's component along the direction by that of a random prompt with another value
    of the label (for a number, on the other side of the median). Raises UserError: the direction belongs to other
    weights or to a place that no edit reaches; answers begin with the same token; few clusters.
    """
    where = f"{saved.site.value} {saved.layer}"
    saved.check(subject, POINTS)
    try:
        if saved.claim is not None:
            Estimate.of(saved.claim)  # a page shows it
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--axis: the claim in the file cannot be read ({error}): run llmgeom probe again") from None
    point: Point = next(name for name in POINTS if name == saved.site.value)
    if saved.position != LAST and positions != "all":
        raise UserError(
            f"--axis: the direction was fitted at position {saved.position}, and the edit is at the final token: give "
            "--positions all to llmgeom ablate, or run llmgeom probe --positions last"
        )
    check(subject, batch)
    donors = _donors(halves(batch, seed)[1], saved.target, seed) if mode == "exchange" else ()
    about = {"label": saved.target, "place": where, "mode": mode, "positions": positions, **saved.read}
    mode = "project-out" if mode == "exchange" else mode
    shared = (positions, controls, seed, batch_tokens)
    edited = LabelAxisProbe(
        PROBE,
        "saved",
        mode,
        (saved.layer,),
        *shared,
        vector=tuple(saved.vector.tolist()),
        point=point,
        target=saved.target,
        answers=answers,
        pair=_first_tokens(subject, answers),
        donors=donors,
    )
    return on_halves(subject, batch, {PROBE: edited}, about, (controls, seed, batch_tokens))


def _donors(batch: Batch, target: str, seed: int) -> tuple[int, ...]:
    """For each prompt, a random prompt with another label; for more than two values, across the median.

    Raises UserError: no such column, bad cells, or only one value.
    """
    column = batch.column(target)
    values = sorted(set(column))
    if len(values) < 2:
        raise UserError(f"column {target!r} is {values[0]!r} in all rows: prompts of two values are exchanged")
    high = values[1] if len(values) == 2 else sorted(column)[len(column) // 2]
    side, rng = np.array([cell >= high for cell in column]), np.random.default_rng([seed, 52])
    others = {value: np.flatnonzero(side != value) for value in (True, False)}
    if not all(len(rows) for rows in others.values()):
        raise UserError(f"column {target!r}: half of the rows hold its least value; give a label of two values")
    return tuple(int(rng.choice(others[bool(value)])) for value in side)


def _first_tokens(subject: Model, answers: tuple[str, ...]) -> tuple[int, ...]:
    """The first token of each answer, after one space (after none in a chat), as `answers.expanded` writes them."""
    if not answers:
        return ()
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    if subject.facts.get("chat"):
        ids = [subject.tokenizer(one.strip(), add_special_tokens=False)["input_ids"] for one in answers]
    else:
        ids = [after_space(one.strip(), subject.tokenizer) for one in answers]
    if any(not one for one in ids) or ids[0][0] == ids[1][0]:
        raise UserError(f"--pair: {answers[0]!r} and {answers[1]!r} begin with the same token; give other answers")
    return tuple(one[0] for one in ids)
