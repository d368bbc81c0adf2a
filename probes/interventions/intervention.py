"""Interventions: copies of a batch in one pass, each with its own change of activations, and what each does to answers.

An `Intervention` says where and with what; a `Runner` gives the effect of each, or by gradients an approximation of it.
Control edits are interventions, too: those of one name are draws of one control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.claims import Claim, Null, estimate
from llmgeom.flags import places
from llmgeom.model.attention import Recorder
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.edits import Clean, Edit, Point, Resume, Where
from llmgeom.probe import Batch, Model, Site
from llmgeom.progress import tell
from llmgeom.result import Estimate
from llmgeom.stats.resampling import Interval, Transform

COPIES, NUMBERS = 32, 2**24  # the most copies of a batch in a pass, and log-probabilities of all (two copies at least)
GRADIENTS = 4  # answers drawn for the approximation of a KL
GRADIENT_TOKENS = 512  # in a pass whose activations stay for gradients
# (x, row) -> displacement of x. x [row coordinate] float64 has the edited positions, input after input; row [row] is
# their number among all edited positions of the batch (with one edited position per input: the input's number).
Move = Callable[[Tensor, Tensor], Tensor]
Location = tuple[Point, int]  # a point of a layer
Moves = Mapping[Location, Move]
# "NAME/OUTCOME" -> [draw input]: what the interventions of this name do to an outcome. A probe's cache holds it as is.
Effects = dict[str, np.ndarray]
# (sites of the clean model, of one copy) -> [input] by outcome
Outcomes = Callable[[Sequence[Tensor], Sequence[Tensor]], dict[str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Intervention:
    """A change of activations during the pass of one copy of a batch.

    Attributes:
        name: What it is called in the effects. Several of one name are draws, in their order.
        moves: Where, and with what: `zero`, `to_mean`, `add` (resample and patch add a donor's activation less the
            input's own; steering adds a direction), or the moves of an `Axis` (project out, keep only, steer).
        columns: The coordinates that move, such as those of one head.
    """

    name: str
    moves: Moves
    columns: slice = field(default_factory=lambda: slice(None))


NOTHING = Intervention("", {})


def zero(x: Tensor, row: Tensor) -> Tensor:
    """Zero ablation: add -x."""
    return -x


def to_mean(mean: Tensor) -> Move:
    """Mean ablation, mean [position coordinate]: one mean for all rows, or one for each edited position of an input."""
    return lambda x, row: mean[row % len(mean)] - x


def add(steps: Tensor) -> Move:
    """Add one step [row coordinate] to each row."""
    return lambda x, row: steps[row]


def rescaled(steps: Tensor, length: Tensor) -> Tensor:
    """The same directions, rescaled to `length` in each row."""
    return steps * (length / steps.norm(dim=-1, keepdim=True).clamp_min(1e-300))


@dataclass(frozen=True, eq=False)
class Runner:
    """A batch under many interventions: a pass holds several copies of it, each under its own, and a clean one.

    Copies of an input have the same bits where they run in one batch of the pass (inputs of one length do), so that an
    intervention without an effect has an effect of exactly 0; in another packing a log-probability of SmolLM2 in
    bfloat16 may differ by .2.

    Attributes:
        batch: The inputs; answers are read at its queried positions.
        at: [input seq] bool, the positions at which interventions act.
        outcomes: Effects from the sites of the clean model and of one copy.
        sites: What `outcomes` reads; of a site with many layers, `layer`.
        compared: Whether `outcomes` reads the clean model, too.
        clean: Of this batch, so that each pass begins at the first layer and position that it edits; None for whole
            passes.
    """

    subject: Model
    batch: Batch
    at: Tensor
    outcomes: Outcomes
    sites: tuple[Site, ...] = (Site.LOG_PROBS,)
    layer: int = -1
    compared: bool = True
    batch_tokens: int = BATCH_TOKENS
    clean: Clean | None = None

    def run(self, interventions: Sequence[Intervention], stage: str = "") -> Effects:
        """The effect of every intervention.

        Args:
            interventions: One for each copy of the batch.
            stage: What the progress calls them; without it they are not shown.
        """
        lowest = [min((layer for _, layer in one.moves), default=0) if self.clean else 0 for one in interventions]
        order = sorted(range(len(interventions)), key=lambda i: lowest[i])  # those that begin together run together
        found: dict[int, dict[str, np.ndarray]] = {}
        rows = len(self.batch) if self.batch.query is None else int(self.batch.query.sum())
        per_pass = min(COPIES, max(2, NUMBERS // (rows * self.subject.facts["vocabulary"]))) - self.compared
        for begin in range(0, len(order), per_pass):
            chunk = order[begin : begin + per_pass]
            copies = [interventions[i] for i in chunk] + [NOTHING] * self.compared
            sites = [x.chunk(len(copies)) for x in self._pass(copies)]
            for j, i in enumerate(chunk):
                found[i] = self.outcomes([x[-1] for x in sites], [x[j] for x in sites])
            if stage:
                tell(stage, begin + len(chunk), len(order))
        names = [one.name for one in interventions]
        return {
            f"{name}/{outcome}": np.stack([found[i][outcome] for i in range(len(names)) if names[i] == name])
            for name in dict.fromkeys(names)
            for outcome in found[0]
        }

    def _pass(self, copies: Sequence[Intervention]) -> list[Tensor]:
        rows = replace(self.batch, posterior=None).take([*range(len(self.batch))] * len(copies))
        edits = [
            # With a spec batches may run at the same time: what is added depends on the batch alone.
            Edit(at[0], self._edit(copies, at), (at[1],), spec={"patches": len(copies)})
            for at in dict.fromkeys(at for one in copies for at in one.moves)
        ]
        resume = None
        if self.clean is not None and edits:
            resume = Resume(self.clean, min(layer for edit in edits for layer in edit.layers or ()), self._first)
        options: dict[str, Any] = {"layers": self.layer, "batch_tokens": self.batch_tokens, "resume": resume}
        capture = self.subject.capture(rows, self.sites, edits, **options)
        return [capture.layers(site)[-1] for site in self.sites]

    @cached_property
    def _queried(self) -> Tensor:
        tokens = self.subject.tokens(self.batch)
        place = torch.arange(tokens.data.shape[1])
        return place == tokens.lengths[:, None] - 1 if self.batch.query is None else self.batch.query

    @cached_property
    def _first(self) -> Tensor:
        """[input] the first position that is edited or queried."""
        at = torch.zeros_like(self._queried)
        at[:, : self.at.shape[1]] = self.at
        return (at | self._queried).int().argmax(1)

    @cached_property
    def _before(self) -> Tensor:
        """[input] the number of edited positions in all inputs before it."""
        count = self.at.sum(1)
        return count.cumsum(0) - count

    def _rows(self, prompt: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(line, position, row) of the edited ones of places [line position] of these prompts [line]."""
        width = self.at.shape[1]
        at = self.at[prompt[:, None], place.clamp(max=width - 1)] & (place < width)
        line, position = at.nonzero(as_tuple=True)
        return line, position, self._before[prompt[line]] + at.cumsum(1)[line, position] - 1

    def _edit(self, copies: Sequence[Intervention], location: Location) -> Callable[[Tensor, Where], Tensor]:
        n = len(self.batch)

        def function(x: Tensor, where: Where) -> Tensor:
            copy = where.prompt.cpu() // n
            line, position, row = self._rows(where.prompt.cpu() % n, where.position.cpu())
            before = x[line, position].flatten(1).double().cpu()
            after = before.clone()
            for j in copy.unique().tolist():
                if location in copies[j].moves:
                    mine, columns = copy[line] == j, copies[j].columns
                    after[mine, columns] += copies[j].moves[location](before[mine], row[mine])[:, columns]
            x = x.clone()
            x[line, position] = after.to(x).unflatten(1, x.shape[2:])
            return x

        return function

    # ---- attribution patching ---------------------------------------------------------------------------------------

    def first_order(
        self, interventions: Sequence[Intervention], scores: Callable[[Tensor, Sequence[int]], Sequence[Tensor]]
    ) -> np.ndarray:
        """[score intervention input] the change of each score to first order, from one clean pass and its gradients.

        Where an activation x becomes x + d a score changes by about grad . d (attribution patching, Nanda 2023).

        Args:
            scores: (log-probabilities of the queried rows [row token], numbers of the inputs of this pass) -> one or
                more numbers, sums over these inputs.
        """
        every = [*dict.fromkeys(at for one in interventions for at in one.moves)]
        tokens, parts = self.subject.tokens(self.batch), []
        per_pass = max(1, GRADIENT_TOKENS // tokens.data.shape[1])
        for begin in range(0, len(self.batch), per_pass):
            members = [*range(begin, min(begin + per_pass, len(self.batch)))]
            parts.append(self._gradients(interventions, every, members, scores))
            tell("gradients", members[-1] + 1, len(self.batch))
        return np.concatenate(parts, 2)

    def _gradients(
        self,
        interventions: Sequence[Intervention],
        locations: Sequence[Location],
        members: list[int],
        scores: Callable[[Tensor, Sequence[int]], Sequence[Tensor]],
    ) -> np.ndarray:
        tokens = self.subject.tokens(self.batch)
        width = int(tokens.lengths[members].max())
        prompt, leaves, seen = torch.tensor(members), {}, {}
        line, position, row = self._rows(prompt, torch.arange(width).expand(len(members), -1))

        def watched(location: Location) -> Callable[[Tensor, Where], Tensor]:
            def function(x: Tensor, where: Where) -> Tensor:
                seen[location] = x.detach()
                leaves[location] = torch.zeros_like(x, requires_grad=True)
                return x + leaves[location]

            return function

        edits = [Edit(at[0], watched(at), (at[1],)) for at in locations]
        queried = self._queried[members, :width]
        where, end = queried.nonzero(as_tuple=True)
        recorder = Recorder(self.subject.blocks, (where, end), frozenset(), edits, (prompt, queried))
        with torch.enable_grad(), self.subject.forward.attached():
            logits = self.subject.forward.run(recorder, tokens.data[members, :width])
            numbers = scores(logits.float().log_softmax(-1), members)
            every = [
                torch.autograd.grad(one, [leaves[at] for at in locations], retain_graph=i + 1 < len(numbers))
                for i, one in enumerate(numbers)
            ]

        def rows(x: Tensor) -> Tensor:
            return x[line, position].flatten(1).double().cpu()

        x = {at: rows(seen[at]) for at in locations}
        found = np.zeros((len(numbers), len(interventions), len(members)))
        slopes = {at: torch.stack([rows(gradient[i]) for gradient in every]) for i, at in enumerate(locations)}
        for i, one in enumerate(interventions):
            for at, move in one.moves.items():
                step = move(x[at], row)[:, one.columns]
                along = (slopes[at][..., one.columns] * step).sum(-1)
                found[:, i] += (
                    torch.zeros(len(numbers), len(members), dtype=along.dtype).index_add_(1, line, along).numpy()
                )
        return found

    def approximate_kl(self, interventions: Sequence[Intervention], seed: int, draws: int = GRADIENTS) -> np.ndarray:
        """[intervention input] bits: KL(clean || edited), mean over an input's queried rows, to second order.

        KL(p || p + dp) = 1/2 d'Fd + O(d^3), with F the Fisher information of the answer at the activation: the mean of
        (grad log p(y) . d)^2 over answers y ~ p, here of `draws` answers. Answers of several rows are independent with
        mean gradient 0, so the square of a sum over rows has the sum of squares as its mean (derived here). From
        gradients alone the ranking is good and the size is not: exact edits of some correct it (`two_stages`).
        """
        count = self._queried.sum(1)

        def scores(log_probs: Tensor, members: Sequence[int]) -> list[Tensor]:
            generator = torch.Generator().manual_seed(hash((seed, members[0])) % 2**31)
            answers = torch.multinomial(log_probs.detach().exp().cpu(), draws, True, generator=generator)
            return [*log_probs.gather(1, answers.to(log_probs.device)).sum(0)]

        slopes = self.first_order(interventions, scores)
        return np.square(slopes).mean(0) / 2 / count.numpy() / np.log(2)


def priced(layers: Iterable[int], depth: int, tokens: int) -> float:
    """Tokens of whole passes that edits of these first layers take, one of `tokens` tokens each: a pass that begins at
    layer l runs the other L - l."""
    return tokens * sum(1 - layer / depth for layer in layers)


def chosen_layers(subject: Model, layers: Any) -> tuple[int, ...]:
    """The edited layers, as `flags.places` reads them; None for all. Raises UserError for one that does not exist."""
    return places("--layers", "all" if layers is None else layers, len(subject.blocks))


def scale_of_interval(claim: Claim, clusters: np.ndarray, *sides: np.ndarray) -> Transform:
    """The scale of an interval: the claim's scale, on which values are compared with draws, if possible.

    The log needs positive sums, whichever cluster is left out, else the identity is used; sides [prompt] are summed.
    """
    positive = all(side.min() >= 0 and len(set(clusters[side > 0])) > 1 for side in sides)
    return "log" if claim.scale == "log" and positive else "identity"


def estimate_against(
    claim: Claim, value: float, interval: Interval, draws: Mapping[str, np.ndarray], clusters: np.ndarray, *more: Null
) -> Estimate:
    """The estimate of a value over prompts in `clusters`, compared with draws of each null and with other nulls."""
    if claim.scale == "log" and min(value, *(kind.min() for kind in draws.values())) <= 0:
        claim = replace(claim, scale="identity")  # the effect of an edit that reaches no output is exactly 0
    nulls = [Null.of(kind, values, claim.side) for kind, values in draws.items()]
    return estimate(claim, value, interval, [*nulls, *more], n=len(clusters), clusters=len(set(clusters)))
