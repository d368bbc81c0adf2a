"""Is the direction along which values are ordered by entropy used? It is edited, and held against edits as large."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom import claims, wind_tunnels
from llmgeom.batch import Batch
from llmgeom.claims import declared, layer_band
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
from llmgeom.probes.interventions import components as parts
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis, Mode, readout_direction, rescaled
from llmgeom.probes.interventions.patching import DOSES, FEW, JUDGED, Bench, Copy, Draw, Effects
from llmgeom.probes.interventions.replacement import Kind, towards
from llmgeom.probes.interventions.splits import Halves
from llmgeom.progress import Progress, prefixed
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.prompts.sula import Sula, available, prior
from llmgeom.provenance import took
from llmgeom.record import Record
from llmgeom.result import Estimate, Figure, Measured, Result, quantity
from llmgeom.run import few_draws
from llmgeom.stats.resampling import jackknife
from llmgeom.stats.tests import spearman
from llmgeom.task import Task
from llmgeom.wind_tunnels.exactness import require_exact

DIRECTIONS = ("pc1", "ridge")
MODES: tuple[Mode, ...] = ("cut", "only", "shift")
_MODE: dict[str, Mode] = {"project-out": "cut", "keep-only": "only", "steer": "shift"}
CONTROL = "ablation_control"
KL, EQUAL, ERROR = "KL of the edit", "KL of the edit, beside equal edits", "rise of the read-out's error"
EVIDENCE, ODDS = "rise of the evidence error", "log-odds moved"


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ablation(Result):
    """What the edit of one axis does, beside edits as large."""

    TITLE: ClassVar[str] = "Ablation of the entropy axis"
    MEANING: ClassVar[str] = (
        "The values are moved along the direction by which they are ordered by entropy, and what the model then says "
        "is compared with what it said. An axis that is used changes it more than directions moved as far, and "
        "more than others that carry as much variance; one that can only be read does not."
    )
    COMPUTED: ClassVar[str] = (
        "Axis from half of the units, effects on the other. z = (x - mean) / sd, c = z . u; cut: x - dose sd (c u); "
        "only: x - dose sd (z - c u); shift: x + dose spread sd u. Decided at dose 1, or over shifts of -2 and 2. KL "
        "of the next-token distributions, clean against edited. Read-out: ridge of entropy on the last residual "
        "stream, fitted on the clean first half. Intervals are jackknifed over units. Never measured: c itself after "
        "the edit, which is so by construction."
    )
    NULL: ClassVar[str] = (
        "Same size: random directions of the space that the values span, orthogonal to the axis, moved at each "
        "position exactly as far. Same variance: random sets of the other principal components with the "
        "variance of the axis."
    )
    FAILURE_MODES: ClassVar[str] = (
        "At the final token of one layer only what this token passes to itself there is edited. Two edits of the same "
        "variance on one half differ on the other: compare their lengths. Where even replacing the values by their "
        "mean does little, nothing about the axis follows."
    )

    dose: np.ndarray = quantity("dose", "dose", "of the edit")
    kl: np.ndarray = quantity(
        "dose",
        "bits",
        "KL(clean || edited), mean over prompts",
        Figure("curve", band="kl_null", interval="kl_interval"),
    )
    kl_null: np.ndarray = quantity("dose bound", "bits", "band of the controls, the higher kind")
    kl_interval: np.ndarray = quantity("dose bound", "bits", "95 % interval over units")
    error: np.ndarray = quantity("dose", "bits^2", "rise of the read-out's error", Figure("curve", band="error_null"))
    error_null: np.ndarray = quantity("dose bound", "bits^2", "band of the controls, the higher kind")
    length: np.ndarray = quantity("edit", "of the values' own", "mean length of the edits that decide, final token")
    scale: float = quantity("", "bits", "KL when the values are replaced by their mean: what there is to lose")
    tenth: float = quantity("", "bits", "a tenth of that")
    share: float = quantity("", "fraction", "of the standardised variance that lies along the axis, first half")
    rho: float = quantity("", "rho", "Spearman's, of c and entropy in the half that is measured")
    step: np.ndarray = quantity(
        "layer coordinate",
        "units of the values",
        "spread sd u: what a shift of dose 1 adds to the edited layers' values",
    )
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layers(Result):
    """The same edit at every layer, one at a time."""

    TITLE: ClassVar[str] = "Ablation of the entropy axis, layer by layer"
    MEANING: ClassVar[str] = (
        "Each layer alone, with its own axis. The layer that decides is the last, declared before; none is picked here."
    )
    COMPUTED: ClassVar[str] = "As for the last layer, at the dose that decides."
    NULL: ClassVar[str] = f"The same two kinds of control, {FEW} draws a layer; the higher band."
    FAILURE_MODES: ClassVar[str] = "Many layers, no correction: one that leaves its band by a little means nothing."

    kl: np.ndarray = quantity(
        "layer", "bits", "KL(clean || edited), mean over prompts", Figure("curve", band="kl_null", beside="tenth")
    )
    kl_null: np.ndarray = quantity("layer bound", "bits", "band of the controls")
    tenth: np.ndarray = quantity(
        "layer", "bits", "a tenth of the KL when the layer's values are replaced by their mean"
    )
    estimates: tuple[Estimate, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found(Result):
    """A direction that must be found: where it is not, no other result here says that a direction is unused."""

    TITLE: ClassVar[str] = "Positive control: the read-out direction of two tokens"
    MEANING: ClassVar[str] = (
        "Removing from the last layer's values what its output weights turn into the log-odds of two tokens must move "
        "these log-odds, or the instrument is blind here."
    )
    COMPUTED: ClassVar[str] = (
        "d = sum over the query heads of each kv head of W_O (g * (u_A - u_B)): u rows of the output embedding, g the "
        "final norm's weight, A and B the two labels or the two likeliest tokens. x - dose ((x - mean) . d) d / |d|^2 "
        "at the final token."
    )
    NULL: ClassVar[str] = "Same size: random directions of the values' span, orthogonal to d, moved exactly as far."
    FAILURE_MODES: ClassVar[str] = (
        "d is exact where attention is added to the last residual stream as it is; the last MLP and norms after "
        "attention are passed over. A final token that does not attend to itself passes nothing on."
    )

    dose: np.ndarray = quantity("dose", "dose", "of the edit")
    odds: np.ndarray = quantity(
        "dose", "bits", "|change of the log-odds of the two tokens|, mean", Figure("curve", band="odds_null")
    )
    odds_null: np.ndarray = quantity("dose bound", "bits", "band of random edits of the same size")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()


# ---- measuring ------------------------------------------------------------------------------------------------------


def _together(axes: Mapping[int, Axis], mode: Mode, count: int, seed: int) -> tuple[Draw, dict[str, list[Draw]]]:
    """The edit of several layers' axes at once, and controls that are drawn for each layer alone and made at once."""
    drawn = {layer: axis.draws(mode, count, (seed, layer)) for layer, axis in axes.items()}
    kinds = [kind for kind in (SIZE, VARIANCE) if all(kind in of for of in drawn.values())]

    def at(kind: str, i: int) -> Draw:
        return lambda dose: {layer: of[kind][i](dose) for layer, of in drawn.items()}

    def own(dose: float) -> Copy:
        return {layer: axis.itself(mode, dose) for layer, axis in axes.items()}

    return own, {kind: [at(kind, i) for i in range(count)] for kind in kinds}


def _scale(bench: Bench, axes: Mapping[int, Axis]) -> float:
    """Bits: KL when the values are replaced by half A's mean, constant coordinates too."""
    return float(bench.run([{n: towards(axis.mean[None]) for n, axis in axes.items()}])["kl"].mean())


def _lengths(
    values: Mapping[int, Tensor], axes: Mapping[int, Axis], dose: float, some: Sequence[Sequence[Draw]]
) -> np.ndarray:
    """[edit] mean length of what is added at a dose over that of x - mean; some: the draws of each edit."""
    whole = {n: (x - axes[n].mean).norm(dim=1).mean() for n, x in values.items()}

    def of(draw: Draw) -> float:
        copy = draw(dose)
        moved = {n: copy[n](x, torch.arange(len(x))) for n, x in values.items()}
        return float(np.mean([added.norm(dim=1).mean() / whole[n] for n, added in moved.items()]))

    return np.array([np.mean([of(draw) for draw in draws]) for draws in some])


def measure_axis(
    probe: str,
    bench: Bench,
    axes: Mapping[int, Axis],
    values: Mapping[int, Tensor],
    mode: Mode,
    count: int,
    seed: int,
    tell: Progress | None,
) -> Ablation:
    """The axes of `bench.places` edited together, against `count` draws of each control. UserError: few units."""
    own, draws = _together(axes, mode, count, seed)
    made, clusters, doses = Effects.of(bench, mode, own, draws, tell), np.array(bench.batch.cluster), DOSES[mode]
    scale, warnings = _scale(bench, axes), []
    last = max(axes)
    c = axes[last].z(values[last]) @ axes[last].u
    if VARIANCE not in draws:
        least = min(axis.shortfall for axis in axes.values())
        warnings.append(
            f"no edit of the same variance: all other components carry {least:.2f} of the axis's; held against edits "
            "of the same size alone, the result is a measurement and no claim"
        )
    # Where there is less to lose than the effect of interest, FAIL is as good as certain; and where a tenth of it is
    # less than the margin, so is equivalence.
    whole = VARIANCE in draws
    open_ = {KL: scale > declared(probe)[KL].effect, EQUAL: scale / 10 > declared(probe)[EQUAL].margin}
    for name in [name for name, is_open in open_.items() if not is_open]:
        warnings.append(
            f"replacing the values by their mean changes {scale:.3g} bits, too little for '{name}' to be decided by "
            f"{declared(probe)[name].smallest:g} bits: it is a measurement and no claim"
        )
    named = [(name, "kl", whole and is_open) for name, is_open in open_.items()] + [(ERROR, "error", True)]
    named += [(EVIDENCE, "evidence", True)] if bench.exact is not None else []
    spans = [jackknife(np.mean, each, clusters) for each in made.own["kl"]]
    return Ablation(
        dose=np.array(doses),
        kl=made.own["kl"].mean(1),
        kl_null=made.bands("kl"),
        kl_interval=np.array([[span.low, span.high] for span in spans]),
        error=made.own["error"].mean(1),
        error_null=made.bands("error"),
        length=_lengths(values, axes, doses[JUDGED[mode][-1]], [[own], *(some[:FEW] for some in draws.values())]),
        scale=scale,
        tenth=scale / 10,
        share=float(np.mean([axis.share for axis in axes.values()])),
        rho=spearman(c.numpy(), bench.entropy),
        estimates=tuple(made.estimate(probe, name, effect, clusters, claimed) for name, effect, claimed in named),
        step=np.stack([(axis.sd * axis.spread * axis.u).numpy() for axis in axes.values()]),
        ticks={"dose": doses, "edit": ("axis", *draws), "layer": tuple(axes)},
        warnings=tuple(warnings),
        notes=(f"mode {mode}, layer{'s' * (len(axes) > 1)} {', '.join(map(str, axes))}, {bench.positions} positions",),
    )


def measure_found(
    bench: Bench, layer: int, axis: Axis, direction: Tensor, count: int, seed: int, tell: Progress | None
) -> Found:
    """A layer's values cut along a direction of each prompt's own, d [prompt coordinate] in x, against random
    directions of the span of half A made orthogonal to it and moved as far."""
    d = direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-300)
    span = torch.cat([axis.u[None], axis.others])
    rng = np.random.default_rng([seed, layer, 2])
    random = (torch.from_numpy(rng.standard_normal((count, len(span)))) @ span) * axis.sd

    def cut(x: Tensor, mine: Tensor) -> Tensor:
        return -((x - axis.mean) * mine).sum(1, keepdim=True) * mine

    def own(dose: float) -> Copy:
        return {layer: lambda x, prompt: dose * cut(x, d[prompt])}

    def at(s: Tensor) -> Draw:
        def move(x: Tensor, prompt: Tensor) -> Tensor:
            mine = s - (d[prompt] @ s)[:, None] * d[prompt]
            mine = mine / mine.norm(dim=1, keepdim=True)
            return rescaled(cut(x, mine), cut(x, d[prompt]).norm(dim=1, keepdim=True))

        return lambda dose: {layer: lambda x, prompt: dose * move(x, prompt)}

    made = Effects.of(bench, "cut", own, {SIZE: [at(s) for s in random]}, tell)
    return Found(
        dose=np.array(DOSES["cut"]),
        odds=made.own["odds"].mean(1),
        odds_null=made.bands("odds"),
        estimates=(made.estimate(CONTROL, ODDS, "odds", np.array(bench.batch.cluster)),),
        ticks={"dose": DOSES["cut"]},
    )


# ---- the run --------------------------------------------------------------------------------------------------------


def examine(
    subject: Subject,
    batch: Batch,
    *,
    directions: Sequence[str] = DIRECTIONS,
    mode: Mode = "cut",
    layers: Sequence[int] | Literal["last", "each"] = "last",
    positions: Positions = "query",
    controls: int = 199,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Axes from one half of the units, effects of editing them on the other, `controls` draws of each kind.

    Raises UserError: a layer that does not exist; fewer than 5 units in a half; a batch with positions of its own.
    """
    started, last = time.time(), len(subject.blocks) - 1
    chosen = tuple(sorted(set(layers))) if not isinstance(layers, str) else (last,)
    if wrong := [layer for layer in chosen if not 0 <= layer <= last]:
        raise UserError(f"--layers {wrong[0]}: {subject.name} has layers 0 to {last}; nothing was edited")
    halves = Halves.of(subject, batch, {Site.VALUE}, seed, batch_tokens)
    entropy = halves.entropy
    value = {name: [x.flatten(1).double() for x in one.layers(Site.VALUE)] for name, one in halves.seen.items()}

    def axes(direction: str, layers: Sequence[int]) -> dict[int, Axis]:
        return {
            n: Axis.of(value["fit"][n].numpy(), entropy["fit"], halves.fit.cluster, direction, seed) for n in layers
        }

    def axis(direction: str) -> Ablation:
        probe, at = f"ablation_{direction}", halves.bench(chosen, positions)
        values, tell = {n: value["held"][n] for n in chosen}, prefixed(progress, probe)
        return measure_axis(probe, at, axes(direction, chosen), values, mode, controls, seed, tell)

    def layered(direction: str) -> Layers:
        rows = []
        for n, one in axes(direction, range(last + 1)).items():
            at = halves.bench((n,), positions)
            own, draws = _together({n: one}, mode, min(FEW, controls), seed)
            each, null = Effects.of(at, mode, own, draws, prefixed(progress, f"layer {n}")).judged("kl")
            rows.append(
                (each.mean(), *layer_band({k: d[:, None] for k, d in null.items()})[0], _scale(at, {n: one}) / 10)
            )
        found = np.array(rows)
        return Layers(kl=found[:, 0], kl_null=found[:, 1:3], tenth=found[:, 3])

    def found() -> Found:
        aimed = readout_direction(subject, halves.pair)
        at = halves.bench((last,), "query")
        return measure_found(at, last, axes("pc1", (last,))[last], aimed, controls, seed, prefixed(progress, CONTROL))

    measures: dict[str, Callable[[], Result]] = {CONTROL: found}
    for direction in directions:
        measures[f"ablation_{direction}"] = partial(axis, direction)
        if layers == "each":
            measures[f"ablation_{direction}_layers"] = partial(layered, direction)
    results, unmeasured = {}, {}
    for name, measure in measures.items():
        try:
            results[name] = measure().lowered()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
    results = claims.judge(results)
    edited = {"directions": list(directions), "mode": mode, "layers": list(chosen), "positions": positions}
    return replace(
        halves.record(results, unmeasured, controls, {"axis": edited, **(facts or {})}),
        warnings=tuple(_limits(subject, results, controls)),
        run=took(started),
    )


def _limits(subject: Subject, results: Mapping[str, Measured], controls: int) -> Iterator[str]:
    yield from few_draws(controls)
    if CONTROL not in results or results[CONTROL].estimates[0].verdict != "PASS":
        yield "the positive control was not found: that an axis does no more than other edits says nothing here"
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
        "query: the final token, or every query of a task. all: every position; with heads and blocks of prompts all "
        "but the first. [default: query; all on a task]",
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
            raise UserError(f"--heads {self.heads} with --blocks {self.blocks}: one or the other is replaced; give one")
        kind: Kind | None = "heads" if self.heads else "blocks" if self.blocks else None
        for field in ("directions", "mode", "layers", "controls") if kind else ("nulls", "also"):
            given, default = getattr(self, field), getattr(RunConfig, field)
            if given != default:
                flag = "--direction" if field == "directions" else f"--{field}"
                said = given[0] if isinstance(given, tuple) else given
                raise UserError(
                    f"--{kind} with {flag} {said}: that says how an axis is edited; leave one out"
                    if kind
                    else f"{flag} {said}: an axis is held against --controls; leave it out, or give --heads or --blocks"
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
            raise UserError(f"--task {self.task} with {prompts[0]}: a task's sequences are no prompts; leave one out")
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
    directions, mode, positions = asked.directions, _MODE[asked.mode], asked.positions
    located = asked.locate()
    task = asked.tunnel(located)
    if task and not kind:
        raise UserError(f"{task.title}: an axis is edited in prompts; of a task give --heads all or --blocks all")
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
        examined = partial(parts.examine, kind=kind, task=task, also=also, nulls=asked.nulls)
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
