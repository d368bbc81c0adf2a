"""How far a model's answers in a wind tunnel are from the exact ones, beside predictors that do not infer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from llmgeom.answers import corrupt_predictive, corrupt_targets, query_logits
from llmgeom.batch import Batch, Posterior
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.shared.length_curves import AS_EXACT
from llmgeom.stats import information
from llmgeom.stats.information import bits
from llmgeom.task import Categorical, Split, Task, seeded, uniform

AT_ONCE = 128  # sequences
BINS = 10


@dataclass(frozen=True)
class Scores:
    """What one predictor's answers are worth: arrays [sequence query ...], in bits.

    kl        KL(exact || predictor), over the whole vocabulary: what is said of no outcome counts against it.
    entropy   of the predictor's answer, all that is no outcome taken as one; exact: of the exact answer.
    """

    kl: np.ndarray
    entropy: np.ndarray
    exact: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """[sequence query] H_predictor - H_exact."""
        return self.entropy - self.exact

    def at(self, queries: slice) -> Self:
        """The same of some of the queries."""
        return replace(self, **{f.name: getattr(self, f.name)[:, queries] for f in fields(self)})


@dataclass(frozen=True)
class Outcomes(Scores):
    """Of answers among tokens.

    right     is the likeliest outcome the one that was drawn (ties: the first).
    leaked    probability of no outcome.
    tally     [sequence query bin 4] by tenths of the predicted probability of an outcome, summed over outcomes:
              predicted and exact probability, how often drawn, how many.
    """

    right: np.ndarray
    leaked: np.ndarray
    tally: np.ndarray


@dataclass(frozen=True)
class Numbers(Scores):
    """Of answers that are real numbers. residual: (drawn - mean) / standard deviation, as the predictor has them."""

    residual: np.ndarray


def score(task: Task, batch: Batch, form: Tensor) -> Scores:
    """Scores of a form [sequence query form] against the exact one and what was drawn."""
    answers, exact, form, target = task.answers, owed(task, batch), form.double(), batch.target
    assert target is not None, "a task draws one at every query"
    measured = (answers.kl(exact, form), answers.entropy(form), answers.entropy(exact))
    kl, entropy, entropy_exact = (bits(x.numpy()) for x in measured)
    if not isinstance(answers, Categorical):
        residual = (target - form[..., 0]) * (-form[..., 1] / 2).exp()
        return Numbers(kl, entropy, entropy_exact, residual.numpy())
    outcomes = len(answers.tokens)
    right = form[..., :outcomes].argmax(-1) == target
    tally = _tally(exact[..., :outcomes].exp(), form[..., :outcomes].exp(), target)
    leaked = form[..., outcomes].exp()
    return Outcomes(kl, entropy, entropy_exact, right.double().numpy(), leaked.numpy(), tally.numpy())


def _tally(exact: Tensor, said: Tensor, target: Tensor) -> Tensor:
    drawn = torch.nn.functional.one_hot(target, exact.shape[-1]).double()
    place = (said * BINS).long().clamp(max=BINS - 1)
    empty = torch.zeros(*target.shape, BINS, dtype=torch.float64)
    return torch.stack([empty.scatter_add(-1, place, x) for x in (said, exact, drawn, torch.ones_like(said))], -1)


@dataclass(frozen=True)
class Grade:
    """A model's answers on one batch.

    own       the model's scores; owed: the exact answer's own (what accuracy it has). tv [sequence query]: total
              variation between both.
    trivial   by name, the scores of predictors that do not infer.
    excluded  trivial predictors that give no probability to what may happen: their divergence is infinite.
    trained   how many queries, the first ones, lie within the horizon: means are over these.
    """

    batch: Batch
    own: Scores
    owed: Scores
    tv: np.ndarray
    trivial: Mapping[str, Scores]
    excluded: tuple[str, ...]
    trained: int

    @property
    def within(self) -> slice:
        return slice(self.trained)

    @property
    def kl(self) -> float:
        """Mean KL(exact || model), bits."""
        return float(self.own.kl[:, self.within].mean())

    @property
    def mae_abs(self) -> float:
        """Mean over sequences and queries of |H_model - H_exact|, bits."""
        return mae_abs(self.own.gap[:, self.within])

    @property
    def mae_mean(self) -> float:
        """Mean over queries of |mean H_model - mean H_exact|, bits: at most mae_abs."""
        return mae_mean(self.own.gap[:, self.within])

    @property
    def as_exact(self) -> tuple[str, ...]:
        """Trivial predictors that are the exact answer here."""
        return tuple(name for name, one in self.trivial.items() if one.kl[:, self.within].mean() < AS_EXACT)

    @property
    def best(self) -> str:
        """The trivial predictor with the least KL of those that are not exact. Raises UserError where all are."""
        kl = {name: one.kl[:, self.within].mean() for name, one in self.trivial.items() if name not in self.as_exact}
        if not kl:
            raise UserError(f"{self.batch.source['name']}: every trivial predictor is exact; nothing is left to infer")
        return min(kl, key=kl.__getitem__)

    @property
    def skill(self) -> float:
        """1 - KL(exact || model) / KL(exact || best trivial predictor)."""
        return skill(np.stack([self.own.kl[:, self.within], self.trivial[self.best].kl[:, self.within]], -1))


def mae_abs(gap: np.ndarray) -> float:
    return float(np.abs(gap).mean())


def mae_mean(gap: np.ndarray) -> float:
    return float(np.abs(gap.mean(0)).mean())


def skill(kl: np.ndarray) -> float:
    """Of [... 2], the model's KL and a trivial predictor's."""
    return information.skill(*kl.reshape(-1, 2).T)


def drawn(task: Task, n: int, seed: int, split: Split, corrupt: float = 0.0) -> Batch:
    """n sequences to be graded on; where targets were drawn again with probability `corrupt`, theirs are too, and the
    exact answer is the mixture. Raises UserError where these are real numbers."""
    batch = task.sample(n, seed, split)
    if not corrupt:
        return batch
    if not isinstance(task.answers, Categorical) or batch.target is None:
        raise UserError(f"labels were drawn again evenly in training; {task.title} asks for real numbers, not outcomes")
    return replace(
        batch,
        target=corrupt_targets(batch.target, corrupt, len(task.answers.tokens), seeded("grade/corrupt", seed)),
        posterior=Posterior(corrupt_predictive(batch.exact.predictive, corrupt)),
    )


@torch.no_grad()
def read(subject: Subject, task: Task, batch: Batch) -> Tensor:
    """The model's answers, [sequence query form]. Raises UserError: inputs that it cannot read, logits that are not
    finite."""
    if subject.edits:
        raise UserError(f"{subject.name} is edited; grading reads models as they are")
    if subject.facts["vocabulary"] < task.vocabulary:
        raise UserError(
            f"{subject.name} has {subject.facts['vocabulary']} outputs; {task.title} needs {task.vocabulary}: "
            "give --task with the fields that it was trained with"
        )
    weight = next(subject.model.parameters())
    query = torch.tensor(task.query, device=weight.device)
    forms: list[Tensor] = []
    for part in subject.tokens(batch).data.split(AT_ONCE):
        part = part.to(weight.device, weight.dtype if part.is_floating_point() else None)
        logits = query_logits(subject.model, part, query).float().cpu()
        if len(bad := (~torch.isfinite(logits).all(-1)).nonzero()):
            sequence, at = bad[0].tolist()
            raise UserError(
                f"{subject.name} gives logits that are not finite at query {at + 1} (position {task.query[at]}) of "
                f"sequence {len(forms) * AT_ONCE + sequence + 1}: try --dtype float32, or check the weights"
            )
        forms.append(task.answers.read(logits))
    return torch.cat(forms)


def owed(task: Task, batch: Batch) -> Tensor:
    """The exact answers in the form that models' are read into."""
    return task.answers.exact(batch.exact.predictive)


def graded(subject: Subject, task: Task, batch: Batch) -> Scores:
    """The model's scores on a batch, and nothing beside them."""
    return score(task, batch, read(subject, task, batch))


def trivials(task: Task, batch: Batch, trained: int, seed: int, corrupt: float = 0.0) -> dict[str, Tensor]:
    """Answers of predictors that do not infer, by name, each like `owed`.

    The task's own; position: the mean exact answer at each query over other sequences; constant: that mean over the
    trained queries, which no constant beats; uniform (of outcomes). Where those sequences happened not to hold an
    outcome, the uniform answer is counted into the mean once, so that it rules nothing out.
    """

    def form(log_predictive: Tensor) -> Tensor:
        return task.answers.exact(corrupt_predictive(log_predictive, corrupt) if corrupt else log_predictive).double()

    others = task.draw_split(len(batch), seeded("grade/constant", seed)).inputs
    means, even = form(task.log_predictive(others)), {}
    if isinstance(task.answers, Categorical):
        even["uniform"] = form(uniform(others[:1], len(task.query), len(task.answers.tokens)))

    def mean(queries: slice, dims: tuple[int, ...]) -> Tensor:
        found = task.answers.mean(means[:, queries], dims)
        if not even or torch.isfinite(found[..., :-1]).all():
            return found
        return task.answers.mean(torch.cat([means, *even.values()])[:, queries], dims)

    found = {
        **{name: form(one) for name, one in task.trivial(batch.tokens.data).items()},
        "position": mean(slice(None), (0,)),
        "constant": mean(slice(trained), (0, 1)),
        **even,
    }
    whole = (len(batch), len(task.query), means.shape[-1])
    return {name: one.expand(whole) for name, one in found.items()}


def grade(
    subject: Subject,
    task: Task,
    n: int = 1000,
    seed: int = 0,
    *,
    split: Split | None = None,
    trained: int | None = None,
    corrupt: float = 0.0,
) -> Grade:
    """The model's answers on n sequences beside the exact ones and trivial predictors'; no null, no interval.

    split     of which hypotheses; by default `task.test_split`.
    trained   how many queries, the first ones, its loss was on, where that is fewer than the task's.
    corrupt   grade against the mixture that labels drawn again with this probability have.
    """
    batch = drawn(task, n, seed, split or task.test_split, corrupt)
    trained = min(task.trained_queries, trained or task.trained_queries)
    exact, form = owed(task, batch), read(subject, task, batch)
    parts = zip(exact.split(AT_ONCE), form.double().split(AT_ONCE), strict=True)
    scored = {name: score(task, batch, one) for name, one in trivials(task, batch, trained, seed, corrupt).items()}
    finite = {name: one for name, one in scored.items() if np.isfinite(one.kl).all()}
    return Grade(
        batch=batch,
        own=_finite(score(task, batch, form), subject.name),
        owed=score(task, batch, exact),
        tv=torch.cat([task.answers.tv(*part) for part in parts]).numpy(),
        trivial=finite,
        excluded=tuple(name for name in scored if name not in finite),
        trained=trained,
    )


def _finite(scores: Scores, name: str) -> Scores:
    if not np.isfinite(scores.kl).all():
        sequence, at = np.argwhere(~np.isfinite(scores.kl))[0] + 1
        raise UserError(f"{name} is infinitely far from the exact answer at query {at} of sequence {sequence}")
    return scores
