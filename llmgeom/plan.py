"""What one run reads of a model and of its controls, planned before anything runs.

Probes say what they need (`llmgeom.probe.Needs`); the plan is the union. A dry run counts it, several processes divide
it, and `llmgeom.run.Run` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.cache.shards import files, room, run_key
from llmgeom.errors import Unavailable, UserError
from llmgeom.flags import places, positions as places_of
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import ATTENDING, INSIDE, OUTPUTS, Site
from llmgeom.model.model import Model
from llmgeom.model.no_context import WRITES, NoContext
from llmgeom.model.passes import Draw, Pass, descent, identity, plan_capture, run_spec
from llmgeom.model.tokenizing import shuffle, special_tokens
from llmgeom.probe import MOST_PROMPTS, NO_CONTEXT, PERMUTED, SHUFFLED, UNTRAINED, Needs, Probe
from llmgeom.provenance import attention_observer
from llmgeom.record import Record
from llmgeom.stats.verdict import LEAST_DRAWS

Places = dict[str, Tensor | None]  # sample -> the prompts of a pass that it has; None for all
MAIN = ""
MODEL = "model"  # beside the controls of `llmgeom.probe.CONTROLS`
UNLAYERED = OUTPUTS | {Site.FINAL}  # what no layer has


@dataclass(frozen=True, eq=False)
class Plan:
    """What one run reads: inputs, sites and controls, and what it measures there. Make one with `Plan.of`.

    Attributes:
        batch: the main sample as it was given.
        probes: those that can measure it, by name. unmeasured: why the others cannot.
        needs: by probe, with those of the optional sites that are there among its sites.
        inputs: sample name -> what the model reads, tokenized; "" is the main sample.
        of_controls: the same with the prompts of the main sample that controls read. subset: which these are; None for
            all.
        draws: MODEL and the controls that are read -> the draws of each: seeds, "permuted 1" ..., or None. Of permuted
            weights no more than decide, since they hardly differ (focusing of 8 draws of SmolLM2: .307 to .316, beside
            an interval of the model's own of .377 to .420).
        no_context: the control without context; None where no probe asks for it, or the model has none.
        layers: the layers that are stored; None for all. sites: those that may be stored; None for all.
        controls: draws of each control that were asked for.
        facts: provenance, for the record. notes: warnings that come first.
        finish: completes the judged record, from it and the observations of the model by probe.
    """

    subject: Model
    batch: Batch
    probes: Mapping[str, Probe]
    unmeasured: Mapping[str, str]
    needs: Mapping[str, Needs]
    inputs: Mapping[str, Batch]
    of_controls: Mapping[str, Batch]
    subset: Tensor | None
    draws: Mapping[str, Sequence[Draw | None]]
    no_context: NoContext | None
    layers: tuple[int, ...] | None
    sites: frozenset[Site] | None
    controls: int
    seed: int
    batch_tokens: int
    facts: Mapping[str, Any]
    notes: Sequence[str]
    finish: Callable[[Record, Mapping[str, Any]], Record] | None

    @classmethod
    def of(
        cls,
        subject: Model,
        batch: Batch,
        probes: Mapping[str, Probe],
        controls: int,
        seed: int,
        batch_tokens: int = BATCH_TOKENS,
        samples: Mapping[str, Batch] = {},
        facts: Mapping[str, Any] = {},
        notes: Sequence[str] = (),
        *,
        whole: bool = True,
        layers: str = "all",
        sites: Collection[str] | None = None,
        positions: str = "last",
        finish: Callable[[Record, Mapping[str, Any]], Record] | None = None,
    ) -> Plan:
        """The union of what the probes need.

        Args:
            subject: the model. batch: the main sample.
            probes: by name; one that cannot measure this batch, or this part of the model, is left out with its reason.
            controls: draws of each control.
            seed: of the draws, and of the prompts that controls read. batch_tokens: tokens that run together.
            samples: further samples by name; those that no probe needs are not read.
            facts, notes, finish: as the attributes.
            whole: controls read every prompt of a sample, not at most `Needs.control_prompts`.
            layers: the layers that are stored: numbers and slices as `llmgeom.flags.places` reads them.
            sites: the sites that are stored, next to the next-token probabilities; None for those that probes read.
            positions: which positions of each prompt are read: "last", or as `layers`. A batch with queries of its own,
                as that of a task, keeps them.

        Raises:
            UserError: a layer or position that is not there; the last layer, which every claim is about, left out.
        """
        depth = subject.facts["layers"]
        chosen = None if layers == "all" else places("--layers", layers, depth)
        if chosen is not None and depth - 1 not in chosen:
            raise UserError(
                f"--layers {layers} leaves out the last layer ({depth - 1}), which claims are about: give {layers},-1"
            )
        kept = None if sites is None else UNLAYERED | set(map(Site, sites))
        reasons = {name: _unable(subject, batch, probe.NEEDS, layers, chosen, kept) for name, probe in probes.items()}
        measured = {name: probe for name, probe in probes.items() if not reasons[name]}
        needs = {}
        for name, probe in measured.items():  # the optional sites that are there are among its sites
            need, lacks = probe.NEEDS, subject.unavailable
            optional = {one for one in need.optional if (kept is None or one in kept) and not lacks({one})}
            if "attention_layers" in subject.facts and not need.sites & ATTENDING:
                optional -= ATTENDING  # beside sites of every layer, those of some would stand at other layers' numbers
            needs[name] = replace(need, sites=need.sites.union(optional), optional=frozenset())
        wanted = _union(frozenset(need.samples) for need in needs.values())
        given = {MAIN: batch} | {name: one for name, one in samples.items() if name in wanted}
        inputs = {name: _queried(subject, one, positions) for name, one in given.items()}
        most = None if whole else min((n.control_prompts or MOST_PROMPTS for n in needs.values()), default=MOST_PROMPTS)
        subset = subset_of(inputs[MAIN], seed, most)
        main = inputs[MAIN] if subset is None else inputs[MAIN].take(subset)
        for name, make in _made(needs).items():
            if name not in inputs and (made := make(subject, main)) is not None:
                inputs[name] = _queried(subject, made, positions)
        of_controls = {}
        for name, one in inputs.items():
            rows = subset_of(one, seed, most)
            of_controls[name] = one if rows is None else one.take(rows)
        # A further sample that no probe compares with a control is read whole, as the main sample is.
        compared = _union(frozenset(need.samples) for need in needs.values() if need.controls)
        inputs = {name: of_controls[name] if name in compared else one for name, one in inputs.items()}

        notes, no_context = [*notes], None
        if positions != "last":
            notes.append(
                f"with --positions {positions}, shuffled prompts keep the final token alone, and claims were "
                "calibrated on the final token"
            )
        used, seeds = _union(need.controls for need in needs.values()), range(seed + 1, seed + 1 + controls)
        draws: dict[str, Sequence[Draw | None]] = {MODEL: (None,)}
        if SHUFFLED in used:
            draws[SHUFFLED] = seeds
        if NO_CONTEXT in used:
            try:
                no_context = NoContext.of(subject, inputs[MAIN], seed, special_tokens(subject.tokenizer)[0])
                draws[NO_CONTEXT] = (None,)
            except Unavailable as reason:
                notes.append(f"no control without context: {reason}")
        if UNTRAINED in used:
            draws[UNTRAINED] = seeds
        if PERMUTED in used and controls:
            if subject.facts.get("quantised") or getattr(subject.model, "hf_device_map", None):
                notes.append("no control with permuted weights: these are packed, or in several places")
            else:
                draws[PERMUTED] = [f"permuted {one}" for one in seeds[:LEAST_DRAWS]]
        selected = {"layers": layers, "sites": None if sites is None else [*sites], "positions": positions}
        selected = {key: value for key, value in selected.items() if value not in ("all", None, "last")}
        return cls(
            subject,
            batch,
            measured,
            {name: why for name, why in reasons.items() if why},
            needs,
            inputs,
            of_controls,
            subset,
            draws,
            no_context,
            chosen,
            kept,
            controls,
            seed,
            batch_tokens,
            {**selected, **facts},
            notes,
            finish,
        )

    @cached_property
    def reader(self) -> Any:
        """The model for passes: its weights are hashed once, before a control may lie in their memory."""
        try:
            return replace(self.subject, facts={**self.subject.facts, "files": identity(self.subject), "weights": None})
        except UserError:  # offloaded, and not from files: plans without a store need no hash
            return self.subject

    @cached_property
    def _together(self) -> dict[str, list[tuple[Batch, Places]]]:
        """`together` of what the model reads, and of what each control does: the main sample, and the further ones of
        probes that name this control."""
        found = {MODEL: together(self.inputs, _made(self.needs))}
        for kind in (UNTRAINED, NO_CONTEXT):
            wanted = {MAIN}.union(*(need.samples for need in self.needs.values() if kind in need.controls))
            found[kind] = together({name: batch for name, batch in self.of_controls.items() if name in wanted})
        return found

    def passes(
        self, kind: str, draw: Draw | None = None, store: str | None = None, means: Tensor | None = None
    ) -> list[tuple[Pass, Places]]:
        """The passes of the model or of one draw of a control, each with the prompts of it that each sample has.

        Args:
            kind: MODEL, or a control that is read.
            draw: one of its draws.
            store: folder of the cache.
            means: of what attention writes (`NoContext.means`): without them the passes of that control can be planned
                and not made.
        """
        options: dict[str, Any] = {"layers": self.layers, "batch_tokens": self.batch_tokens, "store": store}
        reader = self.reader
        if kind in (UNTRAINED, PERMUTED) and draw is not None:  # a control, which need not exist
            reader = replace(reader, facts={**reader.facts, **descent(reader, draw)})
        if kind in (SHUFFLED, PERMUTED):
            batch = self.of_controls[MAIN]
            if kind == SHUFFLED:
                before, after = special_tokens(self.subject.tokenizer)
                batch = replace(batch, inputs=shuffle(batch.tokens, before, int(draw or 0), after))
            sites = _union(need.sites for need in self.needs.values() if kind in need.controls)
            return [(plan_capture(reader, batch, sites, **options), {MAIN: None})]
        found = []
        asking = [need for need in self.needs.values() if kind == MODEL or kind in need.controls]
        for batch, rows in self._together[kind]:
            reading = [need for need in asking if rows.keys() & {MAIN, *need.samples}]
            sites = _union(need.sites | {Site.ENTROPY} for need in reading)
            observers = [o for need in asking for o in need.observers if rows.keys() & {*o.samples}]
            if kind == MODEL and MAIN in rows:
                sites |= {Site.ENTROPY, Site.LIKELY}
                if self.sites is None or Site.ATTENTION in self.sites:
                    observers += attention_observer(self.subject, batch)
                observers += [WRITES] if self.no_context else []
            silent = self.no_context if kind == NO_CONTEXT else None
            edits = [silent.edit(batch, means)] if silent else []
            wanted = sites.union(*(one.wanted for one in observers))
            # Without context nothing moves between positions: where no attention is read, the last one runs alone.
            alone = silent is not None and batch.query is None and not wanted & INSIDE and silent.cuts_all(batch)
            more: dict[str, Any] = {"observers": [*dict.fromkeys(observers)], "edits": edits, "alone": alone}
            found.append((plan_capture(reader, batch, sites, **more, **options), rows))
        return found

    def every(self, store: str | None = None) -> Iterator[tuple[str, Draw | None, Pass]]:
        """Every pass of the run, with its kind and draw; those without context need the model's own captures first."""
        for kind, draws in self.draws.items():
            for draw in draws:
                for work, _ in self.passes(kind, draw, store):
                    yield kind, draw, work

    def check_room(self, store: str) -> None:
        """Raises UserError where the disk has no room for all captures that are not there yet."""
        needed = sum(sum(work.sizes) for _, _, work in self.every())
        stored = files(Path(store) / run_key(run_spec(self.reader)))
        room(store, needed - sum(file.st_size for file in stored))

    def layers_of(self, name: str) -> tuple[int, ...] | None:
        """The numbers of the layers that a probe reads; None for all. In a hybrid one of attention reads those that
        have it."""
        read, needs = self.subject.facts.get("attention_layers"), self.needs[name]
        if read is None or not needs.sites.union(*(observer.wanted for observer in needs.observers)) & ATTENDING:
            return self.layers
        return tuple(layer for layer in read if self.layers is None or layer in self.layers)


def _made(needs: Mapping[str, Needs]) -> dict[str, Any]:
    """The samples that probes make, by name; of one name the last."""
    return {
        name: make for one in needs.values() if isinstance(one.samples, Mapping) for name, make in one.samples.items()
    }


def _union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset().union(*sets)


def _queried(subject: Model, batch: Batch, chosen: str) -> Batch:
    """A batch with its tokens and queried positions. Raises UserError where a prompt has none of the positions."""
    batch = replace(batch, inputs=subject.tokens(batch))
    if chosen == "last" or batch.query is not None:
        return batch
    query = torch.zeros(batch.tokens.data.shape[:2], dtype=torch.bool)
    for i, length in enumerate(batch.tokens.lengths.tolist()):
        if not (read := places_of(chosen, length)):
            raise UserError(f"--positions {chosen}: prompt {i + 1} has {length} tokens and no such position")
        query[i, list(read)] = True
    return replace(batch, query=query)


def _unable(
    subject: Model,
    batch: Batch,
    needs: Needs,
    layers: str,
    chosen: tuple[int, ...] | None,
    kept: frozenset[Site] | None,
) -> str:
    """Why a probe cannot measure this batch in this part of the model; empty where it can."""
    if kept is not None and (lost := needs.sites - kept):
        return f"it reads {', '.join(sorted(lost))}, which --sites {','.join(sorted(kept - UNLAYERED))} leaves out"
    read = needs.sites.union(*(observer.wanted for observer in needs.observers))
    if chosen is not None and not needs.chosen_layers and (read | needs.optional) - UNLAYERED:
        return f"it compares all layers with each other; leave out --layers {layers}"
    if why := subject.unavailable(read, chosen):
        return why
    try:
        if needs.check is not None:
            needs.check(subject, batch)
    except UserError as refusal:
        return str(refusal)
    return ""


def together(samples: Mapping[str, Batch], alone: Collection[str] = ()) -> list[tuple[Batch, Places]]:
    """Samples as they are read: batches, each with the prompts of it that each sample has.

    The main sample is a batch of its own, and so are samples in `alone`: a preview reads them before the others are
    drawn. So is one with queries of its own, or of numbers. The prompts of all others are one batch, none twice.
    """
    found: dict[tuple, tuple[Batch, int]] = {}  # identity of a prompt, its tokens first -> where it stands
    rows: dict[str, list[tuple]] = {}
    batches: list[tuple[Batch, Places]] = []
    for name, batch in samples.items():
        tokens = batch.tokens
        if name == MAIN or name in alone or batch.query is not None or isinstance(tokens, Rows):
            batches.append((batch, {name: None}))
            continue
        columns = [*zip(*batch.columns.values(), strict=True)] if batch.columns else [()] * len(batch)
        # Tokens, and columns, which an observer may read.
        rows[name] = [(tuple(ids), *map(str, row)) for ids, row in zip(tokens.real, columns, strict=True)]
        for i, prompt in enumerate(rows[name]):
            found.setdefault(prompt, (batch, i))
    if found:
        place = {prompt: i for i, prompt in enumerate(found)}
        names = set.intersection(*(set(samples[name].columns) for name in rows))
        joined = Batch(
            Tokens.of([ids for ids, *_ in found]),
            tuple(batch.cluster[i] for batch, i in found.values()),
            {"kind": "further samples"},
            columns={name: tuple(batch.columns[name][i] for batch, i in found.values()) for name in sorted(names)},
        )
        batches.append((joined, {name: torch.tensor([place[one] for one in each]) for name, each in rows.items()}))
    return batches


def subset_of(batch: Batch, seed: int, most: int | None = MOST_PROMPTS) -> Tensor | None:
    """Which prompts of a batch the controls read, in rising order; None for all."""
    if most is None or len(batch) <= most:
        return None
    return torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(batch))[:most]))
