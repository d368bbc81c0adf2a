"""The whole of `llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from llmgeom.batch import Batch
from llmgeom.cache.shards import captures_folder
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.subject import Subject
from llmgeom.probe import Probe
from llmgeom.probes.evidence import belief, controls, published, skill, which_observer
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.progress import Progress
from llmgeom.prompts import nonce
from llmgeom.prompts.sula import CONDITIONS, Sula, available, prior
from llmgeom.record import Record
from llmgeom.run import CONTROLS, run_probes

Protocol = Literal["sound", "published"]
PROBES: dict[Protocol, dict[str, Probe]] = {
    "sound": {
        skill.EVIDENCE: skill,
        which_observer.OBSERVERS: which_observer,
        belief.BELIEF: belief,
        controls.CONTROLS: controls,
    },
    "published": {published.PROBE: published},
}


def examine(
    subject: Subject,
    source: Sula,
    *,
    n: int = 50,
    seed: int = 0,
    nulls: int = CONTROLS,
    protocol: Protocol = "sound",
    batch_tokens: int = BATCH_TOKENS,
    store: str | None = None,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Ask the model, and `nulls` untrained controls, `n` prompts a number of observations in every condition.

    Args:
        subject: the model.
        source: prior, labels, template and numbers of observations.
        n: prompts for each number of observations. seed: of prompts and controls. nulls: untrained controls.
        protocol: "published": by Paper III's definitions, flaws included.
        batch_tokens: tokens that run together.
        store: folder of captures; what was captured or measured there before is loaded.
        progress: called as progress(stage, done, total). facts: further provenance.

    Raises:
        UserError: a tokenizer in which a label is several tokens; too few pairs, numbers of observations or prompts.
    """
    batch, samples = drawn(subject, source, n, seed, protocol)
    main = skill.EVIDENCE if protocol == "sound" else published.PROBE

    def columns(observations: Mapping[str, Any]) -> dict[str, tuple]:
        entropy = observations[main].h_label
        return {"template": batch.columns["lead"], "H label": tuple(round(float(h), 6) for h in entropy)}

    return run_probes(
        subject,
        batch,
        PROBES[protocol],
        samples=samples,
        controls=nulls,
        seed=seed,
        batch_tokens=batch_tokens,
        store=store,
        progress=progress,
        columns=columns,
        facts={
            "conditions": {"main": CONDITIONS["main"], **{name: CONDITIONS[name] for name in samples}},
            **(facts or {}),
        },
    )


def drawn(subject: Subject, source: Sula, n: int, seed: int, protocol: Protocol) -> tuple[Batch, dict[str, Batch]]:
    """The prompts and, by condition, the same draws changed in one way. Raises UserError as `examine` does."""
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    if max(source.ks) < 2:
        raise UserError(f"--k {','.join(map(str, source.ks))}: at least one number of observations above 1 is needed")
    wanted = frozenset().union(*(probe.NEEDS.samples for probe in PROBES[protocol].values()))
    batch = source.sample(n, seed)
    samples = {name: replace(source, condition=name).sample(n, seed) for name in CONDITIONS if name in wanted}
    for one in (batch, *samples.values()):
        label_ids(subject.tokenizer, one)
    return batch, samples


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
    batch_tokens: int = flag(BATCH_TOKENS, "Tokens in a batch.", least=1, most=LARGEST_SEED)
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
    """The whole of `llmgeom evidence`: check, load, examine, save the record and its page; (folder, record)."""
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
    record = examine(
        subject,
        source,
        n=asked.n,
        seed=asked.seed,
        nulls=asked.nulls,
        protocol=protocol,
        batch_tokens=asked.batch_tokens,
        store=str(captures_folder()),
        progress=progress,
        facts={"spec": spec, "command": asked.command()},
    )
    config.keep(record, out)
    return out, record
