"""The bench of the ablations: inputs that are read under many edits at once, and what the edits did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.claims import Claim, Null, declared, estimate, layer_band
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit, Point, Where
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions.axis import Mode, Move
from llmgeom.progress import Progress
from llmgeom.result import Estimate
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import Interval, jackknife

if TYPE_CHECKING:
    from llmgeom.task import Task

DOSES = {"cut": (0.5, 1.0), "only": (0.5, 1.0), "shift": (-2.0, -1.0, 1.0, 2.0)}
JUDGED = {"cut": (1,), "only": (1,), "shift": (0, 3)}  # places in DOSES; several are averaged, prompt by prompt
AT_ONCE = 256  # rows in a pass: several copies of the prompts, each edited in its own way
FEW = 39  # draws behind the band at doses and layers that decide nothing: the fewest that carry 95 %
Place = int | tuple[Point, int]  # where an edit acts: a point of a layer, or by its number alone a layer's values
Copy = Mapping[Place, Move]  # what is done to one copy of the prompts; where it names nothing, nothing
Draw = Callable[[float], Copy]  # at a dose


@dataclass(frozen=True, eq=False)
class Packed(ABC):
    """Inputs, ready to be read under many edits: a pass holds several copies of them, each edited in its own way.

    batch    what is read; its queried positions are where it is asked.
    places   where copies may be edited.
    Subclasses say which positions are edited, which sites are read (`sites`), and what is made of them.
    """

    subject: Subject
    batch: Batch
    places: tuple[Place, ...]

    sites: ClassVar[tuple[Site, ...]] = (Site.LOG_PROBS,)

    @property
    @abstractmethod
    def batch_tokens(self) -> int:
        """How many tokens run together."""

    @property
    @abstractmethod
    def at(self) -> Tensor:
        """[input seq] bool, the positions that are edited."""

    @abstractmethod
    def _effects(self, clean: Sequence[Tensor], edited: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """By effect [input], of what is read of one copy, site by site."""

    @cached_property
    def _clean(self) -> dict[int, list[Tensor]]:
        return {}

    @cached_property
    def _at(self) -> tuple[Tensor, Tensor]:
        """`at`, and how many positions are edited in the inputs before each."""
        count = self.at.sum(1)
        return self.at, count.cumsum(0) - count

    def reference(self, copies: int) -> list[Tensor]:
        """The clean model in the very packing of an edited pass: what no edit reaches differs by exactly nothing."""
        if copies not in self._clean:
            self._clean[copies] = self._pass([dict.fromkeys(self.places, lambda x, _: torch.zeros_like(x))] * copies)
        return self._clean[copies]

    def run(self, copies: Sequence[Copy], progress: Callable[[int, int], None] | None = None) -> dict[str, np.ndarray]:
        """[copy input] by effect."""
        found, at_once = [], max(1, AT_ONCE // len(self.batch))
        for at in range(0, len(copies), at_once):
            chunk = copies[at : at + at_once]
            clean, edited = (
                [each.chunk(len(chunk)) for each in seen] for seen in (self.reference(len(chunk)), self._pass(chunk))
            )
            for j in range(len(chunk)):
                found.append(self._effects([each[j] for each in clean], [each[j] for each in edited]))
            if progress:
                progress(at + len(chunk), len(copies))
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def _pass(self, copies: Sequence[Copy]) -> list[Tensor]:
        rows = replace(self.batch, posterior=None).take([*range(len(self.batch))] * len(copies))
        edits = []
        for place in self.places:
            if any(place in copy for copy in copies):
                point, layer = place if isinstance(place, tuple) else ("value", place)
                edits.append(Edit(point, self._edit(copies, place), (layer,)))
        seen = self.subject.capture(rows, self.sites, edits, batch_tokens=self.batch_tokens)
        return [seen.layers(site)[-1] for site in self.sites]

    def _edit(self, copies: Sequence[Copy], place: Place) -> Callable[[Tensor, Where], Tensor]:
        n, (edited, before_it) = len(self.batch), self._at

        def function(x: Tensor, where: Where) -> Tensor:
            copy, one = where.prompt.cpu() // n, where.prompt.cpu() % n
            at = edited[one, : x.shape[1]]
            line, position = at.nonzero(as_tuple=True)
            row = before_it[one[line]] + at.cumsum(1)[line, position] - 1
            before = x[line, position].flatten(1).double().cpu()
            after = before.clone()
            for j in copy.unique().tolist():
                if place in copies[j]:
                    mine = copy[line] == j
                    after[mine] += copies[j][place](before[mine], row[mine])
            x = x.clone()
            x[line, position] = after.to(x).unflatten(1, x.shape[2:])
            return x

        return function


@dataclass(frozen=True, eq=False)
class Bench(Packed):
    """Prompts, each asked at its end.

    positions "query", the final token; "all"; or "later", all but the first, where many models park their attention.
    entropy   [prompt] bits, of the clean model.   read  [prompt d_model] residual -> bits.
    pair      [prompt 2] ids of the two labels, or of the clean model's two most likely tokens.
    exact     [prompt 2] exact log-probabilities of the labels, nats; None where the prompts have no exact answer.

    Effects: kl, of clean and edited, bits; error, its rise in the read-out of entropy, bits^2; odds, |change of the
    pair's log-odds|, bits; with an exact answer evidence, the rise of KL(exact || model) over the pair.
    """

    positions: Literal["query", "all", "later"]
    entropy: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None
    batch_tokens: int = BATCH_TOKENS

    sites: ClassVar[tuple[Site, ...]] = (Site.LOG_PROBS, Site.RESIDUAL)

    @property
    def at(self) -> Tensor:
        inputs = self.subject.tokens(self.batch)
        place = torch.arange(inputs.data.shape[1]).expand(len(self.batch), -1)
        if self.positions == "query":
            return place == inputs.lengths[:, None] - 1
        return place >= (self.positions == "later")  # pads too: nothing reads them

    def _effects(self, clean: Sequence[Tensor], edited: Sequence[Tensor]) -> dict[str, np.ndarray]:
        # Log-probabilities of float32 sum to 1 within 1e-7 only.
        log_p, log_q = (seen[0].double().log_softmax(-1) for seen in (clean, edited))
        missed = [np.square(self.read(seen[1].double().numpy()) - self.entropy) for seen in (clean, edited)]
        two_p, two_q = (log.gather(1, self.pair) for log in (log_p, log_q))
        odds = (two_q - two_p) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
        found = {"kl": kl(log_p, log_q).clamp_min(0), "odds": odds.abs()}
        if self.exact is not None:
            found["evidence"] = kl(self.exact, two_q.log_softmax(1)) - kl(self.exact, two_p.log_softmax(1))
        return {"error": missed[1] - missed[0]} | {name: bits(nats.numpy()) for name, nats in found.items()}


@dataclass(frozen=True, eq=False)
class Tunnel(Packed):
    """Whole sequences of a task, with all their queries and the exact answer at each.

    Effects in bits, means over a sequence's queries, up to the task's horizon: kl, of clean and edited over all tokens;
    and of what `llmgeom grade` reads, outcomes and all else as one: evidence, the rise of KL(exact || model); mae,
    |H_model - H_exact| of the edited model, and clean_mae, of the clean one.
    """

    task: Task
    positions: Literal["query", "all"]
    batch_tokens: int = BATCH_TOKENS

    @property
    def at(self) -> Tensor:
        asked = self.task.mask().expand(len(self.batch), -1)
        return asked if self.positions == "query" else torch.ones_like(asked)

    @cached_property
    def _exact(self) -> Tensor:
        return self.task.answers.exact(self.batch.exact.flat.predictive).double()

    def _effects(self, clean: Sequence[Tensor], edited: Sequence[Tensor]) -> dict[str, np.ndarray]:
        answers, exact = self.task.answers, self._exact
        logs = [seen[0].double().log_softmax(-1) for seen in (clean, edited)]
        p, q = (answers.read(log).double() for log in logs)
        found = {
            "kl": kl(*logs).clamp_min(0),
            "evidence": answers.kl(exact, q) - answers.kl(exact, p),
            "mae": (answers.entropy(q) - answers.entropy(exact)).abs(),
            "clean_mae": (answers.entropy(p) - answers.entropy(exact)).abs(),
        }
        each = {name: nats.unflatten(0, (len(self.batch), -1))[:, : self.task.trained_queries] for name, nats in found.items()}
        return {name: bits(nats.mean(1).numpy()) for name, nats in each.items()}


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
                    partial(tell, f"{kind}, dose {dose:g}") if tell else None,
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

    def estimate(self, probe: str, name: str, effect: str, clusters: np.ndarray, claimed: bool = True) -> Estimate:
        """Held against every kind; without its claim where one of its nulls could not be had."""
        claim, (each, null) = declared(probe)[name], self.judged(effect)
        claim = claim if claimed else replace(claim, claim="")
        return beside(claim, each.mean(), jackknife(np.mean, each, clusters), null, clusters)


def beside(
    claim: Claim, value: float, span: Interval, null: Mapping[str, np.ndarray], clusters: np.ndarray, *more: Null
) -> Estimate:
    """A value of prompts of these units, held against draws of each kind, and against other nulls where there are."""
    if claim.scale == "log" and min(value, *(draws.min() for draws in null.values())) <= 0:
        claim = replace(claim, scale="identity")  # an edit that reaches nothing does exactly nothing
    nulls = [Null.of(kind, value, draws, claim.side) for kind, draws in null.items()]
    return estimate(claim, value, span, [*nulls, *more], n=len(clusters), clusters=len(set(clusters)))
