"""The runner: one pass of a model and of each control over all prompts, then every probe, in one record.

It has the only loop over controls. Probes declare what they need (`llmgeom.probe.Needs`); the runner captures the
union, each prompt once, and gives every probe its part. Stored captures are loaded; statistics are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from llmgeom import claims
from llmgeom.batch import Prompts
from llmgeom.captures import Run
from llmgeom.errors import brief
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.plan import EVERYTHING, MAIN, PassPlan, Selection, layers_of, measurable
from llmgeom.probe import Batch, Capture, Needs, Probe, ProbeInput, Sample, Site, Subject, UserError
from llmgeom.progress import shown, silent, tell, within
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import CONTROLS, LEAST_SPREAD, caveats, provenance, subset_note, took, unequal_note
from llmgeom.record import Record
from llmgeom.result import Measured, Result


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
    columns: Callable[[Mapping[str, Any]], Mapping[str, tuple]] | None = None,
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
        columns: makes further columns of the prompt table from the observations of the model by probe.
        whole: controls read every prompt of a sample, not at most `plan.MOST`.

    Returns:
        The record, with claims judged. A probe that raises UserError is listed with its reason as not measured.

    Raises:
        UserError: bad input; no room on the disk; logits that are not finite.
        TypeError: a probe returned no result.
    """
    if not isinstance(subject, Subject):
        raise UserError(f"run_probes({brief(subject)}): expected a model that llmgeom.load returned")
    for name, probe in probes.items():
        if not (hasattr(probe, "NEEDS") and hasattr(probe, "measure")):
            raise UserError(f"probe {name!r} has no NEEDS and measure: make one with @llmgeom.probe.probe(Needs(...))")
    if controls < 0:
        raise UserError(f"run_probes(controls={controls}): expected 0 draws of each control or more; {CONTROLS} decide")
    options = (samples or {}, facts or {}, notes, columns, whole)
    question = Question(Batch.of(batch), probes, controls, seed, batch_tokens, *options)
    return question.record(subject, store=store)


def _collected(needs: Needs, captures: Mapping[str, Capture], examined: Any) -> Any:
    return examined if needs.collect is None else needs.collect(captures, examined)


def _observed(needs: Needs, cut: Mapping[str, Capture]) -> Any:
    """A probe's observations of the model without context; None if it examines models, or without such a control."""
    if not cut or not needs.no_context or needs.examine is not None or needs.collect is None:
        return None
    return needs.collect(cut, None)


def _whole(view: ProbeInput, capture: Capture) -> ProbeInput:
    """The input of a probe of `all_prompts`: all prompts, with those that the controls read as its subset."""
    controls: dict[str, Any] = {"untrained": (), "shuffled": (), "permuted": (), "no_context": None}
    return replace(view, capture=capture, entropy=capture.entropy.numpy(), **controls, subset=view)


def _lowered(name: str, result: Result | Measured) -> Measured:
    """A probe's result as plain data. Raises TypeError if it is no result."""
    if not isinstance(result, Result | Measured):
        raise TypeError(
            f"probe {name!r} returned a {type(result).__name__}: expected a Result, a frozen dataclass of quantities "
            "(llmgeom.result)"
        )
    return result.lowered()


def _by_prompt(view: ProbeInput, n: int) -> np.ndarray:
    """[prompt] entropy in bits, mean over the queried positions of a prompt."""
    prompt = view.capture.prompt.numpy()
    return np.bincount(prompt, view.entropy, n) / np.bincount(prompt, minlength=n)


@dataclass(frozen=True)
class Question:
    """A command's request to one model: the arguments of `run_probes`.

    Attributes:
        controls: draws of each control.
        whole: controls read every input of the samples, not at most `plan.MOST`.
        expanded: each prompt is several inputs, so that a number of inputs is none of prompts, and no warning gives it.
        selection: the layers, sites and positions to keep; a probe that reads more is not measured.
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
    expanded: bool = False
    selection: Selection = EVERYTHING
    finish: Callable[[Record], Record] | None = None

    def plan(self, subject: Subject) -> tuple[PassPlan, dict[str, Probe], dict[str, str]]:
        """The passes of the question, the probes that it measures, and why it does not measure the others."""
        measured, unmeasured = measurable(subject, self.batch, self.probes, self.selection)
        draws = (self.controls, self.seed, self.samples, self.whole, self.selection)
        return PassPlan.of(subject, self.batch, measured, *draws), measured, unmeasured

    def waits(self, subject: Subject, store: str) -> bool:
        """Whether a control is still to be read: `preview` then shows something before `record` does."""
        plan, _, _ = self.plan(subject)
        works = plan.works(subject, batch_tokens=self.batch_tokens, store=store)
        return any(kind != "model" and work.missing(range(len(work.groups))) for kind, _, work in works)

    def preview(self, subject: Subject, *, store: str | None = None) -> Record:
        """The record of the model's own pass alone, without controls and so without a verdict."""
        run, unmeasured = self._run(subject, store)
        answers = Answers(run, self, unmeasured)
        with shown(silent):  # the measuring that counts comes after the controls
            return answers.record(judged=False)

    def record(self, subject: Subject, *, store: str | None = None, facts: Mapping[str, Any] | None = None) -> Record:
        """The record of the run; see `run_probes`."""
        run, unmeasured = self._run(subject, store)
        answers = Answers(run, replace(self, facts={**self.facts, **(facts or {})}), unmeasured)
        answers.draw()
        record = answers.record()
        return self.finish(record) if self.finish else record

    def _run(self, subject: Subject, store: str | None) -> tuple[Run, dict[str, str]]:
        plan, measured, unmeasured = self.plan(subject)
        if store:
            plan.check_room(subject, store, self.batch_tokens)
        return Run(subject, plan, measured, self.seed, self.batch_tokens, store), unmeasured


class Answers:
    """The answers of one run: its own pass when it is made, its controls after `draw`.

    Attributes:
        captures: captures of the model, by sample name.
        observations: by probe, its observations of the model. refused: by probe, why it has none.
        untrained: the captures of each untrained control by sample name.
        collected: by probe, the result of NEEDS.collect or NEEDS.examine for each.
        shuffled: the model on shuffled prompts, one capture per draw. permuted: the model with permuted weights.
        cut: the model without context, by sample name; empty without such a control.
        drawing: events while untrained controls are drawn.
    """

    def __init__(self, run: Run, question: Question, unmeasured: Mapping[str, str]) -> None:
        self.started = time.time()
        self.run, self.question, self.unmeasured = run, question, unmeasured
        self.captures = run.model()
        self.untrained: list[dict[str, Capture]] = []
        self.collected: dict[str, list] = {}
        self.shuffled: tuple[Capture, ...] = ()
        self.permuted: list[Capture] = []
        self.cut: Mapping[str, Capture] = {}
        self.drawing: list[str] = []
        self.observations: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        for name, probe in run.probes.items():
            needs = probe.NEEDS
            own = self.captures if needs.all_prompts else run.read_by_controls(self.captures)
            try:
                self.observations[name] = _collected(needs, own, run.examine(name, lambda: run.subject, own))
            except UserError as refusal:
                self.refused[name] = str(refusal)

    @property
    def probes(self) -> dict[str, Probe]:
        """The probes that read the model."""
        return {name: probe for name, probe in self.run.probes.items() if name not in self.refused}

    def draw(self) -> None:
        """Read the controls.

        Those that use the trained model run before untrained ones, which may be drawn in its memory.
        """
        run, needs = self.run, {name: probe.NEEDS for name, probe in self.probes.items()}
        if any(need.shuffled for need in needs.values()):
            self.shuffled = run.shuffles()
        if any(need.no_context for need in needs.values()):
            self.cut = run.without_context(self.captures) or {}
        compared = {name: need for name, need in needs.items() if need.untrained}
        with run.subject.controls(run.store, self.drawing.append) as control:
            for seed in run.plan.untrained if compared else ():
                captures, build = run.control(seed, control)
                self.untrained.append(captures)
                for name, need in compared.items():
                    if need.examine or need.collect:
                        # Without such weights in this control the others decide.
                        with suppress(UserError), within(f"untrained control {len(self.untrained)}"):
                            found = _collected(need, captures, run.examine(name, build, captures, seed))
                            self.collected.setdefault(name, []).append(found)
                tell("untrained controls", len(self.untrained), len(run.plan.untrained))
            for drawn in run.plan.permuted:
                self.permuted.append(run.permuted(drawn, control))
                tell("permuted weights", len(self.permuted), len(run.plan.permuted))

    def _measure(self, view: ProbeInput) -> dict[str, Measured | str]:
        """The result of every probe, or why it has none."""
        results: dict[str, Measured | str] = {}
        for done, (name, probe) in enumerate(self.probes.items()):
            tell(f"measuring {name}", done, len(self.probes))
            whole = self.run.plan.subset is not None and probe.NEEDS.all_prompts
            layers = layers_of(self.run.subject, probe.NEEDS, self.run.plan.layers)
            data = replace(
                _whole(view, self.captures[MAIN]) if whole else view,
                layers=layers,
                observations=self.observations.get(name),
                control_observations=tuple(self.collected.get(name, ())),
                no_context_observations=_observed(probe.NEEDS, self.cut),
            )
            try:
                results[name] = _lowered(name, probe.measure(data)).at_layers(layers)
            except UserError as refusal:
                results[name] = str(refusal)
            tell(f"measuring {name}", done + 1, len(self.probes))
        return results

    def record(self, judged: bool = True) -> Record:
        """The record of what is read so far; with verdicts if `judged`."""
        view = self._view()
        every = {**self._measure(view), **self.refused}
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
            results=claims.judge(results_of, question.batch.source.get("available", 0))
            if judged
            else claims.unjudged(results_of),
            unmeasured=reasons,
            prompts={**texts, **(question.columns(self.observations) if question.columns else {})},
            subject=subject.facts_now,
            source=dict(question.batch.source),
            facts=self._facts(judged),
            warnings=tuple(self._warnings(judged, any(h.claim for m in results_of.values() for h in m.estimates))),
            run=took(self.started),
        )

    @property
    def _subset(self) -> Tensor | None:
        """The prompts of the record: those that controls read, unless every probe measures all; None for all."""
        measures_all = all(probe.NEEDS.all_prompts for probe in self.run.probes.values())
        return None if measures_all else self.run.plan.subset

    @property
    def _shown(self) -> Batch:
        return self.question.batch if self._subset is None else self.question.batch.take(self._subset)

    def _facts(self, judged: bool) -> dict[str, Any]:
        question, plan = self.question, self.run.plan
        edits = [edit.identity for edit in self.run.subject.edits]
        return {
            **provenance(question.batch, plan.main.tokens, question.seed, question.controls if judged else 0),
            "batch_tokens": question.batch_tokens,
            "bos_added": plan.special[0] > 0,
            **({"edits": edits} if edits else {}),
            **({"flat entropy": flat} if (flat := self._flat_entropy()) else {}),
            **(question.selection.facts | dict(question.facts)),
            **({} if judged else {"preview": True}),
        }

    def _flat_entropy(self) -> str:
        """The sentence that stands above all claims where next-token entropy does not vary over the prompts."""
        entropy, vocabulary = self.captures[MAIN].entropy.numpy(), self.run.subject.facts["vocabulary"]
        if len(entropy) < 2 or self.question.batch.posterior is not None or entropy.std() >= LEAST_SPREAD:
            return ""
        even = abs(entropy.mean() - np.log2(vocabulary)) < LEAST_SPREAD
        what = (
            f"log2 {vocabulary:,} = {entropy.mean():.3f} bits, an even answer,"
            if even
            else f"{entropy.mean():.3f} bits"
        )
        return f"Next-token entropy is {what} on every prompt: nothing that rests on it is measured."

    def _warnings(self, judged: bool, claimed: bool) -> Iterator[str]:
        question, plan = self.question, self.run.plan
        if not judged:
            yield "preview, of the model's own pass: no control is read, and no claim is judged yet"
        yield from (*question.notes, *question.selection.notes)
        if not question.expanded:
            yield from subset_note(question.batch, plan.subset, self.run.probes)
        yield from unequal_note(self._shown, self.run.probes)
        if judged and question.controls and not plan.permuted and any(p.NEEDS.permuted for p in self.probes.values()):
            yield "no control with permuted weights: these are packed, or in several places"
        if plan.no_context_why:
            yield f"no control without context: {plan.no_context_why}"
        controls = question.controls if judged else None
        sample = plan.main if self._subset is None else plan.null_sample
        yield from caveats(self.run.subject, self._shown, sample.tokens, controls, claimed)
        untrained = [capture for control in self.untrained for capture in control.values()]
        read = [*self.captures.values(), *untrained, *self.permuted, *self.shuffled, *self.cut.values()]
        yield from dict.fromkeys([*(event for capture in read for event in capture.events), *self.drawing])

    def _view(self) -> ProbeInput:
        """The input of `measure`: the model and its controls, on the prompts that controls read."""
        captures = self.run.read_by_controls(self.captures)
        drawn = {name: tuple(control[name] for control in self.untrained) for name in captures}
        samples = {
            name: Sample(capture, capture.entropy.numpy(), drawn[name], self.cut.get(name))
            for name, capture in captures.items()
            if name != MAIN and (Site.ENTROPY, -1) in capture.tensors
        }
        return ProbeInput(
            captures[MAIN],
            captures[MAIN].entropy.numpy(),
            drawn[MAIN],
            self.shuffled,
            samples,
            seed=self.run.seed,
            no_context=self.cut.get(MAIN),
            permuted=tuple(self.permuted),
        )
