"""Where is evidence held? It is exchanged there for other evidence, and the answer held against the exact one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from llmgeom import claims
from llmgeom.batch import Batch, Posterior
from llmgeom.claims import declared, layer_band
from llmgeom.commands import config
from llmgeom.commands.grade import Told
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions.axis import rescaled
from llmgeom.probes.interventions.patching import FEW, Copy, Packed, Place, beside
from llmgeom.probes.interventions.replacement import moved_by
from llmgeom.probes.interventions.splits import Split
from llmgeom.progress import Progress
from llmgeom.provenance import took
from llmgeom.record import Record
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.run import CONTROLS, few_draws
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS, jackknife
from llmgeom.stats.ridge_probe import folds
from llmgeom.task import Categorical, Task, seeded
from llmgeom.task import Split as Of

SWAP = "swap"
WAY = "way of the evidence"
PLACES = {0: "at the embedding", 1: "after the first layer"}  # declared before: the inputs of layers 0 and 1
RANDOM, AS_FAR, UNTRAINED = "random subspaces", "random subspaces, moved as far", "untrained controls"
POOL = 4096  # sequences among which donors of the placebo are looked for
DIFFER = 0.01  # of a probability: answers that differ by less cannot tell which of the two sequences was read


# ---- the pairs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sequences x and, position by position the same but for one piece of evidence, x'.

    x, other   with the exact answers p to x, and p' to x'.
    at         [sequence seq] the positions at which they differ.
    counted    [sequence query] the queries after a difference, not at one, whose exact answers differ.
    """

    task: Task
    x: Batch
    other: Batch
    at: Bool[Tensor, "sequence seq"]
    counted: Bool[Tensor, "sequence query"]

    @classmethod
    def of(cls, task: Task, n: int, seed: int, split: Of) -> Pairs:
        """Of n sequences those with a query that counts. Raises UserError: a task that does not say what other evidence
        there might be, or asks for real numbers."""
        if not isinstance(task.answers, Categorical):
            raise UserError(f"{task.title} asks for real numbers; a swap is measured on answers among tokens")
        x = task.sample(n, seed, split)
        inputs = x.tokens.data
        swapped = task.counterfactual(inputs, seeded("swap", seed))
        if swapped is None:
            raise UserError(f"{task.title} does not say which other evidence there might have been: give it `swapped`")
        exact = Posterior(task.log_predictive(swapped), outcomes=x.exact.outcomes)
        other = replace(x, inputs=type(x.tokens)(swapped, x.tokens.lengths), posterior=exact)
        at = (swapped != inputs).reshape(*inputs.shape[:2], -1).any(-1)
        query = list(task.query)
        differ = (x.exact.predictive.exp() - exact.predictive.exp()).abs().amax(-1) > DIFFER
        counted = differ & (at.cumsum(1)[:, query] > 0) & ~at[:, query]
        counted[:, task.trained_queries :] = False
        return cls(task, x, other, at, counted).take(counted.any(1).nonzero()[:, 0].tolist())

    def take(self, index: Sequence[int]) -> Pairs:
        return Pairs(self.task, self.x.take(index), self.other.take(index), self.at[index], self.counted[index])

    def shown(self, batch: Batch) -> Tensor:
        """[row ...] what the model reads at the positions where x and x' differ."""
        return batch.tokens.data[self.at]

    def donors(self, seed: int, split: Of) -> tuple[Batch, Tensor]:
        """For every such position of x a sequence with the same input there, [row], and the position, [row].

        Raises UserError where one is not found.
        """
        pool = self.task.draw_split(POOL, seeded("swap/donors", seed), split).inputs
        _, position = self.at.nonzero(as_tuple=True)
        same = torch.stack([
            (pool[:, j] == mine).reshape(POOL, -1).all(1)
            for j, mine in zip(position.tolist(), self.shown(self.x), strict=True)
        ])  # fmt: skip
        if not same.any(1).all():
            raise UserError(f"none of {POOL} sequences holds the same evidence at the same position: no placebo")
        lots = torch.rand(same.shape, generator=seeded("swap/which donor", seed))
        chosen = pool[(lots * same).argmax(1)]
        kind, n = type(self.x.tokens), len(chosen)
        inputs = kind(chosen, torch.full((n,), self.task.length))
        return Batch(inputs, tuple(map(str, range(n))), {}), position


@dataclass(frozen=True, eq=False)
class Exchange(Packed):
    """x, edited where x' differs.

    Effects, bits, means over a sequence's queries that count: moved, KL(p' || q_clean) - KL(p' || q_edited), towards
    the counterfactual; lost, KL(p || q_edited) - KL(p || q_clean), away from the factual answer.
    """

    pairs: Pairs
    batch_tokens: int = BATCH_TOKENS

    @property
    def at(self) -> Tensor:
        return self.pairs.at

    def _effects(self, clean: Sequence[Tensor], edited: Sequence[Tensor]) -> dict[str, np.ndarray]:
        (p, q), pairs = (self.form(seen[0]) for seen in (clean, edited)), self.pairs
        moved = self.kl(pairs.other, p) - self.kl(pairs.other, q)
        return {"moved": self.mean(moved), "lost": self.mean(self.kl(pairs.x, q) - self.kl(pairs.x, p))}

    def form(self, log_probs: Tensor) -> Tensor:
        return self.pairs.task.answers.read(log_probs.double()).double().unflatten(0, (len(self.batch), -1))

    def kl(self, of: Batch, form: Tensor) -> Tensor:
        """[sequence query] nats, of the exact answer to x or to x'."""
        answers = self.pairs.task.answers
        return answers.kl(answers.exact(of.exact.predictive).double(), form)

    def mean(self, each: Tensor) -> np.ndarray:
        counted = self.pairs.counted
        return bits((each.where(counted, 0.0).sum(1) / counted.sum(1)).numpy())

    def way(self) -> np.ndarray:
        """[sequence] KL(p' || q(x)) - KL(p' || q(x')), what there is to move."""
        p, q = (
            self.form(self.subject.capture(one, {Site.LOG_PROBS}, batch_tokens=self.batch_tokens).log_probs)
            for one in (self.pairs.x, self.pairs.other)
        )
        return self.mean(self.kl(self.pairs.other, p) - self.kl(self.pairs.other, q))


# ---- what is exchanged ----------------------------------------------------------------------------------------------


def frame(difference: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, "dimension coordinate"]:
    """An orthonormal basis of the span of the differences between the mean residuals of the pieces of evidence.

    difference [row coordinate] = residual of x' - residual of x at a position, before and after [row ...] what stands
    there. With piece b in the place of a it is m_b - m_a and noise: the m are its least-squares solution, which the
    position and the rest of x do not enter, and K pieces span K - 1 dimensions (derived here).
    """
    pieces, which = torch.unique(torch.cat([before, after]), dim=0, return_inverse=True)
    one, other = (torch.nn.functional.one_hot(each, len(pieces)).double() for each in which.chunk(2))
    means = torch.linalg.pinv(other - one) @ difference
    _, size, basis = torch.linalg.svd(means, full_matrices=False)
    return basis[size > 1e-6 * size.max().clamp_min(1e-300)]


def subspaces(count: int, dimensions: int, width: int, seed: Sequence[int]) -> list[Tensor]:
    """Orthonormal bases of random subspaces, evenly over directions."""
    drawn = np.random.default_rng([*seed, 4]).standard_normal((count, width, dimensions))
    return [torch.linalg.qr(torch.from_numpy(one))[0].T for one in drawn]


@dataclass(frozen=True, eq=False)
class Moved:
    """What the swaps did in one model, bits: way [sequence]; by kind, moved and lost [layer draw sequence]."""

    way: np.ndarray
    moved: Mapping[str, np.ndarray]
    lost: Mapping[str, np.ndarray]
    dimensions: tuple[int, ...]

    @classmethod
    def of(
        cls,
        subject: Subject,
        fit: Pairs,
        held: Pairs,
        layers: Sequence[int],
        *,
        controls: int = 0,
        donors: tuple[Batch, Tensor] | None = None,
        seed: int = 0,
        batch_tokens: int = BATCH_TOKENS,
        tell: Progress | None = None,
    ) -> Moved:
        """Frames from `fit`, effects on `held`, one layer at a time."""

        def residuals(batch: Batch, at: Tensor) -> list[Tensor]:
            asked = replace(batch, query=at, posterior=None)
            seen = subject.capture(asked, {Site.RESIDUAL}, batch_tokens=batch_tokens)
            return [x.double() for x in seen.layers(Site.RESIDUAL)]

        own = residuals(held.x, held.at)
        given = [b - a for a, b in zip(own, residuals(held.other, held.at), strict=True)]
        found = [b - a for a, b in zip(*(residuals(one, fit.at) for one in (fit.x, fit.other)), strict=True)]
        if donors:
            batch, position = donors
            theirs = residuals(batch, torch.arange(held.task.length) == position[:, None])
        rows: list[dict[str, dict[str, np.ndarray]]] = []
        dimensions = []
        for done, layer in enumerate(layers, 1):
            whole = given[layer]
            basis = frame(found[layer], fit.shown(fit.x), fit.shown(fit.other))
            inside = whole @ basis.T @ basis
            kinds = {"whole": [whole], "frame": [inside], "rest": [whole - inside]}
            if donors:
                kinds["placebo"] = [theirs[layer] - own[layer]]
            if controls:
                random = subspaces(controls, len(basis), whole.shape[1], (seed, layer))
                kinds[RANDOM] = [whole @ one.T @ one for one in random]
                length = inside.norm(dim=1, keepdim=True)
                kinds[AS_FAR] = [rescaled(one, length) for one in kinds[RANDOM]]
            place: Place = ("residual", layer)
            copies: list[Copy] = [{place: moved_by(each)} for some in kinds.values() for each in some]
            bench = Exchange(subject, held.x, (place,), held, batch_tokens)
            ends = np.cumsum([len(some) for some in kinds.values()])[:-1]
            made = bench.run(copies)
            rows.append({effect: dict(zip(kinds, np.split(each, ends), strict=True)) for effect, each in made.items()})
            dimensions.append(len(basis))
            if tell:
                tell("layers", done, len(layers))
        way = Exchange(subject, held.x, (), held, batch_tokens).way()
        moved, lost = (
            {kind: np.stack([row[of][kind] for row in rows]) for kind in rows[0][of]} for of in ("moved", "lost")
        )
        return cls(way, moved, lost, tuple(dimensions))


# ---- results --------------------------------------------------------------------------------------------------------


def _curve(name: str, **more: str) -> Figure:
    return Figure("curve", interval=f"{name}_interval", **more)


@dataclass(frozen=True, kw_only=True)
class Swap(Result):
    """How far the answer follows evidence that is exchanged inside the model."""

    TITLE: ClassVar[str] = "Swap of evidence"
    MEANING: ClassVar[str] = (
        "Where a piece of evidence was read, the residual stream is given what it would have held had another piece "
        "been read, and the later answers are held against the exact posterior of that other sequence. As long as the "
        "evidence is still where it was shown, they go the whole way; once it was moved on, they do not go at all."
    )
    COMPUTED: ClassVar[str] = (
        "x' is x with one piece of evidence another, p' its exact answer, q the model's. Moved: KL(p' || q(x)) - "
        "KL(p' || q(x edited)), bits, mean over the later queries where the exact answer differs (some probability by "
        "more than .01), then over sequences. The way: KL(p' || q(x)) - KL(p' || q(x')). Whole: the input of one layer "
        "at those positions is that of x'. Frame: only what of the difference lies in the span of the mean differences "
        "between pieces of evidence, found on the other half of the sequences; rest: all but that. Intervals are "
        "jackknifed over sequences."
    )
    NULL: ClassVar[str] = (
        "Random subspaces of the frame's dimension, as they are and moved exactly as far as the frame moves; the model "
        "re-initialised, its own frame found. Placebo: what another sequence holds there that shows the same."
    )
    FAILURE_MODES: ClassVar[str] = (
        "At the input of layer 0 a whole swap is x' itself and goes the whole way by construction, and so does the "
        "frame where evidence is one token; what is measured there is what random subspaces do. Where the model was "
        "sure of the old answer, an edit that merely destroys it comes nearer to p', too: hence the control moved as "
        "far. A swap that does nothing in a later layer tells that the evidence is read elsewhere by then, not where. "
        "A placebo brings the donor's context: where a position holds more than what it shows, it moves the answer."
    )

    whole: np.ndarray = quantity("layer", "bits", "moved by the whole swap", _curve("whole", beside="way"))
    whole_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    way: np.ndarray = quantity("layer", "bits", "what there is to move, the same for every layer")
    frame: np.ndarray = quantity("layer", "bits", "moved inside the frame", _curve("frame", band="frame_null"))
    frame_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    frame_null: np.ndarray = quantity("layer bound", "bits", "band of random subspaces, the higher kind")
    random: np.ndarray = quantity("layer", "bits", "moved inside random subspaces, mean over draws")
    as_far: np.ndarray = quantity("layer", "bits", "moved inside random subspaces as far as the frame, mean over draws")
    rest: np.ndarray = quantity("layer", "bits", "moved outside the frame", _curve("rest"))
    rest_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    placebo: np.ndarray = quantity("layer", "bits", "moved by the placebo", _curve("placebo"))
    placebo_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    placebo_lost: np.ndarray = quantity("layer", "bits", "rise of KL(p || q) by the placebo, p the answer to x")
    dimensions: np.ndarray = quantity("layer", "dimensions", "of the frame")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def measure(own: Moved, untrained: Sequence[Moved], layers: Sequence[int], clusters: np.ndarray) -> Swap:
    """Raises UserError: fewer than 5 sequences."""
    way, layers = own.way.mean(), tuple(layers)
    spans = {
        kind: np.array([(s.low, s.high) for s in (jackknife(np.mean, one[0], clusters) for one in own.moved[kind])])
        for kind in ("whole", "frame", "rest", "placebo")
    }
    whole_way = jackknife(np.mean, own.way, clusters)
    found = [
        beside(declared(SWAP)[WAY], way, whole_way, {UNTRAINED: np.array([t.way.mean() for t in untrained])}, clusters)
    ]
    warnings, rows = [], np.arange(len(clusters))
    if follows := whole_way.low > 0:
        reached = own.moved["whole"][:, 0].mean(1) / way
        last = [layer for layer, share in zip(layers, reached, strict=True) if share > 0.5]
        where = f"up to the input of layer {last[-1]}" if last else "at no layer asked"
        note = f"the whole swap goes more than half of the way {where}: {', '.join(f'{x:.2f}' for x in reached)}"
        if layers[0] == 0 and abs(reached[0] - 1) > 0.01:
            warnings.append(
                f"at the embedding the whole swap goes {reached[0]:.3f} of the way, where it is x' itself and should "
                "go 1: this model reads its inputs elsewhere, too, and no layer's swap can be trusted"
            )
    else:
        note = f"the answers do not follow the evidence: the way is {way:.3g} bits, not above 0, and has no fractions"
    for i, layer in enumerate(layers):
        if layer not in PLACES:
            continue
        name, mine = f"frame swap {PLACES[layer]}", own.moved["frame"][i, 0]
        null = {kind: own.moved[kind][i].mean(1) for kind in (RANDOM, AS_FAR)}
        theirs = {UNTRAINED: np.array([control.moved["frame"][i, 0].mean() for control in untrained])}
        claim = declared(SWAP)[name]
        if claim.claim and way <= claim.effect:
            claim = replace(claim, claim="")
            warnings.append(
                f"the way of the evidence is {way:.3g} bits, too little for '{name}' to be decided by {claim.effect:g} "
                "bits: it is a measurement and no claim"
            )
        found.append(beside(claim, mine.mean(), jackknife(np.mean, mine, clusters), null | theirs, clusters))
        if follows:
            share = jackknife(partial(_of_the_way, mine, own.way), rows, clusters)
            claim = declared(SWAP)[f"{name}, of the way"]
            found.append(beside(claim, mine.mean() / way, share, {k: v / way for k, v in null.items()}, clusters))
    values = {kind: own.moved[kind][:, 0].mean(1) for kind in spans}
    bands = [layer_band({k: own.moved[k][i].mean(1)[:, None] for k in (RANDOM, AS_FAR)}) for i in range(len(layers))]
    return Swap(
        **values,
        **{f"{kind}_interval": span for kind, span in spans.items()},
        way=np.full(len(layers), way),
        frame_null=np.concatenate(bands),
        random=own.moved[RANDOM].mean((1, 2)),
        as_far=own.moved[AS_FAR].mean((1, 2)),
        placebo_lost=own.lost["placebo"][:, 0].mean(1),
        dimensions=np.array(own.dimensions, dtype=float),
        estimates=tuple(found),
        ticks={"layer": layers},
        warnings=tuple(warnings),
        notes=(note,),
    )


def _of_the_way(moved: np.ndarray, way: np.ndarray, rows: np.ndarray) -> float:
    return moved[rows].mean() / way[rows].mean()


# ---- the run --------------------------------------------------------------------------------------------------------


def examine(
    subject: Subject,
    task: Task,
    *,
    n: int = 200,
    layers: Sequence[int] | None = None,
    controls: int = FEW,
    nulls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    warnings: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """The swap test of a model on a task. layers: whose inputs are edited, one at a time; all by default.

    UserError: a layer that does not exist; a task without counterfactuals (`Pairs.of`); fewer than 5 sequences in
    a half on which the answer changes.
    """
    started, last = time.time(), len(subject.blocks) - 1
    chosen = tuple(sorted(set(range(last + 1) if layers is None else layers)))
    if wrong := [layer for layer in chosen if not 0 <= layer <= last]:
        raise UserError(f"--layers {wrong[0]}: {subject.name} has layers 0 to {last}; nothing was swapped")
    split = task.test_split
    pairs = Pairs.of(task, n, seed, split)
    if len(pairs.x) < 2 * LEAST_CLUSTERS:
        raise UserError(
            f"{task.title}: in {len(pairs.x)} of {n} sequences other evidence changes a later answer; "
            f"{2 * LEAST_CLUSTERS} are needed: give more --n, or another task"
        )
    half = folds(pairs.x.cluster, seed, 2)
    fit, held = (pairs.take(np.flatnonzero(half == one).tolist()) for one in (0, 1))
    moved = partial(Moved.of, fit=fit, held=held, layers=chosen, seed=seed, batch_tokens=batch_tokens)
    own = moved(subject, controls=controls, donors=held.donors(seed, split), tell=progress)
    untrained = []
    for i in range(nulls):
        untrained.append(moved(subject.untrained(seed + 1 + i)))
        if progress:
            progress(UNTRAINED, i + 1, nulls)
    made = measure(own, untrained, chosen, np.array(held.x.cluster)).lowered()
    nats = subject.capture(held.x, {Site.ENTROPY}, batch_tokens=batch_tokens).entropy
    entropy = bits(nats.double().numpy()).reshape(len(held.x), -1).mean(1)
    beginning = Split(subject, held.x, pairs.x, fit.x, held.x, seed, batch_tokens)
    swapped = {"layers": list(chosen), "controls": controls, "positions": float(held.at.sum(1).double().mean())}
    return replace(
        beginning.recorded(entropy, claims.judge({SWAP: made}), {}, nulls, {"swap": swapped, **(facts or {})}),
        warnings=(*warnings, *few_draws(nulls), *few_draws(controls)),
        run=took(started),
    )


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom patch` is asked for."""

    VERB: ClassVar[str] = "patch"

    task: str | None = flag(None, "NAME or NAME:field=value,... [default: the task the model was trained on]")
    n: int = flag(200, "Sequences; half of them estimate the subspace that is patched.", least=20)
    layers: str = flag("all", "Patch the input of these layers, one at a time: all, or e.g. 0,1.")
    controls: int = flag(39, "Random subspaces.", least=1)
    nulls: int = flag(20, "Untrained controls.", least=1)
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes sequences, donors, halves and controls.", least=0, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-patch-TASK-HASH]", group="Output")


@config.command(RunConfig, VerdictOutput, examples=["llmgeom patch --model runs/bijection --layers 0,1"])
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Exchange evidence inside a model, and compare its answer with the exact counterfactual.

    An interchange intervention: activations of one sequence replace those of another.
    """
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom swap`: check, load, examine, save the record and its page; (folder, record)."""
    layers = None
    if asked.layers != "all":
        layers = config.numbers("--layers", asked.layers, "all", "0,1")
    located = asked.locate()
    told = Told.of(located.path)
    task = told.asked(asked.task, asked.model)
    spec = asked.spec(located)
    what = f"patch-{type(task).__name__.lower()}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what, spec)
    config.check_folder(out, spec)
    record = examine(
        subject or asked.load(located),
        task,
        n=asked.n,
        layers=layers,
        controls=asked.controls,
        nulls=asked.nulls,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens,
        progress=progress,
        warnings=tuple(told.doubts(task)),
        facts={"spec": spec, "command": asked.command()},
    )
    config.keep(record, out)
    return out, record
