"""Which heads and which blocks does the answer need? Each is replaced alone, and what the model then says is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from llmgeom import claims
from llmgeom.batch import Batch
from llmgeom.claims import Claim, Null, declared, layer_band
from llmgeom.errors import UserError
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.subject import Positions, Subject
from llmgeom.probes.interventions.patching import beside
from llmgeom.probes.interventions.replacement import DONORS, WHERE, WHERE_OF_A_TASK, Kind, Replaced, Way, sites
from llmgeom.probes.interventions.splits import Halves, Sequences
from llmgeom.progress import Progress
from llmgeom.provenance import took
from llmgeom.record import Record
from llmgeom.result import Estimate, Figure, Measured, Result, quantity
from llmgeom.run import CONTROLS as NULLS
from llmgeom.run import few_draws
from llmgeom.stats.resampling import LEAST_CLUSTERS, Interval, Transform, jackknife, mean_intervals
from llmgeom.stats.ridge_probe import folds
from llmgeom.stats.tests import equivalence_p
from llmgeom.task import Task

TITLED: dict[Way, str] = {"zero": "set to 0", "mean": "set to the mean", "interchange": "exchanged"}
CLAIMED: Way = "zero"  # as published
UNTRAINED = "untrained controls"
LARGEST, SHARE, SECOND = "largest head", "share of the largest head", "second head over the largest"
WEAKEST, OVER_MEDIAN = "weakest middle block", "weakest middle block over the median"
OVER_LAST, BRANCH = "weakest middle block over the last", "MLPs over attentions"
EVIDENCE = "largest rise of the evidence error"
FIRST, TENFOLD = "share of the first layer's heads", "error without the weakest middle block"
BOUNDS = {SECOND: 0.5, TENFOLD: 10.0}  # what a claim about a task must clear beside its null, by its own words
HALVED = "heads above half of the largest"


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heads(Result):
    """What each head's absence changes, and whether one head stands out."""

    TITLE: ClassVar[str] = "Heads, one at a time"
    MEANING: ClassVar[str] = (
        "Each query head's output is replaced, alone, and the next-token distribution is compared with what it was. "
        "A single head that the answer rests on holds most of the sum and leaves the second far behind; a bank of "
        "equals does not."
    )
    COMPUTED: ClassVar[str] = (
        "Replaced: z, a head's output before W_O, by 0 (as published); by its mean over the other half of the units; "
        f"or by the z of another unit's prompt at its final token (interchange, mean over {DONORS} donors). Effect: "
        "KL(clean || edited) of the final token's next-token distribution, mean over prompts. The largest and the "
        "second head are found on one half of the units measured and their effects taken on the other, both ways "
        "round. Share: over the sum of the effects of all heads, each alone. Intervals are jackknifed over units, the "
        "heads found held fixed."
    )
    NULL: ClassVar[str] = (
        "The model re-initialised, edited and measured alike on the same prompts, its own heads found."
    )
    FAILURE_MODES: ClassVar[str] = (
        "Heads that stand in for each other do nothing alone: a small effect is no proof of idleness, and effects do "
        "not add up. 0 is a place where z may never be, and its effect then is that of a shock. An interchange brings "
        "what the donor's final token says, too."
    )

    kl: np.ndarray = quantity("layer head", "bits", "KL(clean || edited), mean over prompts", Figure("heatmap"))
    interval: np.ndarray = quantity("layer head bound", "bits", "95 % interval over units, for each head by itself")
    above_half: float = quantity("", "heads", "with more than half of the largest effect, the largest included")
    equal: float = quantity("", "fraction", "the share of each if all heads did the same")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadsOfEvidence(Heads):
    """The same where the exact answer is known; of label sequences over the two labels."""

    evidence: np.ndarray = quantity("layer head", "bits", "rise of KL(exact || model)", Figure("heatmap"))


OF_A_TASK = (
    " Of a task: whole sequences, every number the mean over a sequence's queries; KL over all tokens, the rise of "
    "KL(exact || model), and the error |H_model - H_exact|."
)


@dataclass(frozen=True, kw_only=True)
class HeadsOfTask(HeadsOfEvidence):
    """The same on a task's sequences, with the error of entropy that the papers use."""

    COMPUTED: ClassVar[str] = Heads.COMPUTED + OF_A_TASK

    error: np.ndarray = quantity("layer head", "bits", "rise of |H_model - H_exact|", Figure("heatmap"))
    clean_error: float = quantity("", "bits", "|H_model - H_exact| of the model as it is")


def _curve(name: str) -> Figure:
    return Figure("curve", band=f"{name}_null", interval=f"{name}_interval")


@dataclass(frozen=True, kw_only=True)
class Blocks(Result):
    """What the absence of each block, and of its two branches, changes."""

    TITLE: ClassVar[str] = "Blocks, one at a time"
    MEANING: ClassVar[str] = (
        "What attention, the MLP, or both add to the residual stream in one layer is replaced, and the next-token "
        "distribution is compared with what it was. If every layer is needed, the weakest middle block stands close "
        "to the median one and to the last."
    )
    COMPUTED: ClassVar[str] = (
        "Replaced: the write, by 0 (both: the block is bypassed) or by its mean over the other half of the units. "
        "Effect: KL(clean || edited) of the final token's next-token distribution, mean over prompts. Middle: neither "
        "first nor last. The weakest middle block and the median one are found on one half of the units measured and "
        "their effects taken on the other, both ways round. MLPs over attentions: sum over layers, each alone. "
        "Intervals are jackknifed over units, the blocks found held fixed."
    )
    NULL: ClassVar[str] = "The model re-initialised, edited and measured alike on the same prompts; a band a layer."
    FAILURE_MODES: ClassVar[str] = (
        "A bypassed first block takes from the final token what later blocks were trained to read: a large effect "
        "is no sign of reasoning. Where the MLP reads what attention wrote, an attention replaced changes the MLP too. "
        "Branches do not add up to the block."
    )

    attention: np.ndarray = quantity("layer", "bits", "KL(clean || attention's write replaced)", _curve("attention"))
    attention_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over units")
    attention_null: np.ndarray = quantity("layer bound", "bits", "band of re-initialised models")
    mlp: np.ndarray = quantity("layer", "bits", "KL(clean || the MLP's write replaced)", _curve("mlp"))
    mlp_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over units")
    mlp_null: np.ndarray = quantity("layer bound", "bits", "band of re-initialised models")
    block: np.ndarray = quantity("layer", "bits", "KL(clean || both writes replaced)", _curve("block"))
    block_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over units")
    block_null: np.ndarray = quantity("layer bound", "bits", "band of re-initialised models")
    relative: np.ndarray = quantity(
        "layer", "of the median block", "KL with both writes replaced", Figure("curve", band="relative_null")
    )
    relative_null: np.ndarray = quantity("layer bound", "of the median block", "band of re-initialised models")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlocksOfEvidence(Blocks):
    """The same where the exact answer is known; of label sequences over the two labels."""

    evidence: np.ndarray = quantity(
        "layer",
        "bits",
        "rise of KL(exact || model), both writes replaced",
        Figure("curve", band="evidence_null"),
    )
    evidence_null: np.ndarray = quantity("layer bound", "bits", "band of re-initialised models")


@dataclass(frozen=True, kw_only=True)
class BlocksOfTask(BlocksOfEvidence):
    """The same on a task's sequences, with the error of entropy that the papers use."""

    COMPUTED: ClassVar[str] = Blocks.COMPUTED + OF_A_TASK

    error: np.ndarray = quantity(
        "layer", "times", "|H_model - H_exact| over that of the model as it is", Figure("curve", band="error_null")
    )
    error_null: np.ndarray = quantity("layer bound", "times", "band of re-initialised models")
    clean_error: float = quantity("", "bits", "|H_model - H_exact| of the model as it is")


@dataclass(frozen=True, kw_only=True)
class Trainings(Result):
    """The metrics of several trainings of one architecture."""

    TITLE: ClassVar[str] = "Over trainings"
    MEANING: ClassVar[str] = (
        "Each model is edited and measured alike on the same sequences, with its own means, donors and largest part. "
        "What is said of one model may be that of its seed; what is said here is not."
    )
    COMPUTED: ClassVar[str] = (
        "The metrics of each model, as above; then their mean, and Student's interval over models (a unit is a "
        "training). Above half: parts whose effect on all units is more than half of the largest's, that one included."
    )
    NULL: ClassVar[str] = "Untrained controls of the first model, each alone: their band is wider than a mean's."
    FAILURE_MODES: ClassVar[str] = (
        "Trainings that differ in more than their seed are no sample of one thing; what was trained is for you to say."
    )

    training: np.ndarray = quantity("statistic training", "as named", "of each model, the first first")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


# ---- what stands out ------------------------------------------------------------------------------------------------


def found_apart(each: np.ndarray, half: np.ndarray, *ranks: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """[prompt] the effect of the part that ranks so on the other half, 0 the largest, and which part it is on halves 0
    and 1; several ranks are averaged. each: [part prompt].

    A largest effect that is measured where it was found is too large by what chance added to it; this one is not.
    """
    value, which = np.zeros(each.shape[1]), []
    for one in (0, 1):
        order = np.argsort(-each[:, half == one].mean(1), kind="stable")
        which.append(int(order[ranks[0]]))
        value[half != one] = each[order[list(ranks)]][:, half != one].mean(0)
    return value, tuple(which)


Fractions = dict[str, tuple[np.ndarray, np.ndarray]]  # metric -> numerator and denominator, [prompt] each


def of_heads(effects: Mapping[str, np.ndarray], half: np.ndarray, layers: int = 1) -> Fractions:
    """The metrics of heads as sum over prompts / sum over prompts."""
    kl = effects["kl"]
    largest, second = (found_apart(kl, half, rank)[0] for rank in (0, 1))
    found = {LARGEST: (largest, np.ones(len(half))), SHARE: (largest, kl.sum(0)), SECOND: (second, largest)}
    if layers > 1 and "mae" in effects:
        found[FIRST] = (kl[: len(kl) // layers].sum(0), kl.sum(0))
    return found | _of_evidence(effects, half)


def of_blocks(effects: Mapping[str, np.ndarray], half: np.ndarray) -> Fractions:
    """The metrics of blocks, those of the middle where there is one."""
    attention, mlp, block = np.split(effects["kl"], 3)
    found, n = {BRANCH: (mlp.sum(0), attention.sum(0))}, len(block)
    if n > 2:
        weakest = found_apart(block[1:-1], half, -1)[0]
        median = found_apart(block, half, (n - 1) // 2, n // 2)[0]
        found |= {WEAKEST: (weakest, np.ones(len(half))), OVER_MEDIAN: (weakest, median)}
        found |= {OVER_LAST: (weakest, block[-1])}
        if "mae" in effects:
            error, clean = (np.split(effects[name], 3)[2] for name in ("mae", "clean_mae"))
            found[TENFOLD] = (found_apart(error[1:-1], half, -1)[0], clean[0])
    return found | _of_evidence({k: np.split(v, 3)[2] for k, v in effects.items()}, half)


def _of_evidence(effects: Mapping[str, np.ndarray], half: np.ndarray) -> Fractions:
    if "evidence" not in effects:
        return {}
    return {EVIDENCE: (found_apart(effects["evidence"], half, 0)[0], np.ones(len(half)))}


def _over(fraction: tuple[np.ndarray, np.ndarray], rows: np.ndarray | slice = slice(None)) -> float:
    above, below = (side[rows].sum() for side in fraction)
    return float(above / below) if below else 0.0


def estimates(
    probe: str, own: Fractions, untrained: Sequence[Fractions], clusters: np.ndarray, way: Way = CLAIMED
) -> tuple[Estimate, ...]:
    """Each fraction with its jackknife on the log scale, the parts found held fixed, beside those of the controls.

    What the papers claim of a part replaced by 0 is no claim about another way.

    Simulated with log-normal effects of 16 heads, sd of the log 1 between prompts, 0.5 to 1.5 between heads, 37 units:
    covers 89-93 % for shares, 92-94 % for ratios, 83-90 % for means; without the log 83-92, 90-93 and 74-87 %.
    Raises UserError where nothing that was replaced changed anything: there is nothing to compare.
    """
    made, rows = [], np.arange(len(clusters))
    for name, fraction in own.items():
        claim = declared(probe)[name]
        claim = claim if way == CLAIMED else replace(claim, claim="")
        if not fraction[1].any():
            raise UserError(f"'{name}' is a share of nothing: what was replaced does not reach what the model says")
        # The log needs something positive left, whichever unit is taken out.
        positive = all(side.min() >= 0 and len(set(clusters[side > 0])) > 1 for side in fraction)
        transform: Transform = "log" if claim.scale == "log" and positive else "identity"
        span = jackknife(partial(_over, fraction), rows, clusters, transform)
        span = replace(span, high=min(span.high, 1.0)) if claim.unit == "fraction" else span
        value, null = _over(fraction), {UNTRAINED: np.array([_over(control[name]) for control in untrained])}
        bounds = [_bound(claim, value, span, len(set(clusters)))] if claim.claim else []
        made.append(beside(claim, value, span, null, clusters, *bounds))
    return tuple(made)


def _bound(claim: Claim, value: float, span: Interval, clusters: int) -> Null:
    """The number that a claim names, as a null without draws: Student's p that the value is not past it."""
    bound = BOUNDS[claim.name]
    near, far = (bound, np.inf) if claim.side == "upper" else (-np.inf, bound)
    return Null("the number in the claim", bound, bound, bound, equivalence_p(value, span, near, far, clusters), 0)


def _probe(effects: Mapping[str, np.ndarray], kind: str) -> str:
    """The probe under which the metrics are declared."""
    return f"{kind}_task" if "mae" in effects else kind


def _where(own: Replaced, effects: Mapping[str, np.ndarray]) -> str:
    return (WHERE_OF_A_TASK if "mae" in effects else WHERE)[own.positions]


def measure_heads(own: Replaced, way: Way, untrained: Sequence[Replaced], half: np.ndarray) -> Heads:
    """Heads replaced in one way, beside those of the controls; half [prompt] 0 or 1, by unit: one finds, one measures.

    Raises UserError as `estimates`, and for fewer than 5 units.
    """
    effects, clusters, layers = own.effects[way], own.clusters, own.layers
    kl, made = effects["kl"], of_heads(effects, half, layers)
    theirs = [of_heads(control.effects[way], half, layers) for control in untrained]
    found = estimates(_probe(effects, "heads"), made, theirs, clusters, way)
    mean = kl.mean(1)
    which = [own.parts[part].name for part in found_apart(kl, half, 0)[1]]
    warnings = []
    if which[0] != which[1]:
        warnings.append(
            f"the two halves of the units find two largest heads, {which[0]} and {which[1]}: neither stands out for "
            "certain, and the shares are those of both"
        )
    if found[0].value < (least := declared("heads")[LARGEST].effect):
        warnings.append(
            f"the largest head changes {found[0].value:.2g} bits, less than {least:g}: shares of so little tell who "
            "does the most of nothing much"
        )
    heads = Heads(
        kl=mean.reshape(layers, -1),
        interval=mean_intervals(kl, clusters).reshape(layers, -1, 2),
        above_half=above_half(mean),
        equal=1 / len(mean),
        estimates=found,
        warnings=tuple(warnings),
        notes=(
            _where(own, effects),
            f"largest head, as found on one half of the units and on the other: {', '.join(which)}",
        ),
    )
    if "evidence" not in effects:
        return heads
    heads = HeadsOfEvidence(**vars(heads), evidence=effects["evidence"].mean(1).reshape(layers, -1))
    if "mae" not in effects:
        return heads
    rise = effects["mae"] - effects["clean_mae"]
    clean = float(effects["clean_mae"].mean())
    return HeadsOfTask(**vars(heads), error=rise.mean(1).reshape(layers, -1), clean_error=clean)


def measure_blocks(own: Replaced, way: Way, untrained: Sequence[Replaced], half: np.ndarray) -> Blocks:
    """Attentions, MLPs and whole blocks replaced in one way, as `measure_heads`."""
    effects, clusters, layers = own.effects[way], own.clusters, own.layers
    theirs = [control.effects[way] for control in untrained]
    null = [of_blocks(one, half) for one in theirs]
    found = estimates(_probe(effects, "blocks"), of_blocks(effects, half), null, clusters, way)

    def branches(of: Mapping[str, np.ndarray], effect: str = "kl") -> np.ndarray:
        return of[effect].mean(1).reshape(3, layers)

    def times(of: Mapping[str, np.ndarray]) -> np.ndarray:
        return branches(of, "mae")[2] / branches(of, "clean_mae")[2]

    def beside_untrained(statistic: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> np.ndarray:
        return layer_band({UNTRAINED: np.array([statistic(one) for one in theirs])})

    kl, interval = branches(effects), mean_intervals(effects["kl"], clusters).reshape(3, layers, 2)
    blocks = Blocks(
        attention=kl[0],
        attention_interval=interval[0],
        attention_null=beside_untrained(lambda one: branches(one)[0]),
        mlp=kl[1],
        mlp_interval=interval[1],
        mlp_null=beside_untrained(lambda one: branches(one)[1]),
        block=kl[2],
        block_interval=interval[2],
        block_null=beside_untrained(lambda one: branches(one)[2]),
        relative=kl[2] / np.median(kl[2]),
        relative_null=beside_untrained(lambda one: (block := branches(one)[2]) / np.median(block)),
        estimates=found,
        notes=(_where(own, effects), _middle(own, effects["kl"], half)),
    )
    if "evidence" not in effects:
        return blocks
    blocks = BlocksOfEvidence(
        **vars(blocks),
        evidence=branches(effects, "evidence")[2],
        evidence_null=beside_untrained(lambda one: branches(one, "evidence")[2]),
    )
    if "mae" not in effects:
        return blocks
    clean = float(effects["clean_mae"].mean())
    return BlocksOfTask(**vars(blocks), error=times(effects), error_null=beside_untrained(times), clean_error=clean)


def measure_trainings(
    kind: Kind,
    way: Way,
    every: Sequence[Replaced],
    names: Sequence[str],
    untrained: Sequence[Replaced],
    half: np.ndarray,
) -> Trainings:
    """The metrics of each model, and their means over models. Raises UserError: fewer than 5 models; models that have
    other parts than the first, or in which nothing reaches the output."""
    if len(every) < LEAST_CLUSTERS:
        raise UserError(
            f"{len(every)} trainings: an interval over them needs at least {LEAST_CLUSTERS}; give more --also"
        )

    def of(one: Replaced) -> dict[str, float]:
        effects = one.effects[way]
        made = of_heads(effects, half, one.layers) if kind == "heads" else of_blocks(effects, half)
        found = {name: _over(fraction) for name, fraction in made.items()}
        return found | ({HALVED: above_half(effects["kl"].mean(1))} if kind == "heads" else {})

    values, null, trainings = [of(one) for one in every], [of(one) for one in untrained], np.arange(len(every))
    found = []
    for name in values[0]:
        x = np.array([one[name] for one in values])
        entry = declared(_probe(every[0].effects[way], kind))[name]
        claim = replace(entry, name=f"{name}, over trainings", claim="", counts="trainings")
        draws = {UNTRAINED: np.array([one[name] for one in null])}
        found.append(beside(claim, x.mean(), jackknife(np.mean, x, trainings), draws, trainings))
    table = np.array([[one[name] for one in values] for name in values[0]])
    return Trainings(training=table, estimates=tuple(found), ticks={"statistic": (*values[0],), "training": (*names,)})


def above_half(mean: np.ndarray) -> float:
    """How many have more than half of the largest, the largest included."""
    return float((mean > mean.max() / 2).sum())


def _middle(own: Replaced, kl: np.ndarray, half: np.ndarray) -> str:
    if own.layers < 3:
        return f"{own.layers} layers: none is in the middle"
    _, which = found_apart(np.split(kl, 3)[2][1:-1], half, -1)
    layers = ", ".join(str(1 + one) for one in which)
    return f"weakest middle block, as found on one half of the units and on the other: {layers}"


# ---- the run --------------------------------------------------------------------------------------------------------


def examine(
    subject: Subject,
    batch: Batch,
    kind: Kind,
    *,
    task: Task | None = None,
    also: Sequence[Subject] = (),
    positions: Positions = "query",
    nulls: int = NULLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Every head, or every block, replaced in each way, of the subject and of `nulls` untrained controls.

    task    whose whole sequences the batch holds; without it, prompts that are asked at their end.
    also    other trainings of the same architecture.
    Raises UserError: fewer than 5 units in a half; a batch with positions of its own and no task; writes that are not
    known; models whose parts are not those of the first.
    """
    started = time.time()

    def halves(of: Subject) -> Halves | Sequences:
        if task:
            return Sequences.of(of, batch, task, seed, batch_tokens)
        return Halves.of(of, batch, sites(kind), seed, batch_tokens)

    def tell(done: int, total: int) -> None:
        if progress:
            progress(kind, done, total)

    def replaced(stage: str, of: Callable[[int], Subject], count: int) -> list[Replaced]:
        made = []
        for i in range(count):
            made.append(Replaced.of(halves(of(i)), kind, positions))
            if progress:
                progress(stage, len(made), count)
        return made

    mine = halves(subject)
    own = Replaced.of(mine, kind, positions, tell)
    others = replaced("other trainings", also.__getitem__, len(also))
    for one, other in zip(also, others, strict=True):
        if other.parts != own.parts:
            raise UserError(
                f"{one.name} has {len(other.parts)} {kind}, {subject.name} {len(own.parts)}: no such training"
            )
    untrained = replaced(UNTRAINED, lambda i: subject.untrained(seed + 1 + i), nulls)
    half, measure = folds(own.clusters, seed, 2), measure_heads if kind == "heads" else measure_blocks
    names = [one.name for one in (subject, *also)]

    def over_trainings(way: Way) -> Trainings:
        return measure_trainings(kind, way, [own, *others], names, untrained, half)

    results, unmeasured = {}, {}
    for way in own.effects:
        measures: dict[str, Callable[[], Result]] = {f"{kind}_{way}": partial(measure, own, way, untrained, half)}
        if also:
            measures[f"{kind}_{way}_trainings"] = partial(over_trainings, way)
        for name, made in measures.items():
            try:
                results[name] = _titled(made(), way)
            except UserError as refusal:
                unmeasured[name] = str(refusal)
    edited = {"kind": kind, "ways": list(own.effects), "positions": positions, "donors": DONORS}
    return replace(
        mine.record(claims.judge(results), unmeasured, nulls, {"parts": edited, **(facts or {})}),
        warnings=(*few_draws(nulls), *filter(None, [subject.facts.get("note")])),
        run=took(started),
    )


def _titled(result: Result, way: Way) -> Measured:
    made = result.lowered()
    return replace(made, title=f"{made.title}: {TITLED[way]}")
