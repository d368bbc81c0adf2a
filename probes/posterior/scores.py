"""Posterior scores: distance of answers from the exact posterior, for a model and for predictors that do not infer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from llmgeom.answers import corrupt_predictive, corrupt_targets
from llmgeom.probe import Batch, Posterior, UserError
from llmgeom.probes.length_generalisation import AS_EXACT
from llmgeom.stats import information
from llmgeom.stats.information import bits
from llmgeom.world import Categorical, Split, World, seeded, uniform

BINS = 10
LAST = "memoryless"  # the trivial predictor that uses the last observation alone
ROWS_AT_ONCE = 128  # sequences whose total variation is computed together


@dataclass(frozen=True)
class Scores:
    """Scores of one predictor's answers, [sequence query ...] in bits.

    Attributes:
        kl: KL(exact || predictor) over the whole vocabulary; probability on tokens that are no outcome raises it.
        entropy: entropy of the predictor's answer, with all tokens that are no outcome as one outcome.
        exact: entropy of the exact answer.
    """

    kl: np.ndarray
    entropy: np.ndarray
    exact: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """[sequence query] H_predictor - H_exact."""
        return self.entropy - self.exact

    @property
    def mae_abs(self) -> float:
        """Mean over sequences and queries of |H_predictor - H_exact|, bits."""
        return float(np.abs(self.gap).mean())

    @property
    def mae_mean(self) -> float:
        """Mean over queries of |mean H_predictor - mean H_exact|, bits: at most mae_abs."""
        return float(np.abs(self.gap.mean(0)).mean())

    def at(self, queries: slice) -> Self:
        """The scores of a subset of queries."""
        return replace(self, **{f.name: getattr(self, f.name)[:, queries] for f in fields(self)})


@dataclass(frozen=True)
class CategoricalScores(Scores):
    """Scores of answers among tokens.

    Attributes:
        right: whether the likeliest outcome (the first of equals) is the drawn one.
        leaked: probability of all tokens that are no outcome.
        tally: [sequence query bin 4] sums over outcomes, by tenths of their predicted probability: predicted
            probability, exact probability, number drawn, number of outcomes.
    """

    right: np.ndarray
    leaked: np.ndarray
    tally: np.ndarray


@dataclass(frozen=True)
class GaussianScores(Scores):
    """Scores of answers that are real numbers; residual is (drawn - predicted mean) / predicted standard deviation."""

    residual: np.ndarray


def score(task: World, batch: Batch, form: Tensor) -> Scores:
    """Scores of answers in the task's form [sequence query form], from the batch's exact answers and targets."""
    answers, exact = task.answers, task.answers.exact(batch.exact.predictive)
    form, target = form.double(), batch.target
    assert target is not None, "a task draws a target at every query"
    nats = (answers.kl(exact, form), answers.entropy(form), answers.entropy(exact))
    kl, entropy, entropy_exact = (bits(x.numpy()) for x in nats)
    if not isinstance(answers, Categorical):
        residual = (target - form[..., 0]) * (-form[..., 1] / 2).exp()
        return GaussianScores(kl, entropy, entropy_exact, residual.numpy())
    outcomes = len(answers.tokens)
    right = form[..., :outcomes].argmax(-1) == target
    leaked, predicted = form[..., outcomes].exp(), form[..., :outcomes].exp()
    drawn = torch.nn.functional.one_hot(target, outcomes).double()
    place, empty = (predicted * BINS).long().clamp(max=BINS - 1), torch.zeros(*target.shape, BINS, dtype=torch.float64)
    columns = (predicted, exact[..., :outcomes].exp(), drawn, torch.ones_like(predicted))
    tally = torch.stack([empty.scatter_add(-1, place, x) for x in columns], -1)
    return CategoricalScores(kl, entropy, entropy_exact, right.double().numpy(), leaked.numpy(), tally.numpy())


@dataclass(frozen=True)
class PosteriorScores:
    """Scores of a model on one batch, with those of the exact answer and of trivial predictors.

    Attributes:
        exact: the scores of the exact answer (its accuracy and calibration).
        tv: [sequence query] total variation between the model's and the exact answer.
        trivial: name -> scores of predictors that do not infer.
        excluded: trivial predictors that exclude a possible outcome, so that their divergence is infinite.
        trained: number of first queries within the horizon; means are over these.
    """

    batch: Batch
    own: Scores
    exact: Scores
    tv: np.ndarray
    trivial: Mapping[str, Scores]
    excluded: tuple[str, ...]
    trained: int

    @property
    def within(self) -> slice:
        """The queries within the horizon."""
        return slice(self.trained)

    @property
    def kl(self) -> float:
        """Mean KL(exact || model), bits."""
        return float(self.own.kl[:, self.within].mean())

    @property
    def mae_abs(self) -> float:
        """That of the model within the horizon."""
        return self.own.at(self.within).mae_abs

    @property
    def mae_mean(self) -> float:
        """That of the model within the horizon."""
        return self.own.at(self.within).mae_mean

    @property
    def as_exact(self) -> tuple[str, ...]:
        """Trivial predictors that equal the exact answer here."""
        return as_exact(self.trivial, self.trained)

    @property
    def best(self) -> str:
        """The trivial predictor with the least KL among those that are not exact.

        Raises:
            UserError: the position alone gives the exact answer. Skill over those that are left, such as the uniform
                one, would say that a model infers where there is nothing to infer.
        """
        kl = {name: x.kl[:, self.within].mean() for name, x in self.trivial.items() if name not in self.as_exact}
        if not kl or ("position" not in kl and "position" in self.trivial):
            name = self.batch.source["name"]
            raise UserError(f"{name}: the position alone gives the answer; nothing is left to infer")
        return min(kl, key=kl.__getitem__)

    @property
    def skill(self) -> float:
        """1 - KL(exact || model) / KL(exact || best trivial predictor)."""
        model, trivial = (scores.kl[:, self.within].ravel() for scores in (self.own, self.trivial[self.best]))
        return information.skill(model, trivial)


def as_exact(trivial: Mapping[str, Scores], trained: int) -> tuple[str, ...]:
    """Names of the predictors that equal the exact answer at the first `trained` queries."""
    return tuple(name for name, x in trivial.items() if x.kl[:, :trained].mean() < AS_EXACT)


def evaluation_batch(task: World, n: int, seed: int, split: Split, corrupt: float = 0.0) -> Batch:
    """A batch of n evaluation sequences.

    Args:
        corrupt: probability with which training redrew targets. The batch then redraws targets, too, and the exact
            answer is the mixture.

    Raises:
        UserError: corrupt targets in a task whose answers are real numbers.
    """
    batch = task.sample(n, seed, split)
    if not corrupt:
        return batch
    if not isinstance(task.answers, Categorical) or batch.target is None:
        raise UserError(f"targets were drawn again from the outcomes in training; {task.title} asks for real numbers")
    return replace(
        batch,
        target=corrupt_targets(batch.target, corrupt, len(task.answers.tokens), seeded("grade/corrupt", seed)),
        posterior=Posterior(corrupt_predictive(batch.exact.predictive, corrupt)),
    )


@dataclass(frozen=True)
class Evaluation:
    """Sequences of a task, their exact answers, and the scores of predictors that do not infer.

    Attributes:
        trained: number of first queries within the horizon.
        corrupt: as in `evaluation_batch`.
    """

    task: World
    n: int
    seed: int
    split: Split
    trained: int
    corrupt: float = 0.0

    @cached_property
    def batch(self) -> Batch:
        """The sequences. Raises UserError as `evaluation_batch`."""
        return evaluation_batch(self.task, self.n, self.seed, self.split, self.corrupt)

    @cached_property
    def trivial(self) -> dict[str, Scores]:
        """Name -> scores of predictors that do not infer, infinite divergences included.

        They are the task's own predictors; position, the mean exact answer at each query over other sequences;
        constant, that mean over the trained queries, which no constant beats; and uniform over outcomes. If the other
        sequences lack an outcome, the uniform answer enters the mean once, so that the mean excludes nothing.
        """
        task = self.task

        def form(log_predictive: Tensor) -> Tensor:
            mixed = corrupt_predictive(log_predictive, self.corrupt) if self.corrupt else log_predictive
            return task.answers.exact(mixed).double()

        others = task.draw_split(len(self.batch), seeded("grade/constant", self.seed)).inputs
        means, even = form(task.log_predictive(others)), {}
        if isinstance(task.answers, Categorical):
            even["uniform"] = form(uniform(others[:1], len(task.query), len(task.answers.tokens)))

        def mean(queries: slice, dims: tuple[int, ...]) -> Tensor:
            average = task.answers.mean(means[:, queries], dims)
            if not even or torch.isfinite(average[..., :-1]).all():
                return average
            return task.answers.mean(torch.cat([means, *even.values()])[:, queries], dims)

        answers = {name: form(x) for name, x in task.trivial(self.batch.tokens.data).items()}
        answers |= {"position": mean(slice(None), (0,)), "constant": mean(slice(self.trained), (0, 1)), **even}
        shape = (len(self.batch), len(task.query), means.shape[-1])
        return {name: self.scores(x.expand(shape)) for name, x in answers.items()}

    @property
    def finite(self) -> dict[str, Scores]:
        """The trivial predictors that exclude no possible outcome."""
        return {name: x for name, x in self.trivial.items() if np.isfinite(x.kl).all()}

    @cached_property
    def exact(self) -> Tensor:
        """The exact answers in the task's form, [sequence query form]."""
        return self.task.answers.exact(self.batch.exact.predictive)

    def scores(self, form: Tensor) -> Scores:
        """Scores of a predictor's answers, [sequence query form]."""
        return score(self.task, self.batch, form)

    def posterior_scores(self, form: Tensor, name: str = "the model") -> PosteriorScores:
        """Scores of a model's answers [sequence query form], of the exact answers and of trivial predictors.

        Raises UserError: an answer is infinitely far from the exact one; the message calls the model `name`.
        """
        parts = zip(self.exact.split(ROWS_AT_ONCE), form.double().split(ROWS_AT_ONCE), strict=True)
        model, finite = self.scores(form), self.finite
        if not np.isfinite(model.kl).all():
            sequence, query = np.argwhere(~np.isfinite(model.kl))[0] + 1
            raise UserError(f"{name} is infinitely far from the exact answer at query {query} of sequence {sequence}")
        return PosteriorScores(
            batch=self.batch,
            own=model,
            exact=self.scores(self.exact),
            tv=torch.cat([self.task.answers.tv(*part) for part in parts]).numpy(),
            trivial=finite,
            excluded=tuple(name for name in self.trivial if name not in finite),
            trained=self.trained,
        )
