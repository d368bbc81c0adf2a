"""A batch in two halves of whole units: one to estimate on, one to measure on, with what the clean model says there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Point
from llmgeom.model.subject import Positions, Subject
from llmgeom.probes.evidence.answers import label_ids
from llmgeom.probes.interventions.patching import Bench, Place, Tunnel
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import provenance
from llmgeom.record import Record
from llmgeom.result import Measured
from llmgeom.stats import ridge_probe
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import folds
from llmgeom.task import Categorical, Task


@dataclass(frozen=True, eq=False)
class Split:
    """What is estimated on one half of the units and measured on the other starts from.

    whole     the batch as the model reads it; fit, held: its halves.   asked  held, in the form in which it was given.
    """

    subject: Subject
    asked: Batch
    whole: Batch
    fit: Batch
    held: Batch
    seed: int
    batch_tokens: int

    @staticmethod
    def halved(subject: Subject, batch: Batch, seed: int) -> tuple[Batch, Batch, Batch, Batch]:
        """asked, whole, fit and held, halves by seed. Raises UserError: fewer than 5 units in a half."""
        half = folds(batch.cluster, seed, 2)
        whole = replace(batch, inputs=subject.tokens(batch))
        fit, held = (whole.take(np.flatnonzero(half == one)) for one in (0, 1))
        if (least := min(len(set(part.cluster)) for part in (fit, held))) < LEAST_CLUSTERS:
            raise UserError(
                f"{len(set(batch.cluster))} units leave {least} in a half; {LEAST_CLUSTERS} in each are needed: add templates"
            )
        return batch.take(np.flatnonzero(half == 1)), whole, fit, held

    def recorded(
        self,
        entropy: np.ndarray,
        results: Mapping[str, Measured],
        unmeasured: Mapping[str, str],
        nulls: int,
        facts: Mapping[str, Any],
    ) -> Record:
        """What was measured on `held`, entropy [input] in bits; its warnings and its time are not here."""
        return Record(
            results=results,
            unmeasured=unmeasured,
            prompts=prompt_table(self.subject, self.asked, self.held.tokens, entropy),
            subject={k: v for k, v in self.subject.facts.items() if v is not None},
            source=dict(self.asked.source),
            facts={
                **provenance(self.held, self.whole.tokens, self.seed, nulls),
                "estimated on": len(self.fit),
                **facts,
            },
        )


@dataclass(frozen=True, eq=False)
class Halves(Split):
    """What the ablations of prompts start from.

    seen      "fit" and "held" -> the clean model at the final tokens.   entropy  the same -> [prompt] bits.
    read      [prompt d_model] last residual stream -> bits: ridge regression of entropy, fitted on `fit`.
    pair, exact  as in `Bench`.
    """

    seen: Mapping[str, Capture]
    entropy: Mapping[str, np.ndarray]
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None

    @classmethod
    def of(cls, subject: Subject, batch: Batch, sites: Set[Site], seed: int, batch_tokens: int) -> Halves:
        """Halves by seed, with `sites` of the clean model. Raises UserError: a batch with positions of its own; fewer
        than 5 units in a half."""
        if batch.query is not None:
            raise UserError(
                "an edit is made where a prompt ends; this batch examines positions of its own: give prompts"
            )
        asked, whole, fit, held = cls.halved(subject, batch, seed)
        sites = {*sites, Site.RESIDUAL, Site.ENTROPY}
        seen = {"fit": subject.capture(fit, sites, batch_tokens=batch_tokens)}
        seen["held"] = subject.capture(held, sites | {Site.LOG_PROBS}, batch_tokens=batch_tokens)
        entropy = {name: bits(one.entropy.double().numpy()) for name, one in seen.items()}
        stream = seen["fit"].layers(Site.RESIDUAL)[-1].double().numpy()
        centre, sd = stream.mean(0), np.where(stream.std(0) > 0, stream.std(0), 1)
        w, intercept = ridge_probe.fit((stream - centre) / sd, entropy["fit"], ridge_probe.folds(fit.cluster, seed))
        exact = held.posterior.predictive[:, -1].double() if held.posterior and "first" in held.columns else None
        pair = seen["held"].log_probs.topk(2).indices if exact is None else label_ids(subject, held)

        def read(x: np.ndarray) -> np.ndarray:
            return (x - centre) / sd @ w + intercept

        return cls(subject, asked, whole, fit, held, seed, batch_tokens, seen, entropy, read, pair, exact)

    def bench(self, places: tuple[Place, ...], positions: Literal["query", "all", "later"]) -> Bench:
        """The half that is measured, ready to be edited at these places."""
        bare, entropy = replace(self.held, posterior=None, columns={}), self.entropy["held"]
        rest = (entropy, self.read, self.pair, self.exact, self.batch_tokens)
        return Bench(self.subject, bare, places, positions, *rest)

    def replacing(self, places: tuple[Place, ...], positions: Positions) -> Bench:
        """The bench where parts are replaced; "all" spares the first token, on which many models park attention."""
        return self.bench(places, "query" if positions == "query" else "later")

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Place, Tensor]:
        """[1 coordinate] over the edited positions of the half that is not measured."""
        seen, later = self.seen["fit"], None
        if positions == "all":
            sites = set(map(Site, points))
            seen = self.subject.capture(self.fit, sites, positions="all", batch_tokens=self.batch_tokens)
            later = seen.position > 0
        found = by_place(seen, points).items()
        return {place: (x if later is None else x[later]).mean(0, keepdim=True) for place, x in found}

    def own(self, points: Sequence[Point], positions: Positions) -> dict[Place, Tensor] | None:
        """[row coordinate] what the half that is measured has at the edited positions; None where prompts of unlike
        lengths have no positions in common."""
        return by_place(self.seen["held"], points) if positions == "query" else None

    def record(
        self, results: Mapping[str, Measured], unmeasured: Mapping[str, str], nulls: int, facts: Mapping[str, Any]
    ) -> Record:
        """What was measured on `held`, with the prompts and the provenance."""
        return self.recorded(self.entropy["held"], results, unmeasured, nulls, facts)


@dataclass(frozen=True, eq=False)
class Sequences(Split):
    """What the ablations of a task start from: whole sequences, each position of which means the same in all."""

    task: Task

    @classmethod
    def of(cls, subject: Subject, batch: Batch, task: Task, seed: int, batch_tokens: int) -> Sequences:
        """Raises UserError: answers that are real numbers; a model with too few outputs; few sequences."""
        if not isinstance(task.answers, Categorical):
            raise UserError(
                f"{task.title} asks for real numbers: a divergence of next-token distributions is not theirs"
            )
        if (outputs := subject.facts["vocabulary"]) < task.vocabulary:
            raise UserError(
                f"{subject.name} has {outputs} outputs; {task.title} needs {task.vocabulary}: give --task with the "
                "fields that it was trained with"
            )
        return cls(subject, *cls.halved(subject, batch, seed), seed, batch_tokens, task)

    def replacing(self, places: tuple[Place, ...], positions: Positions) -> Tunnel:
        """The bench where parts are replaced."""
        return Tunnel(self.subject, self.held, places, self.task, positions, self.batch_tokens)

    def _seen(self, half: Batch, points: Sequence[Point], positions: Positions) -> dict[Place, Tensor]:
        sites = set(map(Site, points))
        return by_place(self.subject.capture(half, sites, positions=positions, batch_tokens=self.batch_tokens), points)

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Place, Tensor]:
        """[position coordinate] over sequences, for each edited position by itself: where it stands stays known."""
        n = len(self.fit)
        return {place: x.unflatten(0, (n, -1)).mean(0) for place, x in self._seen(self.fit, points, positions).items()}

    def own(self, points: Sequence[Point], positions: Positions) -> dict[Place, Tensor]:
        """[row coordinate] what the half that is measured has at the edited positions, sequence after sequence."""
        return self._seen(self.held, points, positions)

    def record(
        self, results: Mapping[str, Measured], unmeasured: Mapping[str, str], nulls: int, facts: Mapping[str, Any]
    ) -> Record:
        """What was measured on `held`; the entropy of a sequence is the mean over its queries."""
        nats = self.subject.capture(self.held, {Site.ENTROPY}, batch_tokens=self.batch_tokens).entropy
        entropy = bits(nats.double().numpy()).reshape(len(self.held), -1).mean(1)
        return self.recorded(entropy, results, unmeasured, nulls, facts)


def by_place(seen: Capture, points: Sequence[Point]) -> dict[Place, Tensor]:
    """[row coordinate] float64 at these points of each layer."""
    return {(point, n): x.flatten(1).double() for point in points for n, x in enumerate(seen.layers(Site(point)))}
