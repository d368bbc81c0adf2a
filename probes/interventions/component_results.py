"""Results of component ablation: which heads and which blocks do the answers need?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from llmgeom.claims import Null, declared, layer_band
from llmgeom.errors import UserError
from llmgeom.model.intervention import Effects
from llmgeom.probes.shared.nulls import compare, cross_selected, log_if_positive, ratio_of
from llmgeom.result import SENTENCE, Estimate, Figure, Labelled, Result, labelled, line
from llmgeom.stats.resampling import TRANSFORMS, jackknife, mean_intervals, student_quantile
from llmgeom.stats.tests import spearman

HEADS, BLOCKS = "Heads, one at a time", "Blocks, one at a time"
TITLES = {"zero": "set to 0", "mean": "set to the mean", "resample": "resampled"}
UNTRAINED = "untrained controls"
BAND = "band of untrained copies"
LARGEST, SHARE, SECOND = "largest head", "share of the largest head", "second head over the largest"
WEAKEST, OVER_MEDIAN = "weakest middle block", "weakest middle block over the median"
OVER_LAST, BRANCH = "weakest middle block over the last", "MLPs over attentions"
MLP_SHARE, MLP_NORM = "MLPs' share of the effects", "MLPs over attentions, by norm"
MLP_EVIDENCE = "MLPs' share of the lost evidence"
EVIDENCE = "largest rise of the evidence error"
FIRST, TENFOLD = "share of the first layer's heads", "error without the weakest middle block"
BOUNDS = {SECOND: 0.5, TENFOLD: 10.0}  # numbers in a claim's sentence, which the value must pass, too
OVER_BOTH = (MLP_SHARE, MLP_EVIDENCE)  # compared with one half, and with copies over the model's own total
CLAIMED: dict[str, str] = dict.fromkeys(OVER_BOTH, "mean")  # the method of a claim; of all others "zero", as published
POSITIONS = {
    "query": "direct effect at the last token: ablated there alone, so that what is written at earlier tokens stays",
    "all": (
        "ablated at every position but the first, where a head can only read the first token itself, and many models "
        "keep an attention sink; the mean is over all of these"
    ),
}
TASK_POSITIONS = {
    "query": "ablated at every query; a mean for each query",
    "all": "ablated at every position; a mean for each position",
}


# ---- shares and ratios ----------------------------------------------------------------------------------------------


Fractions = dict[str, tuple[np.ndarray, np.ndarray]]  # metric -> numerator and denominator, [prompt] each


def head_fractions(effects: Mapping[str, np.ndarray]) -> Fractions:
    """The metrics of heads, each as sum over prompts / sum over prompts; some only if there are several heads."""
    kl, half, layers = effects["kl"], effects["half"], int(effects["layers"])
    ranked = kl[effects["edited"] > 0] if "edited" in effects else kl
    largest = cross_selected(ranked, half, 0)[0]
    fractions = {LARGEST: (largest, np.ones(len(half)))}
    if len(kl) > 1:  # one head has all of the effect
        fractions |= {SHARE: (largest, kl.sum(0)), SECOND: (cross_selected(ranked, half, 1)[0], largest)}
    if layers > 1 and "mae" in effects:
        fractions[FIRST] = (kl[: len(kl) // layers].sum(0), kl.sum(0))
    if "evidence" in effects:
        fractions[EVIDENCE] = (cross_selected(effects["evidence"], half, 0)[0], np.ones(len(half)))
    return fractions


def block_fractions(effects: Mapping[str, np.ndarray], method: str = "zero") -> Fractions:
    """The metrics of blocks; those of middle blocks only if there is one, the MLPs' shares of means alone."""
    half = effects["half"]
    attention, mlp, block = np.split(effects["kl"], 3)
    fractions, n = {BRANCH: (mlp.sum(0), attention.sum(0))}, len(block)
    if n > 2:
        weakest = cross_selected(block[1:-1], half, -1)[0]
        median = cross_selected(block, half, (n - 1) // 2, n // 2)[0]
        fractions |= {WEAKEST: (weakest, np.ones(len(half))), OVER_MEDIAN: (weakest, median)}
        fractions |= {OVER_LAST: (weakest, block[-1])}
        if "mae" in effects:
            error, clean = (np.split(effects[name], 3)[2] for name in ("mae", "clean_mae"))
            fractions[TENFOLD] = (cross_selected(error[1:-1], half, -1)[0], clean[0])
    if "evidence" in effects:
        fractions[EVIDENCE] = (cross_selected(np.split(effects["evidence"], 3)[2], half, 0)[0], np.ones(len(half)))
    if method == "mean":
        for name, outcome in ((MLP_SHARE, "kl"), (MLP_EVIDENCE, "evidence")):
            if outcome in effects:
                attention, mlp, _ = np.split(effects[outcome], 3)
                fractions[name] = mlp.sum(0), (attention + mlp).sum(0)
    return fractions


def over_median(effects: np.ndarray) -> np.ndarray | None:
    """Each effect over the median effect; None if the median is 0."""
    median = np.median(effects)
    return effects / median if median else None


def estimates(
    probe: str,
    fractions: Fractions,
    untrained: Sequence[Fractions],
    clusters: np.ndarray,
    method: str = "zero",
    sampling: Mapping[str, float] = {},
) -> tuple[Estimate, ...]:
    """Estimates of fractions with untrained controls, jackknifed on the log scale with the selection fixed.

    Simulated with log-normal effects of 16 heads, sd of the log 1 between prompts, 0.5 to 1.5 between heads, 37
    clusters: covers 89-93 % for shares, 92-94 % for ratios, 83-90 % for means; without the log 83-92, 90-93 and 74-87
    %. Replacements, means of the estimation half, are kept fixed: in 200 fresh samples of a model of coins the MLPs'
    share was covered in 90 %.

    Args:
        sampling: The standard error of a metric from components that are estimated, not edited; of one on the log
            scale the relative one.

    Raises:
        UserError: no ablation changed anything, so that a share has no total.
    """
    metrics, rows = [], np.arange(len(clusters))
    for name, fraction in fractions.items():
        claim = declared(probe)[name]
        if method != CLAIMED.get(name, "zero"):  # the sentence does not name this method
            claim = replace(claim, claim="")
        if not fraction[1].any():
            raise UserError(f"'{name}' is a share of 0: what was ablated does not reach the model's answers")
        scale, value = log_if_positive(claim, clusters, *fraction), ratio_of(fraction)
        interval = jackknife(partial(ratio_of, fraction), rows, clusters, scale)
        if sampling.get(name) and (scale == "identity" or interval.low > 0):
            reach, forward, back = student_quantile(len(set(clusters))) * sampling[name], *TRANSFORMS[scale]
            below, above = (np.hypot(forward(end) - forward(value), reach) for end in (interval.low, interval.high))
            interval = replace(interval, low=back(forward(value) - below), high=back(forward(value) + above))
        interval = replace(interval, high=min(interval.high, 1.0)) if claim.unit == "fraction" else interval
        drawn = [control[name] for control in untrained]
        if name in OVER_BOTH:  # over the model's own total: small effects make no large share
            drawn = [(above, fraction[1].mean(keepdims=True)) for above, _ in drawn]
        bounds = [Null.number("the number in the claim", BOUNDS[name])] if claim.claim and name in BOUNDS else []
        bounds += [Null.half()] * (name in OVER_BOTH)
        metrics.append(compare(claim, ratio_of, fraction, clusters, {UNTRAINED: drawn}, bounds, interval=interval))
    return tuple(metrics)


def judged(
    metrics: Sequence[Estimate], effects: Effects, clusters: np.ndarray
) -> tuple[tuple[Estimate, ...], dict[str, str]]:
    """The metrics; without their claims where a task's model infers nothing, and then why, by metric.

    No component is needed for an inference that is not made, but some component has the largest effect: of five models
    of targets that cannot be inferred one head stood out in three, by .012 bits. A look-up of the token at the query
    is no inference either: of ten models trained on the last observation alone the MLPs had .99 of all effects.
    """
    if "clean_kl" not in effects:
        return tuple(metrics), {}
    own, local = effects["clean_kl"][0], effects["local_kl"][0]
    if jackknife(np.mean, local - own, clusters).low > 0:
        return tuple(metrics), {}
    why = (
        f"no claim is judged, as the model infers nothing here: its KL(exact || model), {own.mean():.2g} bits, is not "
        f"below that of the best answer that knows only the position and the token there, {local.mean():.2g}"
    )
    return tuple(metric.saying("") for metric in metrics), {m.name: why for m in metrics if m.claim}


# ---- measuring ------------------------------------------------------------------------------------------------------


def _intervals(effects: Effects, clusters: np.ndarray) -> np.ndarray:
    """[component bound] 95 % over clusters; where a component is estimated, with what that may be off."""
    interval, mean = mean_intervals(effects["kl"], clusters), effects["kl"].mean(1)[:, None]
    if "off" not in effects:
        return interval
    return mean + np.hypot(interval - mean, 2 * effects["off"][:, None]) * [-1, 1]


def _stages(effects: Effects, components: str = "heads", of: slice = slice(None)) -> str:
    """What was edited, and how well gradients do where they can be checked."""
    edited, rough = effects["edited"][of], effects["rough"].mean(1)[of]
    sample, mean = edited == 2, effects["kl"].mean(1)[of]
    return (
        f"edited: the {int((edited == 1).sum())} {components} of {len(rough)} that are largest by gradients, and "
        f"{int(sample.sum())} others at random, of which gradients give the order with rho "
        f"{spearman(rough[sample], mean[sample]):.2f}; the other {components} are estimated"
    )


def _edited(effects: Effects, axes: str, *shape: int) -> Labelled | None:
    if "edited" not in effects:
        return None
    meaning = "1: measured by an edit; 0: estimated from gradients, times what edits of a sample give"
    return labelled((effects["edited"] > 0).astype(float).reshape(shape), axes, "1 or 0", meaning, Figure("heatmap"))


def measure_heads(
    effects: Effects, untrained: Sequence[Effects], method: str, clusters: np.ndarray, positions: str
) -> Result:
    """Effects of ablating each head, and whether one head stands out, with untrained controls.

    The evidence error needs exact answers (for label sequences, over the two labels). The error of entropy, which the
    papers use, needs a task's sequences.

    Args:
        effects, untrained: As `ablate` returns them, of the model and of each control.
        positions: A key of POSITIONS.

    Raises UserError as `estimates`; fewer than 5 clusters.
    """
    layers, half, kl = int(effects["layers"]), effects["half"], effects["kl"]
    mean, edited = kl.mean(1), np.flatnonzero(effects.get("edited", np.ones(len(kl))))
    sampling = {SHARE: float(effects["total_error"][0] / mean.sum())} if "total_error" in effects and mean.any() else {}
    null = [head_fractions(control) for control in untrained]
    probe = "heads_task" if "mae" in effects else "heads"
    metrics = estimates(probe, head_fractions(effects), null, clusters, method, sampling)
    metrics, unmeasured = judged(metrics, effects, clusters)
    largest = edited[list(cross_selected(kl[edited], half, 0)[1])]
    names = ["L{}H{}".format(*divmod(index, len(kl) // layers)) for index in largest.tolist()]
    warnings, notes = (
        [],
        [
            (TASK_POSITIONS if "mae" in effects else POSITIONS)[positions],
            f"largest head, as selected on one half of the clusters and on the other: {', '.join(names)}",
        ],
    )
    if len(edited) < len(kl):
        of_sum = f"the sum of all has a standard error of {sampling.get(SHARE, 0):.1%} from that"
        notes.append(f"{_stages(effects)}; {of_sum}. --exact edits every head")
        if mean[effects["edited"] == 0].max() > mean[edited].max() / 2:
            warnings.append("a head that was not edited may have more than half of the largest effect: give --exact")
    if names[0] != names[1]:
        warnings.append(
            f"the two halves of the clusters select different largest heads, {names[0]} and {names[1]}: neither stands "
            "out for certain, and the shares are those of both"
        )
    if metrics[0].value < (least := declared("heads")[LARGEST].effect):
        warnings.append(
            f"the largest head changes {metrics[0].value:.2g} bits, less than {least:g}: shares of so small an effect "
            "mean little"
        )
    if len(kl) == 1:
        unmeasured |= dict.fromkeys((SHARE, SECOND), "not measured: the model has one head")

    def grid(values: np.ndarray, meaning: str) -> Labelled | None:
        return labelled(values.reshape(layers, -1), "layer head", "bits", meaning, Figure("heatmap"))

    effect, copies = metrics[0], [c for c in metrics[0].controls if c.name == UNTRAINED]
    said = (
        f"{' or '.join(dict.fromkeys(names))} has the largest effect of {len(kl)} heads (LiHj: layer i, head j, from "
        f"0): {TITLES[method]}, it changes the next token by {effect.value:.2g} bits of KL "
        f"[{effect.low:.2g}, {effect.high:.2g}] (n = {effect.n})"
    )
    said += "".join(f"; the largest of an untrained copy by {c.low:.2g} to {c.high:.2g}" for c in copies) + "."
    arrays = {
        "kl": grid(mean, "KL(clean || ablated), mean over prompts"),
        "interval": labelled(
            _intervals(effects, clusters).reshape(layers, -1, 2),
            "layer head bound",
            "bits",
            "95 % interval over clusters, for each head alone",
        ),
        "above_half": labelled(
            float((mean > mean.max() / 2).sum()),
            "",
            "heads",
            "with more than half of the largest effect, the largest included",
        ),
        "equal": labelled(1 / len(mean), "", "fraction", "the share of each head if all had the same effect"),
        "edited": _edited(effects, "layer head", layers, len(kl) // layers),
    }
    if "evidence" in effects:
        arrays["evidence"] = grid(effects["evidence"].mean(1), "rise of KL(exact || model)")
    if "mae" in effects:
        rise, clean = (effects["mae"] - effects["clean_mae"]).mean(1), effects["clean_mae"].mean()
        arrays["error"] = grid(rise, "rise of |H_model - H_exact|")
        arrays["clean_error"] = labelled(clean, "", "bits", "|H_model - H_exact| of the clean model")
    return Result.of(
        HEADS,
        arrays,
        __name__,
        estimates=metrics,
        unmeasured=unmeasured,
        warnings=tuple(warnings),
        facts={SENTENCE: said} if method == "mean" else {},
        notes=tuple(notes),
    )


def measure_blocks(
    effects: Effects, controls: Sequence[Effects], method: str, clusters: np.ndarray, positions: str
) -> Result:
    """Effects of ablating each block and its two branches, as `measure_heads`; of means also the MLPs' shares."""
    layers, norms = int(effects["layers"]), effects["norms"]
    probe, how = ("blocks_task", TASK_POSITIONS) if "mae" in effects else ("blocks", POSITIONS)
    fractions, null = block_fractions(effects, method), [block_fractions(one, method) for one in controls]
    unmeasured, warnings, notes = {}, [], [how[positions]]
    if any(above.any() for above, _ in fractions.values()):  # else no ablation has an effect (see `estimates`)
        empty = [name for name, (_, below) in fractions.items() if not below.any()]
        unmeasured = dict.fromkeys(empty, "not measured: the effect that it is a ratio to is 0 on every prompt")
    if layers < 3:
        notes.append(f"{layers} layers: none is in the middle")
    else:
        weakest = cross_selected(np.split(effects["kl"], 3)[2][1:-1], effects["half"], -1)[1]
        numbers = ", ".join(str(1 + index) for index in weakest)
        notes.append(f"weakest middle block, as selected on one half of the clusters and on the other: {numbers}")
    if MLP_EVIDENCE in fractions:
        total = fractions[MLP_EVIDENCE][1]
        lost = jackknife(np.mean, total, clusters)
        if lost.low <= 0:
            warnings.append(
                f"with branches ablated KL(exact || model) rises by {total.mean():.2g} bits "
                f"[{lost.low:.2g}, {lost.high:.2g}], not distinguishable from 0: the MLPs have no share of it"
            )
            del fractions[MLP_EVIDENCE]
    sampling = {}
    if "edited" in effects and not unmeasured:
        of_attention, of_mlp = (part.mean(1).sum() for part in np.split(effects["kl"], 3)[:2])
        off_attention, off_mlp, _ = effects["total_error"]
        sampling[BRANCH] = float(np.hypot(off_attention / of_attention, off_mlp / of_mlp))
        off = np.hypot(of_attention * off_mlp, of_mlp * off_attention)
        sampling[MLP_SHARE] = float(off / (of_attention + of_mlp) ** 2)
        notes += [
            _stages(effects, name, slice(i * layers, (i + 1) * layers)) for i, name in enumerate(("attentions", "MLPs"))
        ]
        notes.append(
            f"every whole block is edited; '{BRANCH}' has a standard error of {sampling[BRANCH]:.1%} from what is "
            "estimated. --exact edits all"
        )
    measured = {name: fraction for name, fraction in fractions.items() if name not in unmeasured}
    metrics = estimates(probe, measured, null, clusters, method, sampling)
    if method == "mean":
        if min(model["norms"].sum((1, 2)).min() for model in (effects, *controls)) > 0:
            drawn = {UNTRAINED: [control["norms"] for control in controls]}
            metrics += (compare(declared(probe)[MLP_NORM], _norm_ratio, norms, clusters, drawn, transform="log"),)
        else:
            warnings.append("a branch writes nothing here or in an untrained copy: there is no ratio of norms")
        shares = [ratio_of(one[MLP_SHARE]) for one in null]
        notes.append(f"MLPs' share of their own effects in untrained copies: {min(shares):.2f} to {max(shares):.2f}")
    metrics, unjudged = judged(metrics, effects, clusters)

    def by_branch(model: Mapping[str, np.ndarray], effect: str = "kl") -> np.ndarray:
        return model[effect].mean(1).reshape(3, layers)

    def times(model: Mapping[str, np.ndarray]) -> np.ndarray:
        return by_branch(model, "mae")[2] / by_branch(model, "clean_mae")[2]

    def null_band(curves: Sequence[np.ndarray | None]) -> tuple[str, np.ndarray | None]:
        there = [one for one in curves if one is not None]
        return BAND, layer_band({UNTRAINED: np.array(there)}) if there else None

    kl, interval = by_branch(effects), _intervals(effects, clusters).reshape(3, layers, 2)
    arrays: dict[str, Labelled | None] = {}
    writes = {"attention": "attention's write", "mlp": "the MLP's write", "block": "both writes"}
    for i, (name, what) in enumerate(writes.items()):
        arrays |= line(
            name,
            kl[i],
            "layer",
            "bits",
            f"KL(clean || {what} ablated)",
            interval=("clusters", interval[i]),
            null=null_band([by_branch(control)[i] for control in controls]),
            beside="attention" if name == "mlp" else "",
        )
    if (relative := over_median(kl[2])) is not None:
        copies = null_band([over_median(by_branch(control)[2]) for control in controls])
        arrays |= line("relative", relative, "layer", "of the median block", "KL with both writes ablated", null=copies)
    for name, what, of in (("attention_norm", "attention", norms[0]), ("mlp_norm", "the MLP", norms[1])):
        meaning = f"rms of what {what} writes, clean"
        arrays[name] = labelled(np.sqrt(of.mean(-1)), "layer", "length", meaning, Figure("curve"))
    if "evidence" in effects:
        rises, meaning = by_branch(effects, "evidence"), "rise of KL(exact || model), {} ablated"
        copies = null_band([by_branch(model, "evidence")[2] for model in controls])
        arrays |= line("evidence", rises[2], "layer", "bits", meaning.format("both writes"), null=copies)
        for i, (name, what) in enumerate((("attention_evidence", "attention's"), ("mlp_evidence", "the MLP's"))):
            arrays[name] = labelled(rises[i], "layer", "bits", meaning.format(what))
    if "mae" in effects:
        meaning = "|H_model - H_exact| over that of the clean model"
        copies = null_band([times(one) for one in controls])
        arrays |= line("error", times(effects), "layer", "times", meaning, null=copies)
        clean = effects["clean_mae"].mean()
        arrays["clean_error"] = labelled(clean, "", "bits", "|H_model - H_exact| of the clean model")
    arrays["edited"] = _edited(effects, "branch layer", 3, layers)
    facts = {}
    if share := next((one for one in metrics if one.name == MLP_SHARE), None):
        of_attention, of_mlp = np.median(kl[:2], axis=1)
        facts[SENTENCE] = (
            f"Set to its mean, the MLP of a layer changes the next token by {of_mlp:.2g} bits of KL, attention by "
            f"{of_attention:.2g} (medians of {layers} layers): the MLPs have {share.value:.2f} of all such effects "
            f"[{share.low:.2f}, {share.high:.2f}] (n = {share.n})."
        )
    return Result.of(
        BLOCKS,
        arrays,
        __name__,
        unmeasured=unmeasured | unjudged,
        estimates=metrics,
        warnings=tuple(warnings),
        facts=facts,
        notes=tuple(notes),
    )


def _norm_ratio(norms: np.ndarray, rows: np.ndarray | slice) -> float:
    """Sum over layers of rms lengths, MLPs over attentions; norms [branch layer prompt] squared lengths."""
    attention, mlp = np.sqrt(norms[..., rows].mean(-1)).sum(1)
    return float(mlp / attention)
