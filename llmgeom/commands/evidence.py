"""`llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does? The SULA protocol is here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmgeom.commands import config
from llmgeom.commands.job import Job, JobOutput
from llmgeom.commands.processes.request import Protocol, RunConfig
from llmgeom.commands.processes.search import show_search
from llmgeom.commands.processes.several import chosen_processes, show_processes
from llmgeom.errors import UserError
from llmgeom.progress import Progress

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject
    from llmgeom.prompts.sula import Sula
    from llmgeom.run import Question

KS = (0, 1, 2, 4, 8)


@config.command(
    RunConfig,
    JobOutput,
    examples=["llmgeom evidence --model EleutherAI/pythia-410m --prior beta:2,2 --k 0,2,4,8,16"],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Test whether a model weighs labelled words by Bayes' rule (the SULA protocol, or --process).

    The answers are compared with the exact posterior, with controls and with simpler observers.
    """
    if settings.fuzz:
        if output.dry_run:
            raise UserError(
                "--dry-run with --fuzz: how many prompts a search reads depends on the answers; leave one out"
            )
        if len(settings.surfaces) > 1:
            raise UserError(
                f"--surface {','.join(settings.surfaces)} with --fuzz: a search reads one; give one of them"
            )
        return show_search(settings, chosen_processes(settings), output)
    settings.refuse_unread(("bound",), "no --fuzz", ", or add --fuzz")
    if settings.processes:
        return show_processes(settings, output)
    return prepare(settings).show(output)


def prepare(settings: RunConfig) -> Job:
    """The job of the SULA protocol: check what can be checked before weights load. Raises UserError."""
    from llmgeom.prompts import nonce
    from llmgeom.prompts.sula import Sula, available, prior

    if settings.surfaces:
        raise UserError(f"--surface {','.join(settings.surfaces)} needs --process; SULA has --template")
    believed, protocol = prior(settings.prior), settings.protocol
    template = settings.template or {"sound": "colon", "published": "plain"}[protocol]
    ks = settings.ks or KS
    Sula(settings.labels or nonce.LABELS[:16], believed, template, ks)  # refused before anything is loaded
    located = settings.locate()

    def ask(subject: Subject, _: Progress | None = None) -> Question:
        source = Sula(settings.labels or available(subject.tokenizer), believed, template, ks)
        draws = {"n": settings.n, "seed": settings.seed, "nulls": settings.nulls, "batch_tokens": settings.batch_tokens}
        return question(subject, source, protocol=protocol, **draws)

    what = f"sula-{settings.prior}-{template}{'-published' * (protocol == 'published')}"
    return Job(settings, located, what.replace(":", "-"), settings.spec(located), ask)


def question(
    subject: Subject, source: Sula, *, n: int = 50, seed: int = 0, protocol: Protocol = "sound", **options: Any
) -> Question:
    """Ask the model, and untrained controls, `n` prompts a number of observations in every condition.

    Args:
        subject: the model.
        source: prior, labels, template and numbers of observations.
        n: prompts for each number of observations. seed: of prompts and controls.
        protocol: "published": by Paper III's definitions, flaws included.
        options: of `probes.evidence.questions.question`, e.g. nulls.

    Raises:
        UserError: a tokenizer in which a label is several tokens; too few pairs, numbers of observations or prompts.
    """
    from llmgeom.probes.evidence import questions
    from llmgeom.prompts.sula import CONDITIONS

    questions.check_tokenizer(subject)
    if max(source.ks) < 2:
        raise UserError(f"--k {','.join(map(str, source.ks))}: at least one number of observations above 1 is needed")
    wanted = questions.wanted_samples(protocol)
    samples = {name: replace(source, condition=name).sample(n, seed) for name in CONDITIONS if name in wanted}
    facts = {"conditions": {"main": CONDITIONS["main"], **{name: CONDITIONS[name] for name in samples}}}
    batch = source.sample(n, seed)
    return questions.question(subject, batch, samples, protocol=protocol, seed=seed, facts=facts, **options)
