"""`llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmgeom.commands import config, folders
from llmgeom.commands.job import Job, JobOutput, show_price
from llmgeom.commands.output import show
from llmgeom.commands.pictures import Shown, run
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.flags import LARGEST_SEED, flag, output_flag, prompt_flag
from llmgeom.progress import bar, first_word, within

if TYPE_CHECKING:
    from llmgeom.model.model import Model
    from llmgeom.plan import Plan
    from llmgeom.record import Record
    from llmgeom.world import World

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


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """The options of `llmgeom evidence`."""

    VERB: ClassVar[str] = "evidence"

    processes: tuple[str, ...] = flag(
        (),
        "Draw the evidence from this world, e.g. markov:symbols=3 (`llmgeom list worlds`), or all. Repeat for several. "
        "[default: two-point]",
        name="--process",
    )
    surfaces: tuple[str, ...] = flag(
        (),
        "list, sentences, code; with --length spaces, commas, lines, words, anew. [default: all; spaces]",
        listed=True,
        name="--surface",
    )
    ks: tuple[int, ...] = flag((), "Numbers of observations shown. [default: the world's own]", name="--k", listed=True)
    n: int = flag(50, "Prompts for each number of observations.", least=10)
    length: int = flag(
        0,
        "Show long sequences of so many symbols instead, and read the belief out at each layer. 512 is usual.",
        least=16,
    )
    nulls: int = config.draws_flag("Untrained copies, and shuffles of the prompts where used")
    seed: int = flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED)
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-WORLD-HASH]")
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
    RunConfig,
    JobOutput,
    examples=[
        "llmgeom evidence --model EleutherAI/pythia-410m --k 0,2,4,8,16",
        "llmgeom evidence --model EleutherAI/pythia-410m --process markov --process edge-hmm:process=rrxor",
        "llmgeom evidence --process edge-hmm --length 512 --control-models 2",
    ],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Test whether a model weighs the evidence in its context by Bayes' rule.

    Prompts show observations of a world with neutral words. The answers are compared with the exact posterior, with
    controls and with simpler observers. Two labels in any order are SULA, with its controls.
    """
    if settings.length:
        if not settings.processes or len(settings.surfaces) > 1 or output.dry_run:
            raise UserError(
                f"--length {settings.length}: give one --process, e.g. edge-hmm, or several of which each sequence "
                "follows one; at most one --surface; and no --dry-run"
            )
        settings.refuse_unread(("ks", "n", "batch_tokens"), f"--length {settings.length}")
        return run(replace(settings, plain=True), output, lambda subject: in_context(subject, settings))
    prepared = out, jobs = prepare(settings)
    if output.dry_run:
        return show_price(settings, jobs[0].located, [job.ask for job in jobs], out, output)
    first_word(f"evidence of {settings.model}: drawing prompts, then the model", output.silent)
    with bar(output.silent):
        records = perform(settings, prepared=prepared)[1]
    return show(out, records, output, between=[*lines(records), ""])


def in_context(subject: Model, settings: RunConfig) -> Shown:
    """Beliefs about one long sequence after another, what simpler readers know, and whether the answer uses them."""
    from llmgeom.stats.resampling import least_at_best
    from llmgeom.verbs.belief_use import BELIEF, CHANCE, PATCH
    from llmgeom.verbs.beliefs import ABLATED, ALL, KL, SHUFFLED

    several = [*settings.processes] if len(settings.processes) > 1 else next(iter(settings.processes))
    options = {"length": settings.length, "controls": settings.nulls, "seed": settings.seed}
    found = subject.beliefs(several, rendering=(settings.surfaces or ("spaces",))[0], **options)

    def spans(reading: Any, name: str, at: int, digits: int = 3) -> str:
        value, low, high = (reading[f"{name}{end}"][at] for end in ("", ", low", ", high"))
        return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    layer, beyond = int(found["R2"].argmax()), int(found[ALL].argmax())
    best = found.attrs["best rival"]
    copies = found.values.get(f"{ALL}, highest of untrained copies", found[ALL] * 0).max()
    enough = [name for name in found.rivals if name.startswith("last") and found.rivals[name] >= found["R2"][layer]]
    if least_at_best(found[ALL][beyond], found[f"{ALL}, low"][beyond], len(found[ALL])) > max(copies, 0):
        said = "It goes beyond what all rivals know: of what they leave together the stream has"
    elif enough:
        said = f"A short memory does as well ({enough[0]}: {found.rivals[enough[0]]:.3f}): beyond all rivals there is"
    else:
        said = f"The best rival, {best}, has {found.rivals[best]:.3f}, and beyond all rivals nothing is shown: there is"
    sentence = (
        f"The exact belief is read out with R2 {spans(found, 'R2', layer)} in layer {layer}, held out by sequence. "
        f"{said} {spans(found, ALL, beyond)} (partial R2, layer {beyond})."
    )
    also = {"untrained copies": "R2, highest of untrained copies", "shuffled order": SHUFFLED, "no attention": ABLATED}
    also["beyond all rivals, untrained copies"] = f"{ALL}, highest of untrained copies"
    controls = "; ".join(f"{name} {found[of].max():.3f}" for name, of in also.items() if of in found.values)
    counter = found.answers.attrs["best counter"]
    away = {name: found.answers[f"KL of {name}"][-1] for name in (counter, "an even answer")}
    details = [
        f"Highest R2 of controls: {controls or 'none were asked for'}.",
        f"At the end the next symbol is {spans(found.answers, KL, -1)} bits from the exact one, {counter} "
        f"{away[counter]:.3f}, an even answer {away['an even answer']:.3f}; the symbols have "
        f"{found.attrs['mass of the symbols']:.0%} of the probability.",
    ]
    pictures = [(found, "R2"), (found, ALL), (found.answers, KL), (found.answers, "R2 of the belief")]
    if found.used is None:
        details.append("Whether the belief is used is not asked: the last symbol says what comes next.")
    else:
        layer = min(layer, len(subject.blocks) - 1)
        moves = {name: found.used.ticks["edit"].index(f"layer {layer}: {name}") for name in (PATCH, BELIEF, CHANCE)}
        shares = "; ".join(f"{name} {spans(found.used, 'moved', at, 2)}" for name, at in moves.items())
        details.append(f"Moved at the input of layer {layer}, the answer goes this share of the exact way: {shares}.")
        pictures += [(found.used, "moved"), (found.used, "size")]
    rows = [f"{name:<28}{r2:>8.3f}" for name, r2 in found.rivals.items()]
    return Shown([sentence], pictures, [*details, "", f"{'reader':<28}{'R2':>8}", *rows, ""], found.simplex())


def prepare(settings: RunConfig) -> tuple[Path, list[Job]]:
    """The run folder, and the job of each world, of several each in a folder of its own.

    Raises UserError for all that can be checked before weights load.
    """
    from llmgeom.prompts.text import title

    chosen, located = {title(world): world for world in worlds(settings)}, settings.locate()
    what = "all" if "all" in settings.processes else folders.safe("+".join(chosen))
    out = Path(settings.out or folders.run_folder(settings.model, located, what, settings.spec(located)))
    jobs = []
    for name, world in chosen.items():
        own, place = settings, folders.safe(name)
        if len(chosen) > 1:
            own = replace(settings, processes=(name,), out=str(out / place))
        jobs.append(Job(own, located, place, partial(question, world=world, settings=own)))
    return out if len(jobs) > 1 else jobs[0].folder, jobs


def worlds(settings: RunConfig) -> list[World]:
    """The worlds of a configuration, `all` for every one with text. Raises UserError."""
    from llmgeom.prompts import text
    from llmgeom.wind_tunnels import load_world, names

    given = settings.processes or ("two-point",)
    specs = [spec for one in given for spec in (names(text=True) if one == "all" else (one,))]
    if settings.ks and max(settings.ks) == 0:
        raise UserError("--k 0: without an observation there is nothing to weigh; give a number above 0, too")
    chosen = list({text.title(world): world for world in (load_world(spec, text=True) for spec in specs)}.values())
    for world in chosen:
        text.check(world, settings.n, settings.ks or world.KS, settings.surfaces)
    return chosen


def perform(
    settings: RunConfig, subject: Model | None = None, prepared: tuple[Path, list[Job]] | None = None
) -> tuple[Path, list[Record]]:
    """Check, load, ask and save: a record for each world, the profile of several, and one page; (folder, records).

    Raises UserError: an unknown world or one that cannot be; prompts that the model's tokenizer or longest input cannot
    take.
    """
    from llmgeom.files import digest
    from llmgeom.probes.evidence.answers import PROFILE, profile
    from llmgeom.run import read_all

    out, jobs = prepared or prepare(settings)
    if len(jobs) == 1:
        return out, [jobs[0].perform(subject)[1]]
    subject = settings.subject(jobs[0].located, subject)
    runs = {job.what: job.begin(subject) for job in jobs}
    read_all(runs)
    records = []
    for job in jobs:
        with within(job.what):
            records.append(job.finish(runs[job.what]))
    if whole := profile(records, {"spec": digest({"run": settings.spec(jobs[0].located), "process": PROFILE})}):
        whole.save(out / PROFILE)
        records.insert(0, whole)
    folders.write_page(out, records)
    return out, records


def question(subject: Model, world: World, settings: RunConfig) -> Plan:
    """The question of one world: its answers, and the belief in the residual stream; of two exchangeable symbols also
    whether the answers stay where the exact one does (`prompts.text.CONDITIONS`).

    Raises UserError for a model without a tokenizer, and for prompts that it cannot read.
    """
    from llmgeom.plan import Plan
    from llmgeom.probes.evidence import answers, belief, controls
    from llmgeom.prompts import text
    from llmgeom.wind_tunnels.exchangeable import Exchangeable

    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    ks = settings.ks or world.KS
    options = {"surfaces": settings.surfaces, "positions": subject.facts["positions"]}
    drawn = partial(text.sample, world, settings.n, settings.seed, subject.tokenizer, **options)
    probes: dict[str, Any] = {answers.PROCESS: answers, belief.BELIEF: belief, belief.SIMPLEX: belief.AS_POINT}
    conditions = {}
    if isinstance(world, Exchangeable) and world.outcomes == 2 and max(ks) >= controls.LEAST_SHOWN:
        changed = [k for k in ks if k >= controls.LEAST_SHOWN]
        conditions = {name: drawn(ks=changed, condition=name) for name in controls.VARIANTS}
        probes[controls.CONTROLS] = controls
    return Plan.of(
        subject, drawn(ks=ks), probes, settings.nulls, settings.seed, settings.batch_tokens, conditions, whole=False
    )


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Accuracy, weight and resolution: by k, by surface, or by world."""
    from llmgeom.probes.evidence.answers import BIAS, LOSS, MASS, PROCESS, RESOLUTION, WEIGHT, found
    from llmgeom.reports.text import grid

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
    yield from grid("world", head, rows, 120)
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
