"""What a model answers to label sequences, measured against the exact answer, rival readers and matched controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.probes.evidence.observers import advantage, losses, readers, seen
from llmgeom.prompts.sula import Sula
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.information import bits, skill_by_count
from llmgeom.stats.pca import standardised
from llmgeom.stats.resampling import Interval, jackknife
from llmgeom.stats.ridge_probe import decodability_interval, folds, read
from llmgeom.stats.tests import correlation_interval, spearman

AT_ONCE = 256
BAYES, UNTRAINED = "Bayesian over other readers", "re-initialised"
LEAST_GAIN = 1e-4  # bits a label
EVIDENCE, BELIEF, CONTROLS = "sula", "sula_belief", "sula_controls"


# ---- reading one model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What a model says after each prompt of a batch, from float32 logits.

    log_p      [prompt 2] log P of the two labels given that it is one of them, nats.
    mass       [prompt] P that it is (fraction).
    h_vocab    [prompt] entropy over the whole vocabulary, bits.
    residual   [depth prompt d_model], and value [prompt coordinate] of the last layer; empty where not asked for.
    """

    log_p: np.ndarray
    mass: np.ndarray
    h_vocab: np.ndarray
    residual: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))
    value: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    @property
    def p(self) -> np.ndarray:
        """[prompt] P(first) of the two."""
        return np.exp(self.log_p[:, 0])

    @property
    def h_label(self) -> np.ndarray:
        """[prompt] bits: entropy of the two labels, renormalised."""
        return label_entropy(self.log_p)


def listen(subject: Subject, batch: Batch, inside: bool = False) -> Reading:
    """Read the labels' probabilities, and where `inside` the last token's residual stream and values."""
    columns = label_ids(subject, batch)
    sites = {Site.LOG_PROBS, Site.ENTROPY} | ({Site.RESIDUAL, Site.VALUE} if inside else set())
    picked, entropy, residual, value = [], [], [], []
    for rows in torch.arange(len(batch)).split(AT_ONCE):
        seen = subject.capture(batch.take(rows.tolist()), sites)
        picked.append(seen.log_probs.gather(1, columns[rows]).double().numpy())
        entropy.append(bits(seen.entropy.double().numpy()))
        if inside:
            residual.append(np.stack([one.double().numpy() for one in seen.layers(Site.RESIDUAL)]))
            value.append(seen.layers(Site.VALUE)[-1].double().flatten(1).numpy())
    both = np.concatenate(picked)
    mass = np.logaddexp(*both.T)
    found = Reading(both - mass[:, None], np.exp(mass), np.concatenate(entropy))
    return replace(found, residual=np.concatenate(residual, 1), value=np.concatenate(value)) if inside else found


def label_ids(subject: Subject, batch: Batch) -> Int[Tensor, "prompt 2"]:
    """The two labels of each prompt as tokens. Raises UserError where one is several."""
    pairs = list(zip(batch.columns["first"], batch.columns["second"], strict=True))
    words = sorted({word for pair in pairs for word in pair})
    ids = {word: subject.tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words}
    if several := [word for word, tokens in ids.items() if len(tokens) != 1]:
        raise UserError(
            f"{', '.join(several)}: not single tokens of this tokenizer; leave --labels out to have some found "
            "(`prompts.sula.available`)"
        )
    return torch.tensor([[ids[word][0] for word in pair] for pair in pairs])


def label_entropy(log_p: np.ndarray) -> np.ndarray:
    """[...] bits of log-probabilities [... 2], to 9 decimals: mirrored counts tie exactly, and must in ranks."""
    return np.round(bits(-(np.exp(log_p) * log_p).sum(-1)), 9)


@dataclass(frozen=True)
class Truth:
    """The prompts' own side: counts, exact answers, and which rows have evidence at all."""

    batch: Batch

    @cached_property
    def k(self) -> np.ndarray:
        return np.array(self.batch.columns["k"])

    @cached_property
    def told(self) -> np.ndarray:
        """Rows with k >= 1: before any evidence there is nothing to weigh, and such rows lie far from the others."""
        return np.flatnonzero(self.k > 0)

    @cached_property
    def cluster(self) -> np.ndarray:
        return np.array(self.batch.cluster)

    @cached_property
    def log_p(self) -> np.ndarray:
        """[prompt 2] exact log P(next label), nats."""
        return self.batch.exact.predictive[:, -1].numpy()

    @cached_property
    def belief(self) -> np.ndarray:
        """[prompt 2] exact log P(latent class), nats."""
        belief = self.batch.exact.belief
        assert belief is not None  # label sequences have one
        return belief[:, -1].numpy()


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence(Result):
    """The model's answers beside the exact ones, by k, and beside those of rival readers."""

    TITLE: ClassVar[str] = "In-context evidence (SULA)"
    MEANING: ClassVar[str] = (
        "Each prompt shows k words with one of two labels, drawn from a stated prior, and asks for the next label: its "
        "exact distribution is known. Skill 1 is that distribution, 0 the best answer that knows only k. Counting "
        "labels is not yet Bayes' rule: the model is Bayesian here if a Bayesian reader predicts its answers better "
        "than any reader that is not."
    )
    COMPUTED: ClassVar[str] = (
        "Label probabilities from float32 logits, renormalised over the two; k = 0 apart. Skill = 1 - sum KL(exact || "
        "model) / sum KL(exact || best constant of that k). Entropy is taken twice: of the two labels (H label) and of "
        "the whole vocabulary. Errors of H label are against the exact entropy of the next label, which stays above a "
        "floor, and against that of the latent class, as published. Readers: KL(model || reader) in bits a label, "
        "parameters fitted to the model's answers on half of the label pairs and scored on the other; the best reader "
        "of a kind is chosen on the first half too; their difference is given over that of a model whose answers are "
        "exact, on the same prompts. Intervals are jackknifed over label pairs."
    )
    NULL: ClassVar[str] = "The same model re-initialised: what an untrained network does with the same prompts."
    FAILURE_MODES: ClassVar[str] = (
        "A model that only counts has high skill with a prior whose exact answer is near a count: see the readers. A "
        "small mass of the two labels means that the renormalised answer is a small part of what the model says. "
        "Labels are words with a history: compare `remap`. A fitted Beta can come close to any smooth reader."
    )

    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    h_label: np.ndarray = quantity(
        "k",
        "bits",
        "entropy of the two labels, mean over prompts",
        Figure("curve", band="h_label_null", beside="h_exact"),
    )
    h_label_null: np.ndarray = quantity("k bound", "bits", "null band of the labels' entropy")
    h_exact: np.ndarray = quantity("k", "bits", "exact entropy of the next label")
    h_latent: np.ndarray = quantity("k", "bits", "exact entropy of the latent class")
    h_vocabulary: np.ndarray = quantity("k", "bits", "entropy over the whole vocabulary")
    mass: np.ndarray = quantity("k", "fraction", "probability of the two labels together")
    skill: np.ndarray = quantity("k", "skill", "skill after k observations; 0 where k = 0, which has nothing to weigh")
    error: np.ndarray = quantity("k", "bits", "mean |H label - exact entropy of the next label|")
    said: np.ndarray = quantity("decile", "probability", "P(first) by its deciles", Figure("curve", beside="owed"))
    owed: np.ndarray = quantity("decile", "probability", "exact P(first) in the same prompts")
    answers: np.ndarray = quantity(
        "prompt answer",
        "probability",
        "P(first): what the exact posterior gives and what the model says, which on the diagonal agree",
        Figure("scatter", colour="k"),
    )
    drawn: np.ndarray = quantity("decile", "fraction", "how often the first label was drawn in the same prompts")
    reader: np.ndarray = quantity(
        "reader", "bits", "KL(model || reader) a label, held-out pairs", Figure("curve", interval="reader_interval")
    )
    reader_interval: np.ndarray = quantity("reader bound", "bits", "95 % interval over label pairs")
    attainable: float = quantity("", "bits", "what an exact model gains a label by being read as Bayesian")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Belief(Result):
    """Where the exact certainty can be read in the last token's representations."""

    TITLE: ClassVar[str] = "Certainty in representations (SULA)"
    MEANING: ClassVar[str] = (
        "How well the exact entropy of the next label can be read, by a linear map, from the residual stream at the "
        "last token, among prompts with the same number of observations. The first principal component of the last "
        "layer's values is followed beside it, as published."
    )
    COMPUTED: ClassVar[str] = (
        "Ridge regression, held out by lead-in and with it by label pair; both sides are taken less their mean at each "
        "k, so that neither k nor length helps. R2 over held-out prompts, k >= 2 (with one observation all are equally "
        "certain). PC1: standardised values; |rho| is Spearman's, given k."
    )
    NULL: ClassVar[str] = "The same model re-initialised, the same prompts."
    FAILURE_MODES: ClassVar[str] = (
        "What can be read need not be used. An untrained network already mixes the label tokens seen, from which their "
        "balance can in part be read: that is what the null band shows."
    )

    decoded: np.ndarray = quantity(
        "layer", "R2", "exact entropy read from the residual stream, given k", Figure("curve", band="decoded_null")
    )
    decoded_null: np.ndarray = quantity("layer bound", "R2", "null band of the same")
    odds: np.ndarray = quantity(
        "layer", "R2", "exact log-odds of the label named first, given k", Figure("curve", band="odds_null")
    )
    odds_null: np.ndarray = quantity("layer bound", "R2", "null band of the same")
    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    pc1: np.ndarray = quantity("k", "standard deviations", "PC1 of the last layer's values, mean", Figure("curve"))
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Controls(Result):
    """What the model's answers do when the prompt is changed in a way whose effect on the exact answer is known."""

    TITLE: ClassVar[str] = "Controls (SULA)"
    MEANING: ClassVar[str] = (
        "Another pair of labels, another order of the same labels: the exact answer does not move. Labels exchanged: "
        "it is mirrored. All labels alike against the two in turn, at the same k: certainty differs by a known amount. "
        "The two published controls are measured as they were defined."
    )
    COMPUTED: ClassVar[str] = (
        "Paired by prompt, k >= 2. Movement: mean |change of P(first)|, after mirroring for the exchange, less the "
        "exact one. Consistent against alternating: fall of H label in bits over the exact fall. Published controls: "
        "mean error of H label against the published target (1 bit) and what an observer with the prior may believe."
    )
    NULL: ClassVar[str] = "The same model re-initialised."
    FAILURE_MODES: ClassVar[str] = (
        "A model without skill moves little: read movement beside the skill. With k = 1 a shuffled prompt has the same "
        "distribution as an unshuffled one, and words are declared irrelevant: neither published control can tell a "
        "Bayesian model from another (derived in docs)."
    )

    movement: np.ndarray = quantity(
        "control",
        "probability",
        "mean |change of P(first)| beyond the exact one",
        Figure("curve", interval="movement_interval"),
    )
    movement_interval: np.ndarray = quantity("control bound", "probability", "95 % interval over label pairs")
    published: np.ndarray = quantity(
        "published target", "bits", "mean |H label - target| of the published controls: 1 bit, observer's"
    )
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


def _by(k: np.ndarray, ks: Sequence[int], values: np.ndarray) -> np.ndarray:
    """[k] means."""
    return np.array([values[k == one].mean() for one in ks])


# ---- measuring ------------------------------------------------------------------------------------------------------


Statistic = Callable[[Any, np.ndarray], float]  # of what one model gave, and rows of prompts


def _estimates(
    probe: str,
    measured: Sequence[tuple[str, Statistic, Sequence[Any], np.ndarray, Interval | None]],
    cluster: np.ndarray,
) -> tuple[Estimate, ...]:
    """A metric each from its name, its statistic, what the model and then its controls gave, the rows of prompts, and
    its interval (None: jackknife), held against the same statistic of the untrained controls."""
    found = []
    for name, statistic, (own, *untrained), rows, span in measured:
        claim, value = declared(probe)[name], statistic(own, rows)
        span = span or jackknife(partial(statistic, own), rows, cluster[rows])
        draws = np.array([statistic(control, rows) for control in untrained])
        null = Null.of(UNTRAINED, value, draws, claim.side)
        found.append(estimate(claim, value, span, [null], n=len(rows), clusters=len(set(cluster[rows]))))
    return tuple(found)


def _indicators(k: np.ndarray) -> np.ndarray:
    return (k[:, None] == np.unique(k)[1:]).astype(float)


def measure_evidence(source: Sula, batch: Batch, own: Reading, untrained: Sequence[Reading]) -> Evidence:
    """Skill, calibration and readers. Raises UserError for fewer than 5 pairs."""
    truth = Truth(batch)
    ks, k, cluster, told = list(source.ks), truth.k, truth.cluster, truth.told
    h_exact, h_latent = label_entropy(truth.log_p), label_entropy(truth.belief)
    several = np.flatnonzero(k >= 2)
    made = readers(source.prior)
    labels = seen(batch)[told]
    _, pair = np.unique(cluster, return_inverse=True)
    half = np.random.default_rng(0).permutation(pair.max() + 1)[pair[told]] % 2 == 0

    def read_as(log_p: np.ndarray) -> np.ndarray:
        return np.stack([losses(reader, labels, log_p[told], half) for reader in made])

    def gained(each: np.ndarray) -> np.ndarray:
        """[prompt] bits a label; 0 where k = 0."""
        gain = np.zeros(len(k))
        gain[told] = advantage(each, half, [reader.bayesian for reader in made])
        return gain

    as_read = read_as(own.log_p)
    attainable = float(gained(read_as(truth.log_p))[told].mean())
    bayesian = []
    if attainable > LEAST_GAIN:
        gains = [gained(as_read), *(gained(read_as(control.log_p)) for control in untrained)]
        bayesian = [(BAYES, lambda gain, rows: float(gain[rows].mean() / attainable), gains, told, None)]

    def error(target: np.ndarray) -> Callable[[Reading, np.ndarray], float]:
        def below(who: Reading, rows: np.ndarray) -> float:
            constant = np.abs(target[rows] - np.median(target[rows])).mean()
            return float(1 - np.abs(who.h_label[rows] - target[rows]).mean() / constant)

        return below

    def ranked(who: Reading, rows: np.ndarray) -> float:
        return spearman(who.h_label[rows], h_exact[rows], _indicators(k[rows]))

    def skilled(who: Reading, rows: np.ndarray) -> float:
        return skill_by_count(truth.log_p[rows], who.log_p[rows], k[rows])

    everyone = (own, *untrained)
    same_k = correlation_interval(
        own.h_label[several], h_exact[several], cluster[several], _indicators(k[several]), signed=True
    )
    estimates = _estimates(
        EVIDENCE,
        (
            ("skill", skilled, everyone, told, None),
            *bayesian,
            ("rho of H label and exact entropy, given k", ranked, everyone, several, same_k),
            ("error of H label, below a constant's", error(h_exact), everyone, told, None),
            ("error of H label, latent class, below a constant's", error(h_latent), everyone, told, None),
            ("mass of the two labels", lambda who, rows: float(who.mass[rows].mean()), everyone, told, None),
        ),
        cluster,
    )
    spans = [jackknife(np.mean, row, cluster[told]) for row in as_read]
    deciles = np.array_split(np.argsort(own.p[told], kind="stable"), 10)
    drawn = np.array(batch.columns["next"])[told] == 0
    exact_p = np.exp(truth.log_p[told, 0])
    return Evidence(
        k=np.array(ks, dtype=float),
        h_label=_by(k, ks, own.h_label),
        h_label_null=layer_band({UNTRAINED: np.stack([_by(k, ks, control.h_label) for control in untrained])}),
        h_exact=_by(k, ks, h_exact),
        h_latent=_by(k, ks, h_latent),
        h_vocabulary=_by(k, ks, own.h_vocab),
        mass=_by(k, ks, own.mass),
        skill=np.array([skilled(own, np.flatnonzero(k == one)) if one else 0.0 for one in ks]),
        error=_by(k, ks, np.abs(own.h_label - h_exact)),
        said=np.array([own.p[told][rows].mean() for rows in deciles]),
        owed=np.array([exact_p[rows].mean() for rows in deciles]),
        drawn=np.array([drawn[rows].mean() for rows in deciles]),
        answers=np.stack([np.exp(truth.log_p[:, 0]), own.p], 1),
        reader=as_read.mean(1),
        reader_interval=np.array([[span.low, span.high] for span in spans]),
        estimates=estimates,
        ticks={
            "k": tuple(ks),
            "reader": tuple(reader.name for reader in made),
            "answer": ("exact P(first)", "the model's P(first)"),
        },
        attainable=attainable,
        warnings=tuple(_doubts(own, told, attainable)),
        notes=("k = 0 enters no metric: there is nothing to weigh",) * (0 in ks),
    )


def _doubts(own: Reading, told: np.ndarray, attainable: float) -> Iterator[str]:
    if attainable <= LEAST_GAIN:
        yield f"{BAYES}: not measured, because on these prompts an exact model answers as one that counts; add larger k"
    mass = own.mass[told].mean()
    if mass < 0.5:
        yield f"the two labels have {mass:.1%} of the model's probability: what is renormalised is a small part of it"


def measure_belief(source: Sula, batch: Batch, own: Reading, untrained: Sequence[Reading], seed: int) -> Belief:
    """Exact entropy read from the residual stream of every depth, given k. Raises UserError for too few lead-ins."""
    truth = Truth(batch)
    rows = np.flatnonzero(truth.k >= 2)
    k, cluster, ks = truth.k[rows], truth.cluster[rows], list(source.ks)
    leads = np.array(batch.columns["lead"])[rows]
    fold = folds(leads if len(set(leads)) >= 5 else cluster, seed)

    def less_its_mean(x: np.ndarray) -> np.ndarray:
        found = np.array(x, dtype=np.float64)
        for one in np.unique(k):
            found[k == one] -= found[k == one].mean(0)
        return found

    h = label_entropy(truth.log_p)
    target = less_its_mean(np.stack([h, truth.log_p[:, 0] - truth.log_p[:, 1]], 1)[rows])

    def decoded(who: Reading) -> np.ndarray:
        """[depth 2] R2 of the exact entropy, and of the exact log-odds of the label named first."""
        return np.stack([read(less_its_mean(x[rows]), target, fold).r2 for x in who.residual])

    values, null = decoded(own), np.array([decoded(control) for control in untrained])
    last = less_its_mean(own.residual[-1][rows])
    span = decodability_interval(last, read(last, target[:, :1], fold), cluster)
    bands = [layer_band({UNTRAINED: null[..., i]}) for i in (0, 1)]

    def pc1(who: Reading) -> np.ndarray:
        z = standardised(who.value)
        left, size, _ = np.linalg.svd(z, full_matrices=False)
        score = left[:, 0] * size[0]
        return score * (np.sign(spearman(score, h)) or 1)

    scores, every = [pc1(who) for who in (own, *untrained)], np.arange(len(batch))

    def ordered(score: np.ndarray, chosen: np.ndarray) -> float:
        return abs(spearman(score[chosen], h[chosen], _indicators(truth.k[chosen])))

    same_k = correlation_interval(scores[0][rows], h[rows], cluster, _indicators(k))
    return Belief(
        decoded=values[:, 0],
        decoded_null=bands[0],
        odds=values[:, 1],
        odds_null=bands[1],
        k=np.array(ks, dtype=float),
        pc1=_by(truth.k, ks, scores[0] / scores[0].std()),
        estimates=_estimates(
            BELIEF,
            (
                (
                    "exact entropy decoded, last layer, given k",
                    lambda r2, _: float(r2),
                    (values[-1, 0], *null[:, -1, 0]),
                    rows,
                    span,
                ),
                ("|rho| of PC1 and exact entropy, given k", ordered, scores, rows, same_k),
                (
                    "|rho| of PC1 and k",
                    lambda score, chosen: abs(spearman(score[chosen], truth.k[chosen])),
                    scores,
                    every,
                    correlation_interval(scores[0], truth.k, truth.cluster),
                ),
            ),
            truth.cluster,
        ),
        ticks={"k": tuple(ks)},
    )


MOVED = ("remap", "permuted", "swap")
PUBLISHED = ("shuffled", "no words")


def measure_controls(
    batches: Mapping[str, Batch], own: Mapping[str, Reading], untrained: Sequence[Mapping[str, Reading]]
) -> Controls:
    """Movement under changes whose effect is known; batches and readings by condition."""
    truth = {name: Truth(batch) for name, batch in batches.items()}
    main = truth["main"]
    rows, cluster = np.flatnonzero(main.k >= 2), main.cluster

    def moved(who: Mapping[str, Reading], name: str) -> np.ndarray:
        """[prompt] |change of P(first)| beyond the exact change, after mirroring where labels are exchanged."""
        model, answer = who[name].p - who["main"].p, np.exp(truth[name].log_p[:, 0]) - np.exp(main.log_p[:, 0])
        if name == "swap":
            model = who[name].p - (1 - who["main"].p)
            answer = np.exp(truth[name].log_p[:, 0]) - (1 - np.exp(main.log_p[:, 0]))
        return np.abs(model - answer)

    def apart(who: Mapping[str, Reading], chosen: np.ndarray) -> float:
        fall = who["alternating"].h_label[chosen] - who["consistent"].h_label[chosen]
        right = label_entropy(truth["alternating"].log_p)[chosen] - label_entropy(truth["consistent"].log_p)[chosen]
        return float(fall.mean() / right.mean())

    def misses(name: str) -> list[float]:
        h = own[name].h_label[rows]
        return [float(np.abs(h - 1).mean()), float(np.abs(h - label_entropy(truth[name].log_p)[rows]).mean())]

    def movement(name: str) -> Statistic:
        return lambda who, kept: float(moved(who, name)[kept].mean())

    each = {name: moved(own, name) for name in MOVED}
    spans = [jackknife(np.mean, e[rows], cluster[rows]) for e in each.values()]
    return Controls(
        movement=np.array([e[rows].mean() for e in each.values()]),
        movement_interval=np.array([[span.low, span.high] for span in spans]),
        published=np.array([misses(name) for name in PUBLISHED]),
        estimates=_estimates(
            CONTROLS,
            (
                *((f"movement: {name}", movement(name), (own, *untrained), rows, None) for name in MOVED),
                ("consistent against alternating", apart, (own, *untrained), rows, None),
            ),
            cluster,
        ),
        ticks={"control": MOVED, "published": PUBLISHED, "target": ("1 bit", "observer's")},
    )
