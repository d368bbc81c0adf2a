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
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.batch import Batch, Rows, Text, Tokens
from llmgeom.cache import keys, results
from llmgeom.cache.shards import run_key
from llmgeom.errors import UserError
from llmgeom.files import digest, sha256
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture, Site
from llmgeom.model.passes import run_spec
from llmgeom.model.running import gather
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import has_template
from llmgeom.plan import MAIN, Layout, PassPlan, measurable, planned
from llmgeom.probe import Needs, Probe, ProbeInput, Sample
from llmgeom.progress import Progress
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import provenance, took
from llmgeom.record import Record, arrays_of, measured_from, plain_of
from llmgeom.result import Measured

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
        samples = {name: _facts_hash(batch) for name, (batch, _, _) in self.plan.own.places.items()}
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


def _facts_hash(batch: Batch) -> str:
    """Clusters, columns, targets and posterior of a batch: what a probe may read besides tokens."""
    facts: dict[str, Any] = {
        "cluster": batch.cluster,
        "columns": {k: list(map(str, v)) for k, v in batch.columns.items()},
    }
    tensors = {"query": batch.query, "target": batch.target}
    if batch.posterior is not None:
        posterior = batch.posterior
        tensors |= {"predictive": posterior.predictive, "belief": posterior.belief, "answers": posterior.answers}
        tensors |= {f"trivial: {name}": each for name, each in posterior.trivial.items()}
    facts |= {name: sha256(x.numpy().tobytes()) for name, x in tensors.items() if x is not None}
    return digest({**facts, "source": dict(batch.source)})


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
    view, control_observations, cut, control_events = _inputs(run, plan, pending, captures)
    for done, (name, probe) in enumerate(pending.items()):
        run._tell(f"measuring {name}", done, len(pending))
        try:
            data = replace(
                view if plan.subset is None or not probe.NEEDS.all_prompts else _whole(view, captures[MAIN]),
                observations=observations.get(name),
                control_observations=control_observations.get(name, ()),
                no_context_observations=_observed(probe.NEEDS, cut),
            )
            answers[name] = probe.measure(data).lowered()
        except UserError as refusal:
            answers[name] = str(refusal)
        run.keep(name, answers[name], control_events)
        run._tell(f"measuring {name}", done + 1, len(pending))
    events += [*control_events, *(event for _, told in stored.values() for event in told)]
    answers = {name: answers[name] for name in measured}  # in the order asked, stored or not
    unmeasured |= {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    results_of = {name: answer for name, answer in answers.items() if isinstance(answer, Measured)}
    for name, answer in results_of.items():
        unmeasured |= {f"{name}: {metric}": why for metric, why in answer.unmeasured.items()}
    shown = batch if plan.subset is None else batch.take(plan.subset)
    table = prompt_table(subject, shown, plan.null_sample.tokens, _by_prompt(view, len(plan.null_sample)), view.capture)
    return Record(
        results=claims.judge(results_of),
        unmeasured=unmeasured,
        prompts={**table, **(columns(observations) if columns else {})},
        subject={k: v for k, v in subject.facts.items() if v is not None},
        source=dict(batch.source),
        facts={
            **provenance(batch, plan.main.tokens, seed, controls),
            "batch_tokens": batch_tokens,
            "bos_added": plan.special[0] > 0,
            **(facts or {}),
        },
        warnings=(
            *notes,
            *_subset_note(batch, plan, measured),
            *([f"no control without context: {plan.no_context_why}"] if plan.no_context_why else []),
            *_warnings(subject, shown, plan.null_sample.tokens, controls),
            *dict.fromkeys(events),
        ),
        run=took(started),
    )


def _collected(needs: Needs, captures: Mapping[str, Capture], examined: Any) -> Any:
    return examined if needs.collect is None else needs.collect(captures, examined)


def _of_subset(captures: Mapping[str, Capture], plan: PassPlan) -> dict[str, Capture]:
    return {**captures, MAIN: captures[MAIN].take(plan.subset)}  # type: ignore[arg-type]


def _inputs(
    run: Run, plan: PassPlan, pending: Mapping[str, Probe], captures: Mapping[str, Capture]
) -> tuple[ProbeInput, dict[str, tuple], dict[str, Capture], list[str]]:
    """What `measure` of every pending probe is given, the captures without context, and events of the controls."""
    untrained: list[dict[str, Capture]] = []
    collected: dict[str, list] = {}
    if any(probe.NEEDS.untrained for probe in pending.values()):
        needs = {name: probe.NEEDS for name, probe in pending.items()}
        examined = [name for name, need in needs.items() if need.untrained and (need.examine or need.collect)]
        for i, seed in enumerate(plan.untrained):
            control, found = run.control(seed, examined)
            untrained.append(control)
            for name in found:
                collected.setdefault(name, []).append(_collected(pending[name].NEEDS, control, found[name]))
            run._tell("untrained controls", i + 1, len(plan.untrained))
    shuffled = run.shuffles() if any(probe.NEEDS.shuffled for probe in pending.values()) else ()
    wanted = any(probe.NEEDS.no_context for probe in pending.values())
    cut = (run.without_context(captures) if wanted else None) or {}
    own = _of_subset(captures, plan) if plan.subset is not None else captures
    samples = {
        name: Sample(capture, capture.entropy.numpy(), tuple(control[name] for control in untrained), cut.get(name))
        for name, capture in own.items()
        if name != MAIN and (Site.ENTROPY, -1) in capture.tensors
    }
    view = ProbeInput(
        own[MAIN],
        own[MAIN].entropy.numpy(),
        tuple(control[MAIN] for control in untrained),
        shuffled,
        samples,
        seed=run.seed,
        no_context=cut.get(MAIN),
    )
    each = [*(one for control in untrained for one in control.values()), *shuffled, *cut.values()]
    events = [event for capture in each for event in capture.events]
    return view, {name: tuple(some) for name, some in collected.items()}, cut, events


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


def _subset_note(batch: Batch, plan: PassPlan, probes: Mapping[str, Probe]) -> list[str]:
    if plan.subset is None:
        return []
    every = [name for name, probe in probes.items() if probe.NEEDS.all_prompts]
    note = f"controls read {len(plan.subset)} of the {len(batch)} prompts, drawn at random"
    return [note + (f"; measured on all: {', '.join(every)}" if every else "")]


def few_draws(controls: int) -> list[str]:
    """The warning that too few draws of a control deserve."""
    return [f"only {controls} draws of each control: how much they vary is badly known; {CONTROLS} are usual"] * (
        controls < CONTROLS
    )


def _warnings(subject: Subject, batch: Batch, tokens: Tokens | Rows, controls: int) -> Iterator[str]:
    """What could overturn a verdict."""
    window, longest = subject.facts.get("window"), int(tokens.lengths.max())
    if window and longest <= window:
        yield f"window inactive: the longest prompt has {longest} tokens, the sliding window {window}"
    if batch.source.get("kind") == "domain" and not subject.name.startswith("pocket:"):
        yield "synthetic prompts: written for llmgeom and filled in by its grammars, not found text"
    if isinstance(batch.inputs, Text) and has_template(subject.tokenizer) and not subject.facts.get("chat"):
        yield "the tokenizer has a chat template, and prompts were read as plain text: scan --chat sends messages"
    if subject.facts.get("note"):
        yield subject.facts["note"]
    yield from few_draws(controls)
    most = max(batch.cluster.count(cluster) for cluster in set(batch.cluster))
    if most > 2:
        yield f"up to {most} prompts share one template; n counts templates, not prompts"


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
