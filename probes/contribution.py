"""Which branch changes the answer, attention or the MLP: by the size of its writes, and by what their absence does?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Edit, Point
from llmgeom.model.subject import Subject
from llmgeom.probe import Needs, ProbeInput
from llmgeom.result import Estimate, Figure, quantity
from llmgeom.result import Result as Base
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import LEAST_CLUSTERS, jackknife

ON_REQUEST = True  # edited passes of every control: more than the rest of a scan together
MOST = 40  # rows that are edited, each of another unit: a scan costs 2 layers + 1 passes of them, and of every control
BRANCHES: dict[Site, Point] = {Site.ATTENTION_WRITE: "attention_write", Site.MLP_WRITE: "mlp_write"}
BY_NORM, BY_EFFECT = "MLPs over attentions, by norm", "MLPs' share of the effects"
BY_EVIDENCE = "MLPs' share of the lost evidence"
UNTRAINED = "re-initialised"
CLAIMS = declared("contribution")


@dataclass(frozen=True)
class Replaced:
    """What replacing each branch did, [branch layer row], bits; branch 0 is attention, 1 the MLP.

    effect     KL(clean || edited).
    evidence   rise of KL(exact || model), where an exact answer is known.
    norm       [branch layer row] squared length of what is written there, of the clean model.
    units      [row].
    """

    effect: np.ndarray
    evidence: np.ndarray | None
    norm: np.ndarray
    clusters: np.ndarray


def replaced(subject: Subject, batch: Batch) -> Replaced:
    """Each branch of each layer alone set to its mean over these rows, at the positions that are asked.

    Raises UserError below 5 units, and where what is asked is a real number.
    """
    exact = batch.posterior
    first: dict[str, int] = {}
    if exact is not None and not exact.outcomes:
        raise UserError("what is asked is a real number: KL of next-token distributions does not compare such answers")
    for row, cluster in enumerate(batch.cluster):
        first.setdefault(cluster, row)
    if len(first) < LEAST_CLUSTERS:
        raise UserError(
            f"{len(first)} units: a contribution needs at least {LEAST_CLUSTERS}; add templates or documents"
        )
    few = batch.take([*first.values()][:MOST])
    clean = subject.capture(few, {Site.LOG_PROBS, *BRANCHES})
    asked, clusters = _said(clean), np.array(few.cluster)[clean.prompt.numpy()]

    def missed(said: Tensor) -> np.ndarray:
        return bits(kl(clean.exact.predictive.double(), said[:, list(clean.exact.outcomes)]).numpy())

    shape = len(BRANCHES), len(subject.blocks), len(asked)
    effect, evidence = np.empty(shape), np.empty(shape)
    for branch, (site, point) in enumerate(BRANCHES.items()):
        for layer, write in enumerate(clean.layers(site)):
            said = _said(subject.capture(few, {Site.LOG_PROBS}, [_mean(point, layer, write)]))
            effect[branch, layer] = bits(kl(asked, said).clamp_min(0).numpy())
            if exact is not None:
                evidence[branch, layer] = missed(said) - missed(asked)
    norm = torch.stack([clean.stacked(site).double().square().sum(-1) for site in BRANCHES]).numpy()
    return Replaced(effect, None if exact is None else evidence, norm, clusters)


def _mean(point: Point, layer: int, write: Tensor) -> Edit:
    mean = write.double().mean(0)
    spec = {"do": "mean", "point": point}
    return Edit(point, lambda x, where: mean.to(x).expand_as(x), (layer,), "query", spec)


def _said(capture: Capture) -> Tensor:
    return capture.log_probs.double().log_softmax(-1)  # float32 sums to 1 within 1e-7 only


def passes(subject: Subject, batch: Batch) -> list[tuple[int, list[int]]]:
    """One clean pass and one a branch and layer, of the first input of each cluster."""
    first = {cluster: i for i, cluster in reversed(list(enumerate(batch.cluster)))}
    lengths = subject.tokens(batch).lengths.tolist()
    return [(2 * subject.facts["layers"] + 1, [lengths[i] for i in sorted(first.values())[:MOST]])]


NEEDS = Needs(
    sites=frozenset(BRANCHES), shuffled=False, examine=lambda subject, captures: replaced(subject, captures[""].batch)
)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """What each layer's attention and MLP write, and what the answer loses without them."""

    TITLE = "MLPs against attention"
    MEANING = (
        "How large the writes of the MLPs are beside those of attention, and how much of what the answer changes, when "
        "one write at a time is held at its mean, is the MLPs' doing. 'The FFN performs the update' says: more than "
        "half of it, and more than MLPs do that have learnt nothing."
    )
    COMPUTED = (
        "By norm: rms length of what is written at the positions that are asked; sum over layers of the MLPs' over "
        "that of the attentions'. Effect: KL(clean || edited) of the next-token distribution, a branch's write "
        "replaced, alone and only where it is asked, by its mean over the same rows; share: sum over layers of the "
        "MLPs' over the sum of both branches'. Lost evidence, in tunnels: the rise of KL(exact || model) in place of "
        f"the KL. The first row of each unit, at most {MOST}. Intervals are jackknifed over units, the means held "
        "fixed. Nothing is fitted: no split, no penalty."
    )
    NULL = (
        "The model re-initialised, edited alike with its own means; its MLPs' bits over the model's own total, for its "
        "effects are small and mostly of MLPs. For shares also one half."
    )
    FAILURE_MODES = (
        "A write that is the same in every row is large and does nothing when replaced by its mean; a norm is no "
        "effect. Where the MLP reads what attention wrote, attention replaced changes the MLP too, which counts for "
        "attention; effects do not add up. Rows asked at unlike positions share one mean, so that what a branch says "
        "of position is taken away too. What attention wrote at earlier positions stays. A branch that others stand in "
        "for does nothing alone."
    )

    attention_norm: np.ndarray = quantity("layer", "length", "rms of what attention writes", Figure("curve"))
    mlp_norm: np.ndarray = quantity("layer", "length", "rms of what the MLP writes", Figure("curve"))
    attention: np.ndarray = quantity(
        "layer",
        "bits",
        "KL(clean || attention's write replaced)",
        Figure("curve", band="attention_null", interval="attention_interval"),
    )
    attention_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over units")
    attention_null: np.ndarray = quantity("layer bound", "bits", "band of re-initialised models")
    mlp: np.ndarray = quantity(
        "layer",
        "bits",
        "KL(clean || the MLP's write replaced)",
        Figure("curve", band="mlp_null", interval="mlp_interval"),
    )
    mlp_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over units")
    mlp_null: np.ndarray = quantity("layer bound", "bits", "band of re-initialised models")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OfEvidence(Result):
    """The same where the exact answer is known."""

    attention_evidence: np.ndarray = quantity("layer", "bits", "rise of KL(exact || model), attention's replaced")
    mlp_evidence: np.ndarray = quantity("layer", "bits", "rise of KL(exact || model), the MLP's replaced")


def measure(view: ProbeInput) -> Result:
    """Norms, effects and shares. Raises UserError where no branch changes anything."""
    own, untrained = view.observations, view.control_observations
    if not own.effect.sum() > 0:
        raise UserError(
            "no branch changes what this model says when replaced by its mean: there is nothing to share out"
        )
    count, clusters, warnings = len(set(own.clusters)), own.clusters, []
    made = [_share(BY_EFFECT, own.effect, [control.effect for control in untrained], clusters)]
    if min(one.norm.sum((1, 2)).min() for one in (own, *untrained)) > 0:
        ratio = _ratio(own.norm)
        span = jackknife(lambda kept: _ratio(own.norm[..., kept]), np.arange(len(clusters)), clusters, "log")
        null = Null.of(UNTRAINED, ratio, np.array([_ratio(control.norm) for control in untrained]))
        made.append(estimate(CLAIMS[BY_NORM], ratio, span, [null], n=len(clusters), clusters=count))
    else:
        warnings.append("a branch writes nothing here or in a re-initialised model: there is no ratio of norms")
    if own.evidence is not None:
        total = own.evidence.sum((0, 1))
        span = jackknife(np.mean, total, clusters)
        if span.low > 0:
            made.append(_share(BY_EVIDENCE, own.evidence, [control.evidence for control in untrained], clusters))
        else:
            warnings.append(
                f"with branches replaced KL(exact || model) rises by {total.mean():.2g} bits "
                f"[{span.low:.2g}, {span.high:.2g}], not distinguishable from 0: there is no evidence to share out"
            )
    norms, theirs = np.sqrt(own.norm.mean(-1)), [float(_part(control.effect)) for control in untrained]
    values = {"attention_norm": norms[0], "mlp_norm": norms[1], "estimates": tuple(made), "warnings": tuple(warnings)}
    for branch, name in enumerate(("attention", "mlp")):
        spans = [jackknife(np.mean, layer, clusters) for layer in own.effect[branch]]
        values |= {
            name: own.effect[branch].mean(1),
            f"{name}_interval": np.array([[max(span.low, 0.0), span.high] for span in spans]),
            f"{name}_null": layer_band(
                {UNTRAINED: np.stack([control.effect[branch].mean(1) for control in untrained])}
            ),
        }
    values["notes"] = (
        f"{len(clusters)} rows of {count} units, edited in {norms.size} passes a model",
        f"MLPs' share of their own effects in re-initialised models: {min(theirs):.2f} to {max(theirs):.2f}",
    )
    if own.evidence is None:
        return Result(**values)
    rises = own.evidence.mean(-1)
    return OfEvidence(**values, attention_evidence=rises[0], mlp_evidence=rises[1])


def _ratio(norm: np.ndarray) -> float:
    """Sum over layers of the rms lengths, MLPs over attentions; norm [branch layer row] squared lengths."""
    attention, mlp = np.sqrt(norm.mean(-1)).sum(1)
    return float(mlp / attention)


def _part(effect: np.ndarray, total: float | None = None) -> float:
    """Of the total, or of the effects' own sum, that of the MLPs; effect [branch layer row]."""
    attention, mlp = effect.mean(-1).sum(1)
    total = attention + mlp if total is None else total
    return float(mlp / total) if total else 0.0


def _share(name: str, own: np.ndarray, untrained: Sequence[np.ndarray], clusters: np.ndarray) -> Estimate:
    """The MLPs' share, against what the untrained controls' MLPs do over the same total, and against one half."""
    claim, count, value = CLAIMS[name], len(set(clusters)), _part(own)
    span = jackknife(lambda kept: _part(own[..., kept]), np.arange(len(clusters)), clusters)
    null = Null.of(
        UNTRAINED, value, np.array([_part(control, own.mean(-1).sum()) for control in untrained]), claim.side
    )
    return estimate(claim, value, span, [null, Null.half(value, span, count)], n=len(clusters), clusters=count)
