"""Passes of a batch under many edits at once, and the effect of each edit on the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.claims import Claim, Null, estimate
from llmgeom.flags import places
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.edits import Clean, Edit, Point, Resume, Where
from llmgeom.probe import Batch, Site, Subject
from llmgeom.progress import tell
from llmgeom.result import Estimate
from llmgeom.stats.information import best_of_input, bits, kl, kl_of_rounded
from llmgeom.stats.resampling import Interval, Transform
from llmgeom.task import Task

ROWS_PER_PASS = 256  # inputs in a pass: several copies of the batch, each under its own patch
# (x, row) -> displacement of x. x [row coordinate] float64 has the edited positions, input after input; row [row] is
# their number among all edited positions of the batch (with one edited position per input: the input's number).
Move = Callable[[Tensor, Tensor], Tensor]
Location = tuple[Point, int]  # where an edit acts: a point of a layer
Patch = Mapping[Location, Move]  # the move at each location of one copy of the batch


@dataclass(frozen=True, eq=False)
class PatchingRun(ABC):
    """A batch read under many patches: a pass contains several copies of the batch, each with its own patch.

    Subclasses define the edited positions, the captured sites, and the effects computed from them.

    Attributes:
        batch: the inputs; answers are read at its queried positions.
        clean: of this batch, so that each pass begins at the first layer and position that it edits; None for whole
            passes.
    """

    subject: Subject
    batch: Batch
    locations: tuple[Location, ...]
    batch_tokens: int = field(default=BATCH_TOKENS, kw_only=True)
    clean: Clean | None = field(default=None, kw_only=True)

    sites: ClassVar[tuple[Site, ...]] = (Site.LOG_PROBS,)

    @property
    @abstractmethod
    def at(self) -> Tensor:
        """[input seq] bool, the edited positions."""

    @abstractmethod
    def _effects(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """Effects by name, [input], from the sites of one copy."""

    @cached_property
    def _clean(self) -> dict[tuple[int, int], list[Tensor]]:
        return {}

    @cached_property
    def _at(self) -> tuple[Tensor, Tensor]:
        """`at`, and the number of edited positions in all inputs before each input."""
        count = self.at.sum(1)
        return self.at, count.cumsum(0) - count

    def reference(self, copies: int, start: int) -> list[Tensor]:
        """The clean model in the packing of a pass that edits from layer `start` on, so that a patch without effect
        differs by exactly 0."""
        if (copies, start) not in self._clean:
            self._clean.clear()  # 256 rows of 49,152 words are 50 MB, and edits come in the order of their layers
            here = [at for at in self.locations if at[1] >= start]
            nothing = dict.fromkeys(here, lambda x, _: torch.zeros_like(x))
            self._clean[copies, start] = self._pass([nothing] * copies)
        return self._clean[copies, start]

    def run(self, patches: Sequence[Patch], stage: str = "") -> dict[str, np.ndarray]:
        """Effects of every patch.

        Args:
            patches: one for each copy of the batch; locations that a patch does not name are not edited.
            stage: what the progress calls these patches; without it they are not shown.

        Returns:
            [patch input] by effect.
        """
        lowest = [min((layer for _, layer in patch), default=0) if self.clean else 0 for patch in patches]
        order = sorted(range(len(patches)), key=lambda i: lowest[i])  # those that begin together run together
        effects: dict[int, dict[str, np.ndarray]] = {}
        per_pass = max(1, ROWS_PER_PASS // len(self.batch))
        for at in range(0, len(patches), per_pass):
            chunk = order[at : at + per_pass]
            sites = (self.reference(len(chunk), lowest[chunk[0]]), self._pass([patches[i] for i in chunk]))
            clean, patched = ([site.chunk(len(chunk)) for site in of] for of in sites)
            for j, i in enumerate(chunk):
                effects[i] = self._effects([site[j] for site in clean], [site[j] for site in patched])
            if stage:
                tell(stage, at + len(chunk), len(patches))
        return {name: np.stack([effects[i][name] for i in range(len(patches))]) for name in effects[0]}

    def run_kinds(self, kinds: Mapping[Any, Sequence[Patch]], stage: str = "") -> dict[str, dict[Any, np.ndarray]]:
        """`run` with patches of several kinds: effect -> kind -> [patch input]."""
        effects = self.run([patch for patches in kinds.values() for patch in patches], stage)
        ends = np.cumsum([len(patches) for patches in kinds.values()])[:-1]
        return {effect: dict(zip(kinds, np.split(x, ends), strict=True)) for effect, x in effects.items()}

    def _pass(self, patches: Sequence[Patch]) -> list[Tensor]:
        rows = replace(self.batch, posterior=None).take([*range(len(self.batch))] * len(patches))
        edits = [
            # With a spec batches may run at the same time: what is added depends on the batch alone.
            Edit(location[0], self._edit(patches, location), (location[1],), spec={"patches": len(patches)})
            for location in self.locations
            if any(location in patch for patch in patches)
        ]
        resume = None
        if self.clean is not None and edits:
            start = min(layer for edit in edits for layer in edit.layers or ())
            resume = Resume(self.clean, start, self._first)
        options = {"layers": self.layers, "batch_tokens": self.batch_tokens, "resume": resume}
        capture = self.subject.capture(rows, self.sites, edits, **options)
        return [capture.layers(site)[-1] for site in self.sites]

    @property
    def layers(self) -> Any:
        """The layers of `sites`; of several the last is read."""
        return -1

    @cached_property
    def _first(self) -> Tensor:
        """[input] the first position that is edited or queried."""
        tokens = self.subject.tokens(self.batch)
        place = torch.arange(tokens.data.shape[1])
        queried = place == tokens.lengths[:, None] - 1 if self.batch.query is None else self.batch.query
        at = torch.zeros_like(queried)
        at[:, : self.at.shape[1]] = self.at
        return (at | queried).int().argmax(1)

    def _edit(self, patches: Sequence[Patch], location: Location) -> Callable[[Tensor, Where], Tensor]:
        n, (edited, before_it) = len(self.batch), self._at

        def function(x: Tensor, where: Where) -> Tensor:
            copy, prompt, place = where.prompt.cpu() // n, where.prompt.cpu() % n, where.position.cpu()
            at = edited[prompt[:, None], place.clamp(max=edited.shape[1] - 1)] & (place < edited.shape[1])
            line, position = at.nonzero(as_tuple=True)
            row = before_it[prompt[line]] + at.cumsum(1)[line, position] - 1
            before = x[line, position].flatten(1).double().cpu()
            after = before.clone()
            for j in copy.unique().tolist():
                if location in patches[j]:
                    mine = copy[line] == j
                    after[mine] += patches[j][location](before[mine], row[mine])
            x = x.clone()
            x[line, position] = after.to(x).unflatten(1, x.shape[2:])
            return x

        return function


@dataclass(frozen=True, eq=False)
class PromptRun(PatchingRun):
    """Prompts, each read at its final token.

    Effects, [prompt]:
        kl: KL(clean || patched) of the next-token distribution, bits.
        error: rise of the squared error of a linear read-out of entropy, bits^2.
        odds: |change of the log-odds of the pair|, bits.
        evidence: with an exact answer, rise of KL(exact || model) over the pair, bits.

    Attributes:
        positions: "query", the final token; "all"; or "later", all but the first token, an attention sink in many
            models.
        entropy: [prompt] bits, of the clean model.
        read: last residual stream [prompt d_model] -> entropy in bits.
        pair: [prompt 2] ids of the two labels, or of the clean model's two likeliest tokens.
        exact: [prompt 2] exact log-probabilities of the labels, nats; None if the prompts have no exact answer.
    """

    positions: Literal["query", "all", "later"]
    entropy: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None

    sites: ClassVar[tuple[Site, ...]] = (Site.LOG_PROBS, Site.RESIDUAL)

    @property
    def at(self) -> Tensor:
        inputs = self.subject.tokens(self.batch)
        position = torch.arange(inputs.data.shape[1]).expand(len(self.batch), -1)
        if self.positions == "query":
            return position == inputs.lengths[:, None] - 1
        return position >= (self.positions == "later")  # padding too: no token reads it

    def _effects(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        log_p, log_q = (sites[0] for sites in (clean, patched))
        errors = [np.square(self.read(sites[1].double().numpy()) - self.entropy) for sites in (clean, patched)]
        two_p, two_q = (log.gather(1, self.pair).double() for log in (log_p, log_q))
        odds = (two_q - two_p) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
        effects = {"kl": kl_of_rounded(log_p, log_q).double(), "odds": odds.abs()}
        if self.exact is not None:
            effects["evidence"] = kl(self.exact, two_q.log_softmax(1)) - kl(self.exact, two_p.log_softmax(1))
        return {"error": errors[1] - errors[0]} | {name: bits(nats.numpy()) for name, nats in effects.items()}


@dataclass(frozen=True, eq=False)
class TaskRun(PatchingRun):
    """Whole sequences of a task, read at all their queries, with the exact answer at each.

    Effects in bits, [sequence], are means over a sequence's queries up to the task's horizon. Except in kl, each
    outcome counts separately and all other tokens together, as in `llmgeom grade`:
        kl: KL(clean || patched) over all tokens.
        evidence: rise of KL(exact || model).
        mae, clean_mae: |H_model - H_exact| of the patched and of the clean model.
        clean_kl: KL(exact || model) of the clean model.
        local_kl: the same of the best answer that knows only the query and the input there (`_local`).
    """

    task: Task
    positions: Literal["query", "all"]

    @property
    def at(self) -> Tensor:
        queries = self.task.mask().expand(len(self.batch), -1)
        return queries if self.positions == "query" else torch.ones_like(queries)

    @cached_property
    def _exact(self) -> Tensor:
        return self.task.answers.exact(self.batch.exact.flat.predictive).double()

    @cached_property
    def _local(self) -> Tensor:
        """[row outcome] `best_of_input`: a model whose attention is silent cannot be below it."""
        read = self.subject.tokens(self.batch).data[:, list(self.task.query)]
        query = np.tile(np.arange(read.shape[1]), len(read))
        return torch.from_numpy(best_of_input(self._exact.numpy(), query, read.flatten(0, 1).numpy()))

    def _effects(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        answers, exact = self.task.answers, self._exact
        logs = [sites[0].double().log_softmax(-1) for sites in (clean, patched)]
        p, q = (answers.read(log).double() for log in logs)
        n, horizon = len(self.batch), self.task.trained_queries
        missed = answers.kl(exact, p)
        effects = {
            "kl": kl(*logs).clamp_min(0),
            "evidence": answers.kl(exact, q) - missed,
            "mae": (answers.entropy(q) - answers.entropy(exact)).abs(),
            "clean_mae": (answers.entropy(p) - answers.entropy(exact)).abs(),
            "clean_kl": missed,
            "local_kl": answers.kl(exact, self._local),
        }
        return {name: bits(x.unflatten(0, (n, -1))[:, :horizon].mean(1).numpy()) for name, x in effects.items()}


def to_zero(x: Tensor, row: Tensor) -> Tensor:
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


def flat(effects: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Nested mappings of arrays as one mapping, for the cache; an array's name is its path, as in "moved/whole"."""
    arrays: dict[str, np.ndarray] = {}
    for name, x in effects.items():
        arrays |= flat(x, f"{prefix}{name}/") if isinstance(x, Mapping) else {f"{prefix}{name}": np.asarray(x)}
    return arrays


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `flat`."""
    effects: dict[str, Any] = {}
    for path, x in arrays.items():
        *parents, name = path.split("/")
        at = effects
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = x
    return effects


def chosen_layers(subject: Subject, layers: Any) -> tuple[int, ...]:
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
