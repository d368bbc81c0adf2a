"""Interchange interventions: patch the residual stream of a counterfactual sequence in where its evidence differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from llmgeom.claims import declared, layer_band
from llmgeom.flags import places
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.intervention import (
    Effects,
    Intervention,
    Location,
    Runner,
    add,
    copies_of,
    priced,
    rescaled,
)
from llmgeom.model.resume import clean_pass
from llmgeom.plan import Plan
from llmgeom.probe import (
    UNTRAINED,
    Batch,
    Capture,
    Model,
    Needs,
    Posterior,
    Probe,
    ProbeInput,
    Site,
    UserError,
    is_control,
)
from llmgeom.probes.interventions import hypothesis_frame
from llmgeom.probes.shared.nulls import compare, mean_of, ratio_of
from llmgeom.progress import tell
from llmgeom.provenance import CONTROLS, few_draws
from llmgeom.result import Labelled, Result, labelled, line
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS, mean_intervals
from llmgeom.stats.ridge_probe import folds
from llmgeom.world import Categorical, Split, World, seeded

PROBE, TOTAL, COPIES = "interchange", "total effect", "untrained controls"
DECLARED_LAYERS = {0: "at the embedding", 1: "after the first layer"}  # the inputs of layers 0 and 1
SUBSPACES = 39  # random controls
RANDOM, AS_FAR = RANDOMS = "random subspaces", "random subspaces, moved as far"
KINDS = ("whole", "frame", "rest", "placebo", *RANDOMS)
POOL = 4096  # sequences searched for donors of the placebo
DIFFER = 0.01  # least difference of a probability: closer answers cannot show which sequence was read


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sequences x and their counterfactuals x', which differ in one piece of evidence and in no other position.

    Attributes:
        x, other: x and x', each with its exact answers.
        at: [sequence seq] the positions at which they differ.
        counted: [sequence query] queries after (not at) a difference whose exact answers differ.
    """

    task: World
    x: Batch
    other: Batch
    at: Bool[Tensor, "sequence seq"]
    counted: Bool[Tensor, "sequence query"]

    @classmethod
    def of(cls, task: World, n: int, seed: int, split: Split) -> Pairs:
        """Pairs with a counted query, out of n sequences.

        Raises UserError: the task has no counterfactuals, or its answers are real numbers.
        """
        if not isinstance(task.answers, Categorical):
            raise UserError(f"{task.title} asks for real numbers; an interchange is measured on answers among tokens")
        x = task.sample(n, seed, split)
        inputs = x.tokens.data
        swapped = task.counterfactual(inputs, seeded("swap", seed))
        if swapped is None:
            raise UserError(f"{task.title} has no counterfactual evidence: give it a method `counterfactual`")
        exact = Posterior(task.log_predictive(swapped), outcomes=x.exact.outcomes)
        other = replace(x, inputs=type(x.tokens)(swapped, x.tokens.lengths), posterior=exact)
        at = (swapped != inputs).reshape(*inputs.shape[:2], -1).any(-1)
        query = list(task.query)
        differ = (x.exact.predictive.exp() - exact.predictive.exp()).abs().amax(-1) > DIFFER
        counted = differ & (at.cumsum(1)[:, query] > 0) & ~at[:, query]
        counted[:, task.trained_queries :] = False
        return cls(task, x, other, at, counted).take(counted.any(1).nonzero()[:, 0].tolist())

    def take(self, index: Sequence[int]) -> Pairs:
        """A subset of the pairs."""
        return Pairs(self.task, self.x.take(index), self.other.take(index), self.at[index], self.counted[index])

    def halves(self, seed: int) -> tuple[Pairs, Pairs]:
        """Estimation and evaluation half, by sequence. Raises UserError: fewer than 5 pairs in a half."""
        if len(self.x) < 2 * LEAST_CLUSTERS:
            raise UserError(
                f"{self.task.title}: other evidence changes a later answer in {len(self.x)} sequences, and "
                f"{2 * LEAST_CLUSTERS} are needed: give more --n, or another task"
            )
        half = folds(self.x.cluster, seed, 2)
        estimation, evaluation = (self.take(np.flatnonzero(half == part).tolist()) for part in (0, 1))
        return estimation, evaluation

    def evidence(self, batch: Batch) -> Tensor:
        """[row ...] inputs at the positions where x and x' differ."""
        return batch.tokens.data[self.at]

    def donors(self, seed: int, split: Split) -> tuple[Batch, Tensor]:
        """A donor for the placebo at every position that differs.

        Returns:
            [row] sequences with the same input as x at that position, and the positions [row].

        Raises:
            UserError: a pool of 4,096 sequences has none.
        """
        pool = self.task.draw_split(POOL, seeded("swap/donors", seed), split).inputs
        _, position = self.at.nonzero(as_tuple=True)
        same = torch.stack(
            [
                (pool[:, j] == evidence).reshape(POOL, -1).all(1)
                for j, evidence in zip(position.tolist(), self.evidence(self.x), strict=True)
            ]
        )
        if not same.any(1).all():
            raise UserError(f"none of {POOL} sequences has the same evidence at the same position: no placebo")
        lots = torch.rand(same.shape, generator=seeded("swap/which donor", seed))
        chosen = pool[(lots * same).argmax(1)]
        kind, n = type(self.x.tokens), len(chosen)
        inputs = kind(chosen, torch.full((n,), self.task.length))
        return Batch(inputs, tuple(map(str, range(n))), {}), position

    # ---- what a patch does ----

    def outcomes(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """Outcomes of patches of x, [sequence] bits, means over a sequence's counted queries.

        With p and p' the exact answers to x and x', and q the model's answer to x. moved: KL(p' || q clean) - KL(p' ||
        q patched), towards the counterfactual answer. lost: KL(p || q patched) - KL(p || q clean), away from the
        factual answer.
        """
        (p, q) = (self._answers(sites[0]) for sites in (clean, patched))
        moved = self._kl(self.other, p) - self._kl(self.other, q)
        return {"moved": self._mean(moved), "lost": self._mean(self._kl(self.x, q) - self._kl(self.x, p))}

    def total(self, subject: Model, batch_tokens: int) -> np.ndarray:
        """[sequence] KL(p' || q(x)) - KL(p' || q(x')), bits: the effect of reading x' instead of x."""
        p, q = (
            self._answers(subject.capture(one, {Site.LOG_PROBS}, batch_tokens=batch_tokens).log_probs)
            for one in (self.x, self.other)
        )
        return self._mean(self._kl(self.other, p) - self._kl(self.other, q))

    def _answers(self, log_probs: Tensor) -> Tensor:
        return self.task.answers.read(log_probs.double()).double().unflatten(0, (len(self.x), -1))

    def _kl(self, batch: Batch, answers: Tensor) -> Tensor:
        """[sequence query] KL(exact answer || answers) in nats; the batch is x or x'."""
        form = self.task.answers
        return form.kl(form.exact(batch.exact.predictive).double(), answers)

    def _mean(self, by_query: Tensor) -> np.ndarray:
        return bits((by_query.where(self.counted, 0.0).sum(1) / self.counted.sum(1)).numpy())


def evidence_frame(difference: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, "dimension coordinate"]:
    """An orthonormal basis of the span of the differences between the mean residuals of the pieces of evidence.

    With piece b instead of a, the difference is m_b - m_a plus noise. The means m are the least-squares solution, in
    which the position and the rest of x cancel; K pieces span K - 1 dimensions (derived here).

    Args:
        difference: [row coordinate] residual of x' minus residual of x at a position.
        before, after: [row ...] the evidence of x and of x' there.
    """
    pieces, which = torch.unique(torch.cat([before, after]), dim=0, return_inverse=True)
    old, new = (torch.nn.functional.one_hot(half, len(pieces)).double() for half in which.chunk(2))
    means = torch.linalg.pinv(new - old) @ difference
    _, size, basis = torch.linalg.svd(means, full_matrices=False)
    return basis[size > 1e-6 * size.max().clamp_min(1e-300)]


def random_subspaces(count: int, dimensions: int, width: int, seed: Sequence[int]) -> list[Tensor]:
    """Orthonormal bases of random subspaces, uniform over directions."""
    normal = np.random.default_rng([*seed, 4]).standard_normal((count, width, dimensions))
    return [torch.linalg.qr(torch.from_numpy(matrix))[0].T for matrix in normal]


def exchange(
    subject: Model,
    estimation: Pairs,
    evaluation: Pairs,
    layers: Sequence[int],
    subspaces: int = 0,
    donors: tuple[Batch, Tensor] | None = None,
    *,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Effects:
    """Patch the input of one layer at a time, with frames from the estimation half.

    Args:
        subspaces: number of random subspaces with the frame's dimensions.
        donors: donors of the placebo (`Pairs.donors`); None for no placebo.
        seed: of the subspaces.

    Returns:
        total [sequence]; "KIND/moved" and "KIND/lost" [layer draw sequence], of the kinds of `_steps`; dimensions
        [layer] of the frame.
    """

    def residuals(batch: Batch, at: Tensor) -> list[Tensor]:
        rows = replace(batch, query=at, posterior=None)
        capture = subject.capture(rows, {Site.RESIDUAL}, batch_tokens=batch_tokens)
        return [x.double() for x in capture.layers(Site.RESIDUAL)]

    base, other = (residuals(batch, evaluation.at) for batch in (evaluation.x, evaluation.other))
    fit, fit_other = (residuals(batch, estimation.at) for batch in (estimation.x, estimation.other))
    placebo: list[Tensor] = []
    if donors:
        batch, position = donors
        placebo = residuals(batch, torch.arange(evaluation.task.length) == position[:, None])
    before, after = (estimation.evidence(batch) for batch in (estimation.x, estimation.other))
    clean = clean_pass(subject, evaluation.x, batch_tokens)
    runner = Runner(subject, evaluation.x, evaluation.at, evaluation.outcomes, batch_tokens=batch_tokens, clean=clean)
    by_layer: list[Effects] = []
    for done, layer in enumerate(layers, 1):
        basis = evidence_frame(fit_other[layer] - fit[layer], before, after)
        given = [x[layer] - base[layer] for x in (other, placebo) if x]
        steps = _steps(given[0], basis, given[1:], subspaces, (seed, layer))
        at: Location = ("residual", layer)
        effects = runner.run([Intervention(kind, {at: add(x)}) for kind, of in steps.items() for x in of])
        by_layer.append(effects | {"dimensions": np.array(len(basis))})
        tell("layers", done, len(layers))
    total = evaluation.total(subject, batch_tokens)
    return {"total": total} | {name: np.stack([one[name] for one in by_layer]) for name in by_layer[0]}


def _steps(
    whole: Tensor, basis: Tensor, placebo: list[Tensor], subspaces: int, seed: Sequence[int]
) -> dict[str, list[Tensor]]:
    """[row coordinate] kind of patch -> what each of its draws adds to the residual of x where x' differs.

    Args:
        whole: residual of x' minus that of x.
        basis: the frame of the evidence, from the estimation half.
        placebo: residual of the donor minus that of x; empty without donors.
    """
    inside = whole @ basis.T @ basis
    kinds = {"whole": [whole], "frame": [inside], "rest": [whole - inside]}
    if placebo:
        kinds["placebo"] = placebo
    if subspaces:
        random = random_subspaces(subspaces, len(basis), whole.shape[1], seed)
        kinds[RANDOM] = [whole @ subspace.T @ subspace for subspace in random]
        kinds[AS_FAR] = [rescaled(step, inside) for step in kinds[RANDOM]]
    return kinds


# ---- results --------------------------------------------------------------------------------------------------------


def measure_interchange(
    trained: Effects, untrained: Sequence[Effects], layers: Sequence[int], clusters: np.ndarray
) -> Result:
    """The result of `exchange`, with estimates at the declared layers. Raises UserError: few sequences."""
    total, claims, warnings = trained["total"].mean(), declared(PROBE), []
    drawn: dict[str, Any] = {COPIES: [control["total"] for control in untrained]}
    estimates = [compare(claims[TOTAL], mean_of, trained["total"], clusters, drawn)]
    follows, moved = estimates[0].low > 0, {kind: trained[f"{kind}/moved"] for kind in KINDS}  # [layer draw sequence]
    bands = [layer_band({kind: moved[kind][i].mean(1)[:, None] for kind in RANDOMS}) for i in range(len(layers))]
    note = (
        f"the answers do not follow the evidence: the total effect is {total:.3g} bits, not above 0, and patched "
        "effects have no fractions of it"
    )
    if follows:
        shares = moved["whole"][:, 0].mean(1) / total
        reaching = [layer for layer, share in zip(layers, shares, strict=True) if share > 0.5]
        where = f"up to the input of layer {reaching[-1]}" if reaching else "at none of these layers"
        each = ", ".join(f"{x:.2f}" for x in shares)
        note = f"the whole patch has more than half of the total effect {where}: {each}"
        if layers[0] == 0 and abs(shares[0] - 1) > 0.01:
            warnings.append(
                f"at the embedding the whole patch has {shares[0]:.3f} of the total effect; there it is x' itself and "
                "should have all of it. This model reads its inputs elsewhere, too, and no layer's patch can be trusted"
            )
    for i, layer in enumerate(layers):
        if layer not in DECLARED_LAYERS:
            continue
        claim, effect = claims[f"frame {DECLARED_LAYERS[layer]}"], moved["frame"][i, 0]
        if claim.claim and total <= claim.effect:
            warnings.append(
                f"the total effect is {total:.3g} bits, too little for '{claim.name}' to be tested at "
                f"{claim.effect:g} bits: it is a measurement and no claim"
            )
            claim = replace(claim, claim="")
        drawn = {kind: moved[kind][i] for kind in RANDOMS}
        copies = {COPIES: [control["frame/moved"][i, 0] for control in untrained]}
        estimates.append(compare(claim, mean_of, effect, clusters, drawn | copies))
        if follows:
            claim = claims[f"frame {DECLARED_LAYERS[layer]}, over the total effect"]
            shares = {kind: [(draw, trained["total"]) for draw in draws] for kind, draws in drawn.items()}
            estimates.append(compare(claim, ratio_of, (effect, trained["total"]), clusters, shares))

    def number(values: np.ndarray, meaning: str, unit: str = "bits") -> Labelled | None:
        return labelled(values, "layer", unit, meaning)

    def curve(kind: str, meaning: str, **more: Any) -> dict[str, Labelled | None]:
        by_layer = moved[kind][:, 0]
        more["interval"] = "sequences", mean_intervals(by_layer, clusters)
        return line(kind, by_layer.mean(1), "layer", "bits", f"effect of the {meaning}", **more)

    # Every layer has draws.
    of_frame = "band of random subspaces, the higher kind", np.concatenate([one for one in bands if one is not None])
    lost = trained["placebo/lost"][:, 0].mean(1)
    arrays: dict[str, Labelled | None] = {
        **curve("whole", "whole patch", beside="total"),
        "total": number(np.full(len(layers), total), "total effect, the same for every layer"),
        **curve("frame", "patch in the frame", null=of_frame),
        "random": number(moved[RANDOM].mean((1, 2)), "effect of patches in random subspaces, mean over draws"),
        "as_far": number(moved[AS_FAR].mean((1, 2)), "the same, moved as far as the frame, mean over draws"),
        **curve("rest", "patch outside the frame"),
        **curve("placebo", "placebo"),
        "placebo_lost": number(lost, "rise of KL(p || q) by the placebo, p the answer to x"),
        "dimensions": number(trained["dimensions"].astype(float), "of the frame", "dimensions"),
    }
    return Result.of(
        "Interchange of evidence",
        arrays,
        __name__,
        estimates=tuple(estimates),
        ticks={"layer": tuple(layers)},
        warnings=tuple(warnings),
        notes=(note,),
    )


# ---- the probe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InterchangeProbe:
    """Interchange interventions on sequences of a task and their counterfactuals, at one layer's input at a time.

    Attributes:
        n: number of sequences drawn; the probe uses those in which other evidence changes a later answer.
        layers: layers whose inputs are patched.
        controls: number of random subspaces; like the placebo, only in the trained model.
        seed: seed of sequences, donors, halves and subspaces.
    """

    task: World
    n: int
    layers: tuple[int, ...]
    controls: int
    seed: int
    batch_tokens: int

    @cached_property
    def halves(self) -> tuple[Pairs, Pairs]:
        """Estimation and evaluation half. Raises UserError as `Pairs.of` and `Pairs.halves`."""
        return Pairs.of(self.task, self.n, self.seed, self.task.test_split).halves(self.seed)

    @property
    def NEEDS(self) -> Needs:
        options: dict[str, Any] = {"seed": self.seed, "batch_tokens": self.batch_tokens}

        def examine(subject: Model, _: Mapping[str, Capture]) -> Effects:
            if is_control(subject):
                return exchange(subject, *self.halves, self.layers, **options)
            donors = self.halves[1].donors(self.seed, self.task.test_split)
            return exchange(subject, *self.halves, self.layers, self.controls, donors, **options)

        return Needs(controls=frozenset({UNTRAINED}), examine=examine)

    def priced(self, subject: Model, batch: Batch, control: bool = False) -> float:
        """Tokens of whole passes that the patches of one model take."""
        lengths, patches = batch.tokens.lengths, 3 if control else 4 + 2 * self.controls
        after = int((lengths - self.halves[1].at.int().argmax(1)).sum())
        # Residuals of both halves, x and x', donors, the clean pass and totals.
        read = (8 - control) * int(lengths.sum())
        every = [layer for layer in self.layers for _ in range(patches)]
        return read + priced(every, len(subject.blocks), after, copies_of(batch, subject))

    def measure(self, data: ProbeInput) -> Result:
        """Total and patched effects at every layer, with all controls."""
        clusters = np.array(self.halves[1].x.cluster)
        return measure_interchange(data.observations, data.control_observations, self.layers, clusters)


def question(
    subject: Model,
    task: World,
    *,
    n: int = 200,
    layers: str | Sequence[int] | None = None,
    controls: int = SUBSPACES,
    nulls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    warnings: Sequence[str] = (),
) -> Plan:
    """The question of interchange interventions in a model, on a task.

    Args:
        layers: layers whose inputs are patched, one at a time; all by default.
        controls: number of random subspaces.
        nulls: untrained controls; None for as many as the claims need, at most 20.

    Raises:
        UserError: a layer that does not exist; a task without counterfactuals; fewer than 5 sequences in a half whose
            answers change.
    """
    chosen = places("--layers", layers, len(subject.blocks))
    probe = InterchangeProbe(task, n, chosen, controls, seed, batch_tokens)
    estimation, evaluation = probe.halves
    patched = {"layers": list(chosen), "controls": controls, "positions": float(evaluation.at.sum(1).double().mean())}
    probes: dict[str, Probe] = {PROBE: probe, hypothesis_frame.PROBE: hypothesis_frame}
    facts, notes = {"estimated on": len(estimation.x), "interchange": patched}, (*warnings, *few_draws(controls))
    return Plan.of(subject, evaluation.x, probes, nulls, seed, batch_tokens, facts=facts, notes=notes)
