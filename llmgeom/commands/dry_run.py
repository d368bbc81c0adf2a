"""What a scan will run, what that costs and what it can find, told by config, tokenizer and prompts alone."""

from __future__ import annotations

import importlib
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.claims import Claim
from llmgeom.commands.config import ModelConfig
from llmgeom.commands.job import Job
from llmgeom.commands.scan import Plan, sampled
from llmgeom.commands.stability import conditions
from llmgeom.model import hub
from llmgeom.model.batching import plan_batches
from llmgeom.model.loading import default_dtype, undisturbed, usable
from llmgeom.model.running import IN_MEMORY
from llmgeom.model.self_check import probe_batch
from llmgeom.model.subject import Subject
from llmgeom.model.trial import Speed
from llmgeom.plan import MOST, PassPlan, Reading, Selection, measurable, planned
from llmgeom.probe import WHOLE, Needs, Probe
from llmgeom.reports.text import grid
from llmgeom.run import Question
from llmgeom.stats import power
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.rule import LEAST_DRAWS
from llmgeom.stats.tests import needed_n_correlation, needed_n_mean
from llmgeom.stats.verdicts import no_n, too_few

# Measured on one core: seconds to start, and that a probe measures, a row, layer and model. Bytes of a report, and held
# by libraries.
START, MEASURING = 8.0, 6e-5
PAGE, HELD = 3 * 2**20, 150 * 2**20
# A layer's widest activations in numbers of its width; bytes of a row of logits, a word of the vocabulary, besides the
# logits themselves: log-probabilities, probabilities, their product and a copy, in float32.
WIDEST, LOGITS = 8, 16
KV_HEADS = "kv heads"  # the one thing counted that prompts do not add to
UNTRAINED, SHUFFLED, EXAMINED = "untrained controls", "shuffled prompts", "examined by"
WITHOUT_CONTEXT = "control without context"


@dataclass(frozen=True, eq=False)
class Weightless(Subject):
    """A model's shapes without its weights: its tokens are real, its entropies random numbers.

    asked   lengths of the prompts whose entropy was asked for, a call each.
    """

    settings: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def found(cls, settings: ModelConfig, located: hub.Located) -> Weightless:
        """From the config, on torch's meta device. Raises UserError where the model could not be captured."""
        shared: dict[str, Any] = {"revision": located.revision, "local_files_only": located.local_only}
        shared["trust_remote_code"] = settings.trust_remote_code
        own = hub.tunnel(located.path)
        if own:
            importlib.import_module("llmgeom.wind_tunnels.models.architectures")
        try:
            with undisturbed(located.local_only):
                tokenizer = None if own else transformers.AutoTokenizer.from_pretrained(located.path, **shared)
                config = transformers.AutoConfig.from_pretrained(located.path, **shared)
                dtype = default_dtype(settings.dtype, usable(settings.device), config)
                with torch.device("meta"):
                    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:
            raise hub.explain(error, located) from error
        who = cls.of(model, tokenizer, located.name, **hub.tunnel_facts(located.path))
        return who.chat() if getattr(settings, "chat", False) else who

    def lengths(self, batch: Batch) -> np.ndarray:
        """Tokens of each input."""
        return self.tokens(batch).lengths.numpy()

    def entropy(self, batch: Batch | str | Iterable[str], **options: Any) -> np.ndarray:
        """Random: which prompts are drawn is not what the scan will draw; how many, and about how long, is."""
        batch = Batch.of(batch)
        self.settings.append(self.lengths(batch))
        return np.random.default_rng(len(batch)).random(len(batch))

    @property
    def unembed(self) -> Any:
        """Not found without weights; whether it can be is decided when the model is loaded."""

    @property
    def checked(self) -> np.ndarray:
        """Lengths of what a model is tried on where its parts are to be told."""
        return probe_batch(self.facts).tokens.lengths.numpy()


# ---- what is run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """The same inputs through `times` models, or in `times` orders: tokens of each input, the bytes that one such pass
    leaves in memory or in the store, and at how many positions of an input it has logits."""

    stage: str
    times: int
    lengths: np.ndarray
    kept: int = 0
    queried: float = 1.0

    @property
    def tokens(self) -> int:
        return self.times * int(self.lengths.sum())

    def batches(self, batch_tokens: int) -> list[tuple[int, float]]:
        """Of each batch the tokens, with the padding between them, which is computed too, and the rows of logits."""
        plan = plan_batches(self.lengths.tolist(), batch_tokens)
        sizes = [(len(members) * int(self.lengths[members[0]]), len(members) * self.queried) for members in plan]
        return sizes * self.times


@dataclass(frozen=True)
class Source:
    """What a scan of one pool runs, with stand-ins for the prompts that only the model's own entropies can choose.

    rows    of its largest sample: queried positions of all prompts.
    """

    subject: Weightless
    pool: Batch
    batch: Batch
    samples: Mapping[str, Batch]
    modules: Mapping[str, Probe]
    stages: tuple[Stage, ...]
    rows: int

    @classmethod
    def of(cls, plan: Plan, who: Weightless, name: str) -> Source:
        """One pool of a scan."""
        who.settings.clear()
        batch, samples, _ = sampled(plan, who, name)
        settings, modules = plan.request, probes.known(plan.probes)
        sizes = (settings.nulls, settings.seed, settings.batch_tokens)
        question = Question(batch, modules, *sizes, samples, whole=False, selection=Selection(**settings.selected))
        return cls.settings(who, question, plan.pools[name])

    @classmethod
    def settings(cls, who: Weightless, question: Question, pool: Batch) -> Source:
        """What a question runs."""
        batch, samples = question.batch, question.samples
        measured, _ = measurable(who, batch, question.probes, question.selection)
        seeds = (question.controls, question.seed)
        settings = PassPlan.of(who, batch, measured, *seeds, samples, question.whole, question.selection)

        def stages_of(called: str, times: int, readings: Sequence[Reading]) -> Iterator[Stage]:
            for reading in readings:
                work = planned(who, None, replace(reading, edits=()), batch_tokens=question.batch_tokens)
                # A shard names its tensors, in about 110 bytes each: of short prompts that is a sixth of a file.
                tensors = len(work.step_sites) * len(reading.layers or range(who.facts["layers"]))
                kept = sum(work.sizes) + len(work.groups) * (400 + 110 * tensors)
                yield Stage(called, times, work.tokens.lengths.numpy(), kept, float(work.where.sum(1).double().mean()))

        stages = [Stage("check at load", 3, who.checked)]
        stages += [Stage("entropy of pools", 1, lengths, 4 * len(lengths)) for lengths in who.settings]
        stages += stages_of("prompts", 1, settings.own.readings)
        stages += stages_of(UNTRAINED, len(settings.untrained), settings.control.readings)
        if settings.shuffles:
            stages += stages_of(SHUFFLED, len(settings.shuffles), [settings.shuffled(0)])
        stages += stages_of(WITHOUT_CONTEXT, 1, settings.without_context())
        for probe, module in measured.items():
            needs, controls = module.NEEDS, len(settings.untrained) * module.NEEDS.untrained
            for models, cost in ((1, needs.cost), (controls, needs.control_cost or needs.cost)):
                runs = cost(who, settings.null_sample) if cost and models else []
                stages += [Stage(f"{EXAMINED} {probe}", models * times, np.asarray(lengths)) for times, lengths in runs]
        kept = tuple(one for one in stages if one.times and len(one.lengths))
        samples = {name: samples[name] for name in settings.own.places if name in samples}
        every = (settings.main, *(settings.own.places[name][0] for name in samples))
        rows = max(len(one) if one.query is None else int(one.query.sum()) for one in every)
        return cls(who, pool, batch, samples, measured, kept, rows)


# ---- what it costs --------------------------------------------------------------------------------------------------


def _usual_width(source: Source) -> int:
    """Tokens of the middle prompt of the stage that runs most of them."""
    return max(1, int(np.median(max(source.stages, key=lambda one: one.tokens).lengths)))


def _minutes(source: Source, batch_tokens: int, speed: Speed) -> dict[str, float]:
    """Minutes by stage: every token passes every layer, every prompt has a row of logits, every control is drawn."""
    layers, parameters = source.subject.facts["layers"], source.subject.facts["parameters"]
    minutes: dict[str, float] = {}
    for work in source.stages:
        ran = work.batches(batch_tokens)
        tokens, rows = map(sum, zip(*ran, strict=True))
        took = layers * (tokens * speed.token + len(ran) * speed.call) + rows * speed.logit
        took += work.times * parameters * speed.number * (work.stage == UNTRAINED)
        stage = "edits and gradients" if work.stage.startswith(EXAMINED) else work.stage
        minutes[stage] = minutes.get(stage, 0) + took / 60
    models = 1 + max((work.times for work in source.stages if work.stage == UNTRAINED), default=0)
    rows = min(source.rows, MOST)
    return minutes | {"measuring": MEASURING * rows * layers * models * len(source.modules) / 60}


def estimate(plan: Plan) -> dict[str, Any]:
    """Prompts, tokens, bytes, memory and minutes of each source, and what its claims can find, as plain data.

    tokens are those of one scan's passes, without padding; capture_bytes lie in the store and in memory; memory_bytes
    adds the weights, those of one untrained control, the captures that are not left on disk, the largest batch and this
    process. cpu_share: processor seconds for each second of the trial. Other programs make it smaller than the
    number of threads; the minutes assume that they keep running. disk_bytes and minutes are those of all `scans`, more
    than one with --stability. Raises UserError as a scan would.
    """
    who, settings = Weightless.found(plan.request, plan.located), plan.request
    scans = 1 + sum(not one.why for one in conditions(settings, who)) * settings.stability
    sources = ((name, Source.of(plan, who, name)) for name in plan.pools)
    return _costs(who, sources, settings.device, settings.batch_tokens, settings.nulls, plan.out, scans)


def price(job: Job) -> dict[str, Any]:
    """The same of a command that asks one question of one model."""
    return price_all(job.settings, job.located, [job.ask], job.folder)


def price_all(
    settings: ModelConfig, located: hub.Located, asks: Sequence[Callable[[Subject], Question]], out: Path
) -> dict[str, Any]:
    """The same of a command that asks one model several questions, each made from the model's shapes."""
    who = Weightless.found(settings, located)
    sources, questions = [], []
    for ask in asks:
        who.settings.clear()
        questions.append(question := ask(who))
        source = Source.settings(who, question, question.batch)
        sources.append((str(question.batch.source.get("name", "prompts")), source))
    return _costs(who, sources, settings.device, questions[0].batch_tokens, questions[0].controls, out)


def _costs(
    who: Weightless,
    sources: Iterable[tuple[str, Source]],
    device: str | None,
    batch_tokens: int,
    nulls: int,
    out: Path,
    scans: int = 1,
) -> dict[str, Any]:
    facts, item = who.facts, who.model.dtype.itemsize
    # Before the trial, which takes memory too.
    process = psutil.Process().memory_info().rss
    device, speed = usable(device), None
    rows: dict[str, dict[str, Any]] = {}
    memory, copies = 0, 1
    for name, source in sources:
        speed = speed or Speed.of(who, device, _usual_width(source), batch_tokens)
        minutes = _minutes(source, batch_tokens, speed)
        copies = max(copies, 1 + any(one.stage == UNTRAINED for one in source.stages))
        longest = max(int(one.lengths.max()) for one in source.stages)
        stored_bytes = sum(one.times * one.kept for one in source.stages)
        computed = max(
            tokens * (WIDEST * facts["d_model"] * item) + logits * facts["vocabulary"] * (item + LOGITS)
            for one in source.stages
            for tokens, logits in one.batches(batch_tokens)
        )
        # Ten thousand permutations of n rows, and two hundred clouds of as many: see probes/value_manifold.py.
        n = source.rows
        held = sum(one.times * one.kept for one in source.stages if one.kept <= IN_MEMORY)
        memory = max(memory, held + computed + 8 * (4 * 10**4 * n + 600 * n**2))
        rows[name] = {
            "pool": len(source.pool),
            "prompts": len(source.batch),
            "clusters": len(set(source.batch.cluster)),
            "pool_clusters": len(set(source.pool.cluster)),
            "passes": sum(one.times for one in source.stages),
            "tokens": sum(one.tokens for one in source.stages),
            "longest": longest,
            "capture_bytes": stored_bytes,
            "minutes": {stage: round(value, 3) for stage, value in minutes.items()},
            "claims": list(findings(source, nulls)),
        }
    weights = facts["parameters"] * item
    return {
        "parameters": facts["parameters"],
        "weight_bytes": weights,
        "memory_bytes": process + HELD + copies * weights + memory,
        "scans": scans,
        "disk_bytes": PAGE + scans * sum(row["capture_bytes"] for row in rows.values()),
        "cpu_share": round(speed.cpu_share, 2) if speed else 1.0,
        "minutes": round(START / 60 + scans * sum(sum(row["minutes"].values()) for row in rows.values()), 2),
        "device": device,
        "layers": facts["layers"],
        "nulls": nulls,
        "sources": rows,
        "out": str(out),
    }


# ---- what it can find -----------------------------------------------------------------------------------------------


@cache
def assumptions() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """[probe][metric] of llmgeom/planning.toml: measured spreads, which a plan assumes and no verdict reads."""
    return tomllib.loads((Path(__file__).parents[1] / "planning.toml").read_text(encoding="utf-8"))


def findings(source: Source, nulls: int) -> Iterator[dict[str, Any]]:
    """A row for each claim that the record would judge, all of them in Holm's correction (llmgeom/stats/power.py)."""
    settings = [
        (probe.NEEDS, claim)
        for probe in source.modules.values()
        for claim in getattr(probe, "CLAIMS", {}).values()
        if claim.claim and _judged(source, probe.NEEDS, claim)
    ]
    each = len(source.batch) / len(set(source.batch.cluster))
    for needs, claim in settings:
        rank = claim.needed == "correlation"
        have, most = _clusters_of(source, needs, claim)
        row = {"probe": claim.probe, "name": claim.name, "unit": claim.unit, "effect": claim.smallest}
        row |= {"counts": claim.counts, "clusters": have, "most_clusters": most}
        assumed = assumptions().get(claim.probe, {}).get(claim.name, {})
        kind = "" if source.batch.posterior is None else "task_"
        spread, null_spread = (assumed.get(f"{kind}{key}", 0.0) for key in ("spread", "null_spread"))
        row |= {"spread": None if rank else spread, "null_spread": null_spread, "why": ""}
        if not (rank or spread):
            yield row | {
                "spread": None,
                "null_spread": None,
                "why": "not planned: how much clusters differ was never measured",
            }
            continue
        control = assumed.get("control", "draws")
        design = power.Design(claim, spread, null_spread, nulls, len(settings), control)
        row["interval_clusters"] = _interval(design)
        row["needed_clusters"] = found = power.needed(design)
        row["needed_prompts"] = math.ceil(found * each) if found and claim.counts != KV_HEADS else None
        row["any_layer_clusters"] = None
        if rank:
            row["any_layer_clusters"] = power.needed_in_any_layer(claim.effect, source.subject.facts["layers"])
        row["detectable"] = power.detectable(design, have)
        if found is None:
            row["why"] = _never(design, claim.unit)
        elif most is not None and found > most:
            row["why"] = f"needs {found} clusters, and there are {most}"
        yield row


def _interval(design: power.Design) -> int:
    """Units at which the interval alone decides, as a verdict says it: without Holm, and without the draws' spread."""
    claim = design.claim
    if claim.needed == "correlation":
        return needed_n_correlation(claim.smallest)
    return needed_n_mean(claim.smallest, design.spread, 0.95 if claim.equivalence else power.POWER)


def _never(design: power.Design, unit: str) -> str:
    if design.draws < LEAST_DRAWS:
        return too_few(design.draws)
    return no_n(design.null_spread, unit if design.claim.needed == "mean" else "on Fisher's scale")


def _judged(source: Source, needs: Needs, claim: Claim) -> bool:
    """Whether the scan will come to a verdict, as far as that is known without weights."""
    if claim.counts == KV_HEADS:
        return _clusters_of(source, needs, claim)[0] >= LEAST_CLUSTERS
    return needs.judged is None or needs.judged(claim.name, source.subject, source.batch, source.samples)


def _queries(whole: Batch) -> int:
    """Of a task's sequence."""
    return whole.exact.predictive.shape[1]


def _clusters_of(source: Source, needs: Needs, claim: Claim) -> tuple[int, int | None]:
    """How many clusters the claim is judged on, and the most there can be; None where that is for the asking."""
    batch, facts = source.batch, source.subject.facts
    if claim.counts == KV_HEADS:
        return (heads := facts["layers"] * (facts["kv_heads"] or 0)), heads
    have, most = len(set(batch.cluster)), len(set(source.pool.cluster)) if batch.posterior is None else None
    if needs.most_rows:
        most = needs.most_rows // _queries(source.samples.get(WHOLE, source.batch))
    return have if most is None else min(have, most), most


def lines(cost: Mapping[str, Any]) -> Iterator[str]:
    """For a terminal."""
    for_all = f" for {cost['scans']} scans, each as below" if cost["scans"] > 1 else ""
    yield (
        f"{cost['parameters'] / 1e6:.1f}M parameters, {cost['weight_bytes'] / 2**20:.0f} MiB of weights; at most about "
        f"{cost['memory_bytes'] / 2**30:.1f} GiB of memory, {cost['disk_bytes'] / 2**20:.0f} MiB on disk, "
        f"{cost['minutes']:.2g} minutes on this machine ({cost['device']}){for_all}; out: {cost['out']}"
    )
    for name, row in cost["sources"].items():
        yield ""
        yield (
            f"{name}: {row['prompts']} of {row['pool']} prompts, about {row['clusters']} of {row['pool_clusters']} "
            f"clusters (templates, sequences); {row['passes']} passes, {row['tokens']} tokens, longest {row['longest']}"
        )
        layers = cost["layers"]
        head = ("effect", "interval", "holds", f"any of {layers} layers", "found", "spread", "of draws")
        yield from grid(f"claims ({len(row['claims'])}, Holm)", head, [_cells(one) for one in row["claims"]])
        for why in dict.fromkeys(one["why"] for one in row["claims"] if one["why"]):
            yield f"{'; '.join(one['name'] for one in row['claims'] if one['why'] == why)}: {why}"
    yield ""
    yield from LEGEND


LEGEND = (
    "Clusters that find the effect in 9 of 10 scans: by the interval alone; for holds: control and Holm over claims",
    "included; by the best layer's p, corrected for all layers. An effect counts from a control's centre. Found:",
    "the smallest effect that this number of clusters finds. Assumed: the spread of clusters and of control draws, as",
    "measured on pocket models and small tunnels (of a correlation: known, and on Fisher's scale); docs/planning.md.",
)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def said(key: str, form: str = "{}") -> str:
        return form.format(row[key]) if row.get(key) else "-"

    clusters, prompts = row.get("needed_clusters"), row.get("needed_prompts")
    found = said("detectable", "{:.2g}") if row.get("detectable") else "nothing"
    return (
        row["name"],
        f"{row['effect']:g} {row['unit']}",
        said("interval_clusters"),
        said("needed_clusters") + f" ({prompts} prompts)" * bool(prompts and prompts != clusters),
        said("any_layer_clusters"),
        f"{found} at {row['clusters']}" if "detectable" in row else "-",
        said("spread", "{:g}"),
        said("null_spread", "{:g}"),
    )
