"""The whole of `llmgeom ablate`: edits of the entropy axis, or ablation of each head or block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from llmgeom import claims, wind_tunnels
from llmgeom.batch import Batch
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.commands.scan import POOL, SEQUENCES
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model import hub
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Site
from llmgeom.model.subject import Positions, Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.probes.interventions.axis import Mode
from llmgeom.probes.interventions.axis_ablation import (
    axes_of,
    edit_axes,
    edit_each_layer,
    edit_readout_direction,
)
from llmgeom.probes.interventions.axis_results import (
    CONTROL,
    measure_axis,
    measure_layers,
    measure_positive_control,
)
from llmgeom.probes.interventions.component_ablation import Kind
from llmgeom.probes.interventions.component_run import examine_components
from llmgeom.probes.interventions.splits import PromptSplit
from llmgeom.progress import Progress, prefixed
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.prompts.sula import Sula, available, prior
from llmgeom.provenance import took
from llmgeom.record import Record
from llmgeom.result import Measured, Result
from llmgeom.run import few_draws
from llmgeom.task import Task
from llmgeom.wind_tunnels.exactness import require_exact

DIRECTIONS = ("pc1", "ridge")
WHERE: tuple[Positions, ...] = ("query", "all")


def examine(
    subject: Subject,
    batch: Batch,
    *,
    directions: Sequence[str] = DIRECTIONS,
    mode: Mode = "project-out",
    layers: Sequence[int] | Literal["last", "each"] = "last",
    positions: Positions = "query",
    controls: int = 199,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Edit the entropy axis: axes from the estimation half, effects on the evaluation half.

    Args:
        controls: draws of each kind of control edit.

    Raises:
        UserError: a layer that does not exist; fewer than 5 clusters in a half; a batch that has query positions.
    """
    started, last = time.time(), len(subject.blocks) - 1
    chosen = tuple(sorted(set(layers))) if not isinstance(layers, str) else (last,)
    if wrong := [layer for layer in chosen if not 0 <= layer <= last]:
        raise UserError(f"--layers {wrong[0]}: {subject.name} has layers 0 to {last}; nothing was edited")
    split = PromptSplit.of(subject, batch, {Site.VALUE}, seed, batch_tokens)

    def axis(direction: str) -> Result:
        probe, axes = f"ablation_{direction}", axes_of(split, direction, chosen)
        return measure_axis(probe, edit_axes(split, axes, mode, positions, controls, prefixed(progress, probe)))

    def each_layer(direction: str) -> Result:
        return measure_layers(edit_each_layer(split, direction, mode, positions, controls, progress))

    def positive_control() -> Result:
        dose = edit_readout_direction(split, controls, prefixed(progress, CONTROL))
        return measure_positive_control(dose, split.clusters)

    measures: dict[str, Callable[[], Result]] = {CONTROL: positive_control}
    for direction in directions:
        measures[f"ablation_{direction}"] = partial(axis, direction)
        if layers == "each":
            measures[f"ablation_{direction}_layers"] = partial(each_layer, direction)
    results, unmeasured = {}, {}
    for name, measure in measures.items():
        try:
            results[name] = measure().lowered()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
    results = claims.judge(results)
    edited = {"directions": list(directions), "mode": mode, "layers": list(chosen), "positions": positions}
    return replace(
        split.record(results, unmeasured, controls, {"axis": edited, **(facts or {})}),
        warnings=tuple(_limits(subject, results, controls)),
        run=took(started),
    )


def _limits(subject: Subject, results: Mapping[str, Measured], controls: int) -> Iterator[str]:
    yield from few_draws(controls)
    if CONTROL not in results or results[CONTROL].estimates[0].verdict not in ("holds", "small"):
        yield "the positive control failed: that an axis does no more than other edits says nothing here"
    if subject.facts.get("note"):
        yield subject.facts["note"]


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom ablate` is asked for."""

    VERB: ClassVar[str] = "ablate"

    heads: Literal["all"] | None = flag(None, "Replace each head, one at a time, instead of editing an axis.")
    blocks: Literal["all"] | None = flag(
        None, "Replace each attention, MLP and whole block, one at a time, instead of editing an axis."
    )
    axis: Literal["entropy"] = flag("entropy", "The axis that is edited.")
    directions: tuple[Literal["pc1", "ridge"], ...] = flag(
        DIRECTIONS,
        "pc1: first principal component, as published. ridge: the weights that predict entropy. Repeat for both.",
        name="--direction",
    )
    mode: Literal["project-out", "keep-only", "steer"] = flag("project-out", "What is done to the axis.")
    layers: str = flag("last", "last, each (one at a time), or e.g. 3,7 (together).")
    positions: Literal["query", "all"] | None = flag(
        None,
        "query: the final token, or every query of a task's sequence. all: every position; with "
        "heads or blocks on prompts, all but the first. [default: query; all on a task]",
    )
    domain: str = flag("mixed", "Prompt domain.")
    sula: bool = flag(False, "Use label sequences instead of a domain; see `llmgeom evidence`.")
    prior: str = flag("two-point", "With --sula: the prior of the label sequences.")
    ks: tuple[int, ...] = flag((1, 2, 4, 8), "With --sula: numbers of labels shown.", name="--k", listed=True)
    n: int | None = flag(None, "Prompts. [default: 75; 20 for each k with --sula; 200 sequences]", least=1)
    limit: int | None = flag(None, "Draw a pool of at most LIMIT prompts.", least=20)
    task: str | None = flag(None, "Heads and blocks: use sequences of this task. [default: the model's own, if any]")
    also: tuple[str, ...] = flag((), "Heads and blocks: another training of the same model. Repeat for several.")
    controls: int = flag(199, "Axis: draws of each control.", least=1)
    nulls: int = flag(20, "Heads and blocks: untrained controls.", least=1)
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes prompts, halves and controls.", least=0, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-ablate-DOMAIN-WHAT-HASH]", group="Output")

    @property
    def kind(self) -> Kind | None:
        """Heads, blocks, or None for an axis. Raises UserError where it is more than one of them."""
        if self.heads and self.blocks:
            raise UserError(
                f"--heads {self.heads} with --blocks {self.blocks}: only one of them can be ablated in a run; give one"
            )
        kind: Kind | None = "heads" if self.heads else "blocks" if self.blocks else None
        for field in ("directions", "mode", "layers", "controls") if kind else ("nulls", "also"):
            given, default = getattr(self, field), getattr(RunConfig, field)
            if given != default:
                flag = "--direction" if field == "directions" else f"--{field}"
                said = given[0] if isinstance(given, tuple) else given
                raise UserError(
                    f"--{kind} with {flag} {said}: this flag only applies to an axis; leave one out"
                    if kind
                    else (
                        f"{flag} {said}: an axis is compared with --controls; leave it out, or give --heads or --blocks"
                    )
                )
        return kind

    def tunnel(self, located: hub.Located) -> Task | None:
        """The task that is asked for, or else the model's own where no prompts are asked for. Raises UserError for one
        that breaks its own laws, and beside prompts."""
        prompts = [
            flag
            for flag, given in (
                ("--sula", self.sula),
                (f"--domain {self.domain}", self.domain != RunConfig.domain),
                (f"--limit {self.limit}", self.limit),
            )
            if given
        ]
        if self.task and prompts:
            raise UserError(f"--task {self.task} with {prompts[0]}: a task brings its own sequences; leave one out")
        spelt = self.task or (hub.tunnel_task(located.path) if hub.tunnel(located.path) and not prompts else None)
        if spelt is None:
            return None
        task = wind_tunnels.load_task(spelt)
        require_exact(task)
        return task


@config.command(
    RunConfig,
    VerdictOutput,
    examples=[
        "llmgeom ablate --model EleutherAI/pythia-410m --layers 12 --positions all",
        "llmgeom ablate --model EleutherAI/pythia-70m --heads all --domain math",
        "llmgeom ablate --model runs/seed0 --also runs/seed1 --also runs/seed2 --heads all",
    ],
)
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Edit the entropy axis, and compare the change of the output with that of equally large random edits.

    With --heads all or --blocks all: replace each head or block, one at a time, and rank them by the change.
    """
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom ablate`: check, load, examine, save the record and its page; (folder, record)."""
    kind = asked.kind
    layers: Sequence[int] | Literal["last", "each"] = "each" if asked.layers == "each" else "last"
    if asked.layers not in ("last", "each"):
        layers = config.numbers("--layers", asked.layers, "last, each", "3,7")
    directions, mode, positions = asked.directions, asked.mode, asked.positions
    located = asked.locate()
    task = asked.tunnel(located)
    if task and not kind:
        raise UserError(
            f"{task.title}: an axis can only be edited on prompts; with a task use --heads all or --blocks all"
        )
    command = asked.command()
    # A head of a task is silenced everywhere, as published: it may write where nothing is asked yet.
    positions = positions or ("all" if task else "query")
    asked = replace(asked, positions=positions)
    n = asked.n or (SEQUENCES if task else 20 if asked.sula else 75)
    if n < (least := 5 if asked.sula else 20):
        raise UserError(f"--n {n}: expected at least {least}")
    if asked.sula and (asked.domain != RunConfig.domain or asked.limit):
        flag, value = ("--domain", asked.domain) if asked.domain != RunConfig.domain else ("--limit", asked.limit)
        raise UserError(f"--sula with {flag} {value}: label sequences have no domain and no pool; leave one out")
    if asked.sula and min(asked.ks) < 1:
        raise UserError(
            f"--k {','.join(map(str, asked.ks))}: expected at least 1: without a label there is no evidence"
        )
    believed, domain = prior(asked.prior), Domain(asked.domain)
    # What is not asked for is not named, so that an axis keeps the hash it had before heads could be asked for.
    without = (
        *(() if kind else ("heads", "blocks", "nulls")),
        *(() if task else ("task",)),
        *(() if asked.also else ("also",)),
    )
    spec = asked.spec(located, without=without)
    drawn = type(task).__name__.lower() if task else "sula" if asked.sula else asked.domain
    what = f"ablate-{drawn}-{kind or asked.mode}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what, spec)
    config.check_folder(out, spec)
    subject = subject or asked.load(located)
    if task:
        batch = task.sample(n, asked.seed, task.test_split)
    elif asked.sula:
        batch = Sula(available(subject.tokenizer), believed, ks=asked.ks).sample(n, asked.seed)
    else:
        pool = fitting(subject, domain.sample(min(POOL, asked.limit or POOL, domain.size()), asked.seed))
        batch = stratify(pool, subject.entropy(pool, batch_tokens=asked.batch_tokens), n, seed=asked.seed)
    examined = partial(examine, directions=directions, mode=mode, layers=layers, controls=asked.controls)
    if kind:
        also = [replace(asked, model=one, revision=None).load() for one in asked.also]
        examined = partial(examine_components, kind=kind, task=task, also=also, nulls=asked.nulls)
    record = examined(
        subject,
        batch,
        positions=positions,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens,
        progress=progress,
        facts={"spec": spec, "command": command},
    )
    config.keep(record, out)
    return out, record
