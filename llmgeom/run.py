"""The runner: one pass of a model and of each control over all prompts, then every probe, in one record.

It holds the only loop over controls. Probes say what they need (`llmgeom.probe.Needs`); the runner captures the union,
each prompt once, and gives every probe its part. What was captured, observed, examined or measured before is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.batch import Batch
from llmgeom.cache import keys, results
from llmgeom.cache.shards import run_key
from llmgeom.errors import UserError
from llmgeom.files import digest, sha256
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture, Site
from llmgeom.model.passes import run_spec
from llmgeom.model.running import gather
from llmgeom.model.subject import Subject
from llmgeom.plan import MAIN, Layout, PassPlan, measurable, planned
from llmgeom.probe import Needs, Probe, ProbeInput, Sample
from llmgeom.progress import Progress
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import caveats, provenance, subset_note, took
from llmgeom.record import Record, arrays_of, measured_from, plain_of
from llmgeom.result import Measured

LOOKS = (5, 10)  # untrained controls after which a run can be looked at
Look = Callable[[int, Callable[[], Record]], bool]
CONTROLS = 20  # the fewest draws with which p = 1 / (draws + 1) can be under .05


@dataclass(frozen=True)
class Run:
    """One run in progress: what is captured where, and what an earlier run has left."""

    subject: Subject
    plan: PassPlan
    probes: Mapping[str, Probe]
    seed: int
    batch_tokens: int
    store: str | None
    progress: Progress | None

    @cached_property
    def _options(self) -> dict[str, Any]:
        return {"batch_tokens": self.batch_tokens, "store": self.store}

    @cached_property
    def folder(self) -> str:
        """The cache's folder for this model."""
        return run_key(run_spec(self.subject))

    @cached_property
    def _captures_key(self) -> str:
        """Names every capture of the run and the facts of its samples that no capture holds."""
        of = [work.store.of for _, _, work in self.plan.works(self.subject, **self._options) if work.store]
        samples = {name: keys.of_facts(batch) for name, (batch, _, _) in self.plan.own.places.items()}
        return digest({"captures": of, "samples": samples, "seed": self.seed, "claims": claims.digest()})

    def key(self, name: str, what: str, *more: Any) -> str:
        """The key of a probe's result or examination: its code and, of a dataclass, its fields decide.

        Raises:
            UserError: a field, or a variable that a function closes over, that no key can hold.
        """
        probe = self.probes[name]
        try:
            fields = keys.named(probe) if dataclasses.is_dataclass(probe) else None
            code = [measuring_code(), keys.of_code(probe.measure) if fields is None else fields]
        except UserError as refusal:
            raise UserError(f"probe {name}: {refusal}") from refusal
        return digest({"what": what, "probe": name, "of": self._captures_key, "code": code, "more": list(more)})[:32]

    # -- captures

    def _captures(self, seed: int | None, layout: Layout, who: Callable[[], Subject]) -> dict[str, Capture]:
        """The captures of the model (seed None) or of a control, which is built only where a shard is missing."""
        captures = []
        for reading in layout.readings:
            work = planned(self.subject, seed, reading, **self._options)
            reader = who() if work.missing(range(len(work.groups))) else self.subject
            try:
                captures.append(gather(reader, work, only_stored=reader is self.subject and seed is not None))
            except LookupError:  # a shard was damaged and is set aside
                captures.append(gather(who(), work))
        return layout.assemble(captures)

    def model(self) -> dict[str, Capture]:
        """Sample name -> capture of the model."""
        readings = self.plan.own.readings
        captures = []
        for i, reading in enumerate(readings):
            captures.append(gather(self.subject, planned(self.subject, None, reading, **self._options)))
            self._tell("prompts", i + 1, len(readings))
        return self.plan.own.assemble(captures)

    def control(self, seed: int, examined: Sequence[str]) -> tuple[dict[str, Capture], dict[str, Any]]:
        """Captures of one untrained control, and what each probe of `examined` took from it."""
        with contextlib.ExitStack() as stack:
            # Drawn only where a shard or an examination is missing.
            who = cache(lambda: stack.enter_context(self.subject.control(seed)))
            captures = self._captures(seed, self.plan.control, who)
            found = {}
            for name in examined:
                with contextlib.suppress(UserError):  # this control has no such weights: the others decide
                    found[name] = self.examine(name, who, captures, seed)
        return captures, found

    def shuffles(self) -> tuple[Capture, ...]:
        """The model on shuffled prompts, one capture a draw."""
        captures = []
        for i in range(len(self.plan.shuffles)):
            captures.append(gather(self.subject, planned(self.subject, None, self.plan.shuffled(i), **self._options)))
            self._tell("shuffled prompts", i + 1, len(self.plan.shuffles))
        return tuple(captures)

    def without_context(self, captures: Mapping[str, Capture]) -> dict[str, Capture] | None:
        """Captures of the model without context, from the model's own; None where there is no such control."""
        if self.plan.no_context is None:
            return None
        made = []
        for reading in self.plan.without_context(captures):
            made.append(gather(self.subject, planned(self.subject, None, reading, **self._options)))
        self._tell("control without context", 1, 1)
        return self.plan.control.assemble(made)

    def examine(
        self, name: str, who: Callable[[], Subject], captures: Mapping[str, Capture], seed: int | None = None
    ) -> Any:
        """What NEEDS.examine returns, from the cache where it is arrays that were stored there."""
        needs = self.probes[name].NEEDS
        if needs.examine is None:
            return None
        key = self.key(name, "examination", seed) if self.store else ""
        if self.store and (entry := results.load(self.folder, key)) is not None:
            return entry[1]
        examine = needs.examine if seed is None else needs.examine_control or needs.examine
        found = examine(who(), captures)
        arrays = isinstance(found, Mapping) and all(isinstance(one, np.ndarray) for one in found.values())
        if self.store and arrays and found:
            results.save(self.folder, key, {}, found)
        return found

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.progress:
            self.progress(stage, done, total)

    # -- results

    def stored(self, name: str) -> tuple[Measured | str, list[str]] | None:
        """The result of a probe (or why it is not measured) and the events of its captures, from an earlier run."""
        if self.store is None or (entry := results.load(self.folder, self.key(name, "result"))) is None:
            return None
        plain, arrays = entry
        if "unmeasured" in plain:
            return plain["unmeasured"], plain["events"]
        return measured_from(plain["measured"], arrays), plain["events"]

    def keep(self, name: str, result: Measured | str, events: Sequence[str]) -> None:
        """Store the result of a probe."""
        if self.store is None:
            return
        plain: dict[str, Any] = {"unmeasured": result}
        arrays: dict[str, np.ndarray] = {}
        if not isinstance(result, str):
            plain, arrays = {"measured": plain_of(result)}, arrays_of(result)
        results.save(self.folder, self.key(name, "result"), {**plain, "events": list(events)}, arrays)


@lru_cache
def measuring_code() -> str:
    """sha256 of the sources that turn captures into results: statistics, claims, probes and what they share."""
    root = Path(__file__).parent
    import llmgeom.probes

    folders = [root / "stats", *map(Path, llmgeom.probes.__path__)]
    paths = [path for folder in folders for path in (*folder.rglob("*.py"), *folder.rglob("*.md"))]
    paths += [root / f"{name}.py" for name in ("claims", "probe", "result", "run", "plan", "task", "answers")]
    return digest({str(path.relative_to(path.parents[1])): sha256(path.read_bytes()) for path in sorted(paths)})


def observe(subject: Subject, batch: Batch, needs: Needs) -> Any:
    """The observations of one probe on one batch, without controls: what `ProbeInput.observations` holds."""
    inputs = {MAIN: replace(batch, inputs=subject.tokens(batch))}
    inputs |= {name: made for name, make in needs.inputs.items() if (made := make(subject, inputs[MAIN])) is not None}
    captures = {
        name: subject.capture(
            one,
            needs.sites | {Site.ENTROPY, Site.LIKELY},
            observers=[observer for observer in needs.observers if name in observer.samples],
        )
        for name, one in inputs.items()
    }
    return _collected(needs, captures, None if needs.examine is None else needs.examine(subject, captures))


def run_probes(
    subject: Subject,
    batch: Batch,
    probes: Mapping[str, Probe],
    *,
    samples: Mapping[str, Batch] | None = None,
    controls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    store: str | None = None,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    columns: Callable[[Mapping[str, Any]], Mapping[str, tuple]] | None = None,
    whole: bool = False,
    look: Look | None = None,
) -> Record:
    """Ask `probes` of a model on a batch, with controls.

    Args:
        subject: the model.
        batch: the main sample.
        probes: name -> module of probes/ or an object of `llmgeom.probe`.
        samples: further samples by name; those that no probe needs are not read.
        controls: draws of each control: untrained copies, and orders of shuffled prompts. Fewer than 5 cannot decide
            at .05.
        seed: of every draw.
        batch_tokens: tokens that run together.
        store: folder of captures; what was captured, examined or measured there before is loaded.
        progress: called as progress(stage, done, total).
        facts: further provenance. notes: warnings of the caller, put before ours.
        columns: makes further columns of the prompt table from the observations of the model by probe.
        whole: controls read every prompt of a sample, not at most `plan.MOST`.
        look: called as look(drawn, record) after the model's own pass and after LOOKS untrained controls; record() is
            what can be measured so far, and no claim in it has a word. Where look returns True, the run ends there
            with that record.

    Returns:
        The record, with claims judged. A probe that raises UserError is listed with its reason as not measured.

    Raises:
        UserError: bad input; no room on the disk; logits that are not finite.
    """
    started = time.time()
    measured, unmeasured = measurable(subject, batch, probes)
    plan = PassPlan.of(subject, batch, measured, controls, seed, samples or {}, whole)
    if store:
        plan.check_room(subject, store, batch_tokens)
    run = Run(subject, plan, measured, seed, batch_tokens, store, progress)
    captures = run.model()
    stored = {name: entry for name in measured if (entry := run.stored(name)) is not None}
    answers: dict[str, Measured | str] = {name: answer for name, (answer, _) in stored.items()}
    events = [event for one in captures.values() for event in one.events]
    observations: dict[str, Any] = {}
    pending = {name: probe for name, probe in measured.items() if name not in stored}
    for name, probe in list((measured if columns else pending).items()):
        try:
            own = captures if plan.subset is None or probe.NEEDS.all_prompts else _of_subset(captures, plan)
            observations[name] = _collected(probe.NEEDS, own, run.examine(name, lambda: subject, own))
        except UserError as refusal:
            answers[name] = str(refusal)
            run.keep(name, str(refusal), ())
            pending.pop(name, None)
    draws = Draws()

    def record(drawn: int | None = None) -> Record:
        """The record of all draws; of a first look, of those that there are."""
        first = drawn is not None
        view = _view(run, captures, draws)
        every = {**answers, **_answers(run, pending, view, captures, observations, draws, keep=not first)}
        every = {name: every[name] for name in measured if name in every}  # in the order of the call, stored or not
        results_of = {name: answer for name, answer in every.items() if isinstance(answer, Measured)}
        reasons = unmeasured | {name: answer for name, answer in every.items() if isinstance(answer, str)}
        for name, answer in results_of.items():
            reasons |= {f"{name}: {metric}": why for metric, why in answer.unmeasured.items()}
        shown = batch if plan.subset is None else batch.take(plan.subset)
        texts = prompt_table(
            subject, shown, plan.null_sample.tokens, _by_prompt(view, len(plan.null_sample)), view.capture
        )
        happened = [*events, *draws.events, *(event for _, stored_events in stored.values() for event in stored_events)]
        so_far = {"first_look": f"controls: {drawn} of {controls}"} if first else {}
        return Record(
            results=_without_words(results_of) if first else claims.judge(results_of),
            unmeasured=reasons,
            prompts={**texts, **(columns(observations) if columns else {})},
            subject={k: v for k, v in subject.facts.items() if v is not None},
            source=dict(batch.source),
            facts={
                **provenance(batch, plan.main.tokens, seed, controls if drawn is None else drawn),
                "batch_tokens": batch_tokens,
                "bos_added": plan.special[0] > 0,
                **(facts or {}),
                **so_far,
            },
            warnings=(
                *(f"first look, {text}: no claim is judged before all controls are read" for text in so_far.values()),
                *notes,
                *subset_note(batch, plan.subset, measured),
                *([f"no control without context: {plan.no_context_why}"] if plan.no_context_why else []),
                *caveats(subject, shown, plan.null_sample.tokens, [] if first else few_draws(controls)),
                *dict.fromkeys(happened),
            ),
            run=took(started),
        )

    for drawn in _drawing(run, pending, captures, draws):
        if look is not None and pending and look(drawn, partial(record, drawn)):
            return record(drawn)
    return record()


def _collected(needs: Needs, captures: Mapping[str, Capture], examined: Any) -> Any:
    return examined if needs.collect is None else needs.collect(captures, examined)


def _of_subset(captures: Mapping[str, Capture], plan: PassPlan) -> dict[str, Capture]:
    return {**captures, MAIN: captures[MAIN].take(plan.subset)}  # type: ignore[arg-type]


@dataclass
class Draws:
    """What was read of the controls so far.

    Attributes:
        untrained: the captures of each untrained control by sample name.
        collected: by probe, what NEEDS.collect or NEEDS.examine made of each.
        shuffled: the model on shuffled prompts, a capture a draw.
        cut: the model without context, by sample name; empty where there is no such control.
    """

    untrained: list[dict[str, Capture]] = field(default_factory=list)
    collected: dict[str, list] = field(default_factory=dict)
    shuffled: tuple[Capture, ...] = ()
    cut: Mapping[str, Capture] = field(default_factory=dict)

    @property
    def events(self) -> list[str]:
        """What happened on the way, e.g. memory that ran out."""
        every = [*(one for control in self.untrained for one in control.values()), *self.shuffled, *self.cut.values()]
        return [event for capture in every for event in capture.events]


def _drawing(run: Run, pending: Mapping[str, Probe], captures: Mapping[str, Capture], draws: Draws) -> Iterator[int]:
    """Read every control that a pending probe compares with. Yields 0 before the first, then each number in LOOKS."""
    needs = {name: probe.NEEDS for name, probe in pending.items()}
    yield 0
    if any(need.untrained for need in needs.values()):
        examined = [name for name, need in needs.items() if need.untrained and (need.examine or need.collect)]
        for i, seed in enumerate(run.plan.untrained, 1):
            control, found = run.control(seed, examined)
            draws.untrained.append(control)
            for name in found:
                draws.collected.setdefault(name, []).append(_collected(needs[name], control, found[name]))
            run._tell("untrained controls", i, len(run.plan.untrained))
            if i in LOOKS and i < len(run.plan.untrained):
                yield i
    if any(need.shuffled for need in needs.values()):
        draws.shuffled = run.shuffles()
    if any(need.no_context for need in needs.values()):
        draws.cut = run.without_context(captures) or {}


def _view(run: Run, captures: Mapping[str, Capture], draws: Draws) -> ProbeInput:
    """What `measure` is given: the model and the controls drawn so far, on the prompts that controls read."""
    own = _of_subset(captures, run.plan) if run.plan.subset is not None else captures
    samples = {
        name: Sample(
            capture, capture.entropy.numpy(), tuple(control[name] for control in draws.untrained), draws.cut.get(name)
        )
        for name, capture in own.items()
        if name != MAIN and (Site.ENTROPY, -1) in capture.tensors
    }
    return ProbeInput(
        own[MAIN],
        own[MAIN].entropy.numpy(),
        tuple(control[MAIN] for control in draws.untrained),
        draws.shuffled,
        samples,
        seed=run.seed,
        no_context=draws.cut.get(MAIN),
    )


def _answers(
    run: Run,
    pending: Mapping[str, Probe],
    view: ProbeInput,
    captures: Mapping[str, Capture],
    observations: Mapping[str, Any],
    draws: Draws,
    keep: bool,
) -> dict[str, Measured | str]:
    """Every pending probe's result, or why it has none; with `keep` they are stored, and progress is shown."""
    answers: dict[str, Measured | str] = {}
    for done, (name, probe) in enumerate(pending.items()):
        if keep:
            run._tell(f"measuring {name}", done, len(pending))
        try:
            data = replace(
                view if run.plan.subset is None or not probe.NEEDS.all_prompts else _whole(view, captures[MAIN]),
                observations=observations.get(name),
                control_observations=tuple(draws.collected.get(name, ())),
                no_context_observations=_observed(probe.NEEDS, draws.cut),
            )
            answers[name] = probe.measure(data).lowered()
        except UserError as refusal:
            answers[name] = str(refusal)
        if keep:
            run.keep(name, answers[name], draws.events)
            run._tell(f"measuring {name}", done + 1, len(pending))
    return answers


def _without_words(results_of: Mapping[str, Measured]) -> dict[str, Measured]:
    """The results with their claims as measurements: their values are there, the controls that judge them are not."""
    return {
        name: replace(measured, estimates=tuple(replace(h, claim="") for h in measured.estimates))
        for name, measured in results_of.items()
    }


def _observed(needs: Needs, cut: Mapping[str, Capture]) -> Any:
    """What a probe collects of the model without context; None where it examines models, or there is no control."""
    if not cut or not needs.no_context or needs.examine is not None or needs.collect is None:
        return None
    return needs.collect(cut, None)


def _whole(view: ProbeInput, capture: Capture) -> ProbeInput:
    """The input of a probe of `all_prompts`: all prompts, with those that the controls read as its subset."""
    controls: dict[str, Any] = {"untrained": (), "shuffled": (), "no_context": None}
    return replace(view, capture=capture, entropy=capture.entropy.numpy(), **controls, subset=view)


def _by_prompt(view: ProbeInput, n: int) -> np.ndarray:
    """[prompt] bits; with several queried positions a prompt, the mean over them."""
    prompt = view.capture.prompt.numpy()
    return np.bincount(prompt, view.entropy, n) / np.bincount(prompt, minlength=n)


def few_draws(controls: int) -> list[str]:
    """The warning that too few draws of a control deserve."""
    return [f"only {controls} draws of each control: how much they vary is badly known; {CONTROLS} are usual"] * (
        controls < CONTROLS
    )


@dataclass(frozen=True)
class Question:
    """What a command asks of one model: the arguments of `run_probes`.

    Attributes:
        whole: controls read every input of the samples, not at most `plan.MOST`.
        finish: completes the judged record, e.g. with a warning that depends on a verdict.
    """

    batch: Batch
    probes: Mapping[str, Probe]
    controls: int
    seed: int
    batch_tokens: int = BATCH_TOKENS
    samples: Mapping[str, Batch] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    columns: Callable[[Mapping[str, Any]], Mapping[str, tuple]] | None = None
    whole: bool = True
    finish: Callable[[Record], Record] | None = None

    def record(self, subject: Subject, **options: Any) -> Record:
        """The answer; options of `run_probes`, e.g. store and progress."""
        record = run_probes(
            subject,
            self.batch,
            self.probes,
            samples=self.samples,
            controls=self.controls,
            seed=self.seed,
            batch_tokens=self.batch_tokens,
            notes=self.notes,
            columns=self.columns,
            whole=self.whole,
            **{**options, "facts": {**self.facts, **options.get("facts", {})}},
        )
        return self.finish(record) if self.finish else record
