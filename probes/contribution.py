"""Which branch changes the answer, attention or the MLP: by the size of what it writes, and by what its absence does?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.capture import Capture, Site
from llmgeom.claims import Null, declared, headline, layer_band
from llmgeom.edits import Edit
from llmgeom.errors import Refused
from llmgeom.information import bits, kl
from llmgeom.result import Figure, Headline, quantity
from llmgeom.result import Result as Base
from llmgeom.scan import Needs, View
from llmgeom.stats import LEAST_UNITS, equivalence_p, jackknife
from llmgeom.subject import Subject

MOST = 40  # rows that are edited, each of another unit: a scan costs 2 layers + 1 passes of them, and of every twin
BRANCHES = (Site.ATTENTION_WRITE, Site.MLP_WRITE)
BY_NORM, BY_EFFECT, BY_EVIDENCE = (f"MLPs over attentions, by {what}" for what in ("norm", "effect", "evidence"))
TWINS = "re-initialised"
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
    units: np.ndarray


def replaced(subject: Subject, batch: Batch) -> Replaced:
    """Each branch of each layer alone set to its mean over these rows, at the positions that are asked.

    Raises Refused below 5 units, and where what is asked is a real number.
    """
    exact, first = batch.posterior, {}
    if exact is not None and not exact.outcomes:
        raise Refused("what is asked is a real number: KL of next-token distributions does not compare such answers")
    for row, unit in enumerate(batch.unit):
        first.setdefault(unit, row)
    if len(first) < LEAST_UNITS:
        raise Refused(f"{len(first)} units: a contribution needs at least {LEAST_UNITS}; add templates or documents")
    few = batch.take([*first.values()][:MOST])
    clean = subject.capture(few, {Site.LOG_PROBS, *BRANCHES})
    asked, units = _said(clean), np.array(few.unit)[clean.prompt.numpy()]

    def missed(said: Tensor) -> np.ndarray:
        return bits(kl(clean.exact.predictive.double(), said[:, list(exact.outcomes)]).numpy())

    shape = len(BRANCHES), len(subject.blocks), len(asked)
    effect, evidence = np.empty(shape), np.empty(shape)
    for branch, site in enumerate(BRANCHES):
        for layer, write in enumerate(clean.layers(site)):
            said = _said(subject.capture(few, {Site.LOG_PROBS}, [_mean(site, layer, write)]))
            effect[branch, layer] = bits(kl(asked, said).clamp_min(0).numpy())
            if exact is not None:
                evidence[branch, layer] = missed(said) - missed(asked)
    norm = torch.stack([clean.stacked(site).double().square().sum(-1) for site in BRANCHES]).numpy()
    return Replaced(effect, None if exact is None else evidence, norm, units)


def _mean(site: Site, layer: int, write: Tensor) -> Edit:
    mean = write.double().mean(0)
    spec = {"do": "mean", "point": site.value}
    return Edit(site.value, lambda x, where: mean.to(x).expand_as(x), (layer,), "query", spec)


def _said(capture: Capture) -> Tensor:
    return capture.log_probs.double().log_softmax(-1)  # float32 sums to 1 within 1e-7 only


NEEDS = Needs(sites=frozenset(BRANCHES), shuffled=False, read=replaced)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """What each layer's attention and MLP write, and what the answer loses without them."""

    TITLE = "MLPs against attention"
    MEANING = (
        "How large the writes of the MLPs are beside those of attention, and how much more the answer changes when an "
        "MLP's write is held at its mean than when attention's is. 'The FFN performs the update' says that the second "
        "ratio is above 1, and above that of an untrained model."
    )
    COMPUTED = (
        "By norm: rms length of what is written at the positions that are asked; sum over layers of the MLPs' over that "
        "of the attentions'. By effect: KL(clean || edited) of the next-token distribution, a branch's write replaced, "
        "alone and only where it is asked, by its mean over the same rows; sum over layers of the MLPs' over that of "
        f"the attentions'. The first row of each unit, at most {MOST}. By evidence, in tunnels: the rise of KL(exact || "
        "model) in place of the KL. Intervals are jackknifed over units, the means held fixed. Nothing is fitted: no "
        "split, no penalty."
    )
    NULL = "The model re-initialised, edited alike with its own means; for the claim also 1: as much as attention."
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
    headlines: tuple[Headline, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OfEvidence(Result):
    """The same where the exact answer is known."""

    attention_evidence: np.ndarray = quantity("layer", "bits", "rise of KL(exact || model), attention's replaced")
    mlp_evidence: np.ndarray = quantity("layer", "bits", "rise of KL(exact || model), the MLP's replaced")


def measure(view: View) -> Result:
    """Norms, effects and their ratios. Raises Refused where no branch of attention changes anything."""
    own, twins = view.reading, view.twin_readings
    rows = np.arange(len(own.units))
    if not own.effect[0].sum() > 0:
        raise Refused("no attention changes what this model says: there is nothing to hold the MLPs against")
    ratios: dict[str, Callable[[Replaced, np.ndarray], float]] = {
        BY_NORM: lambda of, kept: _over(np.sqrt(of.norm[..., kept].mean(-1))),
        BY_EFFECT: lambda of, kept: _over(of.effect[..., kept].mean(-1)),
    }
    warnings = []
    if own.evidence is not None:
        by_attention = own.evidence[0].sum(0)
        span = jackknife(np.mean, by_attention, own.units)
        if span.low > 0:
            # Over the model's own rise: a twin has no evidence to lose, and its ratio would be one of noise.
            rise = by_attention.mean()
            ratios[BY_EVIDENCE] = lambda of, kept: float(
                of.evidence[1][:, kept].mean(-1).sum()
                / (own.evidence[0][:, kept].mean(-1).sum() if of is own else rise)
            )
        else:
            warnings.append(
                f"with attentions replaced KL(exact || model) rises by {by_attention.mean():.2g} bits "
                f"[{span.low:.2g}, {span.high:.2g}], not distinguishable from 0: no ratio of the rises"
            )
    made = [
        _headline(name, own, ratio, np.array([ratio(twin, rows) for twin in twins])) for name, ratio in ratios.items()
    ]

    def each(branch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        spans = [jackknife(np.mean, layer, own.units) for layer in own.effect[branch]]
        draws = np.stack([twin.effect[branch].mean(1) for twin in twins])
        interval = np.array([[max(span.low, 0.0), span.high] for span in spans])
        return own.effect[branch].mean(1), interval, layer_band({TWINS: draws})

    norms = np.sqrt(own.norm.mean(-1))
    values = {"attention_norm": norms[0], "mlp_norm": norms[1], "headlines": tuple(made), "warnings": tuple(warnings)}
    for branch, name in enumerate(("attention", "mlp")):
        values |= zip((name, f"{name}_interval", f"{name}_null"), each(branch), strict=True)
    passes = norms.size + 1
    values["notes"] = (f"{len(rows)} rows of {len(set(own.units))} units, edited in {passes} passes a model",)
    if own.evidence is None:
        return Result(**values)
    rises = own.evidence.mean(-1)
    return OfEvidence(**values, attention_evidence=rises[0], mlp_evidence=rises[1])


def _over(each: np.ndarray) -> float:
    """Sum over layers, MLPs over attentions; 0 where attentions sum to nothing. each: [branch layer]."""
    attention, mlp = each.sum(1)
    return float(mlp / attention) if attention > 0 else 0.0


def _headline(name: str, own: Replaced, ratio: Callable[[Replaced, np.ndarray], float], twins: np.ndarray) -> Headline:
    """A ratio with its interval, on the log scale where it can be, against twins and for a claim against 1."""
    claim, rows, count = CLAIMS[name], np.arange(len(own.units)), len(set(own.units))
    value = ratio(own, rows)
    if claim.scale == "log" and min(value, twins.min()) <= 0:
        claim = replace(claim, scale="identity")
    span = jackknife(lambda kept: ratio(own, kept), rows, own.units, "log" if claim.scale == "log" else "identity")
    nulls = [Null.of(TWINS, value, twins, claim.side)]
    if claim.claim:
        logs = [math.log(max(end, 1e-300)) for end in (value, span.low, span.high)]
        p = equivalence_p(logs[0], replace(span, low=logs[1], high=logs[2]), 0.0, math.inf, count)
        nulls.append(Null("as much as attention", 1.0, 1.0, 1.0, p, 0, side=claim.side))
    found = headline(claim, value, span, nulls, n=len(rows), units=count)
    return replace(found, null="as much as attention") if found.null.startswith("as much") else found
