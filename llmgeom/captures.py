"""The captures of one run, of the model and of each control: captured or loaded, with stored results of probes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.cache import keys, results
from llmgeom.cache.shards import run_key
from llmgeom.errors import UserError, in_float64
from llmgeom.files import digest, sha256
from llmgeom.model.passes import run_spec, unwritten
from llmgeom.model.running import gather
from llmgeom.plan import MAIN, Layout, PassPlan, planned
from llmgeom.probe import Capture, Measured, Probe, Subject
from llmgeom.progress import shown, silent, tell
from llmgeom.record import arrays_of, measured_from, plain_of


@dataclass(frozen=True)
class Run:
    """One run: its captures, and the examinations and results that an earlier run stored."""

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

    @cached_property
    def folder(self) -> str:
        """The cache's folder for this model."""
        return run_key(run_spec(self._reader))

    @cached_property
    def _captures_key(self) -> str:
        """A hash of the keys of all captures of the run, and of the facts of its samples that no capture contains."""
        captures = [work.store.of for _, _, work in self.plan.works(self._reader, **self._options) if work.store]
        samples = {name: keys.of_facts(place.batch) for name, place in self.plan.own.places.items()}
        return digest({"captures": captures, "samples": samples, "seed": self.seed, "claims": claims.files_digest()})

    def key(self, name: str, what: str, *more: Any) -> str:
        """The cache key of a probe's result or examination, from its code or, for a dataclass, its fields.

        Raises UserError: a field, or a variable that a function closes over, cannot be part of a key.
        """
        probe = self.probes[name]
        try:
            fields = keys.named(probe) if dataclasses.is_dataclass(probe) else None
            code = [measuring_code(), keys.of_code(probe.measure) if fields is None else fields]
        except UserError as refusal:
            raise UserError(f"probe {name}: {refusal}") from refusal
        return digest({"what": what, "probe": name, "of": self._captures_key, "code": code, "more": list(more)})[:32]

    # -- captures

    def _captures(self, seed: int | None, layout: Layout, build: Callable[[], Subject]) -> dict[str, Capture]:
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
        self, seed: int, examined: Sequence[str], draw: Callable[[int | None], Subject]
    ) -> tuple[dict[str, Capture], dict[str, Any]]:
        """Captures of one untrained control, and the examination of each probe of `examined`.

        Args:
            seed: Of the control.
            examined: Names of probes.
            draw: From `Subject.controls`; called only if a shard or an examination is missing.
        """
        build = cache(lambda: draw(seed))
        (layout,) = (layout for seeds, layout in self.plan.untrained_parts if seed in seeds)
        captures = self._captures(seed, layout, build)
        examinations = {}
        for name in examined:
            with contextlib.suppress(UserError), shown(silent):  # this control has no such weights: the others decide
                examinations[name] = self.examine(name, build, captures, seed)
        return captures, examinations

    def shuffles(self, captured: Sequence[Capture], number: int) -> tuple[Capture, ...]:
        """The model on shuffled prompts, one capture per draw: the first ones as `captured`, others up to `number`."""
        captures = list(captured)
        for i in range(len(captures), number):
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
        """The return value of NEEDS.examine; arrays are stored in the cache and loaded from it."""
        needs = self.probes[name].NEEDS
        if needs.examine is None:
            return None
        key = self.key(name, "examination", seed) if self.store else ""
        if self.store and (entry := results.load(self.folder, key)) is not None:
            return entry[1]
        examine = needs.examine if seed is None else needs.examine_control or needs.examine
        with in_float64(f"probe {name!r}"):
            examination = examine(build(), captures)
        arrays = isinstance(examination, Mapping) and all(isinstance(x, np.ndarray) for x in examination.values())
        if self.store and arrays and examination:
            results.save(self.folder, key, {}, examination)
        return examination

    # -- results

    def stored(self, name: str, draws: Sequence[int] = ()) -> tuple[Measured | str, list[str]] | None:
        """The stored result of a probe (or why it is not measured) and the events of its captures; None without one.

        draws: the number of draws of each control, if it is smaller than planned.
        """
        if self.store is None or (entry := results.load(self.folder, self.key(name, "result", *draws))) is None:
            return None
        plain, arrays = entry
        if "unmeasured" in plain:
            return plain["unmeasured"], plain["events"]
        return measured_from(plain["measured"], arrays), plain["events"]

    def unsettled(self, draws: Sequence[int]) -> bool:
        """Whether an earlier run of the same probes found that these draws of each control do not settle its claims."""
        return self.store is not None and results.load(self.folder, self._unsettled_key(draws)) is not None

    def keep_unsettled(self, draws: Sequence[int]) -> None:
        """Store what `unsettled` reads."""
        if self.store is not None:
            results.save(self.folder, self._unsettled_key(draws), {"settled": False}, {})

    def _unsettled_key(self, draws: Sequence[int]) -> str:
        return digest([self.key(name, "unsettled", *draws) for name in self.probes])[:32]

    def keep(self, name: str, result: Measured | str, events: Sequence[str], draws: Sequence[int] = ()) -> None:
        """Store the result of a probe, as `stored` loads it."""
        if self.store is None:
            return
        plain: dict[str, Any] = {"unmeasured": result}
        arrays: dict[str, np.ndarray] = {}
        if not isinstance(result, str):
            plain, arrays = {"measured": plain_of(result)}, arrays_of(result)
        results.save(self.folder, self.key(name, "result", *draws), {**plain, "events": list(events)}, arrays)


@lru_cache
def measuring_code() -> str:
    """sha256 of the sources that turn captures into stored results: statistics, claims, probes and shared modules."""
    root = Path(__file__).parent
    import llmgeom.probes

    folders = [root / "stats", *map(Path, llmgeom.probes.__path__)]
    paths = [path for folder in folders for path in (*folder.rglob("*.py"), *folder.rglob("*.md"))]
    names = ("claims", "probe", "result", "record", "captures", "run", "plan", "task", "answers")
    paths += [root / f"{name}.py" for name in names]
    return digest({str(path.relative_to(path.parents[1])): sha256(path.read_bytes()) for path in sorted(paths)})
