"""The whole of `llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from llmgeom.batch import Batch
from llmgeom.cache.shards import captures_folder
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show, show_record
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.files import digest, write_whole
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.subject import Subject
from llmgeom.probe import Probe
from llmgeom.probes.evidence import answers, belief, controls, martingale, published, skill, which_observer
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.probes.evidence.profile import PROFILE, profile
from llmgeom.progress import Progress, bar, first_word, prefixed
from llmgeom.prompts import nonce
from llmgeom.prompts.process import Process
from llmgeom.prompts.processes import load_process, names
from llmgeom.prompts.sula import CONDITIONS, Sula, available, prior
from llmgeom.record import Record
from llmgeom.reports.strips import strips
from llmgeom.run import CONTROLS, run_probes

Protocol = Literal["sound", "published"]
KS = (0, 1, 2, 4, 8)
PROBES: dict[Protocol, dict[str, Probe]] = {
    "sound": {
        skill.EVIDENCE: skill,
        which_observer.OBSERVERS: which_observer,
        belief.BELIEF: belief,
        controls.CONTROLS: controls,
        martingale.MARTINGALE: martingale,
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

    processes: tuple[str, ...] = flag(
        (),
        "Evidence of another process, e.g. markov:labels=3 (`llmgeom list processes`), or all. Repeat for several.",
        name="--process",
        group="Process",
    )
    surfaces: tuple[str, ...] = flag((), "With --process: list, sentences, code. [default: all]", listed=True,
                                     name="--surface", group="Process")  # fmt: skip
    prior: str = flag("two-point", "two-point, two-point:0.8, beta (uniform) or beta:2,1.")
    template: Literal["colon", "is", "plain", "instructed"] | None = flag(
        None,
        "colon: `w: label`. is: `w is label`. plain: no lead-in, as published. instructed: the prior is stated."
        " [default: colon; plain with --protocol published]",
    )
    protocol: Protocol = flag("sound", "published: the papers' own definitions, flaws included.")
    ks: tuple[int, ...] = flag(
        (), "Numbers of labelled words shown. [default: 0,1,2,4,8; of a process its own]", name="--k", listed=True
    )
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
    """Test whether a model weighs labelled words as Bayes' rule does (the SULA protocol, or --process).

    The answers are compared with the exact posterior, with controls and with simpler readers.
    """
    if asked.processes:
        return show_processes(asked, output)
    if asked.surfaces:
        raise UserError(f"--surface {','.join(asked.surfaces)} needs --process; SULA has --template")
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom evidence`: check, load, examine, save the record and its page; (folder, record)."""
    given, protocol = prior(asked.prior), asked.protocol
    template = asked.template or ("colon" if protocol == "sound" else published.TEMPLATE)
    ks = asked.ks or KS
    Sula(asked.labels or nonce.LABELS[:16], given, template, ks)  # refused before anything is loaded
    located = asked.locate()
    spec = asked.spec(located)
    what = f"sula-{asked.prior}-{template}{'-published' * (protocol == 'published')}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what.replace(":", "-"), spec)
    config.check_folder(out, spec)
    subject = subject or asked.load(located)
    source = Sula(asked.labels or available(subject.tokenizer), given, template, ks)
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


# ---- other processes: a record for each, and the profile -------------------------------------------------------------

OF_PROCESS: dict[str, Probe] = {
    answers.PROCESS: answers,
    belief.BELIEF: belief,
    which_observer.OBSERVERS: which_observer,
}
OF_SULA = ("prior", "template", "protocol", "labels")  # flags that a process has no use for


def show_processes(asked: RunConfig, output: VerdictOutput) -> int:
    """Ask the model about every process, and print profile, words and page; the exit code."""
    first_word(f"evidence of {asked.model}: drawing prompts, then the model", output.silent)
    with bar(output.silent) as progress:
        out, records = perform_processes(asked, progress)
    if len(records) > 1 and not output.json:
        click.echo("\n".join([*lines(records), ""]))
    return show(out, records, output)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """The records of several processes as text: the profile where there is one, then every process by itself."""
    whole = [record for record in records if PROFILE in record.results]
    for record in whole:
        measured = record.results[PROFILE]
        yield f"{record.subject['name']}: skill over the best observer that does not infer (1 is exact)"
        yield from strips(measured, "shown", measured.ticks["part"], measured.arrays["skill"])
        yield ""
    yield "skill over the best constant, which knows only how much was shown"
    for record in records:
        if found := [h for m in record.results.values() for h in m.estimates if h.name == answers.SKILL]:
            h = found[0]
            yield f"{record.source['name']:26}{h.value:6.2f} [{h.low:.2f}, {h.high:.2f}] {h.verdict}"


def perform_processes(
    asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None
) -> tuple[Path, list[Record]]:
    """Check, load, ask and save: a record for each process, the profile of several, and one page; (folder, records).

    Args:
        asked: the RunConfig of `llmgeom evidence`, with processes.
        progress: called as progress(stage, done, total).
        subject: the model; loaded unless given.

    Raises:
        UserError: an unknown process or one that cannot be; a flag of the SULA protocol; prompts that the model's
            tokenizer or longest input cannot take.
    """
    chosen = chosen_processes(asked)
    located = asked.locate()
    spec = asked.spec(located)
    what = "+".join(process.title for process in chosen)
    what = "all-processes" if len(chosen) == len(names()) else config.safe(what)
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what, spec)
    specs = [digest({"run": spec, "process": process.title}) for process in chosen]
    folders = [out / config.safe(process.title) if len(chosen) > 1 else out for process in chosen]
    for folder, own in zip(folders, specs, strict=True):
        config.check_folder(folder, own)
    subject = subject or asked.load(located)
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    records = []
    for process, folder, own in zip(chosen, folders, specs, strict=True):
        records.append(_record(asked, process, subject, own, progress))
        records[-1].save(folder)
    if len(records) > 1:
        whole = profile(records, {"spec": digest({"run": spec, "process": PROFILE})})
        if whole.results:
            whole.save(out / PROFILE)
            records.insert(0, whole)
    from llmgeom.reports import page

    write_whole(out / "report.html", page(records).encode())
    return out, records


def chosen_processes(asked: RunConfig) -> list[Process]:
    """The processes of a configuration, `all` for every one. Raises UserError."""
    defaults = {f.name: f.default for f in fields(asked)}
    for name in OF_SULA:
        if getattr(asked, name) != defaults[name]:
            raise UserError(
                f"--{name} belongs to the SULA protocol: with --process give the process's own fields, "
                "e.g. two-point:reliability=0.8"
            )
    specs = [spec for given in asked.processes for spec in (names() if given == "all" else (given,))]
    return [load_process(spec) for spec in dict.fromkeys(specs)]


def _record(asked: RunConfig, process: Process, subject: Subject, spec: str, progress: Progress | None) -> Record:
    positions = subject.facts["positions"]
    batch = process.sample(
        asked.n, asked.seed, subject.tokenizer, ks=asked.ks, surfaces=asked.surfaces, positions=positions
    )
    return run_probes(
        subject,
        batch,
        OF_PROCESS,
        controls=asked.nulls,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens,
        store=str(captures_folder()),
        progress=prefixed(progress, process.title),
        facts={"spec": spec, "command": asked.command()},
    )
