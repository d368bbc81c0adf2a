"""The passes of a run through the model and its controls, planned before anything runs: each prompt once.

Probes say what they need (`llmgeom.probe.Needs`); the plan is the union. `--dry-run` prices it, several processes
divide it, and `llmgeom.run` carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import NO_EXACT, Batch, Rows, Tokens
from llmgeom.cache.shards import folder_size, room, run_key
from llmgeom.flags import places, positions
from llmgeom.model.capture import ATTENDING, OUTPUTS, Capture, Site
from llmgeom.model.edits import Edit
from llmgeom.model.no_context import NoContext
from llmgeom.model.passes import PERMUTED, CapturePlan, Draw, Observer, plan_control, run_spec, unwritten
from llmgeom.model.tokenizing import special_tokens
from llmgeom.probe import Needs, Probe, Subject, Unavailable, UserError
from llmgeom.prompt_table import attention_observer
from llmgeom.stats.verdict import LEAST_DRAWS

MOST = 1000  # prompts that controls read, unless a probe needs fewer: distances and permutations grow with the square
MAIN = ""
UNLAYERED = OUTPUTS | {Site.FINAL}  # what no layer has
NO_CONTEXT = "no context"
FURTHER_SAMPLES = "further samples"  # the kind of a batch of prompts of several samples


@dataclass(frozen=True)
class Selection:
    """The part of a model that a run stores and measures.

    Attributes:
        layers: numbers and slices as `llmgeom.flags.places` reads them. The last layer is one of them, since every
            claim is about it.
        sites: the sites that are stored, next to the next-token probabilities; None for those that the probes read.
        positions: which positions of each prompt are read: "last", or as `layers`. A batch with queries of its own, as
            that of a task, keeps them.
    """

    layers: str = "all"
    sites: tuple[str, ...] | None = None
    positions: str = "last"

    def numbers(self, subject: Subject) -> tuple[int, ...] | None:
        """The chosen layers; None for all. Raises UserError where one is not there, or the last is left out."""
        if self.layers == "all":
            return None
        depth = subject.facts["layers"]
        chosen = places("--layers", self.layers, depth)
        if depth - 1 not in chosen:
            raise UserError(
                f"--layers {self.layers} leaves out the last layer ({depth - 1}), which claims are about: "
                f"give {self.layers},-1"
            )
        return chosen

    def kept(self, sites: frozenset[Site]) -> frozenset[Site]:
        """Those of the sites that may be kept."""
        return sites if self.sites is None else sites & (UNLAYERED | set(map(Site, self.sites)))

    def queried(self, batch: Batch) -> Batch:
        """A tokenized batch with its queried positions. Raises UserError where a prompt has none of them."""
        if self.positions == "last" or batch.query is not None:
            return batch
        lengths, query = batch.tokens.lengths.tolist(), torch.zeros(batch.tokens.data.shape[:2], dtype=torch.bool)
        for i, length in enumerate(lengths):
            chosen = positions(self.positions, length)
            if not chosen:
                raise UserError(
                    f"--positions {self.positions}: prompt {i + 1} has {length} tokens and no such position"
                )
            query[i, list(chosen)] = True
        return replace(batch, query=query)

    def unable(self, needs: Needs) -> str:
        """Why a probe cannot measure this part of a model; empty where it can."""
        if lacking := needs.sites - self.kept(needs.sites):
            return f"it reads {', '.join(sorted(lacking))}, which --sites {','.join(self.sites or ())} leaves out"
        read = needs.sites.union(needs.optional, *(observer.wanted for observer in needs.observers))
        if self.layers != "all" and not needs.chosen_layers and read - UNLAYERED:
            return f"it compares all layers with each other; leave out --layers {self.layers}"
        return ""

    @property
    def facts(self) -> dict[str, Any]:
        """Its facts for the record; empty if everything is read."""
        chosen = {name: value for name, value in vars(self).items() if value != getattr(EVERYTHING, name)}
        return chosen if self.sites is None else {**chosen, "sites": list(self.sites)}

    @property
    def notes(self) -> list[str]:
        """Warnings that a choice of positions deserves."""
        text = (
            f"with --positions {self.positions}, shuffled prompts keep the final token alone, and claims were "
            "calibrated on the final token"
        )
        return [text] * (self.positions != "last")


EVERYTHING = Selection()


@dataclass(frozen=True)
class Reading:
    """One capture: a tokenized batch, the sites and layers that are stored (None: all layers), and the edits."""

    batch: Batch
    sites: frozenset[Site]
    observers: tuple[Observer, ...] = ()
    edits: tuple[Edit, ...] = ()
    layers: tuple[int, ...] | None = None

    @property
    def of_prompts(self) -> bool:
        """Whether it reads prompts at their ends, so that samples can share them."""
        return self.batch.query is None and isinstance(self.batch.inputs, Tokens)

    def also(self, others: Iterable[Reading]) -> Reading:
        """The same inputs, with everything that these readings take as well."""
        every = (self, *others)
        sites = frozenset().union(*(reading.sites for reading in every))
        observers = dict.fromkeys(observer for reading in every for observer in reading.observers)
        return replace(self, sites=sites, observers=tuple(observers))


@dataclass(frozen=True)
class Place:
    """Where the prompts of a sample are: prompt i of `batch` is prompt order[i] of these readings in turn."""

    batch: Batch
    readings: tuple[int, ...]
    order: Tensor


@dataclass(frozen=True)
class Layout:
    """How samples are read: captures without a prompt twice, and the place of each sample among them, by its name."""

    readings: tuple[Reading, ...]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, samples: Mapping[str, Reading], alone: Collection[str] = ()) -> Layout:
        """The layout of samples that share prompts.

        The main sample is the first reading. Another one holds the prompts of all other samples, less those that the
        main sample holds. Samples with queries of their own, of numbers, or in `alone` are readings of their own.

        Args:
            samples: name -> the reading of that sample alone.
            alone: names of samples that share nothing.
        """
        prompts = {
            name: _identities(sample.batch)
            for name, sample in samples.items()
            if sample.of_prompts and name not in alone
        }
        in_main = {identity: i for i, identity in enumerate(prompts.pop(MAIN, ()))}
        others = [samples[name] for name in prompts]
        further: dict[Any, tuple[Batch, int]] = {}  # what the main sample does not hold, with one batch that does
        for identities, sample in zip(prompts.values(), others, strict=True):
            for i, identity in enumerate(identities):
                if identity not in in_main:
                    further.setdefault(identity, (sample.batch, i))
        readings: list[Reading] = []
        places: dict[str, Place] = {}
        if MAIN in samples:  # it takes what the others need as well, where they have a prompt in it
            main = samples[MAIN]
            shared = any(not in_main.keys().isdisjoint(identities) for identities in prompts.values())
            readings.append(main.also(others if shared else ()))
            places[MAIN] = Place(main.batch, (0,), torch.arange(len(main.batch)))
        if further:
            readings.append(replace(others[0], batch=_concatenated(list(further.values()))).also(others))
        in_further = {identity: i for i, identity in enumerate(further)}
        for name, identities in prompts.items():
            of_main, of_further = (not where.keys().isdisjoint(identities) for where in (in_main, in_further))
            start = len(places[MAIN].batch) if of_main else 0
            order = [in_main[one] if one in in_main else start + in_further[one] for one in identities]
            held = (0,) * of_main + (len(readings) - 1,) * of_further
            places[name] = Place(samples[name].batch, held, torch.tensor(order))
        for name, sample in samples.items():
            if name not in places:
                places[name] = Place(sample.batch, (len(readings),), torch.arange(len(sample.batch)))
                readings.append(sample)
        return cls(tuple(readings), places)

    def assemble(self, captures: Sequence[Capture]) -> dict[str, Capture]:
        """Sample name -> its capture, from those of the readings."""
        return {
            name: Capture.joined([captures[i] for i in place.readings], place.batch, place.order)
            for name, place in self.places.items()
        }


def _identities(batch: Batch) -> list[tuple]:
    """The identity of each input of a batch: tokens and columns (an observer may read them)."""
    columns = list(zip(*batch.columns.values(), strict=True)) if batch.columns else [()] * len(batch)
    return [(tuple(ids), *map(str, row)) for ids, row in zip(_ids(batch).real, columns, strict=True)]


def _ids(batch: Batch) -> Tokens:
    assert isinstance(batch.tokens, Tokens), "rows of real numbers are a reading of their own"
    return batch.tokens


def _concatenated(rows: Sequence[tuple[Batch, int]]) -> Batch:
    """Single inputs of several batches as one; columns that all have are kept."""
    tokens = [(_ids(batch).ids[i, : (n := int(batch.tokens.lengths[i]))], n) for batch, i in rows]
    ids = torch.nn.utils.rnn.pad_sequence([one for one, _ in tokens], batch_first=True)
    names = set.intersection(*(set(batch.columns) for batch, _ in rows))
    return Batch(
        Tokens(ids, torch.tensor([n for _, n in tokens])),
        tuple(batch.cluster[i] for batch, i in rows),
        {"kind": FURTHER_SAMPLES},
        columns={name: tuple(batch.columns[name][i] for batch, i in rows) for name in sorted(names)},
    )


@dataclass(frozen=True)
class PassPlan:
    """Everything that a run passes through the model and its controls, before anything runs; `--dry-run` prices it.

    Attributes:
        subset: which prompts of the main sample the controls read; None for all.
        own: what the model reads.
        control: what untrained controls read, and the model without context.
        untrained, shuffles: the seed of each draw of either control. permuted: the draws of the model with permuted
            weights, which read `null_sample` alone, at `permuted_sites`: no more than decide, since they hardly differ
            (focusing of 8 draws of SmolLM2: .307 to .316, beside an interval of the model's own of .377 to .420).
        shuffled_sites: captured of shuffled prompts.
        special: how many tokens at the beginning and at the end a shuffle leaves in place.
        layers: the layers that are stored; None for all.
        no_context: the control without context; None where no probe asks for it, or the model has none: why says which.
    """

    subset: Tensor | None
    own: Layout
    control: Layout
    untrained: range
    shuffles: range
    shuffled_sites: frozenset[Site]
    special: tuple[int, int]
    permuted: tuple[str, ...] = ()
    permuted_sites: frozenset[Site] = frozenset()
    no_context: NoContext | None = None
    no_context_why: str = ""
    layers: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        subject: Subject,
        batch: Batch,
        probes: Mapping[str, Probe],
        controls: int,
        seed: int,
        samples: Mapping[str, Batch],
        whole: bool = False,
        selection: Selection = EVERYTHING,
    ) -> PassPlan:
        """The union of the probes' needs.

        Args:
            batch: the main sample.
            controls: draws of each control.
            seed: of the draws, and of the prompts that controls read.
            samples: further samples by name; those that no probe needs are not read.
            whole: controls read every prompt of a sample, not at most `Needs.control_prompts`.
            selection: which layers, sites and positions are kept.

        Raises:
            UserError: The selection names a layer or position that is not there.
        """
        layers = selection.numbers(subject)
        needs = [_available(probe.NEEDS, subject, selection) for probe in probes.values()]
        most = None if whole else min((need.control_prompts or MOST for need in needs), default=MOST)
        inputs = _tokenized(subject, batch, samples, needs, selection)
        subset = subset_of(inputs[MAIN], seed, most)
        derived = _derived(subject, inputs, needs, subset)
        no_context, no_context_why = _no_context(subject, inputs[MAIN], needs, seed)

        # What the controls read; the model reads the same of all prompts of the main sample, and more.
        control = {
            name: _reading(name, _taken(sample, subset_of(sample, seed, most)), needs, layers)
            for name, sample in (inputs | derived).items()
        }
        observers = control[MAIN].observers
        if selection.kept(frozenset({Site.ATTENTION})):
            observers += attention_observer(subject, inputs[MAIN])
        if no_context:
            observers += (no_context.observer,)
        sites = control[MAIN].sites | {Site.ENTROPY, Site.LIKELY}
        model = control | {MAIN: replace(control[MAIN], batch=inputs[MAIN], sites=sites, observers=observers)}

        draws = range(seed + 1, seed + 1 + controls)
        # Packed weights, and weights in several places, are not permuted.
        permutable = not (subject.facts.get("quantised") or getattr(subject.model, "hf_device_map", None))
        wanted = any(need.permuted for need in needs)
        return cls(
            subset=subset,
            # A preview reads the main sample and `derived`: what it read must not depend on samples drawn later.
            own=Layout.of(model, alone=derived),
            control=Layout.of(control),
            untrained=draws if any(need.untrained for need in needs) else range(0),
            shuffles=draws if any(need.shuffled for need in needs) else range(0),
            shuffled_sites=_union(need.sites for need in needs if need.shuffled),
            special=special_tokens(subject.tokenizer),
            permuted=tuple(f"{PERMUTED} {seed}" for seed in draws[:LEAST_DRAWS]) if permutable and wanted else (),
            permuted_sites=_union(need.sites for need in needs if need.permuted),
            no_context=no_context,
            no_context_why=no_context_why,
            layers=layers,
        )

    @property
    def main(self) -> Batch:
        """The main sample, tokenized."""
        return self.own.places[MAIN].batch

    @property
    def null_sample(self) -> Batch:
        """The part of it that the controls read."""
        return self.control.places[MAIN].batch

    def shuffled(self, i: int) -> Reading:
        """The prompts of the controls with their tokens in random order."""
        batch, (before, after) = self.null_sample, self.special
        inputs = shuffle(batch.tokens, before, self.shuffles[i], after)
        return Reading(replace(batch, inputs=inputs), self.shuffled_sites, layers=self.layers)

    @property
    def permuted_reading(self) -> Reading:
        """What the model with permuted weights reads."""
        return Reading(self.null_sample, self.permuted_sites, layers=self.layers)

    def without_context(self, captures: Mapping[str, Capture] | None = None) -> tuple[Reading, ...]:
        """The readings of the model without context: those of the controls, with the edit.

        Args:
            captures: those of the model, which hold the means; without them the readings can be planned and not made.
        """
        if self.no_context is None:
            return ()
        means = None if captures is None else self.no_context.means(captures[MAIN])
        return tuple(
            replace(reading, edits=(self.no_context.edit(reading.batch, means),)) for reading in self.control.readings
        )

    def works(self, subject: Subject, **options: Any) -> Iterator[tuple[str, Draw | None, CapturePlan]]:
        """Every capture of the run and its work: ("model", None), ("untrained", draw), ("shuffled", seed), or
        (NO_CONTEXT, None), which needs the model's own captures."""
        subject = unwritten(subject)
        for reading in self.own.readings:
            yield "model", None, planned(subject, None, reading, **options)
        for seed in self.untrained:
            for reading in self.control.readings:
                yield "untrained", seed, planned(subject, seed, reading, **options)
        for drawn in self.permuted:
            yield "untrained", drawn, planned(subject, drawn, self.permuted_reading, **options)
        for i, seed in enumerate(self.shuffles):
            yield "shuffled", seed, planned(subject, None, self.shuffled(i), **options)
        for reading in self.without_context():
            yield NO_CONTEXT, None, planned(subject, None, reading, **options)

    def check_room(self, subject: Subject, store: str, batch_tokens: int) -> None:
        """Raises UserError where the disk has no room for all captures that are not there yet."""
        works = self.works(subject, batch_tokens=batch_tokens)
        needed = sum(sum(work.sizes) for _, _, work in works)
        room(store, needed - folder_size(Path(store) / run_key(run_spec(subject))))


def _available(needs: Needs, subject: Subject, selection: Selection) -> Needs:
    """The needs with those of the optional sites that the model has and the selection keeps among their sites."""
    optional = {site for site in selection.kept(needs.optional) if not subject.unavailable({site})}
    if "attention_layers" in subject.facts and not needs.sites & ATTENDING:
        optional -= ATTENDING  # beside sites of every layer, those of some would stand at other layers' numbers
    return replace(needs, sites=needs.sites.union(optional), optional=frozenset())


def layers_of(subject: Subject, needs: Needs, chosen: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The numbers of the layers that a probe reads, of the chosen ones; None for all.

    In a hybrid a probe of attention reads the layers that have it.
    """
    read = subject.facts.get("attention_layers")
    if read is None or not needs.sites.union(*(observer.wanted for observer in needs.observers)) & ATTENDING:
        return chosen
    return tuple(layer for layer in read if chosen is None or layer in chosen)


def _tokenized(
    subject: Subject, batch: Batch, samples: Mapping[str, Batch], needs: Sequence[Needs], selection: Selection
) -> dict[str, Batch]:
    """The main sample and those that a probe needs, by name, with tokens and queried positions."""
    wanted = _union(need.samples for need in needs)
    read = {MAIN: batch} | {name: sample for name, sample in samples.items() if name in wanted}
    return {name: selection.queried(replace(sample, inputs=subject.tokens(sample))) for name, sample in read.items()}


def _derived(
    subject: Subject, inputs: Mapping[str, Batch], needs: Sequence[Needs], subset: Tensor | None
) -> dict[str, Batch]:
    """The inputs that probes make from the prompts that the controls read; of one name the first."""
    derived: dict[str, Batch] = {}
    for name, make in ((name, make) for need in needs for name, make in need.inputs.items()):
        if name not in (*inputs, *derived) and (batch := make(subject, _taken(inputs[MAIN], subset))) is not None:
            derived[name] = batch
    return derived


def _reading(name: str, batch: Batch, needs: Sequence[Needs], layers: tuple[int, ...] | None) -> Reading:
    """What the probes need of the sample of this name."""
    sites = _union(need.sites | {Site.ENTROPY} for need in needs if name in (MAIN, *need.samples))
    observers = dict.fromkeys(o for need in needs for o in need.observers if name in o.samples)
    return Reading(batch, sites, tuple(observers), layers=layers)


def _no_context(subject: Subject, batch: Batch, needs: Sequence[Needs], seed: int) -> tuple[NoContext | None, str]:
    """The control without context where a probe needs it, or why the model has none."""
    if not any(need.no_context for need in needs):
        return None, ""
    try:
        return NoContext.of(subject, batch, seed, special_tokens(subject.tokenizer)[0]), ""
    except Unavailable as reason:
        return None, str(reason)


def _union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset().union(*sets)


def _taken(batch: Batch, rows: Tensor | None) -> Batch:
    """These prompts of a batch; None for all."""
    return batch if rows is None else batch.take(rows)


def planned(subject: Subject, seed: Draw | None, reading: Reading, **options: Any) -> CapturePlan:
    """The work of a reading by the model (seed None) or by an untrained control, which is not built for it."""
    extra = {"observers": reading.observers, "edits": reading.edits, "layers": reading.layers, **options}
    return plan_control(subject, seed, reading.batch, reading.sites, **extra)


def subset_of(batch: Batch, seed: int, most: int | None = MOST) -> Tensor | None:
    """Which prompts of a batch the controls read, in rising order; None for all."""
    if most is None or len(batch) <= most:
        return None
    return torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(batch))[:most]))


def shuffle(tokens: Tokens | Rows, before: int, seed: int, after: int = 0) -> Tokens | Rows:
    """Every sequence with its tokens in random order; special ones `before` and `after` it stay, and the final one."""
    generator = np.random.default_rng(seed)
    data = tokens.data.clone()
    for row, length in zip(data, tokens.lengths.tolist(), strict=True):
        end = length - max(after, 1)
        if end > before:
            order = before + generator.permutation(end - before)
            row[before:end] = row[torch.from_numpy(order)]
    return type(tokens)(data, tokens.lengths)


def measurable(
    subject: Subject, batch: Batch, probes: Mapping[str, Probe], selection: Selection = EVERYTHING
) -> tuple[dict[str, Probe], dict[str, str]]:
    """The probes that can measure this part of the model on this batch, and of the others why not."""
    reasons = {
        name: selection.unable(probe.NEEDS) or _unable(subject, batch, probe.NEEDS, selection.numbers(subject))
        for name, probe in probes.items()
    }
    unmeasured = {name: why for name, why in reasons.items() if why}
    return {name: probe for name, probe in probes.items() if name not in unmeasured}, unmeasured


def _unable(subject: Subject, batch: Batch, needs: Needs, layers: tuple[int, ...] | None) -> str:
    if needs.exact and batch.posterior is None:
        return NO_EXACT
    if why := subject.unavailable(needs.sites.union(*(observer.wanted for observer in needs.observers)), layers):
        return why
    try:
        if needs.check is not None:
            needs.check(subject)
    except UserError as refusal:
        return str(refusal)
    return ""
