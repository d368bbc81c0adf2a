"""Interchange interventions: patch the residual stream of a counterfactual sequence in where its evidence differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from llmgeom.model.resume import clean_pass
from llmgeom.probe import Batch, Posterior, Site, Subject, UserError
from llmgeom.probes.interventions.patching import BATCH_TOKENS, Location, PatchingRun, add, flat, nested, rescaled
from llmgeom.progress import tell
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import folds
from llmgeom.task import Categorical, Split, Task, seeded

RANDOM, AS_FAR = "random subspaces", "random subspaces, moved as far"
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

    task: Task
    x: Batch
    other: Batch
    at: Bool[Tensor, "sequence seq"]
    counted: Bool[Tensor, "sequence query"]

    @classmethod
    def of(cls, task: Task, n: int, seed: int, split: Split) -> Pairs:
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
        same = torch.stack([
            (pool[:, j] == evidence).reshape(POOL, -1).all(1)
            for j, evidence in zip(position.tolist(), self.evidence(self.x), strict=True)
        ])  # fmt: skip
        if not same.any(1).all():
            raise UserError(f"none of {POOL} sequences has the same evidence at the same position: no placebo")
        lots = torch.rand(same.shape, generator=seeded("swap/which donor", seed))
        chosen = pool[(lots * same).argmax(1)]
        kind, n = type(self.x.tokens), len(chosen)
        inputs = kind(chosen, torch.full((n,), self.task.length))
        return Batch(inputs, tuple(map(str, range(n))), {}), position


@dataclass(frozen=True, eq=False)
class InterchangeRun(PatchingRun):
    """Sequences x, patched where x' differs.

    With p and p' the exact answers to x and x', and q the model's answer to x, effects in bits are means over a
    sequence's counted queries:
        moved: KL(p' || q clean) - KL(p' || q patched), towards the counterfactual answer.
        lost: KL(p || q patched) - KL(p || q clean), away from the factual answer.
    """

    pairs: Pairs

    @property
    def at(self) -> Tensor:
        return self.pairs.at

    def _effects(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        (p, q), pairs = (self._answers(sites[0]) for sites in (clean, patched)), self.pairs
        moved = self._kl(pairs.other, p) - self._kl(pairs.other, q)
        return {"moved": self._mean(moved), "lost": self._mean(self._kl(pairs.x, q) - self._kl(pairs.x, p))}

    def _answers(self, log_probs: Tensor) -> Tensor:
        return self.pairs.task.answers.read(log_probs.double()).double().unflatten(0, (len(self.batch), -1))

    def _kl(self, batch: Batch, answers: Tensor) -> Tensor:
        """[sequence query] KL(exact answer || answers) in nats; the batch is x or x'."""
        form = self.pairs.task.answers
        return form.kl(form.exact(batch.exact.predictive).double(), answers)

    def _mean(self, by_query: Tensor) -> np.ndarray:
        counted = self.pairs.counted
        return bits((by_query.where(counted, 0.0).sum(1) / counted.sum(1)).numpy())

    def total_effect(self) -> np.ndarray:
        """[sequence] KL(p' || q(x)) - KL(p' || q(x')), bits: the effect of reading x' instead of x."""
        p, q = (
            self._answers(self.subject.capture(one, {Site.LOG_PROBS}, batch_tokens=self.batch_tokens).log_probs)
            for one in (self.pairs.x, self.pairs.other)
        )
        return self._mean(self._kl(self.pairs.other, p) - self._kl(self.pairs.other, q))


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


@dataclass(frozen=True, eq=False)
class Controls:
    """Patches that only the trained model gets in addition.

    Attributes:
        subspaces: number of random subspaces with the frame's dimensions.
        donors: donors of the placebo (`Pairs.donors`); None for no placebo.
        seed: seed of the subspaces.
    """

    subspaces: int = 0
    donors: tuple[Batch, Tensor] | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class InterchangeEffects:
    """Effects of the interchanges in one model, in bits.

    Attributes:
        total: [sequence] the total effect.
        moved, lost: kind of patch -> [layer draw sequence].
        dimensions: dimensions of the frame, by layer.
    """

    total: np.ndarray
    moved: Mapping[str, np.ndarray]
    lost: Mapping[str, np.ndarray]
    dimensions: tuple[int, ...]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The effects as arrays by name, for the cache."""
        return flat(vars(self))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> InterchangeEffects:
        """The effects from `arrays`."""
        effects = nested(arrays)
        return cls(**effects | {"dimensions": tuple(effects["dimensions"].tolist())})

    @classmethod
    def of(
        cls,
        subject: Subject,
        estimation: Pairs,
        evaluation: Pairs,
        layers: Sequence[int],
        controls: Controls = Controls(),
        *,
        batch_tokens: int = BATCH_TOKENS,
    ) -> InterchangeEffects:
        """Patch the input of one layer at a time, with frames from the estimation half."""

        def residuals(batch: Batch, at: Tensor) -> list[Tensor]:
            rows = replace(batch, query=at, posterior=None)
            capture = subject.capture(rows, {Site.RESIDUAL}, batch_tokens=batch_tokens)
            return [x.double() for x in capture.layers(Site.RESIDUAL)]

        def minus(others: list[Tensor], base: list[Tensor]) -> list[Tensor]:
            return [b - a for a, b in zip(base, others, strict=True)]

        base = residuals(evaluation.x, evaluation.at)
        whole = minus(residuals(evaluation.other, evaluation.at), base)
        estimated = minus(residuals(estimation.other, estimation.at), residuals(estimation.x, estimation.at))
        placebo: list[Tensor] = []
        if controls.donors:
            batch, position = controls.donors
            placebo = minus(residuals(batch, torch.arange(evaluation.task.length) == position[:, None]), base)
        before, after = (estimation.evidence(batch) for batch in (estimation.x, estimation.other))
        options: Any = {"batch_tokens": batch_tokens, "clean": clean_pass(subject, evaluation.x, batch_tokens)}
        by_layer: list[dict[str, dict[str, np.ndarray]]] = []
        dimensions = []
        for done, layer in enumerate(layers, 1):
            basis = evidence_frame(estimated[layer], before, after)
            steps = _steps(whole[layer], basis, placebo[layer : layer + 1], controls, layer)
            location: Location = ("residual", layer)
            run = InterchangeRun(subject, evaluation.x, (location,), evaluation, **options)
            by_layer.append(run.run_kinds({kind: [{location: add(x)} for x in of] for kind, of in steps.items()}))
            dimensions.append(len(basis))
            tell("layers", done, len(layers))
        moved, lost = (
            {kind: np.stack([layer[effect][kind] for layer in by_layer]) for kind in by_layer[0][effect]}
            for effect in ("moved", "lost")
        )
        total = InterchangeRun(subject, evaluation.x, (), evaluation, batch_tokens=batch_tokens).total_effect()
        return cls(total, moved, lost, tuple(dimensions))


def _steps(
    whole: Tensor, basis: Tensor, placebo: list[Tensor], controls: Controls, layer: int
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
    if controls.subspaces:
        random = random_subspaces(controls.subspaces, len(basis), whole.shape[1], (controls.seed, layer))
        kinds[RANDOM] = [whole @ subspace.T @ subspace for subspace in random]
        kinds[AS_FAR] = [rescaled(step, inside.norm(dim=1, keepdim=True)) for step in kinds[RANDOM]]
    return kinds
