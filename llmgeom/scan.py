"""A scan: one subject, one batch, some probes, and the nulls they are held against, in one record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from llmgeom import __version__, claims
from llmgeom.batch import NO_EXACT, Batch, Rows, Text, Tokens
from llmgeom.cache import keys as fingerprint
from llmgeom.cache.shards import room, run_key, taken
from llmgeom.errors import UserError
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture, Site
from llmgeom.model.subject import Subject
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.stats.information import bits

NULLS = 20  # the fewest draws with which p = 1 / (draws + 1) can be under .05
MOST = 1000  # prompts that are held against nulls: statistics of distances and permutations grow with their square

UNSTRATIFIED, ONE_TOKEN, LENGTH = "unstratified", "one final token", "length-matched"
MIXED, MATCHED = "mixed", "mixed, as diverse"
WHOLE = "whole sequences"  # of a task, with all their queries, where the main batch asks one of each


@dataclass(frozen=True)
class Needs:
    """What a probe reads.

    sites      at the queried positions, of the subject and of what it is held against.
    optional   sites that it reads where the model has them, and does without where not.
    untrained controls, shuffled   which nulls.
    samples    names of second samples that it measures too, where the source can give them.
    exact      whether it asks for exact answers: prompts have none, and nothing is captured for it there.
    many       whether it measures any number of prompts, and holds them against nulls of a sample, `View.held`; any
               other probe is given the sample alone where there are more than 1,000.
    read       what it takes from a model itself beside the capture, e.g. from its weights, given the main batch: of the
               subject and of every untrained control while that is in memory.
    """

    sites: frozenset[Site] = frozenset()
    optional: frozenset[Site] = frozenset()
    untrained: bool = True
    shuffled: bool = True
    samples: frozenset[str] = frozenset()
    exact: bool = False
    many: bool = False
    read: Callable[[Subject, Batch], Any] | None = None


@dataclass(frozen=True)
class Sample:
    """A second batch beside the main one: its capture, its entropy (bits, [row]), and one capture an control."""

    capture: Capture
    entropy: np.ndarray
    untrained: tuple[Capture, ...]

    @property
    def clusters(self) -> np.ndarray:
        """[row] str: the cluster of each row."""
        return _units(self.capture)


@dataclass(frozen=True)
class View:
    """What a probe is given.

    capture       the subject on the batch.
    entropy       [row] float64, bits: the trained model's next-token entropy at each queried position.
    untrained controls         the same batch through re-initialised models, one capture an init.
    shuffled      the subject on the prompts with all tokens but the final one in random order, one capture a draw.
    samples       second samples by name, with their own controls: those of NEEDS.samples that the source can give.
    reading       what NEEDS.read took from the subject; control_readings, from each untrained control.
    seed          for every draw the probe makes itself.
    sample        of more than 1,000 prompts, for a probe of `many`: the view of those that the nulls ran on.
    """

    capture: Capture
    entropy: np.ndarray
    untrained: tuple[Capture, ...] = ()
    shuffled: tuple[Capture, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict)
    reading: Any = None
    control_readings: tuple[Any, ...] = ()
    seed: int = 0
    sample: View | None = None

    @property
    def held(self) -> View:
        """What is held against the nulls: the same prompts as theirs."""
        return self.sample or self

    @property
    def clusters(self) -> np.ndarray:
        """[row] str: the cluster (template, document, sequence) of each row."""
        return _units(self.capture)


def shuffle(tokens: Tokens | Rows, keep: int, seed: int) -> Tokens | Rows:
    """Every sequence with its tokens in random order, the first `keep` (special) and the final one left in place."""
    generator = np.random.default_rng(seed)
    data = tokens.data.clone()
    for row, length in zip(data, tokens.lengths.tolist(), strict=True):
        if length - 1 > keep:
            order = keep + generator.permutation(length - 1 - keep)
            row[keep : length - 1] = row[torch.from_numpy(order)]
    return type(tokens)(data, tokens.lengths)


@dataclass(frozen=True)
class Passes:
    """What a scan captures, told before anything runs.

    whole      the batch, tokenized; `chosen`, which of its prompts the nulls run on, where these are not all.
    batches    name -> tokenized batch: "" is the chosen part of the main one, the others are second samples.
    sites      of every pass; those of the subject and its untrained controls on `batches` give their entropy as well.
    untrained controls, shuffles   the seed of each draw of either null.
    special    how many tokens at the beginning a shuffle leaves in place.
    """

    whole: Batch
    chosen: Tensor | None
    batches: Mapping[str, Batch]
    sites: frozenset[Site]
    untrained: range
    shuffles: range
    special: int

    @classmethod
    def of(
        cls,
        subject: Subject,
        batch: Batch,
        probes: Mapping[str, ModuleType],
        nulls: int,
        seed: int,
        samples: Mapping[str, Batch],
    ) -> Passes:
        needs = [probe.NEEDS for probe in probes.values()]
        optional = frozenset().union(*(need.optional for need in needs))
        sites = frozenset(site for site in optional if not subject.unavailable({site}))
        wanted = frozenset().union(*(need.samples for need in needs))
        given = {"": batch} | {name: other for name, other in samples.items() if name in wanted}
        found = {name: replace(each, inputs=subject.tokens(each)) for name, each in given.items()}
        few = {name: _few(each, seed) for name, each in found.items()}
        draws = range(seed + 1, seed + 1 + nulls)
        return cls(
            found[""],
            few[""],
            {name: each if (kept := few[name]) is None else each.take(kept) for name, each in found.items()},
            sites.union(*(need.sites for need in needs)),
            draws if any(need.untrained for need in needs) else range(0),
            draws if any(need.shuffled for need in needs) else range(0),
            subject.special_prefix(),
        )

    @property
    def of_model(self) -> list[Batch]:
        """What the model itself reads: all prompts, and the second samples."""
        return [self.whole, *list(self.batches.values())[1:]]

    @property
    def own_sites(self) -> frozenset[Site]:
        return self.sites | {Site.ENTROPY, Site.LIKELY}

    def shuffled(self, i: int) -> Batch:
        """The prompts of the main batch with their tokens in random order."""
        main = self.batches[""]
        return replace(main, inputs=shuffle(main.tokens, self.special, self.shuffles[i]))

    def room(self, subject: Subject, store: str, batch_tokens: int) -> None:
        """Raises UserError where the disk has no room for all that is to be captured and is not there yet."""

        def size(batch: Batch, sites: frozenset[Site]) -> int:
            return sum(subject.work(batch, sites, batch_tokens=batch_tokens).sizes)

        needed = sum(size(one, self.own_sites) for one in self.of_model)
        needed += sum(size(one, self.own_sites) for one in self.batches.values()) * len(self.untrained)
        needed += size(self.batches[""], self.sites) * len(self.shuffles)
        room(store, needed - taken(Path(store) / run_key(fingerprint.of_run(subject))))


def _few(batch: Batch, seed: int) -> Tensor | None:
    """Which prompts of a batch the nulls run on, in rising order; None for all."""
    if len(batch) <= MOST:
        return None
    return torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(batch))[:MOST]))


def able(subject: Subject, batch: Batch, probes: Mapping[str, ModuleType]) -> tuple[dict[str, ModuleType], dict]:
    """The probes that may measure this, and of the others why not."""
    unmeasured = {name: why for name, probe in probes.items() if (why := _unable(subject, batch, probe.NEEDS))}
    return {name: probe for name, probe in probes.items() if name not in unmeasured}, unmeasured


def scan(
    subject: Subject,
    batch: Batch,
    probes: Mapping[str, ModuleType],
    *,
    seed: int = 0,
    nulls: int = NULLS,
    samples: Mapping[str, Batch] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    store: str | None = None,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Record:
    """Measure `probes` (name -> module with NEEDS and measure) on `subject` and `batch`.

    nulls    draws of each null: untrained controls and shuffled prompts. Fewer than 20 can decide nothing at .05.
    samples  second samples by name; those that no probe needs are not run.
    notes    warnings of the caller's, put before ours.
    A probe that refuses becomes a row "not measured, because"; any other exception is a bug and ends the scan.
    """
    started = time.time()
    measured, unmeasured = able(subject, batch, probes)
    asked = Passes.of(subject, batch, measured, nulls, seed, samples or {})
    bare = asked.batches[""]
    if store:
        asked.room(subject, store, batch_tokens)

    def passes(stage: str, n: int, run: Callable[[int], Any]) -> tuple:
        captures = []
        for i in range(n):
            captures.append(run(i))
            if progress:
                progress(stage, i + 1, n)
        return tuple(captures)

    def pass_of(who: Subject, what: Batch, of: frozenset[Site]) -> Capture:
        return who.capture(what, of, batch_tokens=batch_tokens, store=store)

    def readings(who: Subject) -> dict[str, Any]:
        return {name: probe.NEEDS.read(who, bare) for name, probe in measured.items() if probe.NEEDS.read}

    of_model, captured = asked.of_model, list(asked.batches.values())
    main = list(passes("prompts", len(of_model), lambda i: pass_of(subject, of_model[i], asked.own_sites)))
    whole = main[0]
    if asked.chosen is not None:
        main[0] = whole.take(asked.chosen)
    own: dict[str, Any] = {}
    for name in [name for name, probe in measured.items() if probe.NEEDS.read]:
        try:
            needs = measured[name].NEEDS
            own[name] = needs.read(subject, asked.whole if needs.many else bare)
        except UserError as refusal:
            unmeasured[name] = str(refusal)
            del measured[name]

    def control(i: int) -> tuple[list[Capture], dict[str, Any]]:
        other = subject.untrained(asked.untrained[i])
        return [pass_of(other, each, asked.own_sites) for each in captured], readings(other)

    untrained = passes("untrained controls", len(asked.untrained), control)
    shuffled = passes(
        "shuffled prompts", len(asked.shuffles), lambda i: pass_of(subject, asked.shuffled(i), asked.sites)
    )
    each = [Sample(one, _bits(one), tuple(found[i] for found, _ in untrained)) for i, one in enumerate(main)]
    view = View(
        capture=each[0].capture,
        entropy=each[0].entropy,
        untrained=each[0].untrained,
        shuffled=shuffled,
        samples=dict(zip(list(asked.batches)[1:], each[1:], strict=True)),
        seed=seed,
    )
    large = replace(view, capture=whole, entropy=_bits(whole), untrained=(), shuffled=(), sample=view)
    sampled = asked.chosen is not None
    results = {}
    for done, (name, probe) in enumerate(measured.items()):
        if progress:
            progress(f"measuring {name}", done, len(measured))
        theirs = tuple(found[name] for _, found in untrained if name in found)
        try:
            given = large if sampled and probe.NEEDS.many else view
            results[name] = probe.measure(replace(given, reading=own.get(name), control_readings=theirs)).lowered()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
        if progress:
            progress(f"measuring {name}", done + 1, len(measured))
    shown, said = batch, []
    if asked.chosen is not None:
        shown = batch.take(asked.chosen)
        all_of = [name for name, probe in measured.items() if probe.NEEDS.many]
        said = [
            f"nulls, and what is held against them, are of {len(shown)} of the {len(batch)} prompts, drawn at random"
            + (f"; measured on all: {', '.join(all_of)}" if all_of else "")
        ]
    events = [
        event for one in (*main, *(c for found, _ in untrained for c in found), *shuffled) for event in one.events
    ]
    return Record(
        results=claims.judge(results),
        unmeasured=unmeasured,
        prompts=prompt_table(subject, shown, bare.tokens, _of_prompts(view, len(bare)), view.capture),
        subject={k: v for k, v in subject.facts.items() if v is not None},
        source=dict(batch.source),
        facts={
            **provenance(batch, asked.whole.tokens, seed, nulls),
            "batch_tokens": batch_tokens,
            "bos_added": asked.special > 0,
            **(facts or {}),
        },
        warnings=(*notes, *said, *_warnings(subject, shown, bare.tokens, view, nulls), *dict.fromkeys(events)),
        run=took(started),
    )


def _unable(subject: Subject, batch: Batch, needs: Needs) -> str:
    """Why a probe cannot measure this, told before anything is run; empty where it may."""
    return NO_EXACT if needs.exact and batch.posterior is None else subject.unavailable(needs.sites)


def _units(capture: Capture) -> np.ndarray:
    return np.asarray(capture.batch.cluster)[capture.prompt.numpy()]


def _bits(capture: Capture) -> np.ndarray:
    return bits(capture.entropy.double().numpy())


def provenance(batch: Batch, tokens: Tokens | Rows, seed: int, nulls: int) -> dict[str, Any]:
    """The facts that every record carries, whatever was measured."""
    return {
        "llmgeom": __version__,
        "seed": seed,
        "nulls": nulls,
        "prompts_hash": fingerprint.of_tokens(tokens),
        "claims_hash": claims.digest(),
        "prompts": len(batch),
        "clusters": len(set(batch.cluster)),
        "versions": versions(),
    }


def took(started: float) -> dict[str, Any]:
    """What varies between equal runs: `started` is a time.time()."""
    return {
        "seconds": round(time.time() - started, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def few_draws(nulls: int) -> list[str]:
    """The warning that too few draws of a null deserve."""
    return [f"only {nulls} draws of each null: at least {NULLS} are needed to decide at p < .05"] * (nulls < NULLS)


def _of_prompts(view: View, n: int) -> np.ndarray:
    """[prompt] bits; with several queried positions a prompt, the mean over them."""
    prompt = view.capture.prompt.numpy()
    return np.bincount(prompt, view.entropy, n) / np.bincount(prompt, minlength=n)


def prompt_table(
    subject: Subject, batch: Batch, tokens: Tokens | Rows, entropy: np.ndarray, capture: Capture | None = None
) -> dict[str, tuple]:
    """A record's prompts, column by column; entropy [prompt] in bits. Tokens without text are decoded.

    pieces        where what is read is tokens: each as text, those that the tokenizer adds too.
    next tokens   with a capture of Site.LIKELY: the likeliest at the last queried position, [piece, probability] each.
    """
    n = len(batch)
    if isinstance(batch.inputs, Text):
        text = batch.text
    elif isinstance(tokens, Rows):
        text = tuple(
            f"{n} rows of {cluster}" for n, cluster in zip(tokens.lengths.tolist(), batch.cluster, strict=True)
        )
    elif subject.tokenizer is not None:
        text = tuple(subject.tokenizer.decode(ids) for ids in tokens.real)
    else:
        text = tuple(" ".join(map(str, ids)) for ids in tokens.real)
    return {
        "tags": ("",) * n,
        "domain": (str(batch.source.get("name", "")),) * n,
        "template": batch.cluster,
        **{name: tuple(map(str, column)) for name, column in batch.columns.items()},
        "text": text,
        "entropy": tuple(round(float(h), 6) for h in entropy),
        "tokens": tuple(tokens.lengths.tolist()),
        **({"pieces": _pieces(subject, tokens)} if isinstance(tokens, Tokens) else {}),
        **({"next tokens": _likely(subject, tokens, capture)} if capture and isinstance(tokens, Tokens) else {}),
    }


def _pieces(subject: Subject, tokens: Tokens) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(_piece(subject, *ids[max(i - 1, 0) : i + 1]) for i in range(len(ids))) for ids in tokens.real)


def _piece(subject: Subject, *ids: int) -> str:
    """The last of one or two tokens as text: what it adds to the one before, since some tokenizers write no space
    before a text's first; by its own name where it is part of a character only."""
    if subject.tokenizer is None:
        return str(ids[-1])
    before, whole = (subject.tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (ids[:-1], ids))
    piece = whole.removeprefix(before)
    if piece and "\ufffd" not in whole:
        return piece
    # Embeddings may be padded beyond the tokens that there are.
    return subject.tokenizer.convert_ids_to_tokens(ids[-1]) or f"token {ids[-1]}"


def _likely(subject: Subject, tokens: Tokens, capture: Capture) -> tuple[tuple[tuple[str, float], ...], ...]:
    last = {prompt: row for row, prompt in enumerate(capture.prompt.tolist())}
    told = []
    for prompt, row in sorted(last.items()):
        before, (ids, log_p) = int(tokens.ids[prompt, capture.position[row]]), capture.likely[row].tolist()
        pieces = [_piece(subject, before, int(token)) for token in ids]
        told.append(tuple((piece, round(math.exp(p), 6)) for piece, p in zip(pieces, log_p, strict=True)))
    return tuple(told)


def _warnings(subject: Subject, batch: Batch, tokens: Tokens | Rows, view: View, nulls: int) -> list[str]:
    """What could overturn a verdict."""
    found = []
    window, longest = subject.facts.get("window"), int(tokens.lengths.max())
    if window and longest <= window:
        found.append(f"window inactive: the longest prompt has {longest} tokens, the sliding window {window}")
    spread = float(view.entropy.max() - view.entropy.min())
    if spread < 1:
        found.append(f"next-token entropy spans only {spread:.2f} bits: correlations with it mean little")
    if batch.source.get("kind") == "domain" and not subject.name.startswith("pocket:"):
        found.append("synthetic prompts: written for llmgeom and filled in by its grammars, not found text")
    if subject.facts.get("note"):
        found.append(subject.facts["note"])
    found += few_draws(nulls)
    most = max(batch.cluster.count(cluster) for cluster in set(batch.cluster))
    if most > 2:
        found.append(f"up to {most} prompts share one template; n counts templates, not prompts")
    return found


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
