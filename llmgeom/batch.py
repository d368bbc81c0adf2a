"""A batch: inputs, the positions at which predictions are examined, and the exact answer if it is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from llmgeom.errors import Unavailable, UserError, brief, unknown

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

# What `Batch.of` takes.
Prompts: TypeAlias = "Batch | str | Iterable[str] | Iterable[int] | Iterable[Iterable[int]]"


@dataclass(frozen=True)
class Text:
    """Prompts as strings; a Model's own tokenizer turns them into tokens."""

    strings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.strings)


@dataclass(frozen=True)
class Tokens:
    """Token ids, right-padded: `ids[i, :lengths[i]]` are real. Shapes: ids [batch seq] int64, lengths [batch] int64."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Collection[Sequence[int]]) -> Tokens:
        """From the ids of each input."""
        import torch

        lengths = [len(row) for row in rows]
        ids = torch.zeros(len(rows), max(lengths, default=0), dtype=torch.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = torch.tensor(row, dtype=torch.int64)
        return cls(ids, torch.tensor(lengths, dtype=torch.int64))

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def data(self) -> Tensor:
        """What the model reads, [batch seq ...]."""
        return self.ids

    @property
    def real(self) -> list[list[int]]:
        """The ids of each input, without the padding."""
        return [ids[:n] for ids, n in zip(self.ids.tolist(), self.lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Rows:
    """Real-valued input rows, right-padded. Shapes: values [batch seq feature] float, lengths [batch] int64."""

    values: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def data(self) -> Tensor:
        """What the model reads, [batch seq ...]."""
        return self.values


@dataclass(frozen=True)
class Posterior:
    """The exact answer at the queried positions, as log-probabilities in nats.

    Attributes:
        predictive: [batch query outcome] of the target's outcomes; for a real-valued target [batch query 2], mean and
            log variance of a Gaussian.
        belief: [batch query state] of the latent state, if the task has one.
        outcomes: the token of each outcome; empty for a real-valued target, and if tokens differ by input.
        answers: [batch query outcome] int64: the token of each outcome, if they differ by input (processes in text).
        trivial: log-probabilities [batch query outcome] of observers that do not infer, by name.
        bearing: [batch query seq] bool, if the task defines it: the positions up to the query on which its answer
            depends (Paper I's feasible positions).
    """

    predictive: Tensor
    belief: Tensor | None = None
    outcomes: tuple[int, ...] = ()
    bearing: Tensor | None = None
    answers: Tensor | None = None
    trivial: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def categorical(self) -> bool:
        """Whether the target is one of several outcomes, not a real number."""
        return bool(self.outcomes or self.trivial) or self.belief is not None or self.answers is not None

    def take(self, index: Any) -> Posterior:
        """The answers of the inputs `index`, in that order."""
        return self._of(lambda each: each[index])

    def at(self, query: Int[Tensor, " batch"]) -> Posterior:
        """One query of each input."""
        return self._of(lambda each: each[list(range(len(each))), query][:, None])

    @property
    def entropy(self) -> Tensor:
        """Entropy of `predictive` in nats, [batch query]; for a Gaussian log(2 pi e v) / 2, which may be below 0."""
        if not self.categorical:
            return (math.log(2 * math.pi * math.e) + self.predictive[..., 1]) / 2
        from llmgeom.stats.information import entropy  # here, since `llmgeom list domains` needs no numpy

        return entropy(self.predictive)

    @property
    def flat(self) -> Posterior:
        """Input and query as one axis, in the order of a capture's rows."""
        return self._of(lambda each: each.flatten(0, 1))

    def _of(self, pick: Callable[[Tensor], Tensor]) -> Posterior:
        tensors = {name: getattr(self, name) for name in ("predictive", "belief", "bearing", "answers")}
        picked: dict[str, Any] = {name: pick(tensor) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, trivial={name: pick(tensor) for name, tensor in self.trivial.items()}, **picked)


@dataclass(frozen=True)
class Batch:
    """Inputs with the facts that statistics need.

    Attributes:
        inputs: texts, tokens or rows of real numbers.
        cluster: the cluster of each input: template, document or sequence. Permutations and intervals move or delete
            whole clusters, and n counts clusters.
        source: the spec of this batch, as plain data: it is stored and hashed.
        query: [batch seq] bool, the examined positions; None means the final real token of each input (prompts).
        target: [batch query], the outcome that was drawn at each queried position; None for prompts.
        columns: facts about each input by name (domain, tags ...), each of length batch; figures are coloured by them.
        posterior: the exact answer of a wind tunnel or a process; None for other prompts.
    """

    inputs: Text | Tokens | Rows
    cluster: tuple[str, ...]
    source: Mapping[str, Any]
    query: Tensor | None = None
    target: Tensor | None = None
    columns: Mapping[str, tuple] = field(default_factory=dict)
    posterior: Posterior | None = None

    def __post_init__(self) -> None:
        n = len(self.inputs)
        for name, column in {"cluster": self.cluster, **self.columns}.items():
            if len(column) != n:
                raise ValueError(f"Batch.{name} has {len(column)} entries for {n} inputs: expected one for each")

    @classmethod
    def of(cls, prompts: Prompts) -> Batch:
        """A batch from strings or token ids, each prompt its own cluster; a batch is returned unchanged.

        Args:
            prompts: A string or several; the ids of one prompt or of several, as numbers, lists, NumPy or torch.

        Raises:
            UserError: There is no prompt, or one of them is neither a string nor whole numbers.
        """
        if isinstance(prompts, Batch):
            return prompts
        if hasattr(prompts, "columns"):  # iterating over a frame of pandas gives the names of its columns
            raise UserError(
                f"prompts: a {type(prompts).__name__} is no list of strings; make a Batch of it with "
                "llmgeom.prompts.files.from_frame, or give one of its columns"
            )
        strings: tuple[Any, ...] = (
            tuple(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else (prompts,)
        )
        if not isinstance(prompts, str | Mapping) and (tokens := _token_ids(strings)):
            return tokens
        odd = [prompts] if isinstance(prompts, Mapping) else [text for text in strings if not isinstance(text, str)]
        if odd or not strings:
            problem = f"{brief(odd[0])} is no string" if odd else "there is none"
            raise UserError(f"prompts: {problem}; give a string, a list of strings, token ids, or a Batch")
        return cls(Text(strings), tuple(str(i) for i in range(len(strings))), {"kind": "strings", "name": "strings"})

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        name, kind = self.source.get("name", "unnamed"), type(self.inputs).__name__.lower()
        exact = ", with the exact answer" if self.posterior is not None else ""
        return f"<Batch {name!r}: {len(self)} inputs of {kind}, {len(set(self.cluster))} clusters{exact}>"

    @property
    def text(self) -> tuple[str, ...]:
        """The prompts as strings. Raises TypeError if the inputs are not text."""
        if not isinstance(self.inputs, Text):
            raise TypeError(f"the inputs of {dict(self.source)!r} are {type(self.inputs).__name__}, not Text")
        return self.inputs.strings

    @property
    def tokens(self) -> Tokens | Rows:
        """The inputs as a model reads them. Raises TypeError if they are text that is not tokenized."""
        if isinstance(self.inputs, Text):
            raise TypeError(f"the inputs of {dict(self.source)!r} are Text; Model.tokens makes tokens of them")
        return self.inputs

    @property
    def exact(self) -> Posterior:
        """The exact answer. Raises Unavailable if there is none."""
        if self.posterior is None:
            raise Unavailable("these prompts have no exact answer; it takes a wind tunnel (--task)")
        return self.posterior

    def column(self, name: str) -> tuple:
        """A column without missing cells, of one kind: finite numbers, truth values or text.

        Raises:
            UserError: No such column; missing cells, or cells of several kinds, with their rows counted from 1.
        """
        if name not in self.columns:
            raise unknown("column", name, self.columns)
        kinds: dict[str, list[int]] = {}
        for row, cell in enumerate(self.columns[name], 1):
            kind = "no value" if cell is None else "truth values" if isinstance(cell, bool) else "text"
            if isinstance(cell, int | float) and not isinstance(cell, bool):
                kind = "numbers" if math.isfinite(cell) else "a number that is not finite"
            kinds.setdefault(kind, []).append(row)
        for bad, remedy in (
            ("no value", "fill it in or remove the row"),
            ("a number that is not finite", "replace it"),
        ):
            if bad in kinds:
                raise UserError(f"column {name!r} has {bad} in {row_numbers(kinds[bad])}: {remedy}")
        if len(kinds) > 1:
            mixed = ", ".join(f"{kind} in {row_numbers(rows)}" for kind, rows in sorted(kinds.items()))
            raise UserError(f"column {name!r} mixes kinds ({mixed}): write all its cells as numbers, or all as text")
        return self.columns[name]

    def take(self, index: Iterable[Any]) -> Batch:
        """The batch restricted to `index` (a sequence of ints), in that order."""
        index = [int(i) for i in index]
        if isinstance(self.inputs, Text):
            inputs: Text | Tokens | Rows = Text(tuple(self.inputs.strings[i] for i in index))
        else:
            inputs = type(self.inputs)(self.inputs.data[index], self.inputs.lengths[index])
        return replace(
            self,
            inputs=inputs,
            cluster=tuple(self.cluster[i] for i in index),
            columns={name: tuple(column[i] for i in index) for name, column in self.columns.items()},
            query=None if self.query is None else self.query[index],
            target=None if self.target is None else self.target[index],
            posterior=None if self.posterior is None else self.posterior.take(index),
        )


def _token_ids(prompts: Sequence[Any]) -> Batch | None:
    """A batch of the token ids of one prompt or of several, right-padded; None where they are none.

    Raises UserError for a prompt without ids, and for an id below 0.
    """
    listed = [row.tolist() if hasattr(row, "tolist") else row for row in prompts]
    rows = [listed] if listed and all(map(_whole, listed)) else listed
    if not rows or not all(isinstance(row, list | tuple) for row in rows):
        return None
    for place, row in enumerate(rows, 1):
        if not row or not all(_whole(token) and token >= 0 for token in row):
            raise UserError(f"prompt {place} is {brief(row)}: expected a string, or token ids, whole numbers from 0")
    return Batch(Tokens.of(rows), tuple(map(str, range(len(rows)))), {"kind": "tokens", "name": "token ids"})


def _whole(token: Any) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)  # a mask would be read as the ids 1 and 0


def recorded(column: tuple) -> tuple:
    """A column for a record: finite numbers and truth values unchanged, all else as text; no cell is ""."""
    truth = {isinstance(cell, bool) for cell in column}
    if len(truth) == 1 and all(isinstance(cell, int | float) and math.isfinite(cell) for cell in column):
        return column
    return tuple("" if cell is None else str(cell) for cell in column)


def row_numbers(rows: Sequence[int], most: int = 5) -> str:
    """Row numbers in words, the first few of many: "rows 1, 4, 9, 12, 30 and 7 more"."""
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:most]))}{more}"
