"""The bench of the ablations: one half of the prompts, read under many edits at once, and what the edits did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.capture import Site
from llmgeom.claims import Claim, Null, declared, headline, layer_band
from llmgeom.edits import Edit, Point, Where
from llmgeom.experiments.axis import Mode, Move
from llmgeom.information import bits, kl
from llmgeom.plan import BATCH_TOKENS
from llmgeom.progress import Progress
from llmgeom.result import Headline
from llmgeom.stats import Interval, jackknife
from llmgeom.subject import Subject

DOSES = {"cut": (0.5, 1.0), "only": (0.5, 1.0), "shift": (-2.0, -1.0, 1.0, 2.0)}
JUDGED = {"cut": (1,), "only": (1,), "shift": (0, 3)}  # places in DOSES; several are averaged, prompt by prompt
AT_ONCE = 256  # rows in a pass: several copies of the prompts, each edited in its own way
FEW = 39  # draws behind the band at doses and layers that decide nothing: the fewest that carry 95 %
Place = int | tuple[Point, int]  # where an edit acts: a point of a layer, or by its number alone a layer's values
Copy = Mapping[Place, Move]  # what is done to one copy of the prompts; where it names nothing, nothing
Draw = Callable[[float], Copy]  # at a dose


@dataclass(frozen=True, eq=False)
class Bench:
    """Half B, ready to be read under many edits: a pass holds several copies of it, each edited in its own way.

    batch     token ids.   entropy  [prompt] bits, of the clean model.   read  [prompt d_model] residual -> bits.
    places    where copies may be edited.
    positions "query", the final token; "all"; or "later", all but the first, where many models park their attention.
    pair      [prompt 2] ids of the two labels, or of the clean model's two most likely tokens.
    exact     [prompt 2] exact log-probabilities of the labels, nats; None where the prompts have no exact answer.
    """

    subject: Subject
    batch: Batch
    places: tuple[Place, ...]
    positions: Literal["query", "all", "later"]
    entropy: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None
    batch_tokens: int = BATCH_TOKENS

    @cached_property
    def _clean(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def reference(self, copies: int) -> tuple[Tensor, Tensor]:
        """The clean model in the very packing of an edited pass: what no edit reaches differs by exactly nothing."""
        if copies not in self._clean:
            self._clean[copies] = self._pass([dict.fromkeys(self.places, lambda x, _: torch.zeros_like(x))] * copies)
        return self._clean[copies]

    def run(self, copies: Sequence[Copy], progress: Callable[[int, int], None] | None = None) -> dict[str, np.ndarray]:
        """[copy prompt] by effect: kl, of clean and edited, bits; error, its rise in the read-out of entropy, bits^2;
        odds, |change of the pair's log-odds|, bits; with an exact answer evidence, the rise of KL(exact || model)."""
        n, found = len(self.batch), []
        at_once = max(1, AT_ONCE // n)
        for at in range(0, len(copies), at_once):
            chunk = copies[at : at + at_once]
            clean, edited = self.reference(len(chunk)), self._pass(chunk)
            for j in range(len(chunk)):
                rows = slice(j * n, (j + 1) * n)
                found.append(self._effects(*(tensor[rows] for tensor in (*clean, *edited))))
            if progress:
                progress(at + len(chunk), len(copies))
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def _pass(self, copies: Sequence[Copy]) -> tuple[Tensor, Tensor]:
        rows = self.batch.take([*range(len(self.batch))] * len(copies))
        at = "query" if self.positions == "query" else "all"
        edits = []
        for place in self.places:
            if any(place in copy for copy in copies):
                point, layer = place if isinstance(place, tuple) else ("value", place)
                edits.append(Edit(point, self._edit(copies, place), (layer,), at))
        seen = self.subject.capture(rows, {Site.LOG_PROBS, Site.RESIDUAL}, edits, batch_tokens=self.batch_tokens)
        return seen.log_probs, seen.layers(Site.RESIDUAL)[-1]

    def _edit(self, copies: Sequence[Copy], place: Place) -> Callable[[Tensor, Where], Tensor]:
        first = int(self.positions == "later")

        def function(x: Tensor, where: Where) -> Tensor:
            at = where.query if self.positions == "query" else torch.ones_like(where.query)
            row, position = at[:, first:].nonzero(as_tuple=True)
            position = position + first
            before, prompt = x[row, position].flatten(1).double().cpu(), where.prompt[row].cpu()
            copy, prompt = prompt // len(self.batch), prompt % len(self.batch)
            after = before.clone()
            for j in copy.unique().tolist():
                if place in copies[j]:
                    mine = copy == j
                    after[mine] += copies[j][place](before[mine], prompt[mine])
            x = x.clone()
            x[row, position] = after.to(x).unflatten(1, x.shape[2:])
            return x

        return function

    def _effects(self, log_p: Tensor, stream: Tensor, log_q: Tensor, edited: Tensor) -> dict[str, np.ndarray]:
        log_p, log_q = (log.double().log_softmax(-1) for log in (log_p, log_q))  # float32 sums to 1 within 1e-7 only
        missed = [np.square(self.read(x.double().numpy()) - self.entropy) for x in (stream, edited)]
        two_p, two_q = (log.gather(1, self.pair) for log in (log_p, log_q))
        odds = (two_q - two_p) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
        found = {"kl": kl(log_p, log_q).clamp_min(0), "odds": odds.abs()}
        if self.exact is not None:
            found["evidence"] = kl(self.exact, two_q.log_softmax(1)) - kl(self.exact, two_p.log_softmax(1))
        return {"error": missed[1] - missed[0]} | {name: bits(nats.numpy()) for name, nats in found.items()}


@dataclass(frozen=True, eq=False)
class Effects:
    """What an edit and its controls did, by effect: `own` [dose prompt]; `null`, kind -> [draw prompt] a dose."""

    mode: Mode
    own: Mapping[str, np.ndarray]
    null: Mapping[str, Sequence[Mapping[str, np.ndarray]]]

    @classmethod
    def of(
        cls,
        bench: Bench,
        mode: Mode,
        own: Draw,
        draws: Mapping[str, Sequence[Draw]],
        tell: Progress | None,
        few: int = FEW,
    ) -> Effects:
        null = {
            kind: [
                bench.run(
                    [one(dose) for one in (some if place in JUDGED[mode] else some[:few])],
                    (lambda i, n, kind=kind, dose=dose: tell(f"{kind}, dose {dose:g}", i, n)) if tell else None,
                )
                for place, dose in enumerate(DOSES[mode])
            ]
            for kind, some in draws.items()
        }
        return cls(mode, bench.run([own(dose) for dose in DOSES[mode]]), null)

    def judged(self, effect: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """[prompt] at the dose that decides, and kind -> [draw] means over prompts."""
        places = list(JUDGED[self.mode])
        return self.own[effect][places].mean(0), {
            kind: np.mean([doses[i][effect] for i in places], 0).mean(1) for kind, doses in self.null.items()
        }

    def bands(self, effect: str) -> np.ndarray:
        """[dose bound] of the kind that lies higher."""
        each = range(len(DOSES[self.mode]))
        return np.concatenate(
            [layer_band({k: doses[i][effect].mean(1)[:, None] for k, doses in self.null.items()}) for i in each]
        )

    def headline(self, probe: str, name: str, effect: str, units: np.ndarray, claimed: bool = True) -> Headline:
        """Held against every kind; without its claim where one of its nulls could not be had."""
        claim, (each, null) = declared(probe)[name], self.judged(effect)
        claim = claim if claimed else replace(claim, claim="")
        return beside(claim, each.mean(), jackknife(np.mean, each, units), null, units)


def beside(claim: Claim, value: float, span: Interval, null: Mapping[str, np.ndarray], units: np.ndarray) -> Headline:
    """A value of prompts of these units, held against draws of each kind."""
    if claim.scale == "log" and min(value, *(draws.min() for draws in null.values())) <= 0:
        claim = replace(claim, scale="identity")  # an edit that reaches nothing does exactly nothing
    nulls = [Null.of(kind, value, draws, claim.side) for kind, draws in null.items()]
    return headline(claim, value, span, nulls, n=len(units), units=len(set(units)))
