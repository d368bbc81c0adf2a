"""The runner: one pass of a model and of each control over all prompts, then every probe, in one record.

It has the only loop over controls. Probes declare what they need (`llmgeom.probe.Needs`); the runner captures the
union, each prompt once, and gives every probe its part. Stored captures, observations and results are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from llmgeom import claims
from llmgeom.captures import Run
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.plan import EVERYTHING, MAIN, PassPlan, Selection, measurable
from llmgeom.probe import Batch, Capture, Needs, Probe, ProbeInput, Sample, Site, Subject, UserError
from llmgeom.progress import shown, silent, tell
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import CONTROLS, caveats, provenance, subset_note, took, unequal_note
from llmgeom.record import Record
from llmgeom.result import NO_COMPARISON, Measured, Result

LOOKS = (5, 10)  # draws of each control after which a run offers a first look, and a sequential one may end
Look = Callable[[int, Callable[[], Record]], bool]


def observe(subject: Subject, batch: Batch, needs: Needs) -> Any:
    """The observations of one probe on one batch, without controls, as in `ProbeInput.observations`."""
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
    batch: Batch | str | Iterable[str],
    probes: Mapping[str, Probe],
    *,
    samples: Mapping[str, Batch] | None = None,
    controls: int | None = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    store: str | None = None,
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    columns: Callable[[Mapping[str, Any]], Mapping[str, tuple]] | None = None,
    whole: bool = False,
    look: Look | None = None,
) -> Record:
    """Measure `probes` in a model on a batch, with controls.

    Args:
        subject: the model. batch: the main sample, or prompts as strings.
        probes: name -> module of probes/ or an object of `llmgeom.probe`.
        samples: further samples by name; those that no probe needs are not read.
        controls: draws of each control: untrained copies, and orders of shuffled prompts. Fewer than 5 cannot decide
            at .05. None: up to 20, fewer if no likely further draw changes a word (`claims.settled`).
        seed: seed of every draw. batch_tokens: tokens that run together.
        store: folder of the cache; captures, examinations and results stored there are loaded.
        facts: provenance. notes: warnings, placed first.
        columns: makes further columns of the prompt table from the observations of the model by probe.
        whole: controls read every prompt of a sample, not at most `plan.MOST`.
        look: called as look(drawn, record) after the model's own pass and after LOOKS untrained controls; record() is
            the record so far, without verdicts. If look returns True, the run ends there with that record.

    Returns:
        The record, with claims judged. A probe that raises UserError is listed with its reason as not measured.

    Raises:
        UserError: bad input; no room on the disk; logits that are not finite.
        TypeError: a probe returned no result.
    """
    if not isinstance(subject, Subject):
        raise UserError(f"run_probes({subject!r}): expected a model that llmgeom.load returned")
    for name, probe in probes.items():
        if not (hasattr(probe, "NEEDS") and hasattr(probe, "measure")):
            raise UserError(f"probe {name!r} has no NEEDS and measure: make one with @llmgeom.probe.probe(Needs(...))")
    if controls is not None and controls < 0:
        raise UserError(f"run_probes(controls={controls}): expected 0 draws of each control or more; 20 decide")
    options = (samples or {}, facts or {}, notes, columns, whole)
    question = Question(Batch.of(batch), probes, controls, seed, batch_tokens, *options)
    return question.record(subject, store=store, look=look)


def _collected(needs: Needs, captures: Mapping[str, Capture], examined: Any) -> Any:
    return examined if needs.collect is None else needs.collect(captures, examined)


@dataclass
class Draws:
    """The controls read so far.

    Attributes:
        untrained: the captures of each untrained control by sample name.
        collected: by probe, the result of NEEDS.collect or NEEDS.examine for each.
        shuffled: the model on shuffled prompts, one capture per draw.
        cut: the model without context, by sample name; empty without such a control.
        drawing: events while untrained controls are drawn.
    """

    untrained: list[dict[str, Capture]] = field(default_factory=list)
    collected: dict[str, list] = field(default_factory=dict)
    shuffled: tuple[Capture, ...] = ()
    cut: Mapping[str, Capture] = field(default_factory=dict)
    drawing: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[str]:
        """What happened on the way, e.g. memory or a disk that ran out."""
        untrained = (capture for control in self.untrained for capture in control.values())
        every = [*untrained, *self.shuffled, *self.cut.values()]
        return [*(event for capture in every for event in capture.events), *self.drawing]


def _observed(needs: Needs, cut: Mapping[str, Capture]) -> Any:
    """A probe's observations of the model without context; None if it examines models, or without such a control."""
    if not cut or not needs.no_context or needs.examine is not None or needs.collect is None:
        return None
    return needs.collect(cut, None)


def _whole(view: ProbeInput, capture: Capture) -> ProbeInput:
    """The input of a probe of `all_prompts`: all prompts, with those that the controls read as its subset."""
    controls: dict[str, Any] = {"untrained": (), "shuffled": (), "no_context": None}
    return replace(view, capture=capture, entropy=capture.entropy.numpy(), **controls, subset=view)


def _lowered(name: str, result: Result | Measured) -> Measured:
    """A probe's result as plain data, with the names of its claims that `claims.settled` cannot judge, if any.

    Raises TypeError if it is no result.
    """
    if not isinstance(result, Result | Measured):
        raise TypeError(
            f"probe {name!r} returned a {type(result).__name__}: expected a Result, a frozen dataclass of quantities "
            "(llmgeom.result)"
        )
    measured = result.lowered()
    alone = ", ".join(h.name for h in measured.estimates if h.claim and h.compared is None)
    return replace(measured, facts={**measured.facts, NO_COMPARISON: alone}) if alone else measured


def _by_prompt(view: ProbeInput, n: int) -> np.ndarray:
    """[prompt] entropy in bits, mean over the queried positions of a prompt."""
    prompt = view.capture.prompt.numpy()
    return np.bincount(prompt, view.entropy, n) / np.bincount(prompt, minlength=n)


@dataclass(frozen=True)
class Question:
    """A command's request to one model: the arguments of `run_probes`.

    Attributes:
        controls: draws of each control; None for a sequential run: at most CONTROLS, and fewer if no likely further
            draw changes a word.
        whole: controls read every input of the samples, not at most `plan.MOST`.
        expanded: each prompt is several inputs, so that a number of inputs is none of prompts, and no warning gives it.
        selection: the layers, sites and positions to keep; a probe that reads more is not measured.
        finish: completes the judged record, e.g. with a warning that depends on a verdict.
    """

    batch: Batch
    probes: Mapping[str, Probe]
    controls: int | None
    seed: int
    batch_tokens: int = BATCH_TOKENS
    samples: Mapping[str, Batch] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    columns: Callable[[Mapping[str, Any]], Mapping[str, tuple]] | None = None
    whole: bool = True
    expanded: bool = False
    selection: Selection = EVERYTHING
    finish: Callable[[Record], Record] | None = None

    @property
    def draws(self) -> int:
        """The most draws of each control."""
        return CONTROLS if self.controls is None else self.controls

    @property
    def sequential(self) -> bool:
        """Whether the run may end before all draws."""
        return self.controls is None

    def plan(self, subject: Subject) -> tuple[PassPlan, dict[str, Probe], dict[str, str]]:
        """The passes of the question, the probes that it measures, and why it does not measure the others."""
        measured, unmeasured = measurable(subject, self.batch, self.probes, self.selection)
        draws = (self.draws, self.seed, self.samples, self.whole, self.selection)
        return PassPlan.of(subject, self.batch, measured, *draws), measured, unmeasured

    def record(
        self,
        subject: Subject,
        *,
        store: str | None = None,
        look: Look | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Record:
        """The record of the run, or the record so far if `look` ends it; see `run_probes`."""
        plan, measured, unmeasured = self.plan(subject)
        if store:
            plan.check_room(subject, store, self.batch_tokens)
        run = Run(subject, plan, measured, self.seed, self.batch_tokens, store)
        answers = Answers(run, replace(self, facts={**self.facts, **(facts or {})}), unmeasured)
        if look is not None and answers.pending and look(0, answers.first_look):
            return answers.first_look()
        with closing(answers.draw()) as stages:
            for drawn in stages:
                if answers.settled():
                    break
                if look is not None and look(drawn, answers.first_look):
                    return answers.first_look()
        record = answers.record()
        return self.finish(record) if self.finish else record


class Answers:
    """The answers of one run as its controls are drawn.

    Attributes:
        captures: captures of the model, by sample name.
        stages: numbers of draws after which a first look is offered and a sequential run may end; the last is all.
        drawn: the stage that the run is at; 0 before the first.
        answers: the stored results for that stage, by probe. pending: the probes without one.
        measured: the results of the pending probes, if they were measured at that stage.
        observations: by probe, its observations of the model. refused: by probe, why it has none.
        draws: the controls drawn so far.
    """

    def __init__(self, run: Run, question: Question, unmeasured: Mapping[str, str]) -> None:
        self.started = time.time()
        self.run, self.question, self.unmeasured = run, question, unmeasured
        self.captures = run.model()
        self.draws = Draws()
        self.observations: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.measured: dict[str, Measured | str] | None = None
        self._loaded: tuple[int, ...] | None = None
        total = question.draws
        needs = [probe.NEEDS for probe in run.probes.values()]
        drawn = any(need.untrained or need.shuffled for need in needs)
        looks = [look for look in LOOKS if look < total and drawn]
        self.stages = [look for look in looks if not question.sequential or not run.unsettled(self._draws_of(look))]
        self.stages.append(total)
        self._reach(self.stages[0])
        self.drawn = 0
        self._observe(run.probes if question.columns else self.pending)

    def _draws_of(self, stage: int) -> tuple[int, ...]:
        """The draws of each control at a stage, where they are not all: a part of the key of its results."""
        return () if stage == self.question.draws else (stage,)

    def _reach(self, stage: int) -> None:
        """Go to a stage, and load the results that are stored for it."""
        self.drawn, self.measured = stage, None
        draws = self._draws_of(stage) if self.question.sequential else ()
        if draws == self._loaded:  # the stages of a run with a fixed number of draws have the results of its end
            return
        self._loaded, final = draws, not draws
        names = [name for name in self.run.probes if name not in self.refused]
        stored = {name: entry for name in names if (entry := self.run.stored(name, draws)) is not None}
        if not final and len(stored) < len(names):  # whether the run ends here depends on all of them
            stored = {}
        self.answers: dict[str, Measured | str] = {name: answer for name, (answer, _) in stored.items()}
        self.earlier_events = [event for _, events in stored.values() for event in events]
        self.pending = {name: self.run.probes[name] for name in names if name not in stored}

    def _observe(self, names: Iterable[str]) -> None:
        """Make the probes' observations of the model, while its weights are in its memory."""
        for name in [name for name in names if name not in (*self.observations, *self.refused)]:
            needs = self.run.probes[name].NEEDS
            own = self.captures if needs.all_prompts else self.run.read_by_controls(self.captures)
            try:
                self.observations[name] = _collected(needs, own, self.run.examine(name, lambda: self.run.subject, own))
            except UserError as refusal:
                self.refused[name] = str(refusal)
                self.pending.pop(name, None)

    def _wanted(self, control: str) -> list[str]:
        """The pending probes that compare with a kind of control."""
        return [name for name, probe in self.pending.items() if getattr(probe.NEEDS, control)]

    def draw(self) -> Generator[int, None, None]:
        """Read the controls that pending probes need, stage by stage. Yields the number of draws after each.

        Controls that use the trained model run before untrained ones, which may be drawn in its memory.
        """
        with self.run.subject.controls(self.run.store, self.draws.drawing.append) as control:
            for stage in self.stages:
                self._reach(stage)
                if self.pending and (self.question.sequential or stage == self.stages[0]):
                    control(None)  # the weights of the model itself, which `observe` and the shuffled prompts read
                    self._observe(self.pending)
                    self._of_model(stage if self.question.sequential else self.question.draws)
                self._untrained(stage, control)
                yield stage

    def _of_model(self, shuffles: int) -> None:
        """Read what the model itself is a control of: shuffled prompts, and prompts without context."""
        if self._wanted("shuffled"):
            self.draws.shuffled = self.run.shuffles(self.draws.shuffled, shuffles)
        if self._wanted("no_context") and not self.draws.cut:
            self.draws.cut = self.run.without_context(self.captures) or {}

    def _untrained(self, stage: int, control: Callable[[int | None], Subject]) -> None:
        """Read the untrained controls up to a stage."""
        run, draws, names = self.run, self.draws, self._wanted("untrained")
        needs = {name: self.pending[name].NEEDS for name in names}
        examined = [name for name, need in needs.items() if need.examine or need.collect]
        for seed in run.plan.untrained[len(draws.untrained) : stage] if names else ():
            captures, examinations = run.control(seed, examined, control)
            draws.untrained.append(captures)
            for name, examination in examinations.items():
                draws.collected.setdefault(name, []).append(_collected(needs[name], captures, examination))
            tell("untrained controls", len(draws.untrained), len(run.plan.untrained))

    def settled(self) -> bool:
        """Whether the run ends at this stage: it is the last, or no likely further draw changes a word."""
        if self.drawn == self.question.draws:
            return True
        if not self.question.sequential:
            return False
        if not self.pending:
            return True
        with shown(silent):
            self.measured = self._measure(self._view())
        results_of = {name: answer for name, answer in self.measured.items() if isinstance(answer, Measured)}
        settled = claims.settled(results_of, self.question.draws)
        if not settled:
            self.run.keep_unsettled(self._draws_of(self.drawn))
        return settled

    def _measure(self, view: ProbeInput) -> dict[str, Measured | str]:
        """The result of every pending probe, or why it has none."""
        results: dict[str, Measured | str] = {}
        for done, (name, probe) in enumerate(self.pending.items()):
            tell(f"measuring {name}", done, len(self.pending))
            whole = self.run.plan.subset is not None and probe.NEEDS.all_prompts
            data = replace(
                _whole(view, self.captures[MAIN]) if whole else view,
                observations=self.observations.get(name),
                control_observations=tuple(self.draws.collected.get(name, ())),
                no_context_observations=_observed(probe.NEEDS, self.draws.cut),
            )
            try:
                results[name] = _lowered(name, probe.measure(data)).at_layers(self.run.plan.layers)
            except UserError as refusal:
                results[name] = str(refusal)
            tell(f"measuring {name}", done + 1, len(self.pending))
        return results

    def first_look(self) -> Record:
        """The record of the draws so far, without verdicts."""
        with shown(silent):
            return self.record(final=False)

    def record(self, final: bool = True) -> Record:
        """The record of the draws so far. If it is `final`, claims have verdicts, and every result is stored."""
        view = self._view()
        new = self._measure(view) if self.measured is None else self.measured
        if final:
            self._keep({**new, **self.refused})
        every = {**self.answers, **new, **self.refused}
        every = {name: every[name] for name in self.run.probes if name in every}  # in the order of the call
        results_of = {name: answer for name, answer in every.items() if isinstance(answer, Measured)}
        reasons = {**self.unmeasured, **{name: why for name, why in every.items() if isinstance(why, str)}}
        for name, answer in results_of.items():
            reasons |= {f"{name}: {metric}": why for metric, why in answer.unmeasured.items()}
        question, plan, subject = self.question, self.run.plan, self.run.subject
        whole = self._subset is None
        seen, sample = (_whole(view, self.captures[MAIN]), plan.main) if whole else (view, plan.null_sample)
        entropy = _by_prompt(seen, len(sample))
        texts = prompt_table(subject, self._shown, sample.tokens, entropy, seen.capture)
        return Record(
            results=claims.judge(results_of, self.question.draws) if final else claims.unjudged(results_of),
            unmeasured=reasons,
            prompts={**texts, **(question.columns(self.observations) if question.columns else {})},
            subject=subject.facts_now,
            source=dict(question.batch.source),
            facts=self._facts(final),
            warnings=tuple(self._warnings(final)),
            run=took(self.started),
        )

    def _keep(self, results: Mapping[str, Measured | str]) -> None:
        """Store results of this stage, and tell progress that they are measured where a look measured them."""
        for name, result in results.items():
            self.run.keep(name, result, self.draws.events, self._draws_of(self.drawn))
        if self.measured is not None and self.pending:
            tell(f"measuring {[*self.pending][-1]}", len(self.pending), len(self.pending))

    @property
    def _subset(self) -> Tensor | None:
        """The prompts of the record: those that controls read, unless every probe measures all; None for all."""
        measures_all = all(probe.NEEDS.all_prompts for probe in self.run.probes.values())
        return None if measures_all else self.run.plan.subset

    @property
    def _shown(self) -> Batch:
        return self.question.batch if self._subset is None else self.question.batch.take(self._subset)

    @property
    def _of_all(self) -> str:
        return f"controls: {self.drawn} of {self.question.draws}"

    def _facts(self, final: bool) -> dict[str, Any]:
        question, plan = self.question, self.run.plan
        edits = [edit.identity for edit in self.run.subject.edits]
        return {
            **provenance(question.batch, plan.main.tokens, question.seed, self.drawn),
            "batch_tokens": question.batch_tokens,
            "bos_added": plan.special[0] > 0,
            **({"edits": edits} if edits else {}),
            **(question.selection.facts | dict(question.facts)),
            **({"most_nulls": question.draws} if question.sequential and final else {}),
            **({} if final else {"first_look": self._of_all}),
        }

    def _warnings(self, final: bool) -> Iterator[str]:
        question, plan = self.question, self.run.plan
        if not final:
            yield f"first look, {self._of_all}: no claim is judged yet"
        yield from (*question.notes, *question.selection.notes)
        if not question.expanded:
            yield from subset_note(question.batch, plan.subset, self.run.probes)
        yield from unequal_note(self._shown, self.run.probes)
        if plan.no_context_why:
            yield f"no control without context: {plan.no_context_why}"
        controls = question.draws if final else None
        sample = plan.main if self._subset is None else plan.null_sample
        yield from caveats(self.run.subject, self._shown, sample.tokens, controls)
        events = [event for capture in self.captures.values() for event in capture.events]
        yield from dict.fromkeys([*events, *self.draws.events, *self.earlier_events])

    def _view(self) -> ProbeInput:
        """The input of `measure`: the model and the controls drawn so far, on the prompts that controls read."""
        captures, draws = self.run.read_by_controls(self.captures), self.draws
        drawn = {name: tuple(control[name] for control in draws.untrained if name in control) for name in captures}
        samples = {
            name: Sample(capture, capture.entropy.numpy(), drawn[name], draws.cut.get(name))
            for name, capture in captures.items()
            if name != MAIN and (Site.ENTROPY, -1) in capture.tensors
        }
        return ProbeInput(
            captures[MAIN],
            captures[MAIN].entropy.numpy(),
            drawn[MAIN],
            draws.shuffled,
            samples,
            seed=self.run.seed,
            no_context=draws.cut.get(MAIN),
            layers=self.run.plan.layers,
        )
