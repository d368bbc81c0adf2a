"""Interventions: copies of a batch in one pass, each with its own change of activations, and what each does to answers.

An `Intervention` says where and with what; a `Runner` gives the effect of each, or by gradients an approximation of it.
Control edits are interventions, too: those of one name are draws of one control.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.model.attention import Recorder
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Site
from llmgeom.model.edits import Clean, Edit, Point, Resume, Where
from llmgeom.progress import tell

COPIES, NUMBERS = 32, 2**26  # the most copies of a batch in a pass, and log-probabilities of all (two copies at least)
GRADIENTS = 2  # answers drawn for the approximation of a KL
# Of more than EVERY components the first EDITED of a ranking by gradients are edited, and as many draws of the others.
EVERY, EDITED = 60, 24
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
        dose: What multiplies every displacement.
        at: [input seq] bool, which of the runner's positions move; None for all. A pass begins at the first of them.
    """

    name: str
    moves: Moves
    columns: slice = field(default_factory=lambda: slice(None))
    dose: float = 1.0
    at: Tensor | None = None


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


def rescaled(steps: Tensor, like: Tensor) -> Tensor:
    """The same directions, each row as long as that of `like`."""
    return steps * (like.norm(dim=-1, keepdim=True) / steps.norm(dim=-1, keepdim=True).clamp_min(1e-300))


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

    subject: Any
    batch: Batch
    at: Tensor
    outcomes: Outcomes
    sites: tuple[Site, ...] = (Site.LOG_PROBS,)
    layer: int = -1
    compared: bool = True
    batch_tokens: int = BATCH_TOKENS
    clean: Clean | None = None

    def run(self, interventions: Sequence[Intervention], stage: str = "") -> Effects:
        """`measure`, with the interventions of one name as draws: "NAME/OUTCOME" -> [draw input]."""
        found, names = self.measure(interventions, stage), [one.name for one in interventions]
        return {
            f"{name}/{outcome}": by_input[[i for i, each in enumerate(names) if each == name]]
            for name in dict.fromkeys(names)
            for outcome, by_input in found.items()
        }

    def measure(self, interventions: Sequence[Intervention], stage: str = "") -> Effects:
        """outcome -> [intervention input], the effect of every intervention.

        Args:
            interventions: One for each copy of the batch.
            stage: What the progress calls them; without it they are not shown.
        """
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # The first layer that each changes.
        begins = [min((layer for _, layer in one.moves), default=0) if self.clean else 0 for one in interventions]
        for i, one in enumerate(interventions):
            # A copy that is compared with the clean one runs the same positions as that.
            key = tuple(self._first(one).tolist()) if self.compared and self.clean else ()
            groups[key].append(i)
        found: dict[int, dict[str, np.ndarray]] = {}
        most = copies_of(self.batch, self.subject) - self.compared
        for group in groups.values():
            order = sorted(group, key=lambda i: begins[i])
            lowest = [begins[i] for i in order]
            for chunk in together(lowest, len(self.subject.blocks), most, self.compared):
                members = [order[i] for i in chunk]
                copies = [interventions[i] for i in members] + [NOTHING] * self.compared
                sites = [x.chunk(len(copies)) for x in self._pass(copies)]
                for j, i in enumerate(members):
                    found[i] = self.outcomes([x[-1] for x in sites], [x[j] for x in sites])
                if stage:
                    tell(stage, len(found), len(interventions))
        return {outcome: np.stack([found[i][outcome] for i in range(len(found))]) for outcome in found.get(0, ())}

    def _pass(self, copies: Sequence[Intervention]) -> list[Tensor]:
        rows = replace(self.batch, posterior=None).take([*range(len(self.batch))] * len(copies))
        edits = [
            # With a spec batches may run at the same time: what is added depends on the batch alone.
            Edit(at[0], partial(self._moved, copies, at), (at[1],), spec={"patches": len(copies)})
            for at in dict.fromkeys(at for one in copies for at in one.moves)
        ]
        resume = None
        if self.clean is not None and edits:
            first = [self._first(one) for one in copies]
            if self.compared:
                first[-1] = first[0]
            # No layer runs above the last one that is read.
            end = None if Site.LOG_PROBS in self.sites or self.layer < 0 else self.layer + 1
            start = min(layer for edit in edits for layer in edit.layers or ())
            resume = Resume(self.clean, start, torch.cat(first), end)
        options: dict[str, Any] = {"layers": self.layer, "batch_tokens": self.batch_tokens, "resume": resume}
        capture = self.subject.capture(rows, self.sites, edits, **options)
        return [capture.layers(site)[-1] for site in self.sites]

    @cached_property
    def _queried(self) -> Tensor:
        tokens = self.subject.tokens(self.batch)
        place = torch.arange(tokens.data.shape[1])
        return place == tokens.lengths[:, None] - 1 if self.batch.query is None else self.batch.query

    def _first(self, one: Intervention) -> Tensor:
        """[input] the first position that it changes, or that is read."""
        read = self._queried.clone()
        read[:, : self.at.shape[1]] |= self.at if one.at is None else one.at
        return read.int().argmax(1)

    @cached_property
    def _row(self) -> Tensor:
        """[input seq] the number of each edited position among those of all inputs."""
        return self.at.flatten().cumsum(0).view_as(self.at) - 1

    def _rows(self, prompt: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(line, position, row) of the edited ones of places [line position] of these prompts [line]."""
        width = self.at.shape[1]
        at = self.at[prompt[:, None], place.clamp(max=width - 1)] & (place < width)
        line, position = at.nonzero(as_tuple=True)
        return line, position, self._row[prompt[line], place[line, position]]

    def _moved(self, copies: Sequence[Intervention], location: Location, x: Tensor, where: Where) -> Tensor:
        """The activation of a pass of these copies, each moved by its intervention."""
        n = len(self.batch)
        copy, prompt, place = where.prompt.cpu() // n, where.prompt.cpu() % n, where.position.cpu()
        line, position, row = self._rows(prompt, place)
        before = x[line, position].flatten(1).double().cpu()
        after = before.clone()
        for j in copy.unique().tolist():
            if location in copies[j].moves:
                one, mine = copies[j], copy[line] == j
                if one.at is not None:
                    mine &= one.at[prompt[line], place[line, position]]
                step = one.dose * one.moves[location](before[mine], row[mine])
                after[mine, one.columns] += step[:, one.columns]
        x = x.clone()
        x[line, position] = after.to(x).unflatten(1, x.shape[2:])
        return x

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

        def watched(location: Location, x: Tensor, where: Where) -> Tensor:
            seen[location] = x.detach()
            leaves[location] = torch.zeros_like(x, requires_grad=True)
            return x + leaves[location]

        edits = [Edit(at[0], partial(watched, at), (at[1],)) for at in locations]
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
            # Only the rows that it changes: patches of one place have a tenth of them.
            own = torch.arange(len(row)) if one.at is None else one.at[prompt[line], position].nonzero()[:, 0]
            for at, move in one.moves.items():
                step = one.dose * move(x[at][own], row[own])[:, one.columns]
                along = (slopes[at][:, own][..., one.columns] * step).sum(-1)
                total = torch.zeros(len(numbers), len(members), dtype=along.dtype)
                found[:, i] += total.index_add_(1, line[own], along).numpy()
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


def gradients(approximate: Callable[[], np.ndarray] | None, components: int, runner: Runner) -> np.ndarray | None:
    """What an approximation gives. None without one, for at most EVERY components, and where no gradient can be taken:
    then all is edited, which the log says."""
    if approximate is None or components <= EVERY:
        return None
    try:
        return approximate()
    except Exception as refusal:  # a family's own modules may refuse a gradient in any way
        logging.getLogger("llmgeom").info("%s: everything is edited (%s)", runner.subject.name, refusal)
        return None


def two_stages(
    runner: Runner,
    groups: Sequence[Sequence[Intervention]],
    outcome: str,
    approximate: Callable[[], np.ndarray] | None,
    *,
    seed: int,
    strata: Sequence[int] = (),
    whole: Sequence[int] = (),
    number: int = EDITED,
    stage: str = "",
) -> Effects:
    """The effect of every component; of many, the largest by gradients and a random sample of the others are edited.

    The sample of a stratum has `number` draws with replacement, half of the chance even and half by the gradients'
    effect: the mean of effect / chance is an unbiased estimate of the others' total (Hansen and Hurwitz 1943), also
    where gradients see nothing of a component. What is not edited has the gradients' effect, times the factor that
    gives this total.

    Simulated, 1,500 models with 270 heads of log-normal effects, log sd 1.5, gradients off by a log sd of .3 to 1 and
    blind to 10 heads or none: the total lies within 2 standard errors, 5 to 10 % of it, in 87 to 94 %.

    Args:
        groups: The interventions of each component, as many draws each, whose mean is its effect.
        outcome: The one that is estimated in two stages, never negative.
        approximate: Gives [intervention input], the effects by gradients, group after group. All is edited where
            `gradients` has none; every outcome is then measured.
        strata: [component] which stratum it is of; all of one by default. whole: strata of which all are edited.
        number: Of a stratum, the components that are edited as the largest, and the draws of its others.

    Returns:
        outcome [component input], and of two stages: edited [component], 1 for the largest, 2 for the sample, 0
        where it is estimated; rough [component input]; total_error [stratum], of the sum of its components' means; off
        [component], 0 where it is edited, else the rms difference of a component's mean from its estimate in the sample
        of its stratum.
    """

    def means(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, len(groups[0]), x.shape[1]).mean(1)

    rough = gradients(approximate, len(groups), runner)
    if rough is None:
        return {name: means(x) for name, x in runner.measure([one for of in groups for one in of], stage).items()}
    rough = means(rough)
    size, of = rough.mean(1), np.zeros(len(groups), dtype=int) if not len(strata) else np.asarray(strata)
    edited, drawn, rng = np.zeros(len(groups), dtype=int), {}, np.random.default_rng([seed, 5])
    for stratum in np.unique(of).tolist():
        members = np.flatnonzero(of == stratum)
        order = members[np.argsort(-size[members], kind="stable")]
        if stratum in whole or len(order) <= 2 * number:
            edited[members] = 1
            continue
        others = order[number:]
        chance = 0.5 / len(others) + 0.5 * size[others] / max(size[others].sum(), 1e-300)
        some = rng.choice(len(others), number, p=chance / chance.sum())
        edited[order[:number]], edited[others[some]] = 1, 2
        drawn[stratum] = others[some], chance[some]
    chosen, values = np.flatnonzero(edited), rough.copy()
    values[chosen] = means(runner.measure([one for i in chosen.tolist() for one in groups[i]], stage)[outcome])
    effect = values.mean(1)
    error, off = (np.zeros(int(of.max()) + 1) for _ in range(2))
    for stratum, (some, chance) in drawn.items():
        rest, sampled = (of == stratum) & (edited == 0), (of == stratum) & (edited == 2)
        totals = effect[some] / chance
        factor = max(totals.mean() - effect[sampled].sum(), 0.0) / max(size[rest].sum(), 1e-300)
        values[rest] *= factor
        error[stratum] = totals.std(ddof=1) / np.sqrt(number)
        off[stratum] = np.sqrt(np.square(effect[sampled] - factor * size[sampled]).mean())
    off = np.where(edited == 0, off[of], 0.0)
    return {outcome: values, "edited": edited, "rough": rough, "total_error": error, "off": off}


def copies_of(batch: Batch, subject: Any) -> int:
    """The most copies of a batch in a pass."""
    rows = len(batch) if batch.query is None else int(batch.query.sum())
    return min(COPIES, max(2, NUMBERS // (rows * subject.facts["vocabulary"])))


def together(begins: Sequence[int], depth: int, most: int, more: int = 1) -> list[range]:
    """Copies of rising first layers in passes of `most` or fewer, each with `more` clean ones, so that the fewest
    layers run: a pass runs those from its lowest first layer on."""
    best, cuts = [0], [0]
    for end in range(1, len(begins) + 1):
        cost, start = min(
            (best[start] + (end - start + more) * (depth - begins[start]), start)
            for start in range(max(0, end - most), end)
        )
        best.append(cost)
        cuts.append(start)
    chunks, end = [], len(begins)
    while end:
        chunks.append(range(cuts[end], end))
        end = cuts[end]
    return chunks[::-1]


def priced(layers: Sequence[int], depth: int, tokens: float, most: int = COPIES) -> float:
    """Tokens of whole passes that edits of these first layers take, and the clean copies beside them, of `tokens`
    tokens each: a pass that begins at layer l runs the other L - l."""
    begins = sorted(layers)
    passes = together(begins, depth, most - 1)
    return tokens * sum((len(one) + 1) * (depth - begins[one.start]) for one in passes) / depth
