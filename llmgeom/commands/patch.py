"""The whole of `llmgeom patch`: interchange interventions on sequences of a task, or on prompts of a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmgeom.commands import config, folders
from llmgeom.commands.job import Job, JobOutput
from llmgeom.commands.pictures import Shown, run
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.flags import LARGEST_SEED, flag, output_flag, places, prompt_flag

if TYPE_CHECKING:
    from llmgeom.model.model import Model
    from llmgeom.plan import Plan
    from llmgeom.probes.labels.directions import SavedDirection
    from llmgeom.world import World

SHOWN = 4  # places that the terminal names
SUBSPACES, DIRECTIONS = 39, 5  # random controls, and of text
# Flags that patching of two prompts does not read.
OF_EVIDENCE = (
    "task", "process", "ks", "axis", "prompts", "pair", "n", "layers", "controls", "nulls", "batch_tokens", "seed",
    "chat",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig(config.ChatConfig):
    """The options of `llmgeom patch`."""

    VERB: ClassVar[str] = "patch"
    LISTS: ClassVar[bool] = True

    clean: str | None = prompt_flag(None, "A prompt whose activations are patched into --corrupt, of as many tokens.")
    corrupt: str | None = prompt_flag(None, "The prompt that is patched.")
    answers: tuple[str, ...] = prompt_flag((), "The two answers, of --clean and of --corrupt: Paris,Rome.", listed=True)
    pairs: str | None = prompt_flag(
        None,
        "Many pairs: .csv or .jsonl with the columns clean, corrupt, answer, instead; all of one length in tokens.",
    )
    at: Literal["residual", "attn_out", "mlp_out", "heads", "edges"] = prompt_flag(
        "residual", "What is patched, of prompts; edges: each head's direct path to the reader of --to."
    )
    to: str = prompt_flag("", "With --at edges: LAYER.HEAD.key (or query, value) that reads. [default: the answer]")
    metric: Literal["logit-difference", "log-probability"] = prompt_flag(
        "logit-difference", "Of the two answers, or of the first one."
    )
    task: str | None = flag(None, "NAME or NAME:field=value,... [default: the task the model was trained on]")
    process: str | None = flag(None, "A process in text instead, e.g. two-point (`llmgeom list worlds`).")
    ks: tuple[int, ...] = flag(
        (), "With --process: numbers of observations. [default: the process's own]", name="--k", listed=True
    )
    axis: str | None = flag(
        None, "Exchange the component along this direction.safetensors alone, with --prompts or --process."
    )
    prompts: str | None = flag(
        None, "With --axis: prompts with the direction's label; each is exchanged with one of another value."
    )
    pair: tuple[str, ...] = flag((), "With --prompts: two answers, whose log-odds are measured.", listed=True)
    n: int = flag(
        200,
        "Sequences of the task (half of them estimate the subspace that is patched); with --process: its prompts, "
        "spread over the numbers of --k. With --prompts it is not read: every prompt of the file is.",
        least=20,
    )
    layers: str = flag("all", "Patch the input of these layers, one at a time: numbers and slices, e.g. 0:12:2,-1.")
    controls: int | None = flag(
        None, "Random subspaces or directions. [default: 39; with --process alone 5]", least=1, name="--random-edits"
    )
    exact: bool = flag(
        False,
        "With --process: patch controls at every layer, too, not at eight, and every edge of attention, not the 24 "
        "largest by gradients.",
    )
    nulls: int = config.draws_flag("Untrained copies")
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes sequences, donors, halves and controls.", least=0, most=LARGEST_SEED)
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-patch-TASK-HASH]")


@config.command(
    RunConfig,
    JobOutput,
    examples=[
        'llmgeom patch --clean "The capital of France is" --corrupt "The capital of Italy is" --answers Paris,Rome',
        "llmgeom patch --model runs/bijection --layers 0,1",
        "llmgeom patch --model EleutherAI/pythia-410m --process two-point",
        "llmgeom patch --axis runs/mine/direction.safetensors --prompts mine.jsonl --pair yes,no",
    ],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Activation patching: activations of one prompt replace those of another.

    Of two prompts, or of pairs from a file, place by place: where is the answer decided? With --process or in a wind
    tunnel evidence is exchanged (an interchange intervention), and the answer compared with the exact counterfactual.
    """
    if not (settings.clean or settings.corrupt or settings.pairs):
        settings.refuse_unread(("answers", "at", "to", "metric"), "no --clean, --corrupt or --pairs")
        return prepare(settings).show(output)
    if settings.pairs:
        settings.refuse_unread(("clean", "corrupt", "answers"), f"--pairs {settings.pairs}")
    elif not (settings.clean and settings.corrupt and len(settings.answers) == 2):
        raise UserError(
            "--clean, --corrupt and --answers belong together: two prompts, and two answers, e.g. Paris,Rome"
        )
    settings.refuse_unread(OF_EVIDENCE, "two prompts")
    if output.dry_run:
        raise UserError("--dry-run with two prompts: they take seconds; leave it out")
    return run(settings, output, lambda subject: look(subject, settings))


def look(subject: Model, settings: RunConfig) -> Shown:
    """Which places restore the clean prompt's answer, by patches and by gradients."""
    import numpy as np

    from llmgeom.verbs.lens import following

    if settings.pairs:
        table = read_pairs(settings.pairs)
        clean, corrupt = table["clean"], table["corrupt"]
        answers = [
            tuple(following(subject, word) for word in two)
            for two in zip(table["answer"], table["instead"], strict=True)
        ]
    else:
        clean, corrupt = [str(settings.clean)], [str(settings.corrupt)]
        answers = [tuple(following(subject, word) for word in settings.answers)]
    options: dict[str, Any] = {"at": settings.at, "metric": settings.metric.replace("logit-", "logit ")}
    if settings.to:
        parts = settings.to.split(".")
        if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
            raise UserError(f"--to {settings.to}: expected LAYER.HEAD.query, LAYER.HEAD.key or LAYER.HEAD.value")
        options["to"] = (int(parts[0]), int(parts[1]), parts[2])
    patch = subject.patch(clean, corrupt, answers, **options)
    ends, measured = (patch.attrs["clean"], patch.attrs["corrupt"]), next(iter(patch.values))
    of = "the two answers" if measured == "logit difference" else f"the answer {str(answers[0][0]).strip()!r}"
    sentences = [f"The {measured} of {of} is {ends[0]:.2f} clean and {ends[1]:.2f} corrupt."]
    pictures = [(patch, measured)]
    if "restored" in patch.values:
        across = [*patch.coords][1]
        ticks = patch.ticks.get(across, tuple(map(str, patch.coords[across])))
        restored = patch["restored"]
        best = np.argsort(-restored, axis=None)[:SHOWN]
        named = [(layer, place) for layer, place in zip(*np.unravel_index(best, restored.shape), strict=True)]
        if settings.at == "residual":
            said = []
            for place, group in groupby(range(len(restored)), key=lambda layer: int(restored[layer].argmax())):
                first, *_, last = [*(layers := [*group]), layers[-1]]
                said.append(
                    f"{ticks[place].strip()!r}, layer" + (f"s {first} to {last}" if last > first else f" {first}")
                )
            sentences.insert(0, f"Patched at one position, the input of a layer restores most at {'; '.join(said)}.")
        else:
            each = [
                f"L{layer}H{place}" if across == "head" else f"layer {layer}, {ticks[place].strip()!r}"
                for layer, place in named
            ]
            shown = [f"{name} {restored[at]:.2f}" for name, at in zip(each, named, strict=True)]
            sentences.insert(0, f"Restored by one patch, most: {'; '.join(shown)} (1 is the clean answer).")
        if "restored, low" in patch.values:
            layer, place = named[0]
            low, high = patch["restored, low"][layer, place], patch["restored, high"][layer, place]
            other = patch.values.get("restored by another pair's prompt")
            sentences.append(
                f"The largest is {restored[named[0]]:.2f} [{low:.2f}, {high:.2f}] over {len(clean)} pairs"
                + ("." if other is None else f"; another pair's prompt restores {other[layer, place]:.2f} there.")
            )
        pictures = [(patch, "restored")]
        if settings.at != "edges":
            rough = subject.patch(clean, corrupt, answers, **options, attribution=True)
            off = float(np.sqrt(np.mean((rough["restored"] - restored) ** 2)))
            sentences.append(
                f"Attribution patching, one pass and its gradients, is off by {off:.2f} (rms over {restored.size} "
                "places)."
            )
            pictures.append((rough, "restored"))
    return Shown(sentences, pictures)


def read_pairs(path: str) -> dict[str, list[str]]:
    """The columns of a file of pairs, as text. Raises UserError for one that cannot be read, or lacks a column."""
    import pandas

    try:
        if path.endswith(".csv"):
            table = pandas.read_csv(path, dtype=str, keep_default_na=False)
        else:
            as_written: Any = False
            table = pandas.read_json(path, lines=True, dtype=as_written)
    except (OSError, ValueError) as error:
        raise UserError(f"--pairs {path}: {error}; expected .csv, or .jsonl with an object a line") from error
    if lacking := [name for name in ("clean", "corrupt", "answer", "instead") if name not in table]:
        raise UserError(f"--pairs {path}: no column {lacking[0]!r}; expected clean, corrupt, answer, instead")
    if len(table) < 2:
        raise UserError(f"--pairs {path} holds {len(table)} pairs: expected 2 or more; one is --clean and --corrupt")
    return {name: table[name].astype(str).tolist() for name in ("clean", "corrupt", "answer", "instead")}


def prepare(settings: RunConfig) -> Job:
    """Check what can be checked before weights load. Raises UserError."""
    places("--layers", settings.layers, 1, strict=False)
    if settings.axis is None:
        for name in ("prompts", "pair"):
            if getattr(settings, name):
                raise UserError(f"--{name} is read with --axis FILE; give the direction of an llmgeom probe run")
    else:
        if (settings.prompts is None) == (settings.process is None):
            raise UserError(f"--axis {settings.axis}: give either --prompts FILE or --process NAME")
        settings.refuse_unread(("task", "layers"), f"--axis {settings.axis}")
        if settings.prompts:
            settings.refuse_unread(("ks", "n", "nulls"), f"--prompts {settings.prompts}")
        if settings.pair and (settings.process or len(settings.pair) != 2):
            raise UserError(f"--pair {config.shown(settings.pair)}: expected two answers, e.g. yes,no, with --prompts")
    if settings.process is None:
        settings.refuse_unread(("exact",), "no --process")
        if settings.chat:
            raise UserError("--chat reads lists as messages: give --process NAME")
    elif settings.task:
        raise UserError(
            f"--task {settings.task} and --process {settings.process}: give one of them; evidence is patched in one "
            "source"
        )
    draws = settings.values("seed", "batch_tokens")
    if settings.axis is None and settings.process is None:  # sequences of a task, each with activations of another
        if settings.ks:
            raise UserError(f"--k {config.shown(settings.ks)} is of --process; a task has sequences of its own length")
        from llmgeom.grading import Origin
        from llmgeom.probes.interventions import interchange

        located = settings.locate()
        origin = Origin.of(located.path)
        task = origin.load_world(settings.task, settings.model)
        draws |= settings.values("n", "nulls", "layers") | {"controls": settings.controls or SUBSPACES}
        ask = partial(interchange.question, task=task, warnings=tuple(origin.doubts(task)), **draws)
        return Job(settings, located, f"patch-{type(task).__name__.lower()}", ask)
    from llmgeom.probes.labels.directions import SavedDirection

    saved = None if settings.axis is None else SavedDirection.load(settings.axis)
    if saved and settings.prompts:  # each prompt with the component of one of another value along the direction
        from llmgeom.probes.interventions import label_axis
        from llmgeom.prompts import files

        batch, located = files.read(settings.prompts), settings.locate()
        labels = [str(cell) for cell in batch.column(saved.target)]
        content = {"texts": list(batch.text), "clusters": list(batch.cluster), "labels": labels, "along": saved.plain}
        draws |= {"mode": "exchange", "positions": "query", "controls": settings.controls or SUBSPACES}
        ask = partial(label_axis.question, batch=batch, saved=saved, answers=settings.pair, **draws)
        return Job(settings, located, f"patch-{folders.safe(saved.target)}", ask, content)
    from llmgeom.prompts import text  # prompts of a process, each with activations of one of other evidence
    from llmgeom.wind_tunnels import load_world

    process, located = load_world(str(settings.process), text=True), settings.locate()
    draws |= settings.values("n", "ks", "exact", "nulls", "layers")
    draws |= {"directions": settings.controls or (DIRECTIONS if saved is None else SUBSPACES), "axis": saved}
    content = {} if saved is None else {"along": saved.plain}
    ask = partial(question_of_text, process=process, **draws)
    return Job(settings, located, f"patch-{folders.safe(text.title(process))}", ask, content)


def question_of_text(
    subject: Model,
    process: World,
    *,
    n: int = 200,
    ks: Sequence[int] = (),
    layers: str | Sequence[int] | None = None,
    directions: int = DIRECTIONS,
    axis: SavedDirection | None = None,
    exact: bool = False,
    nulls: int = config.DRAWS,
    seed: int = 0,
    batch_tokens: int = 4096,
) -> Plan:
    """The question of interchange interventions on prompts of a process.

    Args:
        n: prompts, spread over the numbers of observations.
        ks: numbers of observations; by default those of the process above 0.
        axis: a direction, whose component alone is exchanged, at the input of its layer.
        exact: patch every position of every layer.

    Raises:
        UserError: a direction that is not of this model's residual stream; a layer that does not exist; no tokenizer;
            prompts that the model cannot read; too few pairs.
    """
    from llmgeom.plan import Plan
    from llmgeom.probes.interventions.text_pairs import TextPairs
    from llmgeom.probes.interventions.text_patching import PROBE, TextPatchingProbe
    from llmgeom.prompts import text

    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    along: tuple[float, ...] = ()
    if axis is not None:
        axis.check(subject, ("residual",))
        layers, along = (axis.layer,), tuple(axis.vector.tolist())
    chosen = places("--layers", layers, len(subject.blocks))
    ks = tuple(ks) or tuple(k for k in process.KS if k)
    each, positions = -(-n // len(ks)), subject.facts["positions"]
    batch = text.sample(process, each, seed, subject.tokenizer, ks=ks, positions=positions)
    pairs = TextPairs.of(batch, subject.tokens(batch), text.changes(process, batch, seed))
    probe = TextPatchingProbe(text.title(process), pairs, chosen, directions, seed, batch_tokens, along, exact)
    facts: dict[str, Any] = {"interchange": {"layers": list(chosen), "directions": directions, "pairs": len(pairs.x)}}
    if axis is not None:
        where = f"{axis.site.value} {axis.layer}"
        facts["axis"] = {"label": axis.target, "place": where, "mode": "exchange", **axis.read}
    return Plan.of(subject, pairs.x, {PROBE: probe}, nulls, seed, batch_tokens, facts=facts)
