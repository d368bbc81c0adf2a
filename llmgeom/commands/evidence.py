"""`llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does? The SULA protocol is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from llmgeom.commands import config
from llmgeom.commands.job import Job, JobOutput, show_price
from llmgeom.commands.output import show
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import LARGEST_SEED, flag, output_flag, process_flag, prompt_flag
from llmgeom.progress import bar, first_word, within

if TYPE_CHECKING:
    from llmgeom.model import hub
    from llmgeom.model.subject import Subject
    from llmgeom.prompts.process import Process
    from llmgeom.prompts.sula import Sula
    from llmgeom.record import Record
    from llmgeom.run import Question

Protocol = Literal["sound", "published"]
KS = (0, 1, 2, 4, 8)
# Arrays by k, and the head of their column in the terminal.
OF_K = {
    "accuracy": "accuracy",
    "accuracy_exact": "exact",
    "answer": "P(likeliest)",
    "answer_exact": "exact",
    "divergence": "KL, bits",
    "divergence_left": "recalibrated",
    "divergence_even": "even answer",
    "mass": "mass",
}
OF_SULA = ("prior", "template", "protocol", "labels")  # flags that a process has no use for


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """The options of `llmgeom evidence`."""

    VERB: ClassVar[str] = "evidence"

    processes: tuple[str, ...] = process_flag(
        (),
        "Draw the evidence from another process, e.g. markov:labels=3 (`llmgeom list processes`), or all. "
        "Repeat for several.",
        name="--process",
    )
    surfaces: tuple[str, ...] = process_flag((), "With --process: list, sentences, code. [default: all]", listed=True,
                                     name="--surface")  # fmt: skip
    prior: str = flag(
        "two-point",
        "How labels are drawn. two-point: one of them 9 times in 10, or two-point:0.8. beta: in "
        "shares from a uniform prior, or from beta:2,1.",
    )
    template: Literal["colon", "is", "plain", "instructed"] | None = flag(
        None,
        "colon: `w: label`. is: `w is label`. plain: no lead-in, as published. instructed: the prior is stated."
        " [default: colon; plain with --protocol published]",
    )
    protocol: Protocol = flag("sound", "published: the papers' own definitions, flaws included.")
    ks: tuple[int, ...] = flag(
        (),
        "Numbers of labelled words shown. [default: 0,1,2,4,8; a process has its own default]",
        name="--k",
        listed=True,
    )
    labels: tuple[str, ...] = flag((), "Labels. [default: syllables that are one token]", listed=True)
    n: int = flag(50, "Prompts for each number of labelled words.", least=10)
    nulls: int = config.draws_flag("Untrained copies, and shuffles of the prompts where used")
    seed: int = flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED)
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-sula-PRIOR-TEMPLATE-HASH]")
    plain: bool = prompt_flag(
        False,
        "Read prompts as plain text. By default, if the tokenizer has a chat template, a list is a user's message, and "
        "its last item begins the answer.",
    )

    def reading(self, subject: Any) -> Any:
        """The model as it reads prompts: in its tokenizer's chat template, if it has one and without --plain."""
        from llmgeom.model.tokenizing import has_template
        from llmgeom.prompts.surfaces import QUESTION

        if self.plain or subject.tokenizer is None or not has_template(subject.tokenizer):
            return subject
        try:
            talking = subject.chat(QUESTION)
            talking.tokenizer("First: a, second: b. stone: a, hill:")
        except UserError as refusal:
            raise UserError(str(refusal).replace("leave out --chat", "give --plain")) from None
        return talking


@config.command(
    RunConfig, JobOutput, examples=["llmgeom evidence --model EleutherAI/pythia-410m --prior beta:2,2 --k 0,2,4,8,16"]
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Test whether a model weighs labelled words by Bayes' rule (the SULA protocol, or --process).

    The answers are compared with the exact posterior, with controls and with simpler observers.
    """
    if settings.processes:
        return show_processes(settings, output)
    return prepare(settings).show(output)


# ---- the SULA protocol -----------------------------------------------------------------------------------------------


def prepare(settings: RunConfig) -> Job:
    """The job of the SULA protocol: check what can be checked before weights load. Raises UserError."""
    from llmgeom.prompts import nonce
    from llmgeom.prompts.sula import Sula, available, prior

    if settings.surfaces:
        raise UserError(f"--surface {config.shown(settings.surfaces)} needs --process; SULA has --template")
    believed, protocol = prior(settings.prior), settings.protocol
    template = settings.template or {"sound": "colon", "published": "plain"}[protocol]
    ks = settings.ks or KS
    Sula(settings.labels or nonce.LABELS[:16], believed, template, ks)  # refused before anything is loaded
    located = settings.locate()

    def ask(subject: Subject) -> Question:
        source = Sula(settings.labels or available(subject.tokenizer), believed, template, ks)
        return question(subject, source, **settings.values("n", "seed", "protocol", "nulls", "batch_tokens"))

    what = f"sula-{settings.prior}-{template}{'-published' * (protocol == 'published')}"
    return Job(settings, located, what.replace(":", "-"), ask)


def question(
    subject: Subject, source: Sula, *, n: int = 50, seed: int = 0, protocol: Protocol = "sound", **options: Any
) -> Question:
    """Ask the model, and untrained controls, `n` prompts a number of observations in every condition.

    Args:
        source: prior, labels, template and numbers of observations.
        n: prompts for each number of observations. seed: of prompts and controls.
        protocol: "published": by Paper III's definitions, flaws included.
        options: of `probes.evidence.questions.question`, e.g. nulls.

    Raises:
        UserError: a tokenizer in which a label is several tokens; too few pairs, numbers of observations or prompts.
    """
    from llmgeom.probes.evidence import predictions, questions
    from llmgeom.prompts.process import check_fits
    from llmgeom.prompts.sula import CONDITIONS

    questions.check_tokenizer(subject)
    if max(source.ks) < 2:
        raise UserError(f"--k {config.shown(source.ks)}: at least one number of observations above 1 is needed")
    wanted = questions.wanted_samples(protocol)
    samples = {name: replace(source, condition=name).sample(n, seed) for name in CONDITIONS if name in wanted}
    facts = {"conditions": {"main": CONDITIONS["main"], **{name: CONDITIONS[name] for name in samples}}}
    batch = source.sample(n, seed)
    predictions.label_ids(subject.tokenizer, batch)  # labels of several tokens make prompts long: they are named first
    for sample in (batch, *samples.values()):
        title = batch.source["name"]
        check_fits(title, batch.columns["k"], sample.text, subject.tokenizer, subject.facts["positions"])
    return questions.question(subject, batch, samples, protocol=protocol, seed=seed, facts=facts, **options)


# ---- processes: a record for each, the profile of several, and one page ----------------------------------------------


@dataclass(frozen=True)
class Runs:
    """A run for each process: where the model is, the hash of the command, and the run folder."""

    settings: RunConfig
    processes: Sequence[Process]
    located: hub.Located
    spec: str
    out: Path

    @classmethod
    def of(cls, settings: RunConfig, processes: Sequence[Process], prefix: str = "") -> Runs:
        """Locate the model; without `--out` the folder is named after the processes. Raises UserError."""
        from llmgeom.prompts.processes import names

        located = settings.locate()
        spec = settings.spec(located)
        titles = "+".join(process.title for process in processes)
        what = prefix + ("all-processes" if len(processes) == len(names()) else config.safe(titles))
        out = Path(settings.out or config.run_folder(settings.model, located, what, spec))
        return cls(settings, processes, located, spec, out)

    def records(
        self, kind: str, make: Callable[[Subject, Process, Mapping[str, Any]], Record], subject: Subject | None = None
    ) -> list[Record]:
        """A saved record of each process: in the run folder, or where there are several each in a folder of its own.

        Args:
            kind: What is made of a process; a folder holds one kind.
            make: Called as make(subject, process, facts).
            subject: The model; loaded unless given.

        Raises:
            UserError: A folder holds another run.
        """
        specs = [digest({"run": self.spec, kind: process.title}) for process in self.processes]
        several = len(self.processes) > 1
        folders = [self.out / config.safe(process.title) if several else self.out for process in self.processes]
        for folder, spec in zip(folders, specs, strict=True):
            config.check_folder(folder, spec)
        subject = self.settings.subject(self.located, subject)
        records = []
        for process, folder, spec in zip(self.processes, folders, specs, strict=True):
            records.append(make(subject, process, {"spec": spec, "command": self.settings.command()}))
            config.save(records[-1], folder)
        return records


def chosen_processes(settings: RunConfig) -> list[Process]:
    """The processes of a configuration, `all` for every one. Raises UserError."""
    from llmgeom.prompts.processes import load_process, names

    if of_sula := [name for name in OF_SULA if name in settings.changed]:
        raise UserError(
            f"--{of_sula[0]} belongs to the SULA protocol: with --process give the process's own fields, "
            "e.g. two-point:reliability=0.8"
        )
    specs = [spec for given in settings.processes for spec in (names() if given == "all" else (given,))]
    if settings.ks and max(settings.ks) == 0:
        raise UserError("--k 0: without an observation there is nothing to weigh; give a number above 0, too")
    processes = list({process.title: process for process in map(load_process, specs)}.values())
    for process in processes:
        process.check(settings.n, settings.ks, settings.surfaces)
    return processes


def show_processes(settings: RunConfig, output: JobOutput) -> int:
    """Ask the model about every process, and print profile, words and page, or the price; the exit code."""
    if output.dry_run:
        from llmgeom.commands.dry_run import price

        runs = Runs.of(settings, chosen_processes(settings))
        asks = [partial(_of_process, settings, process) for process in runs.processes]
        return show_price(price(settings, runs.located, asks, runs.out), output)
    first_word(f"evidence of {settings.model}: drawing prompts, then the model", output.silent)
    with bar(output.silent):
        out, records = perform_processes(settings)
    if not output.json:
        click.echo("\n".join([*lines(records), ""]))
    return show(out, records, output)


def perform_processes(settings: RunConfig, subject: Subject | None = None) -> tuple[Path, list[Record]]:
    """Check, load, ask and save: a record for each process, the profile of several, and one page; (folder, records).

    Raises UserError: an unknown process or one that cannot be; a flag of the SULA protocol; prompts that the model's
    tokenizer or longest input cannot take.
    """
    from llmgeom.cache.shards import captures_folder
    from llmgeom.probes.evidence.profile import PROFILE, profile

    def ask(subject: Subject, process: Process, facts: Mapping[str, Any]) -> Record:
        with within(process.title):
            return _of_process(settings, process, subject).record(subject, store=str(captures_folder()), facts=facts)

    runs = Runs.of(settings, chosen_processes(settings))
    records = runs.records("process", ask, subject)
    if whole := profile(records, {"spec": digest({"run": runs.spec, "process": PROFILE})}):
        whole.save(runs.out / PROFILE)
        records.insert(0, whole)
    config.write_page(runs.out, records)
    return runs.out, records


def _of_process(settings: RunConfig, process: Process, subject: Subject) -> Question:
    """The question of one process. Raises UserError for prompts that the model cannot read."""
    from llmgeom.probes.evidence import questions

    questions.check_tokenizer(subject)
    options = {"ks": settings.ks, "surfaces": settings.surfaces, "positions": subject.facts["positions"]}
    batch = process.sample(settings.n, settings.seed, subject.tokenizer, **options)
    return questions.question_of_process(batch, settings.nulls, settings.seed, settings.batch_tokens)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """What is the case in one sentence, then accuracy, weight and resolution: by k, by surface, or by process."""
    from llmgeom.probes.evidence.answers import BIAS, LOSS, MASS, PROCESS, RESOLUTION, WEIGHT
    from llmgeom.probes.evidence.profile import found
    from llmgeom.reports.text import grid
    from llmgeom.result import SENTENCE

    for record in records[:1]:  # of several, the profile
        yield from (measured.facts[SENTENCE] for measured in record.results.values() if SENTENCE in measured.facts)
    some = [record for record in records if PROCESS in record.results]
    head = ("k", "accuracy", "exact", "weight (1: Bayes)", "resolution", "bias, bits", "loss, bits", "mass")
    rows = []
    for record in some:
        arrays, name = record.results[PROCESS].arrays, str(record.source["name"])
        h = {metric: found(record, metric) for metric in (WEIGHT, RESOLUTION, BIAS, LOSS, MASS)}
        ends = {metric: f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]" for metric, one in h.items()}
        ends[MASS] = f"{h[MASS].value:.2f}"
        shown = (f"{arrays[key][-1]:.2f}" for key in ("accuracy", "accuracy_exact"))
        rows.append((name, str(record.results[PROCESS].ticks["k"][-1]), *shown, *ends.values()))
    yield from grid("process", head, rows, 120)
    if len(some) == 1:
        measured = some[0].results[PROCESS]
        arrays = measured.arrays
        by_k = [(f"{k}", *(f"{arrays[key][i]:.2f}" for key in OF_K)) for i, k in enumerate(measured.ticks["k"])]
        yield from grid("k", tuple(OF_K.values()), by_k)
        by_surface = []
        for i, name in enumerate(measured.ticks["surface"]):
            found_at = (
                (arrays[of][i], *arrays[f"{of}_interval"][i]) for of in ("surface_weight", "surface_resolution")
            )
            by_surface.append((name, *(f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in found_at)))
        yield from grid("surface", ("weight", "resolution"), by_surface)
