"""The whole of `llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from llmgeom import claims
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model.subject import Subject
from llmgeom.probes.evidence import published
from llmgeom.probes.evidence.predictions import ExactAnswers, LabelPredictions, predict_labels
from llmgeom.probes.evidence.published import measure_published
from llmgeom.probes.evidence.results import (
    BELIEF,
    CONTROLS,
    EVIDENCE,
    measure_belief,
    measure_controls,
    measure_evidence,
)
from llmgeom.progress import Progress
from llmgeom.prompt_table import prompt_table
from llmgeom.prompts import nonce
from llmgeom.prompts.sula import CONDITIONS, Sula, available, prior
from llmgeom.provenance import provenance, took
from llmgeom.record import Record
from llmgeom.run import CONTROLS as DRAWS
from llmgeom.run import few_draws

Protocol = Literal["sound", "published"]


def examine(
    subject: Subject,
    source: Sula,
    *,
    n: int = 50,
    seed: int = 0,
    nulls: int = DRAWS,
    protocol: Protocol = "sound",
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Ask the model, and `nulls` untrained controls, `n` prompts a number of observations in every condition.

    protocol    "published": by Paper III's definitions, flaws included.
    Raises UserError: a tokenizer in which a label is several tokens; too few pairs, numbers of observations or prompts.
    """
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    if max(source.ks) < 2:
        raise UserError(f"--k {','.join(map(str, source.ks))}: at least one number of observations above 1 is needed")
    started = time.time()
    conditions = CONDITIONS if protocol == "sound" else published.CONDITIONS
    batches = {name: replace(source, condition=name).sample(n, seed) for name in conditions}

    def predictions(model: Subject) -> dict[str, LabelPredictions]:
        return {name: predict_labels(model, batch, internals=name == "main") for name, batch in batches.items()}

    own = predictions(subject)
    untrained = []
    for i in range(nulls):
        untrained.append(predictions(subject.untrained(seed + 1 + i)))
        if progress:
            progress("untrained controls", i + 1, nulls)
    main = batches["main"]
    measures = {
        EVIDENCE: lambda: measure_evidence(source, main, own["main"], [control["main"] for control in untrained]),
        BELIEF: lambda: measure_belief(source, main, own["main"], [control["main"] for control in untrained], seed),
        CONTROLS: lambda: measure_controls(batches, own, untrained),
    }
    if protocol == "published":
        truth = {name: ExactAnswers(batch) for name, batch in batches.items()}
        measures = {published.PROBE: lambda: measure_published(source, truth, own, untrained)}
    results, unmeasured = {}, {}
    for i, (name, measure) in enumerate(measures.items()):
        if progress:
            progress(f"measuring {name}", i, len(measures))
        try:
            results[name] = measure().lowered()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
    tokens = subject.tokens(main)
    return Record(
        results=claims.judge(results),
        unmeasured=unmeasured,
        prompts={
            **prompt_table(subject, main, tokens, own["main"].h_vocab),
            "template": main.columns["lead"],
            "H label": tuple(round(float(h), 6) for h in own["main"].h_label),
        },
        subject={k: v for k, v in subject.facts.items() if v is not None},
        source=dict(main.source),
        facts={
            **provenance(main, tokens, seed, nulls),
            "conditions": {name: CONDITIONS[name] for name in conditions},
            **(facts or {}),
        },
        warnings=(*few_draws(nulls), *filter(None, [subject.facts.get("note")])),
        run=took(started),
    )


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom evidence` is asked for."""

    VERB: ClassVar[str] = "evidence"

    prior: str = flag("two-point", "two-point, two-point:0.8, beta (uniform) or beta:2,1.")
    template: Literal["colon", "is", "plain", "instructed"] | None = flag(
        None,
        "colon: `w: label`. is: `w is label`. plain: no lead-in, as published. instructed: the prior is stated."
        " [default: colon; plain with --protocol published]",
    )
    protocol: Protocol = flag("sound", "published: the papers' own definitions, flaws included.")
    ks: tuple[int, ...] = flag((0, 1, 2, 4, 8), "Numbers of labelled words shown.", name="--k", listed=True)
    labels: tuple[str, ...] = flag((), "Labels. [default: syllables that are one token]", listed=True)
    n: int = flag(50, "Prompts for each number of labelled words.", least=10)
    nulls: int = flag(20, "Untrained controls.", least=1)
    seed: int = flag(0, "Fixes prompts and nulls.", least=0, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-sula-PRIOR-TEMPLATE-HASH]", group="Output")


@config.command(
    RunConfig,
    VerdictOutput,
    examples=["llmgeom evidence --model EleutherAI/pythia-410m --prior beta:2,2 --k 0,2,4,8,16"],
)
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Test whether a model weighs labelled words as Bayes' rule does (the SULA protocol).

    The answers are compared with the exact posterior, with controls and with simpler readers.
    """
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom sula`: check, load, examine, save the record and its page; (folder, record)."""
    given, protocol = prior(asked.prior), asked.protocol
    template = asked.template or ("colon" if protocol == "sound" else published.TEMPLATE)
    Sula(asked.labels or nonce.LABELS[:16], given, template, asked.ks)  # refused before anything is loaded
    located = asked.locate()
    spec = asked.spec(located)
    what = f"sula-{asked.prior}-{template}{'-published' * (protocol == 'published')}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what.replace(":", "-"), spec)
    config.check_folder(out, spec)
    subject = subject or asked.load(located)
    source = Sula(asked.labels or available(subject.tokenizer), given, template, asked.ks)
    told = {"spec": spec, "command": asked.command()}
    record = examine(
        subject,
        source,
        n=asked.n,
        seed=asked.seed,
        nulls=asked.nulls,
        protocol=protocol,
        progress=progress,
        facts=told,
    )
    config.keep(record, out)
    return out, record
