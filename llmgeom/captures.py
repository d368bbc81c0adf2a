"""The captures of one run, of the model and of each control: captured or loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from llmgeom.cache import keys
from llmgeom.cache.shards import Store
from llmgeom.errors import UserError, in_float64
from llmgeom.model.passes import Draw, run_spec, unwritten
from llmgeom.model.running import gather
from llmgeom.plan import MAIN, Layout, PassPlan, planned
from llmgeom.probe import Capture, Probe, Subject
from llmgeom.progress import tell


@dataclass(frozen=True)
class Run:
    """One run: how its captures are made, or loaded where an earlier run stored them."""

    subject: Subject
    plan: PassPlan
    probes: Mapping[str, Probe]
    seed: int
    batch_tokens: int
    store: str | None

    @cached_property
    def _options(self) -> dict[str, Any]:
        return {"batch_tokens": self.batch_tokens, "store": self.store}

    @cached_property
    def _reader(self) -> Any:
        """The model for plans: its weights are hashed once, before a control may lie in their memory."""
        return unwritten(self.subject)

    def _captures(self, seed: Draw | None, layout: Layout, build: Callable[[], Subject]) -> dict[str, Capture]:
        """The captures of the model (seed None) or of a control, which `build` makes only if a shard is missing."""
        captures = []
        for reading in layout.readings:
            work = planned(self._reader, seed, reading, **self._options)
            reader = build() if work.missing(range(len(work.groups))) else self.subject
            try:
                captures.append(gather(reader, work, only_stored=reader is self.subject and seed is not None))
            except LookupError:  # a shard was damaged and is set aside
                captures.append(gather(build(), work))
        return layout.assemble(captures)

    def model(self) -> dict[str, Capture]:
        """Sample name -> capture of the model."""
        readings = self.plan.own.readings
        captures = []
        for i, reading in enumerate(readings):
            captures.append(gather(self.subject, planned(self._reader, None, reading, **self._options)))
            tell("prompts", i + 1, len(readings))
        return self.plan.own.assemble(captures)

    def control(
        self, seed: int, draw: Callable[[Draw | None], Subject]
    ) -> tuple[dict[str, Capture], Callable[[], Subject]]:
        """Captures of one untrained control, and what builds it; `draw` (from `Subject.controls`) is called only if a
        shard is missing, or by that."""
        build = cache(lambda: draw(seed))
        return self._captures(seed, self.plan.control, build), build

    def permuted(self, drawn: str, draw: Callable[[Draw | None], Subject]) -> Capture:
        """The capture of one control with permuted weights."""
        reading = self.plan.permuted_reading
        return self._captures(drawn, Layout.of({MAIN: reading}), cache(lambda: draw(drawn)))[MAIN]

    def shuffles(self) -> tuple[Capture, ...]:
        """The model on shuffled prompts, one capture per draw."""
        captures = []
        for i in range(len(self.plan.shuffles)):
            captures.append(gather(self.subject, planned(self._reader, None, self.plan.shuffled(i), **self._options)))
            tell("shuffled prompts", i + 1, len(self.plan.shuffles))
        return tuple(captures)

    def read_by_controls(self, captures: Mapping[str, Capture]) -> Mapping[str, Capture]:
        """The captures, with the main sample reduced to the prompts that controls read."""
        if self.plan.subset is None:
            return captures
        return {**captures, MAIN: captures[MAIN].take(self.plan.subset)}

    def without_context(self, captures: Mapping[str, Capture]) -> dict[str, Capture] | None:
        """Captures of the model without context, derived from the model's captures; None without such a control."""
        if self.plan.no_context is None:
            return None
        cut = [
            gather(self.subject, planned(self._reader, None, reading, **self._options))
            for reading in self.plan.without_context(captures)
        ]
        tell("control without context", 1, 1)
        return self.plan.control.assemble(cut)

    def examine(
        self, name: str, build: Callable[[], Subject], captures: Mapping[str, Capture], seed: int | None = None
    ) -> Any:
        """The return value of NEEDS.examine for the model (seed None) or a control.

        Arrays of our own probes are stored like a capture of one shard, under a hash of the program: they come from
        passes of their own, or from the weights of a control that would have to be drawn again.
        """
        needs = self.probes[name].NEEDS
        examine = needs.examine if seed is None else needs.examine_control or needs.examine
        if examine is None:
            return None
        store = self._examination(name, seed)
        if store is not None and (stored := store.read(0)) is not None:
            return {key: tensor.numpy() for key, tensor in stored[0].items()}
        with in_float64(f"probe {name!r}"):
            found = examine(build(), captures)
        if store is not None and isinstance(found, Mapping):  # also where it is empty: no control is drawn for it again
            with contextlib.suppress(TypeError):  # not arrays of numbers
                tensors = {key: torch.from_numpy(np.array(array, order="C")) for key, array in found.items()}
                with store.writing():
                    store.write(0, tensors, {})
        return found

    def _examination(self, name: str, seed: int | None) -> Store | None:
        """Where an examination is stored; None without a cache, and for a probe or an observer without a cache key."""
        probe, own = self.probes[name], self.plan.own
        works = [planned(self._reader, None, reading, **self._options) for reading in own.readings]
        ours = getattr(probe.measure, "__module__", "").startswith("llmgeom.")
        if not ours or any(work.store is None for work in works):
            return None
        try:
            fields = keys.named(probe) if dataclasses.is_dataclass(probe) else None
        except UserError:
            return None
        spec = {
            "examination": name,
            "untrained": seed,
            "sites": [f"examination of {name}"],
            "fields": fields,
            "captures": [work.store.of for work in works if work.store],
            "samples": {sample: keys.of_facts(place.batch) for sample, place in own.places.items()},
            "seed": self.seed,
            "program": keys.of_program(),
        }
        assert self.store is not None
        about = {"of": str(own.places[MAIN].batch.source.get("name", "prompts")), "prompts": len(self.plan.main)}
        origin = {"name": self.subject.name, "revision": self.subject.facts.get("revision")}
        return Store(self.store, run_spec(self._reader), spec, (origin, {**about, "shards": 1}))
