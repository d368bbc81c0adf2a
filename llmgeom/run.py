"""The runner: a model and its controls read all prompts once, then every probe measures, in one record.

It has the only loop over controls. Probes declare what they need (`llmgeom.probe.Needs`); the plan is the union
(`llmgeom.plan.Plan`). Stored captures are loaded; statistics are computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom import claims
from llmgeom.batch import Batch, Prompts
from llmgeom.cache import keys
from llmgeom.cache.shards import Store
from llmgeom.errors import UserError, brief, in_float64
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.model.passes import Draw, run_spec
from llmgeom.model.running import gather
from llmgeom.model.tokenizing import special_tokens
from llmgeom.plan import MAIN, MODEL, Plan
from llmgeom.probe import NO_CONTEXT, PERMUTED, SHUFFLED, UNTRAINED, Probe, ProbeInput
from llmgeom.progress import shown, silent, tell, within
from llmgeom.provenance import CONTROLS, caveats, flat_entropy, prompt_table, provenance, took
from llmgeom.record import Record
from llmgeom.result import Result


def run_probes(
    subject: Model,
    batch: Prompts,
    probes: Mapping[str, Probe],
    *,
    samples: Mapping[str, Batch] | None = None,
    controls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    store: str | None = None,
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    whole: bool = False,
) -> Record:
    """Measure `probes` in a model on a batch, with controls.

    Args:
        subject: the model. batch: the main sample, or prompts as strings.
        probes: name -> module of probes/ or an object of `llmgeom.probe`.
        samples: further samples by name; those that no probe needs are not read.
        controls: draws of each control: untrained copies, and orders of shuffled prompts. Fewer than 5 decide nothing.
        seed: seed of every draw. batch_tokens: tokens that run together.
        store: folder of the cache; captures stored there are loaded.
        facts: provenance. notes: warnings, placed first.
        whole: controls read every prompt of a sample, not at most `probe.MOST_PROMPTS`.

    Returns:
        The record, with claims judged. A probe that raises UserError is listed with its reason as not measured.

    Raises:
        UserError: bad input; no room on the disk; logits that are not finite.
        TypeError: a probe returned no result.
    """
    if not isinstance(subject, Model):
        raise UserError(f"run_probes({brief(subject)}): expected a model that llmgeom.load returned")
    for name, probe in probes.items():
        if not (hasattr(probe, "NEEDS") and hasattr(probe, "measure")):
            raise UserError(f"probe {name!r} has no NEEDS and measure: make one with @llmgeom.probe.probe(Needs(...))")
    if controls < 0:
        raise UserError(f"run_probes(controls={controls}): expected 0 draws of each control or more; {CONTROLS} decide")
    options = (controls, seed, batch_tokens, samples or {}, facts or {}, notes)
    return Run(Plan.of(subject, Batch.of(batch), probes, *options, whole=whole), store).record()


def read_all(runs: Mapping[str, Run]) -> None:
    """All that some runs of one model read, by name. A copy of it, untrained or permuted, is drawn once for all."""
    of, events = [*runs.values()], list[str]()
    for name, run in runs.items():
        with within(name) if len(of) > 1 else contextlib.nullcontext():
            run.read()
    with of[0].subject.controls(of[0].store, events.append) as control:
        for kind, what in ((UNTRAINED, "untrained controls"), (PERMUTED, "permuted weights")):
            draws = [*dict.fromkeys(draw for run in of for draw in run.plan.draws.get(kind, ()))]
            for done, draw in enumerate(draws, 1):
                build = cache(partial(control, draw))
                for run in of:
                    if draw in run.plan.draws.get(kind, ()):
                        run.control(kind, draw, build)
                tell(what, done, len(draws))
    for run in of:
        run.drawing, run.complete = events, True


class Run:
    """A plan that is read and measured.

    Attributes:
        captures: MODEL or control -> the captures of each of its draws that is read, by sample name.
        observations: probe -> its observations of the model. of_controls: of each untrained control.
        refused: probe -> why it has none.
        drawing: events while untrained controls were drawn. complete: whether all is read.
    """

    def __init__(self, plan: Plan, store: str | None = None) -> None:
        """Nothing is read yet. Raises UserError where the disk has no room for the captures."""
        self.plan, self.subject, self.store, self.started = plan, plan.subject, store, time.time()
        self.captures: dict[str, list[dict[str, Capture]]] = {}
        self.observations: dict[str, Any] = {}
        self.of_controls: dict[str, list[Any]] = {}
        self.refused: dict[str, str] = {}
        self.drawing: list[str] = []
        self.complete = False
        if store:
            plan.check_room(store)

    @property
    def waits(self) -> bool:
        """Whether a control is still to be read: `preview` then shows something before `record` does."""
        every = self.plan.every(self.store)
        return any(kind != MODEL and work.missing(range(len(work.groups))) for kind, _, work in every)

    def preview(self) -> Record:
        """The record of the model's own pass alone, without controls and so without a verdict."""
        self._read_model()
        with shown(silent):  # the measuring that counts comes after the controls
            return self._record(judged=False)

    def record(self, facts: Mapping[str, Any] = {}) -> Record:
        """Read what is not read yet, measure and judge; see `run_probes`. `facts` are added to those of the plan."""
        if not self.complete:
            read_all({"": self})
        record = self._record(facts=facts)
        return self.plan.finish(record, self.observations) if self.plan.finish else record

    # ---- captures ----------------------------------------------------------------------------------------------------

    def _read(
        self, kind: str, draw: Draw | None = None, build: Callable[[], Model] | None = None, means: Tensor | None = None
    ) -> dict[str, Capture]:
        """Sample name -> its capture, read or loaded; a control is built only if a shard is missing."""
        every = self.plan.passes(kind, draw, self.store, means)
        found: dict[str, Capture] = {}
        for done, (work, rows) in enumerate(every, 1):
            reader = build() if build and work.missing(range(len(work.groups))) else self.subject
            try:
                capture = gather(reader, work, only_stored=build is not None and reader is self.subject)
            except LookupError:  # a shard was damaged and is set aside
                assert build is not None
                capture = gather(build(), work)
            inputs = self.plan.inputs if kind == MODEL else self.plan.of_controls
            for name, each in rows.items():
                found[name] = capture if each is None else capture.take(each, inputs[name])
            if kind == MODEL:
                tell("prompts", done, len(every))
        self.captures.setdefault(kind, []).append(found)
        return found

    def _read_model(self) -> None:
        """The model on every sample, and what each probe observes there."""
        if MODEL in self.captures:
            return
        self._read(MODEL)
        for name, needs in self.plan.needs.items():
            own = self._own(subset=not needs.control_prompts)
            try:
                self.observations[name] = self._observed(name, own, lambda: self.subject)
            except UserError as refusal:
                self.refused[name] = str(refusal)

    def _own(self, subset: bool = True) -> Mapping[str, Capture]:
        """The captures of the model; with `subset` the main sample reduced to the prompts that controls read."""
        own = self.captures[MODEL][0]
        return {**own, MAIN: own[MAIN].take(self.plan.subset)} if subset and self.plan.subset is not None else own

    def read(self) -> None:
        """The model and the controls that use its own weights; untrained ones may later be drawn in its memory."""
        self._read_model()
        plan, draws = self.plan, self.plan.draws
        for done, seed in enumerate(draws.get(SHUFFLED, ()), 1):
            self._read(SHUFFLED, seed)
            tell("shuffled prompts", done, len(draws[SHUFFLED]))
        if NO_CONTEXT in draws and plan.no_context is not None:
            self._read(NO_CONTEXT, means=plan.no_context.means(self.captures[MODEL][0][MAIN]))
            tell("control without context", 1, 1)

    def control(self, kind: str, seed: Draw | None, build: Callable[[], Model]) -> None:
        """One draw of untrained or permuted weights, and what probes observe in it; `build` makes it, if it must be."""
        compared = [
            name for name, needs in self.plan.needs.items() if kind in needs.controls and name not in self.refused
        ]
        if kind == UNTRAINED and not compared:
            return
        captures = self._read(kind, seed, build)
        for name in compared if kind == UNTRAINED else ():
            needs = self.plan.needs[name]
            if needs.examine or needs.collect:
                # Without such weights in this control the others decide.
                with contextlib.suppress(UserError), within(f"untrained control {len(self.captures[UNTRAINED])}"):
                    self.of_controls.setdefault(name, []).append(self._observed(name, captures, build, seed))

    def _observed(
        self, name: str, captures: Mapping[str, Capture], build: Callable[[], Model], seed: Draw | None = None
    ) -> Any:
        """A probe's observations of the model (seed None) or of a control.

        Arrays that `examine` of our own probes returns are stored like a capture of one shard, under a hash of the
        program: they come from passes of their own, or from the weights of a control that would have to be drawn again.
        """
        needs, examined = self.plan.needs[name], None
        if needs.examine is not None:
            store = self._examination(name, seed)
            if store is not None and (stored := store.read(0)) is not None:
                examined = {key: tensor.numpy() for key, tensor in stored[0].items()}
            else:
                with in_float64(f"probe {name!r}"):
                    examined = needs.examine(build(), captures)
                if store is not None and isinstance(examined, Mapping):  # also an empty one: no control is drawn again
                    with contextlib.suppress(TypeError):  # not arrays of numbers
                        arrays = {key: torch.from_numpy(np.array(one, order="C")) for key, one in examined.items()}
                        with store.writing():
                            store.write(0, arrays, {})
        return examined if needs.collect is None else needs.collect(captures, examined)

    def _examination(self, name: str, seed: Draw | None) -> Store | None:
        """Where an examination is stored; None without a cache, and for a probe or an observer without a cache key."""
        plan, probe = self.plan, self.plan.probes[name]
        works = [work for work, _ in plan.passes(MODEL, store=self.store)]
        ours = getattr(probe.measure, "__module__", "").startswith("llmgeom.")
        if self.store is None or not ours or any(work.store is None for work in works):
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
            "samples": {sample: keys.of_facts(batch) for sample, batch in plan.inputs.items()},
            "seed": plan.seed,
            "program": keys.of_program(),
        }
        about = {"of": str(plan.batch.source.get("name", "prompts")), "prompts": len(plan.inputs[MAIN]), "shards": 1}
        origin = {"name": self.subject.name, "revision": self.subject.facts.get("revision")}
        return Store(self.store, run_spec(plan.reader), spec, (origin, about))

    # ---- the record --------------------------------------------------------------------------------------------------

    def _record(self, judged: bool = True, facts: Mapping[str, Any] = {}) -> Record:
        """The record of what is read so far; with verdicts if `judged`."""
        plan, subject, view = self.plan, self.subject, self._view()
        measured = {**self._measure(view), **self.refused}
        measured = {name: measured[name] for name in plan.probes if name in measured}  # in the order of the call
        results = {name: answer for name, answer in measured.items() if isinstance(answer, Result)}
        reasons = {**plan.unmeasured, **{name: why for name, why in measured.items() if isinstance(why, str)}}
        for name, answer in results.items():
            reasons |= {f"{name}: {metric}": why for metric, why in answer.unmeasured.items()}
        # The prompts of the record: those that controls read, unless every probe measures all.
        subset = None if all(needs.control_prompts for needs in plan.needs.values()) else plan.subset
        batch = plan.batch if subset is None else plan.batch.take(subset)
        tokens = (plan.inputs if subset is None else plan.of_controls)[MAIN].tokens
        capture = self._own(subset=subset is not None)[MAIN]
        prompt, entropy = capture.prompt.numpy(), capture.entropy.numpy()
        of_prompts = np.bincount(prompt, entropy, len(batch)) / np.bincount(prompt, minlength=len(batch))
        edits = [edit.identity for edit in subject.edits]
        claimed = any(h.claim for measured in results.values() for h in measured.estimates)
        if judged:
            results = claims.judge(results, plan.batch.source.get("available", 0))
        else:  # claims as plain measurements: the controls that judge them are not there
            results = {
                name: replace(one, estimates=tuple(h.saying("") for h in one.estimates))
                for name, one in results.items()
            }
        return Record(
            results=results,
            unmeasured=reasons,
            prompts=prompt_table(subject, batch, tokens, of_prompts, capture),
            subject=subject.facts_now,
            source=dict(plan.batch.source),
            facts={
                **provenance(plan.batch, plan.inputs[MAIN].tokens, plan.seed, plan.controls if judged else 0),
                "batch_tokens": plan.batch_tokens,
                "bos_added": special_tokens(subject.tokenizer)[0] > 0,
                **({"edits": edits} if edits else {}),
                **flat_entropy(plan.batch, self.captures[MODEL][0][MAIN].entropy.numpy(), subject.facts["vocabulary"]),
                **plan.facts,
                **facts,
                **({} if judged else {"preview": True}),
            },
            warnings=tuple(self._warnings(batch, tokens, judged, claimed)),
            run=took(self.started),
        )

    def _warnings(self, batch: Batch, tokens: Any, judged: bool, claimed: bool) -> Iterator[str]:
        """Warnings of a record of this batch."""
        plan = self.plan
        if not judged:
            yield "preview, of the model's own pass: no control is read, and no claim is judged yet"
        yield from plan.notes
        if plan.subset is not None and len(plan.draws) > 1:
            whole = [name for name, need in plan.needs.items() if need.control_prompts]
            also = f"; measured on all: {', '.join(whole)}" if whole else ""
            yield f"controls read {len(plan.subset)} of the {len(plan.batch)} prompts, drawn at random{also}"
        yield from caveats(self.subject, batch, tokens, plan.controls if judged else None, claimed)
        every = [capture for draws in self.captures.values() for draw in draws for capture in draw.values()]
        yield from dict.fromkeys([*(event for capture in every for event in capture.events), *self.drawing])

    def _view(self) -> ProbeInput:
        """The input of `measure`: the model and its controls, on the prompts that controls read."""
        own, seed = self._own(), self.plan.seed

        def drawn(kind: str, name: str = MAIN) -> tuple[Capture, ...]:
            return tuple(captures[name] for captures in self.captures.get(kind, ()) if name in captures)

        def view(name: str, **more: Any) -> ProbeInput:
            without = next(iter(drawn(NO_CONTEXT, name)), None)
            entropy = own[name].entropy.numpy()
            return ProbeInput(own[name], entropy, drawn(UNTRAINED, name), no_context=without, seed=seed, **more)

        further = [name for name in own if name != MAIN and (Site.ENTROPY, -1) in own[name].tensors]
        samples = {name: view(name) for name in further}
        return view(MAIN, shuffled=drawn(SHUFFLED), permuted=drawn(PERMUTED), samples=samples)

    def _measure(self, view: ProbeInput) -> dict[str, Result | str]:
        """The result of every probe, or why it has none."""
        plan = self.plan
        answers: dict[str, Result | str] = {}
        probes = {name: probe for name, probe in plan.probes.items() if name not in self.refused}
        without = next(iter(self.captures.get(NO_CONTEXT, ())), None)
        for done, (name, probe) in enumerate(probes.items()):
            tell(f"measuring {name}", done, len(probes))
            needs, data = plan.needs[name], view
            if plan.subset is not None and needs.control_prompts:
                own = self.captures[MODEL][0][MAIN]
                data = ProbeInput(own, own.entropy.numpy(), samples=view.samples, seed=view.seed, subset=view)
            unseen = None
            if without and NO_CONTEXT in needs.controls and needs.examine is None and needs.collect is not None:
                unseen = needs.collect(without, None)
            seen: dict[str, Any] = {"observations": self.observations.get(name), "no_context_observations": unseen}
            seen["control_observations"] = tuple(self.of_controls.get(name, ()))
            data = replace(data, layers=plan.layers_of(name), **seen)
            try:
                result = probe.measure(data)
                if not isinstance(result, Result):
                    raise TypeError(f"probe {name!r} returned a {type(result).__name__}: expected what Result.of gives")
                if data.layers is not None and any("layer" in one.axes for one in result.quantities.values()):
                    result = replace(result, ticks={"layer": data.layers, **result.ticks})
                answers[name] = result
            except UserError as refusal:
                answers[name] = str(refusal)
            tell(f"measuring {name}", done + 1, len(probes))
        return answers
