"""What a question will run: a model of shapes without weights, and the passes through it and through each control."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers

from llmgeom.commands.config import ModelConfig
from llmgeom.model import hub
from llmgeom.model.batching import BatchRules, at_once, plan_batches
from llmgeom.model.loading import default_dtype, undisturbed, usable
from llmgeom.model.self_check import probe_batch
from llmgeom.plan import FURTHER_SAMPLES, MAIN, PassPlan, Reading, planned
from llmgeom.probe import Batch, Needs, Probe, Subject
from llmgeom.run import Question

PROMPTS, UNTRAINED, SHUFFLED, EXAMINED = "prompts", "untrained controls", "shuffled prompts", "examined by"
CHECK, POOLS, WITHOUT_CONTEXT = "check at load", "entropy of pools", "control without context"
CAPTURED = (PROMPTS, UNTRAINED, SHUFFLED)  # what several processes divide among them


@dataclass(frozen=True, eq=False)
class Weightless(Subject):
    """A model's shapes without its weights: its tokens are real, its entropies random numbers.

    Attributes:
        pools: lengths of the prompts of each pool whose entropy was asked for.
    """

    pools: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def found(cls, settings: ModelConfig, located: hub.Located) -> Weightless:
        """From the config, on torch's meta device. Raises UserError where the model could not be captured."""
        tokenizer, config = settings.described(located)
        try:
            device = usable(settings.device)
            dtype = default_dtype(settings.dtype, device, config)
            with undisturbed(located.local_only), torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:
            raise hub.explain(error, located) from error
        # There are no weights to check; and the device decides how inputs are divided into batches.
        facts = {**hub.tunnel_facts(located.path), "self_check": {}, "device": device}
        who = cls.of(model, tokenizer, located.name, **facts)
        in_place = settings.backend == "transformers" and not (settings.quantize or settings.device_map)
        return replace(settings.reading(who), in_place=in_place)

    def lengths(self, batch: Batch) -> np.ndarray:
        """Tokens of each input."""
        return self.tokens(batch).lengths.numpy()

    def entropy(self, batch: Batch | str | Iterable[str], **options: Any) -> np.ndarray:
        """Random: which prompts are drawn is not what the scan will draw; how many, and about how long, is."""
        batch = Batch.of(batch)
        self.pools.append(self.lengths(batch))
        return np.random.default_rng(len(batch)).random(len(batch))

    @property
    def unembed(self) -> Any:
        """Not found without weights; whether it can be is decided when the model is loaded."""

    @property
    def checked(self) -> np.ndarray:
        """Lengths of what a model is tried on where its parts are to be told."""
        return probe_batch(self.facts).tokens.lengths.numpy()


@dataclass(frozen=True)
class Stage:
    """The same inputs through `times` models, or in `times` orders.

    Attributes:
        lengths: tokens of each input.
        kept: bytes that one such pass leaves in memory or in the store.
        queried: positions of an input at which there are logits.
        everywhere: bytes a token, of all layers, that observers read at every position while a batch runs.
        own: whether the model itself runs, in its prompts as they are, before a first page.
        rules: how its inputs are divided into batches.
        share: the part of it that one of several processes runs.
    """

    stage: str
    times: int
    lengths: np.ndarray
    kept: int = 0
    queried: float = 1.0
    everywhere: int = 0
    own: bool = False
    rules: BatchRules = BatchRules()
    share: float = 1.0

    @property
    def passes(self) -> int:
        return math.ceil(self.times * self.share)

    @property
    def tokens(self) -> int:
        return round(self.times * int(self.lengths.sum()) * self.share)

    def at_once(self, batch_tokens: int) -> int:
        """How many batches run at the same time."""
        lengths = self.lengths.tolist()
        plan = plan_batches(lengths, batch_tokens, self.rules)
        return min(torch.get_num_threads(), at_once(plan, lengths, batch_tokens, self.rules))

    def batches(self, batch_tokens: int) -> list[tuple[int, float]]:
        """Of each batch the tokens, with the padding between them, which is computed too, and the rows of logits."""
        plan = plan_batches(self.lengths.tolist(), batch_tokens, self.rules)
        sizes = [(len(members) * int(self.lengths[members[0]]), len(members) * self.queried) for members in plan]
        return sizes * self.times


@dataclass(frozen=True)
class Source:
    """What a question runs, with stand-ins for the prompts that only the model's own entropies can choose.

    Attributes:
        rows: how many positions are queried in each sample that is read, by its name; MAIN is the main sample.
        controls: untrained controls.
        draws: of each control.
        judged: whether claims get verdicts.
    """

    subject: Weightless
    pool: Batch
    batch: Batch
    samples: Mapping[str, Batch]
    modules: Mapping[str, Probe]
    stages: tuple[Stage, ...]
    rows: Mapping[str, int]
    controls: int
    draws: int
    judged: bool = True

    @classmethod
    def of(cls, who: Weightless, question: Question, pool: Batch, early: bool = False) -> Source:
        """What `question` runs on prompts out of `pool`; `early`: a first page comes before the further samples."""
        passes, measured, _ = question.plan(who)
        samples = {name: question.samples[name] for name in passes.own.places if name in question.samples}
        every = {MAIN: passes.main, **{name: passes.own.places[name].batch for name in samples}}
        return cls(
            subject=who,
            pool=pool,
            batch=question.batch,
            samples=samples,
            modules=measured,
            stages=tuple(_stages(who, question.batch_tokens, passes, measured, early)),
            rows={name: len(x) if x.query is None else int(x.query.sum()) for name, x in every.items()},
            controls=len(passes.untrained),
            draws=question.controls,
        )

    def preview(self) -> Source:
        """What runs before a first page, with which `scan --preview` ends: no control, and no claim."""
        own = tuple(stage for stage in self.stages if stage.own)
        return replace(self, stages=own, controls=0, draws=0, judged=False)

    def shared(self, count: int) -> Source:
        """What one of `count` jobs runs: its share of the captures of all draws, and nothing is measured.

        Each job chooses the prompts itself. An untrained control stays with one job if there are enough of them; else
        a job may have to draw them all.
        """
        stages = [replace(stage, share=1 / count) for stage in self.stages if stage.stage in CAPTURED]
        stages += [stage for stage in self.stages if stage.stage in (CHECK, POOLS)]
        controls = math.ceil(self.controls / count) if self.controls >= count else self.controls
        return replace(self, stages=tuple(stages), modules={}, controls=controls, judged=False)

    def most_rows(self, needs: Needs) -> int:
        """Of the largest sample that a probe with these needs reads."""
        return max(rows for name, rows in self.rows.items() if name in (MAIN, *needs.samples))


def _stages(
    who: Weightless, batch_tokens: int, passes: PassPlan, measured: Mapping[str, Probe], early: bool
) -> Iterator[Stage]:
    """What a plan runs, in order, without what has no inputs; early: see `Source.of`."""

    def of_readings(called: str, times: int, readings: Sequence[Reading]) -> Iterator[Stage]:
        for reading in readings:
            work = planned(who, None, replace(reading, edits=()), batch_tokens=batch_tokens)
            # A shard names its tensors, in about 110 bytes each: of short prompts that is a sixth of a file.
            tensors = len(work.step_sites) * len(reading.layers or range(who.facts["layers"]))
            later = early and reading.batch.source.get("kind") == FURTHER_SAMPLES
            yield Stage(
                called,
                times,
                lengths=work.tokens.lengths.numpy(),
                kept=sum(work.sizes) + len(work.groups) * (400 + 110 * tensors),
                queried=float(work.where.sum(1).double().mean()),
                everywhere=work.token_bytes(who.facts),
                own=called == PROMPTS and not later,
            )

    stages = [Stage(CHECK, 3, who.checked, own=True)]
    for i, lengths in enumerate(who.pools):
        stages.append(Stage(POOLS, 1, lengths, 4 * len(lengths), own=not (early and i)))
    stages += of_readings(PROMPTS, 1, passes.own.readings)
    stages += of_readings(UNTRAINED, len(passes.untrained), passes.control.readings)
    if passes.shuffles:
        stages += of_readings(SHUFFLED, len(passes.shuffles), [passes.shuffled(0)])
    stages += of_readings(WITHOUT_CONTEXT, 1, passes.without_context())
    for name, probe in measured.items():
        needs, controls = probe.NEEDS, len(passes.untrained) * probe.NEEDS.untrained
        for models, cost, own in ((1, needs.cost, True), (controls, needs.control_cost or needs.cost, False)):
            runs = cost(who, passes.null_sample) if cost and models else []
            stages += [Stage(f"{EXAMINED} {name}", models * times, np.asarray(x), own=own) for times, x in runs]
    rules = BatchRules.of(who.facts, getattr(who.model, "config", None))
    return (replace(stage, rules=rules) for stage in stages if stage.times and len(stage.lengths))
