"""A batch in two halves by cluster: one gives means, axes and subspaces, the other the effects of interventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.model.edits import Clean, Point
from llmgeom.model.intervention import Location, Outcomes, Runner
from llmgeom.model.resume import clean_pass
from llmgeom.probe import Batch, Capture, Model, Site, UserError
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.stats.information import best_of_input, bits, kl, kl_of_rounded
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import fit, folds
from llmgeom.world import Categorical, World

Positions = Literal["query", "all"]  # at which an edit is made
EVALUATION, ESTIMATION = "", "estimation"  # names of the samples: the main one is the evaluation half
# Sites that are captured in the clean model at the final tokens of prompts.
PROMPT_SITES = frozenset({Site.RESIDUAL, Site.LIKELY})


def halves(batch: Batch, seed: int) -> tuple[Batch, Batch]:
    """Estimation and evaluation half; no cluster is in both. Raises UserError: fewer than 5 clusters in a half."""
    half = folds(batch.cluster, seed, 2)
    estimation, evaluation = (batch.take(np.flatnonzero(half == part)) for part in (0, 1))
    if (least := min(len(set(part.cluster)) for part in (estimation, evaluation))) < LEAST_CLUSTERS:
        raise UserError(
            f"{len(set(batch.cluster))} clusters leave {least} in a half; {LEAST_CLUSTERS} in each are needed: "
            "add templates"
        )
    return estimation, evaluation


def check(subject: Model, batch: Batch, task: World | None = None) -> None:
    """Raise UserError for prompts with query positions; for a task of real numbers, or of more tokens than outputs."""
    if task is None:
        if batch.query is not None:
            raise UserError(
                "edits of prompts are at their final token, and this batch has other query positions: give prompts"
            )
        return
    if not isinstance(task.answers, Categorical):
        raise UserError(
            f"{task.title} asks for real numbers: ablations compare next-token distributions, which such a task lacks"
        )
    if (outputs := subject.facts["vocabulary"]) < task.vocabulary:
        raise UserError(
            f"{subject.name} has {outputs} outputs; {task.title} needs {task.vocabulary}: give --task with the "
            "fields that it was trained with"
        )


@dataclass(frozen=True, eq=False)
class Halves:
    """Both halves, with the activations of the clean model.

    Attributes:
        captures: ESTIMATION and EVALUATION -> the clean model at the queried positions; of prompts with PROMPT_SITES
            and the entropy.
        task: The task of whole sequences, whose positions correspond; None for prompts, read at their final tokens.
    """

    subject: Model
    captures: Mapping[str, Capture]
    seed: int
    batch_tokens: int
    task: World | None = None

    @property
    def estimation(self) -> Batch:
        """The half that gives means and axes, tokenized."""
        return self.captures[ESTIMATION].batch

    @property
    def evaluation(self) -> Batch:
        """The half on which effects are measured, tokenized."""
        return self.captures[EVALUATION].batch

    @cached_property
    def clean(self) -> Clean | None:
        """The clean pass of the evaluation half, from which edited passes go on."""
        return clean_pass(self.subject, self.evaluation, self.batch_tokens)

    def entropy(self, half: str) -> np.ndarray:
        """[prompt] bits, of the clean model."""
        return self.captures[half].entropy.numpy()

    @cached_property
    def pair(self) -> Tensor:
        """[prompt 2] ids of the two labels where the answer is known, or of the clean model's two likeliest tokens."""
        if self.exact is not None:
            return label_ids(self.subject.tokenizer, self.evaluation)
        return self.captures[EVALUATION].likely[:, 0, :2].long()

    @cached_property
    def exact(self) -> Tensor | None:
        """[prompt 2] exact log-probabilities of the labels, nats; None if the prompts have no exact answer."""
        if self.evaluation.posterior is None or "first" not in self.evaluation.columns:
            return None
        return self.evaluation.posterior.predictive[:, -1].double()

    def runner(self, positions: Literal["query", "all", "later"], pair: Tensor | None = None) -> Runner:
        """The evaluation half, ready for interventions.

        Args:
            positions: "query", the final token or every query of a task; "all"; or "later", all but the first token
                of prompts, an attention sink in many models.
            pair: Instead of `pair`.
        """
        tokens, batch = self.subject.tokens(self.evaluation), self.evaluation
        position = torch.arange(tokens.data.shape[1]).expand(len(batch), -1)
        if self.task is not None:
            queries = self.task.mask().expand(len(batch), -1)
            at = queries if positions == "query" else torch.ones_like(queries)
            outcomes = task_outcomes(self.task, batch, tokens.data)
        else:
            # Pads, too: no token reads them.
            at = position == tokens.lengths[:, None] - 1 if positions == "query" else position >= (positions == "later")
            batch = replace(batch, posterior=None, columns={})
            outcomes = prompt_outcomes(
                self.entropy(EVALUATION), self._read_out, self.pair if pair is None else pair, self.exact
            )
        sites = (Site.LOG_PROBS, Site.RESIDUAL)[: 2 - (self.task is not None)]
        return Runner(self.subject, batch, at, outcomes, sites, batch_tokens=self.batch_tokens, clean=self.clean)

    @cached_property
    def _read_out(self) -> Callable[[np.ndarray], np.ndarray]:
        """Last residual stream [prompt d_model] -> entropy in bits: a ridge regression on the estimation half."""
        stream = self.captures[ESTIMATION].layers(Site.RESIDUAL)[-1].double().numpy()
        centre, sd = stream.mean(0), np.where(stream.std(0) > 0, stream.std(0), 1)
        fold = folds(self.estimation.cluster, self.seed)
        w, intercept = fit((stream - centre) / sd, self.entropy(ESTIMATION), fold)
        return lambda x: (x - centre) / sd @ w + intercept

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[position coordinate] means over the estimation half: for a task at each edited position, so that position
        stays known; of prompts one over all edited positions, for "all" those after the first token."""
        capture, activations = self.activations(ESTIMATION, points, positions)
        if self.task is not None:
            return {at: x.unflatten(0, (len(self.estimation), -1)).mean(0) for at, x in activations.items()}
        kept = slice(None) if positions == "query" else capture.position > 0
        return {at: x[kept].mean(0, keepdim=True) for at, x in activations.items()}

    def activations(
        self, half: str, points: Sequence[Point], positions: Positions
    ) -> tuple[Capture, dict[Location, Tensor]]:
        """A half's capture at the edited positions, and its activations [row coordinate], input after input; at "all"
        of prompts, the positions of two inputs do not correspond."""
        capture = self.captures[half]
        if positions == "all":
            sites = set(map(Site, points))
            capture = self.subject.capture(capture.batch, sites, positions="all", batch_tokens=self.batch_tokens)
        return capture, {
            (point, n): x.flatten(1).double() for point in points for n, x in enumerate(capture.layers(Site(point)))
        }


def prompt_outcomes(
    entropy: np.ndarray, read: Callable[[np.ndarray], np.ndarray], pair: Tensor, exact: Tensor | None
) -> Outcomes:
    """Outcomes of prompts at their final token, [prompt], from LOG_PROBS and the last residual stream.

    kl: KL(clean || edited) of the next-token distribution, bits. error: rise of the squared error of a linear read-out
    of entropy, bits^2. odds: |change of the log-odds of the pair|, bits. evidence: with an exact answer, rise of
    KL(exact || model) over the pair, bits.

    Args:
        entropy: [prompt] bits, of the clean model.
        read: Last residual stream [prompt d_model] -> entropy in bits.
        pair, exact: As in `Halves`.
    """

    def outcomes(clean: Sequence[Tensor], edited: Sequence[Tensor]) -> dict[str, np.ndarray]:
        log_p, log_q = clean[0], edited[0]
        before, after = (np.square(read(sites[1].double().numpy()) - entropy) for sites in (clean, edited))
        two_p, two_q = (log.gather(1, pair).double() for log in (log_p, log_q))
        odds = (two_q - two_p) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
        nats = {"kl": kl_of_rounded(log_p, log_q).double(), "odds": odds.abs()}
        if exact is not None:
            nats["evidence"] = kl(exact, two_q.log_softmax(1)) - kl(exact, two_p.log_softmax(1))
        return {"error": after - before} | {name: bits(x.numpy()) for name, x in nats.items()}

    return outcomes


def task_outcomes(task: World, batch: Batch, tokens: Tensor) -> Outcomes:
    """Outcomes of whole sequences, [sequence] bits, means over a sequence's queries up to the task's horizon.

    Except in kl, each outcome of the task counts separately and all other tokens together, as in `llmgeom grade`. kl:
    KL(clean || edited) over all tokens. evidence: rise of KL(exact || model). mae, clean_mae: |H_model - H_exact| of
    the edited and of the clean model. clean_kl: KL(exact || model) of the clean model. local_kl: the same of the best
    answer that knows only the query and the input there (`best_of_input`), below which a model whose attention is
    silent cannot be.
    """
    answers, n, horizon = task.answers, len(batch), task.trained_queries
    exact = answers.exact(batch.exact.flat.predictive).double()
    read = tokens[:, list(task.query)]
    query = np.tile(np.arange(read.shape[1]), len(read))
    local = torch.from_numpy(best_of_input(exact.numpy(), query, read.flatten(0, 1).numpy()))

    def outcomes(clean: Sequence[Tensor], edited: Sequence[Tensor]) -> dict[str, np.ndarray]:
        logs = [sites[0].double().log_softmax(-1) for sites in (clean, edited)]
        p, q = (answers.read(log).double() for log in logs)
        missed = answers.kl(exact, p)
        nats = {
            "kl": kl(*logs).clamp_min(0),
            "evidence": answers.kl(exact, q) - missed,
            "mae": (answers.entropy(q) - answers.entropy(exact)).abs(),
            "clean_mae": (answers.entropy(p) - answers.entropy(exact)).abs(),
            "clean_kl": missed,
            "local_kl": answers.kl(exact, local),
        }
        return {name: bits(x.unflatten(0, (n, -1))[:, :horizon].mean(1).numpy()) for name, x in nats.items()}

    return outcomes
