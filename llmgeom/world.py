"""Worlds: a prior gives a hypothesis, the hypothesis a sequence, and Bayes' rule the exact answers."""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from llmgeom.answers import Answers, Categorical, Gaussian, uniform
from llmgeom.batch import Batch, Posterior, Rows, Tokens
from llmgeom.errors import UserError
from llmgeom.flags import changed_fields
from llmgeom.sampling import Generator
from llmgeom.stats.information import bits

__all__ = ["Categorical", "Gaussian", "Sequences", "Split", "World", "held_out", "seeded", "uniform"]

Split = Literal["any", "seen", "held-out"]
BUCKETS = 10  # buckets of the hash; one of them is held out


@dataclass(frozen=True)
class Sequences:
    """Sequences on the device where they were drawn, and the outcome drawn at each query.

    Attributes:
        inputs: Token ids [sequence seq] int64, or real-valued rows [sequence seq feature] float32.
        target: [sequence query]: the outcome's number, int64; for Gaussian answers its value, float32.
    """

    inputs: Tensor
    target: Tensor


class World(ABC):
    """A hidden cause, sequences drawn under it, and the exact answer: a frozen dataclass whose fields are its spec.

    A sequence is drawn in two steps, hypothesis ~ prior and inputs ~ p(. | hypothesis), so that a hash of the
    hypothesis can hold some of them out of training. The model is queried at the same positions in every sequence.
    Small models train on the tokens or rows themselves (a wind tunnel); `prompts.text` writes the same sequences with
    neutral words for language models.

    A subclass defines `vocabulary`, `length`, `draw` and `log_predictive`, and if possible `answers`, `hypothesis`,
    `counterfactual` and `bearing`; for text, `showing`. The first line of its docstring is its title in lists.

    Attributes:
        TEXT: Values of fields in text, where they differ from the defaults.
        KS: Default numbers of observations of a prompt.
        PRIMITIVE: The ability that the answer needs: "accumulate", "transport", or "bind" (tokens that are no answers
            are then the items that the answers belong to).
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of the subclass
    TEXT: ClassVar[Mapping[str, Any]] = {}
    KS: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    PRIMITIVE: ClassVar[str] = "accumulate"
    FILE_SPEC: ClassVar[str] = ""  # FILE:CLASS of a world from the user's own file
    FILE_HASH: ClassVar[str] = ""  # SHA-256 of that file

    # ---- shape ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Token ids run from 0 to vocabulary - 1. For rows: the number of outputs of the model's head."""

    @property
    def features(self) -> int:
        """Real numbers in a row of inputs; 0 if inputs are tokens."""
        return 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions of a sequence."""

    @property
    def header(self) -> int:
        """Positions before the first query."""
        return 0

    @property
    def query(self) -> tuple[int, ...]:
        """The queried positions, ascending; by default all after the header. Inputs show an answer later or never."""
        return tuple(range(self.header, self.length))

    @property
    def answers(self) -> Answers:
        """The family of predictions: over all tokens by default, over some of them, or over real numbers."""
        return Categorical(tuple(range(self.vocabulary)))

    @property
    def trained_queries(self) -> int:
        """The number of first queries that the training loss covers: the field `horizon`, or all."""
        return getattr(self, "horizon", 0) or len(self.query)

    @property
    def log2_hypotheses(self) -> float:
        """log2 of the number of hypotheses; inf for a continuum."""
        return math.inf

    def mask(self) -> Bool[Tensor, " seq"]:
        """Which positions are queries."""
        queried = torch.zeros(self.length, dtype=torch.bool)
        queried[list(self.query)] = True
        return queried

    @property
    def name(self) -> str:
        """The name in `llmgeom list worlds`, or FILE:CLASS."""
        return self.FILE_SPEC or type(self).__module__.rsplit(".", 1)[-1].replace("_", "-")

    @property
    def title(self) -> str:
        """NAME:field=value,... with the fields that differ from their defaults; `load_world` reads it back."""
        return changed_fields(self, self.name)

    @property
    def file_code(self) -> dict[str, str]:
        """The hash of the user's file that defines the task; empty for shipped tasks."""
        return {"code": self.FILE_HASH} if self.FILE_SPEC else {}

    def require(self, holds: bool, expected: str) -> None:
        """Raises UserError with the task's title and what was expected, unless `holds`."""
        if not holds:
            raise UserError(f"{self.title}: expected {expected}")

    def numbers(self, name: str) -> tuple[float, ...]:
        """The numbers of a field, separated by commas. Raises UserError."""
        text = getattr(self, name)
        try:
            return tuple(float(number) for number in text.split(","))
        except ValueError:
            raise UserError(f"{self.title}: {name}={text!r}; expected numbers with commas between") from None

    # ---- as text ----------------------------------------------------------------------------------------------------

    @classmethod
    def has_text(cls) -> bool:
        """Whether its sequences can be written with words."""
        return cls.showing is not World.showing

    def showing(self, k: int) -> World:
        """The world with sequences of k observations before the last query; answers shown are the observations.

        Raises UserError: It has no such sequences, or no form as text.
        """
        raise UserError(f"{self.title}: this world has no form as text")

    def statement(self, inputs: Tensor, marks: Sequence[str]) -> str:
        """What a prompt says before the evidence about a sequence [seq], e.g. stated numbers; nothing by default."""
        return ""

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """n independent draws from the prior, [n ...], one hypothesis per row; none by default."""
        return torch.zeros(n, 0, device=generator.device)

    @abstractmethod
    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        """One sequence for each hypothesis.

        With `training`, inputs may come from another distribution that leaves the posterior unchanged (sticky keys).
        """

    def draw_split(self, n: int, generator: Generator, split: Split = "any", training: bool = False) -> Sequences:
        """n sequences of a split, on the generator's device.

        Raises:
            UserError: The task holds no hypotheses out, so it has no such split.
        """
        if split != "any" and self.memorisable:
            raise UserError(f"{self.title} holds no hypotheses out: {self.memorisable}")
        return self.draw(self._hypotheses(n, generator, split), generator, training)

    # ---- held-out hypotheses ----------------------------------------------------------------------------------------

    @property
    def memorisable(self) -> str:
        """Why the task cannot hold out hypotheses (a table could replace inference), or "" if it can."""
        return "it gives no `hypothesis`" if type(self).hypothesis is World.hypothesis else ""

    @property
    def training_split(self) -> Split:
        """The split that models train on."""
        return "any" if self.memorisable else "seen"

    @property
    def test_split(self) -> Split:
        """The split that models are graded on."""
        return "any" if self.memorisable else "held-out"

    def split_key(self, hypothesis: Tensor) -> Int[Tensor, "n column"]:
        """The hashed integers that decide if a hypothesis is held out: its own, or its real numbers in cells of 1/4."""
        flat = hypothesis.flatten(1)
        return (flat * 4).floor().long() if flat.is_floating_point() else flat.long()

    def _hypotheses(self, n: int, generator: Generator, split: Split) -> Tensor:
        """The first n hypotheses of the split among a fixed number of draws."""
        if split == "any":
            return self.hypothesis(n, generator)
        share = self._held_out_share if split == "held-out" else 1 - self._held_out_share
        if share < 0.01:
            raise UserError(
                f"{self.title}: {share:.2%} of the prior is {split}; give it more hypotheses, or finer cells"
            )
        # The number of draws does not depend on the draws, so nothing waits for the device and a CUDA graph can record
        # it. The reserve is eight standard deviations.
        draws = math.ceil((n + 8 * math.sqrt(n) + 64) / share)
        hypotheses = self.hypothesis(draws, generator)
        in_split = held_out(self.split_key(hypotheses)) == (split == "held-out")
        # If there were fewer than n after all, some would be repeated; none comes from the other split.
        order = torch.arange(n, device=hypotheses.device) % in_split.sum().clamp_min(1)
        return hypotheses[torch.argsort(~in_split, stable=True)[order]]

    @functools.cached_property
    def _held_out_share(self) -> float:
        """The held-out share of the prior, by draws: the hash holds out a tenth of the cells, which may be unequal."""
        return held_out(self.split_key(self.hypothesis(4096, seeded("share", 0)))).double().mean().item()

    # ---- held-out states --------------------------------------------------------------------------------------------

    def sufficient(self, inputs: Tensor) -> Int[Tensor, "sequence query column"] | None:
        """The state of the evidence at each query: integers of which the exact answer is a function.

        It keeps what a look-up table needs and drops what Bayes' rule ignores, e.g. the order of independent
        observations. Two prefixes of equal state have equal answers. A task with few states can be answered from a
        table even where its hypotheses are many: the bijection of 8 values shown once each has 40,320 maps but 255
        states, one for each set of used values. Derived here.

        None by default: the states are unknown, and no table is filled.
        """
        return None

    def held_out_states(self, inputs: Tensor) -> Bool[Tensor, "sequence query"]:
        """Which queries are in a state that training leaves out if it holds states out.

        A tenth of the states of each query, by the hash that holds hypotheses out. A query with fewer than 10 states
        has none held out: it could lose all of them.

        Raises:
            UserError: The task does not define its states.
        """
        states = self.sufficient(inputs)
        if states is None:
            raise UserError(f"{self.title} does not define `sufficient`: its states cannot be held out")
        queries = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        keys = torch.cat([queries[..., None], states], -1).flatten(0, 1)
        return held_out(keys).unflatten(0, queries.shape) & self._many_states.to(states.device)

    @functools.cached_property
    def _many_states(self) -> Bool[Tensor, " query"]:
        """Which queries have at least 10 states, among those of 4,096 sequences."""
        states = self.sufficient(self.draw_split(4096, seeded("states", 0)).inputs)
        assert states is not None
        return torch.tensor([len(states[:, query].unique(dim=0)) >= BUCKETS for query in range(states.shape[1])])

    # ---- exact answers ----------------------------------------------------------------------------------------------

    @abstractmethod
    def log_predictive(self, inputs: Tensor) -> Tensor:
        """The exact answer at each query, given the inputs up to it.

        Returns:
            [sequence query outcome] log-probabilities in nats; for Gaussian answers [sequence query 2], mean and log
            variance.
        """

    def log_first(self) -> Tensor:
        """log P(the first symbol shown), [symbol]; uniform by default."""
        return -torch.ones(self.vocabulary, dtype=torch.float64) * math.log(self.vocabulary)

    def log_belief(self, inputs: Tensor) -> Tensor | None:
        """log P(latent state | inputs up to each query) in nats, [sequence query state]; None without latent states."""
        return None

    def bearing(self, inputs: Tensor) -> Bool[Tensor, "sequence query seq"] | None:
        """The positions up to each query on which the exact answer there depends (Paper I: "feasible", not defined).

        An earlier position bears if some other content there changes the answer. New content about the queried item
        (its key, chain or symbol) is excluded, since every position could have shown it. The query itself bears if any
        other content there changes the answer. Derived here.

        None if the task does not define it, or if all inputs bear and there is no contrast (`hmm`, `coin`,
        `regression`; in `recurrence` all numbers bear until chance is certain, then none).
        """
        return None

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """The same sequences with one piece of evidence replaced by another that the task could have drawn.

        `log_predictive` gives their exact answers. None if the task does not define it.
        """
        return None

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """Predictions of predictors that do not infer, by name, in the form of `log_predictive`.

        The uniform and the constant predictor need not be listed: they are graded for every task.
        """
        return {}

    # ---- batches ----------------------------------------------------------------------------------------------------

    def sample(self, n: int, seed: int, split: Split = "any", device: str = "cpu") -> Batch:
        """n sequences with their exact answers, each its own cluster; the same bits whatever ran before.

        Target and posterior are [sequence query ...].
        """
        sequences = self.draw_split(n, seeded(f"sample/{split}", seed, device), split)
        x = sequences.inputs
        source = {"kind": "task", "name": self.title, "n": n, "seed": seed, "split": split, "spec": asdict(self)}
        return Batch(
            inputs=self._padded(x, torch.full((n,), self.length)),
            cluster=tuple(f"sequence {i}" for i in range(n)),
            source={**source, "trained": self.trained_queries},
            query=self.mask().expand(n, -1),
            target=sequences.target,
            posterior=Posterior(self.log_predictive(x), self.log_belief(x), self.answers.tokens, self.bearing(x)),
        )

    def truncated(self, n: int, seed: int, split: Split = "any", at: int | None = None) -> Batch:
        """n sequences, each truncated after one of its queries, so that the query is last as in a prompt.

        Args:
            n: number of sequences. seed: seed of the draw. split: split of the hypotheses.
            at: the number of the query, from 0, for every sequence. By default it is drawn uniformly, without the first
                query if there are others, since no evidence comes before it.

        Returns:
            A batch with the columns `asked_at` (the query's position), `exact_entropy` (bits) and, for token answers,
            `likeliest`: the latent state, or else the outcome, of highest exact probability (ties: the first).
        """
        whole = self.sample(n, seed, split)
        places = self.query[1:] or self.query
        chosen = torch.randint(len(places), (n,), generator=seeded("cut", seed)) + len(self.query) - len(places)
        if at is not None:
            chosen = torch.full((n,), range(len(self.query))[at])
        lengths, exact = torch.tensor(self.query)[chosen] + 1, whole.exact.at(chosen)
        entropy = bits(self.answers.entropy(self.answers.exact(exact.predictive)))[:, 0]
        columns: dict[str, tuple] = {
            "asked_at": tuple((lengths - 1).tolist()),
            "exact_entropy": tuple(round(float(h), 6) for h in entropy),
        }
        if exact.outcomes:
            about = exact.predictive if exact.belief is None else exact.belief
            columns["likeliest"] = tuple(about[:, 0].argmax(-1).tolist())
        assert whole.target is not None
        inputs, target = self._padded(whole.tokens.data, lengths), whole.target[torch.arange(n), chosen][:, None]
        return replace(whole, inputs=inputs, query=None, target=target, columns=columns, posterior=exact)

    def _padded(self, inputs: Tensor, lengths: Int[Tensor, " sequence"]) -> Rows | Tokens:
        return Rows(inputs, lengths) if self.features else Tokens(inputs, lengths)


def seeded(purpose: str, seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator for one purpose: training never draws what grading draws, whatever the seed."""
    whole = hashlib.sha256(f"llmgeom/{purpose}/{seed}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(whole[:8], "big") >> 1)


def held_out(keys: Int[Tensor, "n column"]) -> Bool[Tensor, " n"]:
    """Which hypotheses are never trained on: a tenth of them, by a hash that is the same on every device."""
    return _shift_right(hashed(keys), 1) % BUCKETS == 0


def hashed(keys: Int[Tensor, "n column"]) -> Int[Tensor, " n"]:
    """A 64-bit hash of each row, the same on every device.

    Each column is mixed in with the finaliser of SplitMix64 (Steele, Lea & Flood 2014), multiplications and shifts
    modulo 2^64: a column that moves by one changes about half of the bits.
    """
    state = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
    for column in keys.unbind(1):
        state = state + column + _signed(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ _shift_right(state, shift)) * _signed(factor)
        state = state ^ _shift_right(state, 31)
    return state


def _shift_right(x: Tensor, by: int) -> Tensor:
    """A logical shift: shifts of int64 copy the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
