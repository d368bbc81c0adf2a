"""The plan of one capture: batches, sites, observers, and the shards that they are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.cache import keys
from llmgeom.cache.shards import Store
from llmgeom.errors import Unavailable, UserError, in_float64
from llmgeom.files import digest, sha256
from llmgeom.model.batching import BATCH_TOKENS, BatchRules, at_once, group_batches, plan_batches
from llmgeom.model.capture import INSIDE, ROWS, Key, Site, nbytes
from llmgeom.model.edits import Edit, Positions, Resume, Where, original
from llmgeom.model.forward import Reader
from llmgeom.model.loading import OFFLOADED, weight_hash

# One input is run whole, and three more to see that it may be; a smaller share of the tokens, or fewer of them, are not
# worth it.
WHOLE, SPARED, LEAST_SPARED = 4, 0.15, 512
Draw = int | str  # of an untrained control its seed; "permuted 1" of one with permuted weights (`model.controls`)


@dataclass(frozen=True)
class Step:
    """One batch of a pass while its tensors are in memory; what an observer reads.

    Attributes:
        batch: the inputs of this step, with their columns and posterior.
        tokens: the same as the model reads them, [input seq ...], padded.
        lengths: [input] real tokens of each input.
        prompt, position: [row] input and position of each queried row.
        all_prompt, all_position: [row] the same of every real position.
        logits: [row vocabulary] at the queried rows, in the model's dtype; what is computed is where they are, and has
            float64 there. Numbers of prompts, positions and tokens are in host memory.
        log_probs: [row vocabulary] float32, nats: next-token log-probabilities at the queried rows.
        unembed: the logit lens, [row d_model] -> [row vocabulary] log-probabilities in nats, where the logits are.
        tokenizer: of the model; None for one that reads token ids.
    """

    batch: Batch
    tokens: Tensor
    lengths: Tensor
    prompt: Tensor
    position: Tensor
    all_prompt: Tensor
    all_position: Tensor
    logits: Tensor
    log_probs: Tensor
    unembed: Callable[[Tensor], Tensor]
    tokenizer: Any
    _kept: Mapping[Key, Tensor]
    _everywhere: Mapping[Key, Tensor]

    def layers(self, site: Site) -> list[Tensor]:
        """[row ...] a layer, at the queried rows."""
        return self._by_layer(self._kept, site)

    def numbers(self, site: Site) -> list[int]:
        """The numbers of the layers of `layers`: in a hybrid some have no attention."""
        return sorted(layer for kept, layer in self._kept if kept == site)

    def everywhere(self, site: Site) -> list[Tensor]:
        """[row ...] a layer, at every real position."""
        return self._by_layer(self._everywhere, site)

    def sums(self, x: Tensor) -> Tensor:
        """[input ...] sums over the positions of each input of x, [row ...] at every real position.

        In one order, so that it is the same again: `index_add` on a GPU adds in any.
        """
        padded = x.new_zeros(len(self.lengths), int(self.lengths.max()), *x.shape[1:])
        padded[self.all_prompt, self.all_position] = x
        return padded.sum(1)

    def _by_layer(self, tensors: Mapping[Key, Tensor], site: Site) -> list[Tensor]:
        """All where the logits are: a model can be divided over several devices."""
        keys = sorted((key for key in tensors if key[0] == site), key=lambda key: key[1])
        return [tensors[key].to(self.logits.device) for key in keys]


@dataclass(frozen=True)
class Observer:
    """Reduces the tensors of each step to small arrays, which are kept with the capture.

    Attributes:
        name: prefix of the arrays: `Capture.observed("NAME.ARRAY")`.
        function: Step -> name of an array -> [row ...], one entry a queried row. Its Step alone decides what it
            returns: batches run in any order, several at the same time.
        sites: read at the queried rows. everywhere: read at every real position.
        samples: names of the samples that it reads ("" is the main one).
        version: the version of this code in cache keys, to be raised where its numbers change. Without one, captures
            that it takes part in are not stored.
        row_bytes: about how many bytes a row takes, for the estimate of disk space, or a function of a model's facts;
            by default two numbers a layer and head.
    """

    name: str
    function: Callable[[Step], Mapping[str, Tensor]]
    sites: frozenset[Site] = frozenset()
    everywhere: frozenset[Site] = frozenset()
    samples: tuple[str, ...] = ("",)
    version: str = ""
    row_bytes: int | Callable[[Mapping[str, Any]], int] = lambda facts: (
        16 * (facts["layers"] or 1) * (facts["heads"] or 1)
    )

    @property
    def wanted(self) -> frozenset[Site]:
        """Sites that it reads anywhere."""
        return self.sites | self.everywhere

    def observe(self, step: Step) -> dict[Key, Tensor]:
        """The arrays of one step under their keys. Raises ValueError where one has not an entry a row."""
        with in_float64(f"observer {self.name!r}"):
            arrays = self.function(step)
        for name, array in arrays.items():
            if len(array) != len(step.prompt):
                raise ValueError(
                    f"observer {self.name!r}: {name} has {len(array)} entries for {len(step.prompt)} queried rows; "
                    "return one entry a row"
                )
        return {(f"{self.name}.{name}", -1): array.detach().clone() for name, array in arrays.items()}


@dataclass(frozen=True)
class Pass:
    """One capture before it runs: a pure function of model facts, batch and options.

    Attributes:
        where: [batch seq] bool, the rows to keep.
        examined: [batch seq] bool, the positions that an edit at "query" or at a negative place refers to.
        batches: Which inputs run together.
        sizes: Bytes that each batch gives, about.
        groups: Batches that share a shard.
        store: Where shards are written; None for nowhere.
        layers: The numbers under which tensors are kept, -1 for tensors without a layer; None for all.
        at_once: How many batches may run at the same time.
        resume: Where edited passes begin; None for whole passes.
        shared: With how many tokens all inputs begin that are run once, for one of them; no row is kept there.
        alone: Whether the last position of each input runs alone, as edits replace all that attention writes.
    """

    batch: Batch
    tokens: Tokens | Rows
    where: Tensor
    examined: Tensor
    sites: frozenset[Site]
    edits: tuple[Edit, ...]
    batches: tuple[tuple[int, ...], ...]
    sizes: list[int]
    groups: tuple[range, ...]
    observers: tuple[Observer, ...] = ()
    store: Store | None = None
    layers: tuple[int, ...] | None = None
    at_once: int = 1
    resume: Resume | None = None
    shared: int = 0
    alone: bool = False

    @property
    def runs(self) -> Tensor:
        """[input] how many of its positions run."""
        return torch.ones_like(self.tokens.lengths) if self.alone else self.tokens.lengths - self.shared

    def keeps(self, key: Key) -> bool:
        """Whether a tensor of a pass is kept: its site, at a chosen layer. The residual stream after the last layer
        belongs to that layer."""
        return key[0] in self.sites and (self.layers is None or key[1] in self.layers)

    @cached_property
    def order(self) -> Tensor:
        """[row] the index of each row of the capture among the rows of all batches, one batch after another."""
        members = torch.tensor([i for batch in self.batches for i in batch])
        return torch.argsort(members.repeat_interleave(self.where.sum(1)[members]), stable=True)

    @property
    def attends(self) -> bool:
        """Whether it reads or edits what only attention has."""
        edited = {Site.ATTENTION if edit.point == "scores" else Site(edit.point) for edit in self.edits}
        return self.resume is not None or bool((self.step_sites | self.everywhere | edited) & INSIDE)

    @property
    def everywhere(self) -> frozenset[Site]:
        """Sites that observers read at every real position."""
        return frozenset().union(*(observer.everywhere for observer in self.observers))

    @property
    def step_sites(self) -> frozenset[Site]:
        """Sites at the queried rows: those to keep and those that observers read."""
        return self.sites.union(*(observer.sites for observer in self.observers))

    def missing(self, shards: Iterable[int]) -> list[int]:
        """Which of these shards are not stored."""
        return [i for i in shards if self.store is None or i not in self.store]


def plan_capture(
    reader: Reader,
    batch: Batch,
    sites: Iterable[Site],
    edits: Sequence[Edit] = (),
    *,
    positions: Positions = "query",
    layers: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    batch_tokens: int = BATCH_TOKENS,
    store: str | None = None,
    resume: Resume | None = None,
    alone: bool = False,
) -> Pass:
    """The plan of `Model.capture` with the same arguments; `alone` as `Pass.alone`, for rows at the last position.

    Raises:
        Unavailable: A site cannot be captured from this model, or edited.
        UserError: The model cannot read the batch; an edit to be stored has no spec.
    """
    sites, edits = frozenset(sites), reader.edits + tuple(edits)
    wanted = [(sites.union(*(observer.wanted for observer in observers)), layers)]
    for edit in edits:  # each layer that is named must have what is edited; all layers are those that have it
        site = frozenset({Site("attention" if edit.point == "scores" else edit.point)})
        wanted += [(site, None)] if edit.layers is None else [(site, (one,)) for one in edit.on(len(reader.blocks))]
    for some, places in wanted:
        if why := reader.unavailable(some, places):
            raise Unavailable(f"{reader.name}: {why}")
    tokens = reader.tokens(batch)
    examined, where = _queried(batch, tokens, positions)
    whole = Where(torch.arange(len(batch)), examined, 0, tokens.ids if isinstance(tokens, Tokens) else None)
    for edit in edits:
        edit.check_reach(whole, torch.arange(examined.shape[1]) < tokens.lengths[:, None])
    rules = BatchRules.of(reader.facts, getattr(reader.model, "config", None))
    everywhere = frozenset[Site]().union(*(one.everywhere for one in observers))
    shared = 0 if resume or edits or everywhere & ROWS else _shared(tokens, where)
    left = tokens.lengths - shared if resume is None else resume.left(tokens.lengths)
    lengths = [1] * len(batch) if alone else left.tolist()
    batches = plan_batches(lengths, batch_tokens, rules)
    rows = [int(where[[*members]].sum()) for members in batches]
    declared = [observer.row_bytes for observer in observers]
    observed = sum(one(reader.facts) if callable(one) else one for one in declared)
    facts = dict(reader.facts)
    if layers is not None:
        depth, layers = facts["layers"], tuple(layers)
        facts["layers"] = len(layers)
        layers = (-1, *layers, *([depth] if depth - 1 in layers else []))
    sizes = [
        nbytes(facts, sites, n, lengths[members[0]]) + observed * n for n, members in zip(rows, batches, strict=True)
    ]
    together = at_once(batches, lengths, batch_tokens, rules)
    plan = Pass(
        batch,
        tokens,
        where,
        examined,
        sites,
        edits,
        batches,
        sizes,
        group_batches(sizes, together),
        tuple(observers),
        layers=layers,
        at_once=together,
        resume=resume,
        shared=shared,
        alone=alone,
    )
    if store is None or any(not observer.version for observer in plan.observers):
        return plan
    return replace(plan, store=Store(store, *_specs(reader, plan)))


def descent(reader: Reader, seed: Draw, initial: bool = False) -> dict[str, Any]:
    """The facts of an untrained control that say which model it was made from, and how, as `controls` has it."""
    origin = {"name": reader.facts["name"], "revision": reader.facts.get("revision")}
    drawn = {"untrained": seed, "untrained_of": origin, "initial": initial or None}
    return {"files": identity(reader), "weights": None, **drawn}


def identity(reader: Reader) -> str:
    """The hash that stands for a model's weights in cache keys.

    It is that of the files they were read from, unless they were written to since; else of the weights themselves. An
    untrained control has the identity of the model that it was made from: its seed and config tell it from others.
    Raises UserError: the weights are offloaded and were not read from files.
    """
    files, weights, quantised = map(reader.facts.get, ("files", "weights", "quantised"))
    # Weights of files are not read whole again before each capture: a sample of them shows writes through .data.
    # bitsandbytes packs weights anew in their first pass, and an untrained control has no weights of the files.
    if files and (quantised or not weights or weight_hash(original(reader.model), bits=False) in (weights, OFFLOADED)):
        return str(files)
    if reader.weight_hash == OFFLOADED:
        raise UserError(f"{reader.name} is offloaded and was not read from files: capture without store, or load it")
    return reader.weight_hash


def run_spec(reader: Reader) -> dict[str, Any]:
    """The part of the cache key that all captures of a model and of its untrained controls share."""
    facts = {**reader.facts, "attention": reader.forward.attention}
    return keys.run_spec(facts, identity(reader), reader.model, reader.tokenizer)


def _specs(reader: Reader, plan: Pass) -> tuple[dict[str, Any], dict[str, Any], tuple[dict, dict]]:
    """What a `Store` is made with: `run_spec`, what tells this capture from others, and descriptions of both."""
    if any(not edit.spec for edit in plan.edits):
        raise UserError("an edit without a spec cannot be stored: give Edit(..., spec={...}) or capture without store")
    facts, source = reader.facts, plan.batch.source
    spec = {
        "untrained": facts.get("untrained"),
        "initial": facts.get("initial"),
        "tokens": keys.of_tokens(plan.tokens),
        "positions": sha256(plan.where.numpy().tobytes()),
        # How many batches run at the same time decides how many threads each has.
        "plan": digest(
            {"batches": plan.batches, "shards": [list(group) for group in plan.groups], "at once": plan.at_once}
        ),
        "sites": sorted(plan.sites),
        "edits": [edit.identity for edit in plan.edits],
    }
    if plan.shared:
        spec["shared"] = plan.shared
    if plan.alone:
        spec["alone"] = True
    if plan.edits:
        spec["examined"] = sha256(plan.examined.numpy().tobytes())
    if plan.layers is not None:
        spec["layers"] = list(plan.layers)
    if plan.observers:
        spec["observers"] = {one.name: one.version for one in plan.observers}
        spec["batch"] = keys.of_facts(plan.batch)  # an observer reads the batch, too
    origin = facts.get("untrained_of") or {"name": facts["name"], "revision": facts.get("revision")}
    name = str(source.get("name", source.get("kind", "prompts")))
    return run_spec(reader), spec, (origin, {"of": name, "prompts": len(plan.batch), "shards": len(plan.groups)})


def _shared(tokens: Tokens | Rows, where: Tensor) -> int:
    """With how many tokens all inputs begin, before any that is read; 0 where to run them once would spare little."""
    if not isinstance(tokens, Tokens):
        return 0
    same = (tokens.ids == tokens.ids[:1]).all(0) & ~where.any(0)
    shared = int(same[: int(tokens.lengths.min())].int().cumprod(0).sum())
    spared = shared * (len(where) - WHOLE)
    return shared if spared >= max(SPARED * int(tokens.lengths.sum()), LEAST_SPARED) else 0


def _queried(batch: Batch, tokens: Tokens | Rows, positions: Positions) -> tuple[Tensor, Tensor]:
    """[batch seq] bool each: the positions under examination, and the rows to keep. UserError if no prompt has any."""
    place, ends = torch.arange(tokens.data.shape[1]), tokens.lengths[:, None]
    query = place == ends - 1 if batch.query is None else batch.query & (place < ends)
    ids = tokens.ids if isinstance(tokens, Tokens) else None
    where = Where(torch.arange(len(query)), query, 0, ids).at(positions) & (place < ends)
    if not where.any():
        raise UserError(
            f"positions {positions!r}: no prompt has such a position; the longest has {int(ends.max())} tokens"
        )
    return query, where
