"""What a wind tunnel is: a hypothesis drawn from a prior, a sequence drawn from it, the exact answer at each query."""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llmgeom.answers import Answers, Categorical, Gaussian
from llmgeom.batch import Batch, Posterior, Rows, Tokens
from llmgeom.errors import UserError
from llmgeom.stats.information import bits

__all__ = ["Categorical", "Gaussian", "Sequences", "Split", "Task", "held_out", "on_device", "seeded", "uniform"]

Split = Literal["any", "seen", "held-out"]
BUCKETS = 10  # one of them is held out


@dataclass(frozen=True)
class Sequences:
    """Sequences on the device where they were drawn, and what was drawn at each query.

    inputs      token ids [sequence seq] int64, or real rows [sequence seq feature] float32.
    target      [sequence query]: the number of the outcome, int64; where the answers are Gaussian the value, float32.
    """

    inputs: Tensor
    target: Tensor


class Task(ABC):
    """A wind tunnel: a frozen dataclass whose fields are its spec. A subclass gives `vocabulary`, `length`, `query`,
    `answers`, `draw`, `log_predictive`, and where it can `hypothesis` and `swapped`; its first docstring line is its
    title.

    A sequence is drawn in two steps, hypothesis ~ prior and inputs ~ p(. | hypothesis), so that hypotheses can be held
    out of training by their hash. What a model is asked stands at the same positions in every sequence.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of the subclass
    FILE_SPEC: ClassVar[str] = ""  # FILE:CLASS of a task of yours

    # ---- what a task says of itself ---------------------------------------------------------------------------------

    @property
    def memorisable(self) -> str:
        """Why nothing is held out of training, empty where hypotheses are: a table could stand in for inference, or the
        task gives no `hypothesis`."""
        return "it gives no `hypothesis`" if type(self).hypothesis is Task.hypothesis else ""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Token ids of inputs and answers: 0 .. vocabulary - 1. Where inputs are rows: outputs of the model's head."""

    @property
    def features(self) -> int:
        """Real numbers in a row of inputs; 0 where inputs are tokens."""
        return 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions of a sequence."""

    @property
    @abstractmethod
    def query(self) -> tuple[int, ...]:
        """The positions at which an answer is asked, ascending. The answer itself stands later, or nowhere."""

    @property
    @abstractmethod
    def answers(self) -> Answers:
        """What the outcomes are: some of the tokens, or real numbers."""

    @property
    def trained_queries(self) -> int:
        """How many queries, the first ones, a loss is on: the horizon. All of them unless the task has one."""
        return len(self.query)

    @property
    def log2_hypotheses(self) -> float:
        """log2 of how many hypotheses the prior is spread over; inf where they are a continuum."""
        return math.inf

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """n independent draws from the prior, [n ...]; one row is one hypothesis. None by default."""
        return torch.zeros(n, 0, device=generator.device)

    def split_key(self, hypothesis: Tensor) -> Int[Tensor, "n column"]:
        """What is hashed to hold a hypothesis out: its integers, or real numbers in cells a quarter wide."""
        flat = hypothesis.flatten(1)
        return (flat * 4).floor().long() if flat.is_floating_point() else flat.long()

    @abstractmethod
    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        """One sequence a hypothesis. With `training` the inputs may be drawn otherwise where the posterior does not
        depend on how (sticky keys)."""

    def draw_split(self, n: int, generator: torch.Generator, split: Split = "any", training: bool = False) -> Sequences:
        """n sequences of a split, on the generator's device. UserError for a split that the task does not have."""
        if split != "any" and self.memorisable:
            raise UserError(f"{self.title} holds no hypotheses out: {self.memorisable}")
        return self.draw(self._hypotheses(n, generator, split), generator, training)

    def _hypotheses(self, n: int, generator: torch.Generator, split: Split) -> Tensor:
        """The first n of a fixed number of draws that are in the split.

        How many are drawn does not depend on what is drawn, so that nothing waits for the device and a CUDA graph can
        hold it; the reserve is eight standard deviations.
        """
        if split == "any":
            return self.hypothesis(n, generator)
        share = self._held_out_share if split == "held-out" else 1 - self._held_out_share
        if share < 0.01:
            raise UserError(
                f"{self.title}: {share:.2%} of the prior is {split}; give it more hypotheses, or finer cells"
            )
        many = math.ceil((n + 8 * math.sqrt(n) + 64) / share)
        found = self.hypothesis(many, generator)
        wanted = held_out(self.split_key(found)) == (split == "held-out")
        # Were there fewer than n after all, some would come twice; none comes from the other split.
        order = torch.arange(n, device=found.device) % wanted.sum().clamp_min(1)
        return found[torch.argsort(~wanted, stable=True)[order]]

    @functools.cached_property
    def _held_out_share(self) -> float:
        """By trial: the hash holds out a tenth of the cells, which are few or unequal in some tasks."""
        return held_out(self.split_key(self.hypothesis(4096, seeded("share", 0)))).double().mean().item()

    # ---- exact answers ----------------------------------------------------------------------------------------------

    @abstractmethod
    def log_predictive(self, inputs: Tensor) -> Tensor:
        """What Bayes' rule says at each query, from the inputs up to it: [sequence query outcome] log-probabilities in
        nats, or where the answers are Gaussian [sequence query 2], mean and log variance."""

    def log_belief(self, inputs: Tensor) -> Tensor | None:
        """log P(latent state | inputs up to each query) in nats, [sequence query state]; None where it has none."""
        return None

    def bearing(self, inputs: Tensor) -> Bool[Tensor, "sequence query seq"] | None:
        """The positions up to each query that bear on the exact answer there.

        An earlier position bears if some other content there would change the answer, short of content about what is
        asked (its key, chain or symbol) that was not there before: anything might have been about it. The query itself
        bears if any other content there would. Derived here; Paper I says "feasible" and does not define it.
        None where the task does not say, and where there is no contrast since all that is shown bears, punctuation
        aside (`hmm`, `coin`, `regression`; in `recurrence` all numbers do until chance is certain, then none).
        """
        return None

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """The same sequences with one piece of their evidence another, which the task might have drawn too: what the
        answers would then have been, `log_predictive` says. None where the task does not say."""
        return None

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """By name, what predictors that do not infer would say, as `log_predictive` says it. Uniform and constant ones
        need not be here: every task is held against them."""
        return {}

    # ---- a batch ----------------------------------------------------------------------------------------------------

    @property
    def from_file(self) -> bool:
        """Is it a task of yours, from a file?"""
        return bool(self.FILE_SPEC)

    @property
    def title(self) -> str:
        """NAME:field=value,... with the fields that differ from their defaults; `--task` reads it back. A task of your
        own is named by its file."""
        name = self.FILE_SPEC or type(self).__module__.rsplit(".", 1)[-1]
        given = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{name}:{','.join(given)}" if given else name

    def sample(self, n: int, seed: int, split: Split = "any", device: str = "cpu") -> Batch:
        """n sequences with their exact answers, each a unit of its own; the same bits whatever ran before.

        target and posterior are given query by query: [sequence query ...].
        """
        return self._sampled(n, seed, split, device)[0]

    def _sampled(self, n: int, seed: int, split: Split, device: str = "cpu") -> tuple[Batch, Sequences, Posterior]:
        drawn = self.draw_split(n, seeded(f"sample/{split}", seed, device), split)
        exact = Posterior(
            self.log_predictive(drawn.inputs),
            self.log_belief(drawn.inputs),
            self.answers.tokens,
            self.bearing(drawn.inputs),
        )
        source = {"kind": "task", "name": self.title, "n": n, "seed": seed, "split": split, "spec": asdict(self)}
        batch = Batch(
            inputs=self._padded(drawn, torch.full((n,), self.length)),
            cluster=tuple(f"sequence {i}" for i in range(n)),
            source={**source, "trained": self.trained_queries},
            query=self.mask().expand(n, -1),
            target=drawn.target,
            posterior=exact,
        )
        return batch, drawn, exact

    def _padded(self, drawn: Sequences, lengths: Int[Tensor, " sequence"]) -> Rows | Tokens:
        return Rows(drawn.inputs, lengths) if self.features else Tokens(drawn.inputs, lengths)

    def truncated(self, n: int, seed: int, split: Split = "any") -> Batch:
        """n sequences, each cut at one of its queries, so that what is asked stands at the end as in a prompt.

        The query is drawn evenly; the first, before which nothing was seen, is left out where there are others.
        columns: asked_at, its position, exact_entropy in bits, and where outcomes are tokens likeliest, the number of
        the state, or else the outcome, with the highest exact probability (ties: the first).
        """
        whole, drawn, exact = self._sampled(n, seed, split)
        places = self.query[1:] or self.query
        chosen = torch.randint(len(places), (n,), generator=seeded("cut", seed)) + len(self.query) - len(places)
        rows, lengths = torch.arange(n), torch.tensor(self.query)[chosen] + 1
        exact = exact.at(chosen)
        entropy = bits(self.answers.entropy(self.answers.exact(exact.predictive)))[:, 0]
        about = exact.predictive if exact.belief is None else exact.belief
        likeliest = {"likeliest": tuple(about[:, 0].argmax(-1).tolist())} if exact.outcomes else {}
        return replace(
            whole,
            inputs=self._padded(drawn, lengths),
            query=None,
            target=drawn.target[rows, chosen][:, None],
            columns={
                "asked_at": tuple((lengths - 1).tolist()),
                "exact_entropy": tuple(round(float(h), 6) for h in entropy),
                **likeliest,
            },
            posterior=exact,
        )

    def mask(self) -> Bool[Tensor, " seq"]:
        """Which positions are queries."""
        found = torch.zeros(self.length, dtype=torch.bool)
        found[list(self.query)] = True
        return found


def seeded(purpose: str, seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator of its own for each purpose: training never draws what grading draws."""
    whole = hashlib.sha256(f"llmgeom/{purpose}/{seed}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(whole[:8], "big") >> 1)


def held_out(cells: Int[Tensor, "n column"]) -> Bool[Tensor, " n"]:
    """Which hypotheses are never trained on: a tenth, by a hash that is the same on every device.

    Each column is mixed in by a multiplication and a shift modulo 2^64 (the finaliser of SplitMix64: Steele, Lea &
    Flood 2014), so that one column moved by one changes about half of the bits.
    """
    state = torch.zeros(len(cells), dtype=torch.int64, device=cells.device)
    for column in cells.unbind(1):
        state = state + column + _signed(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ _right(state, shift)) * _signed(factor)
        state = state ^ _right(state, 31)
    return _right(state, 1) % BUCKETS == 0


def _right(x: Tensor, by: int) -> Tensor:
    """A logical shift: int64 shifts copy the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def uniform(inputs: Tensor, queries: int, outcomes: int) -> Float[Tensor, "sequence query outcome"]:
    """log 1/K at every query."""
    return torch.full((len(inputs), queries, outcomes), -math.log(outcomes), dtype=torch.float64, device=inputs.device)


def altered(
    symbols: Int[Tensor, "sequence place"], many: int, generator: torch.Generator
) -> Int[Tensor, "sequence place"]:
    """One symbol of each sequence, at a place drawn evenly, is another one of 0 .. many - 1."""
    n, places = symbols.shape
    chosen = torch.randint(places, (n, 1), generator=generator, device=generator.device)
    further = torch.randint(1, many, (n, 1), generator=generator, device=generator.device)
    return symbols.scatter(1, chosen, (symbols.gather(1, chosen) + further) % many)


def renamed(
    inputs: Int[Tensor, "sequence seq"], one: Int[Tensor, "sequence 1"], other: Int[Tensor, "sequence 1"]
) -> Int[Tensor, "sequence seq"]:
    """Two tokens exchanged wherever they stand."""
    return torch.where(inputs == one, other, torch.where(inputs == other, one, inputs))


def on_device(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " number"]:
    """Constants in float64, filled where they are needed: a CUDA graph cannot hold a copy from the host."""
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])
