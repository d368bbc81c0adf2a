"""A batch in two halves of whole units: one to estimate on, one to measure on, with what the clean model says there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.capture import Capture, Site
from llmgeom.errors import Refused
from llmgeom.experiments.axis import ridge
from llmgeom.experiments.bench import Bench, Place
from llmgeom.information import bits
from llmgeom.readout import folds
from llmgeom.record import Record
from llmgeom.result import Measured
from llmgeom.scan import prompt_table, provenance
from llmgeom.stats import LEAST_UNITS
from llmgeom.subject import Subject


@dataclass(frozen=True, eq=False)
class Halves:
    """What the ablations start from.

    whole     the batch as token ids; fit, held: its halves.   asked  held, in the form in which it was given.
    seen      "fit" and "held" -> the clean model at the final tokens.   entropy  the same -> [prompt] bits.
    read      [prompt d_model] last residual stream -> bits: ridge regression of entropy, fitted on `fit`.
    pair, exact  as in `Bench`.
    """

    subject: Subject
    asked: Batch
    whole: Batch
    fit: Batch
    held: Batch
    seen: Mapping[str, Capture]
    entropy: Mapping[str, np.ndarray]
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None
    seed: int
    batch_tokens: int

    @classmethod
    def of(cls, subject: Subject, batch: Batch, sites: Set[Site], seed: int, batch_tokens: int) -> Halves:
        """Halves by seed, with `sites` of the clean model. Raises Refused: a batch with positions of its own; fewer
        than 5 units in a half."""
        if batch.query is not None:
            raise Refused("an edit is made where a prompt ends; this batch examines positions of its own: give prompts")
        half = folds(batch.unit, seed, 2)
        whole = replace(batch, inputs=subject.tokens(batch))
        fit, held = (whole.take(np.flatnonzero(half == one)) for one in (0, 1))
        if (least := min(len(set(part.unit)) for part in (fit, held))) < LEAST_UNITS:
            raise Refused(
                f"{len(set(batch.unit))} units leave {least} in a half; {LEAST_UNITS} in each are needed: add templates"
            )
        sites = {*sites, Site.RESIDUAL, Site.ENTROPY}
        seen = {"fit": subject.capture(fit, sites, batch_tokens=batch_tokens)}
        seen["held"] = subject.capture(held, sites | {Site.LOG_PROBS}, batch_tokens=batch_tokens)
        entropy = {name: bits(one.entropy.double().numpy()) for name, one in seen.items()}
        stream = seen["fit"].layers(Site.RESIDUAL)[-1].double().numpy()
        centre, sd = stream.mean(0), np.where(stream.std(0) > 0, stream.std(0), 1)
        w, intercept = ridge((stream - centre) / sd, entropy["fit"], fit.unit, seed)
        exact = held.posterior.predictive[:, -1].double() if held.posterior and "first" in held.columns else None
        pair = seen["held"].log_probs.topk(2).indices if exact is None else _labels(subject, held)

        def read(x: np.ndarray) -> np.ndarray:
            return (x - centre) / sd @ w + intercept

        asked = batch.take(np.flatnonzero(half == 1))
        return cls(subject, asked, whole, fit, held, seen, entropy, read, pair, exact, seed, batch_tokens)

    def bench(self, places: tuple[Place, ...], positions: Literal["query", "all", "later"]) -> Bench:
        """The half that is measured, ready to be edited at these places."""
        bare, entropy = replace(self.held, posterior=None, columns={}), self.entropy["held"]
        rest = (entropy, self.read, self.pair, self.exact, self.batch_tokens)
        return Bench(self.subject, bare, places, positions, *rest)

    def record(
        self, results: Mapping[str, Measured], unmeasured: Mapping[str, str], nulls: int, facts: Mapping[str, Any]
    ) -> Record:
        """What was measured on `held`, with the prompts and the provenance; its warnings and its time are not here."""
        return Record(
            results=results,
            unmeasured=unmeasured,
            prompts=prompt_table(self.subject, self.asked, self.held.inputs, self.entropy["held"]),
            subject={k: v for k, v in self.subject.facts.items() if v is not None},
            source=dict(self.asked.source),
            facts={
                **provenance(self.held, self.whole.inputs, self.seed, nulls),
                "estimated on": len(self.fit),
                **facts,
            },
        )


def _labels(subject: Subject, batch: Batch) -> Tensor:
    """[prompt 2] the ids of the labels."""
    words = zip(batch.columns["first"], batch.columns["second"], strict=True)
    ids = [[subject.tokenizer(f" {one}", add_special_tokens=False)["input_ids"] for one in two] for two in words]
    if any(len(one) != 1 for two in ids for one in two):
        raise Refused("a label is several tokens of this tokenizer; use the labels that `prompts.sula.available` finds")
    return torch.tensor(ids)[..., 0]
