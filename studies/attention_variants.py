"""Do grouped queries or a sliding window change what attention does with depth, and leave the values as they are?

Models that differ in nothing else, {every head its own keys and values, one pair for all} x {full attention, a window},
in several seeds. Paper III (Table 2) tells the two apart by comparing production models, which differ in everything.

The folder of a run holds models/NAME, trained, and cells/NAME.json, measured: delete cells/ to measure them again, for
instance when a probe has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import transformers
from jaxtyping import Float

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.cache import keys
from llmgeom.errors import UserError
from llmgeom.files import write_whole
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.prompts import corpus, grammar, pool
from llmgeom.prompts.domains import MIXED
from llmgeom.run import run_probes
from llmgeom.stats.pca import shares
from llmgeom.stats.resampling import Interval, mean_intervals
from llmgeom.stats.tests import equivalence_p, holm, needed_n_mean, two_sided_p
from studies import evaluate as exam
from studies import pocket
from studies.training_data import Lessons, domains, examination, lessons


class Kind(TypedDict):
    """What a kind of attention changes in `Spec`."""

    grouped: bool
    windowed: bool


KINDS: dict[str, Kind] = {  # in the order of the axes [grouped windowed]
    "mha-full": {"grouped": False, "windowed": False},
    "mha-window": {"grouped": False, "windowed": True},
    "gqa-full": {"grouped": True, "windowed": False},
    "gqa-window": {"grouped": True, "windowed": True},
}
LOSS = "held-out loss, nats a token"
PER_HEAD, COLUMNS = "PC1+PC2 share, one kv head at a time", "columns of W_K, every kv head"
LEAST_SEEDS = 5  # 4 degrees of freedom: with 3 seeds Student's quantile alone is 4.3
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Signature:
    """A number that is compared between kinds: `estimate` of `probe`, or one measured here where `probe` is "kinds".

    Attributes:
        nature: what Paper III takes it to be: "dynamic" changes with the kind of attention, "static" does not.
        effect: the smallest change of interest, declared before any model was trained, in the unit of the metric: that
            of its claim, save for focusing, where .1 is about the difference between the families that Paper III
            compares (31 and 20-30 %), not the 30 % that one model must reach.
        width: it depends on how many coordinates the values have, and grouping changes that: a change with grouping is
            partly arithmetic, and the verdict says so.
    """

    name: str
    probe: str
    estimate: str
    nature: Literal["dynamic", "static"]
    effect: float
    width: bool = False


_FOCUS, _VALUES = "attention_focus", "value_manifold"
_SHARE, _RHO, _R2 = "PC1+PC2 share", "|rho| of PC1 and entropy", "entropy decodability (held-out R2)"
SIGNATURES = (
    Signature("focusing", _FOCUS, "focusing", "dynamic", 0.1),
    Signature("focusing without the first token", _FOCUS, "focusing without the first token", "dynamic", 0.1),
    Signature("monotonicity", _FOCUS, "monotonicity", "dynamic", 0.3),
    Signature("values: PC1+PC2 share", _VALUES, _SHARE, "static", 0.1, width=True),
    Signature("values: PC1+PC2 share, by kv head", "kinds", PER_HEAD, "static", 0.1),
    Signature("values: |rho| of PC1 and entropy", _VALUES, _RHO, "static", 0.3),
    Signature("values: R2 of entropy", _VALUES, _R2, "static", 0.1, width=True),
    Signature("writes: PC1+PC2 share", _VALUES, f"attention write: {_SHARE}", "static", 0.1),
    Signature("writes: |rho| of PC1 and entropy", _VALUES, f"attention write: {_RHO}", "static", 0.3),
    Signature("writes: R2 of entropy", _VALUES, f"attention write: {_R2}", "static", 0.1),
    Signature("columns of W_K", "kinds", COLUMNS, "static", 0.01),
    Signature("token keys, by head", "key_orthogonality", "token keys, by head", "static", 0.01),
)


@dataclass(frozen=True)
class Spec(pocket.Pocket):
    """What is trained, on what, and what it is asked: all that a cell depends on.

    Attributes:
        ffn: width of the MLP where heads have their own keys and values; grouped models get the width that makes up for
            the parameters they lack. No dropout, so that the noise drawn is the same in every kind.
        pool: prompts drawn, of which `prompts` are read, at most two of a template, without regard to entropy: to
            spread them over the entropies of some model would favour its kind, and each kind has its own.
        nulls: draws of each null in a scan; they decide nothing here.
        grouped: all query heads read one kv head; `windowed`: a query sees the last `window` tokens only.
    """

    pool: int = 1000
    prompts: int = 150
    nulls: int = 2
    grouped: bool = False
    windowed: bool = False
    window: int = 1

    def config(self) -> transformers.PreTrainedConfig:
        """One architecture for every kind: without a window, MistralForCausalLM computes what LlamaForCausalLM does."""
        config, head = super().config(), self.hidden // self.heads
        # Keys and values of one head instead of all: 2 hidden (hidden - head) weights; an MLP unit has 3 hidden.
        more = round(2 * (self.hidden - head) / 3) if self.grouped else 0
        config.intermediate_size = self.ffn + more
        config.num_attention_heads, config.head_dim = self.heads, head
        config.num_key_value_heads = 1 if self.grouped else self.heads
        config.sliding_window = self.window if self.windowed else None
        return config


# All that decides is said here, so that tuning the pocket models changes nothing. There is text alone, no labels.
SPEC = Spec(
    "kinds", "mistral",
    hidden=96, layers=4, heads=4, ffn=256, vocabulary=1024, context=128,
    batch=12, steps=900, learning_rate=5e-3, weight_decay=0.01, dropout=0.0,
    noise=0.04, split=0.05, tokenizer_texts=20_000, text_seed=0, fillings=2, examination_seed=1,
    share=0.0, first=0.0, emphasis=1.0, spared=0.0,
)  # fmt: skip


def matched(spec: Spec) -> dict[str, int]:
    """Parameters of each kind. Raises UserError where they differ by more than 2 %."""
    with torch.device("meta"):
        models = {name: replace(spec, **kind).start() for name, kind in KINDS.items()}
    found = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    if max(found.values()) > 1.02 * min(found.values()):
        raise UserError(f"parameters {found} differ by more than 2 %: choose a width that is a multiple of 3 x heads")
    return found


class Material:
    """The text, tokenizer and prompts that all cells share.

    Attributes:
        stream: what all seeds read; its first texts give the tokenizer.
        reader: a model that has learnt nothing, with that tokenizer.
        prompts: as tokens, none longer than a training window.
        window: a third of the median prompt, in tokens.
        examination: texts of templates never trained on, none longer than a training window.
    """

    def __init__(self, spec: Spec, seeds: int) -> None:
        self.spec, windows = spec, seeds * spec.steps * spec.batch
        self.stream = lessons(
            windows, spec.context, spec.vocabulary,
            seed=spec.text_seed, at_once=spec.tokenizer_texts, split=spec.split, share=spec.share,
        )  # fmt: skip
        self.reader = Subject.of(spec.start(), self.stream.tokenizer)
        batch = pool.plain(fitting(self.reader, exam.prompts(MIXED, spec.pool)), spec.prompts)
        tokens = self.reader.tokens(batch)
        self.prompts, self.prompts_hash = replace(batch, inputs=tokens), keys.of_tokens(tokens)
        self.window = max(1, round(float(np.median(tokens.lengths)) / 3))
        rows = [row for row in examination(spec.fillings, spec.examination_seed) if row["set"] == "held-out"]
        ids = self.reader.tokenizer([row["text"] for row in rows])["input_ids"]
        self.examination = [row for row, text in zip(rows, ids, strict=True) if len(text) <= spec.context]

    def lessons(self, seed: int) -> Lessons:
        """The seed's own part of the stream: the same windows in the same order for every kind, others each seed."""
        size, whole = self.spec.steps * self.spec.batch, self.stream
        rows = slice(seed * size, (seed + 1) * size)
        # A window begins with a text, and each separator but one in the last column begins another.
        begun = np.cumsum([0, *(1 + (whole.windows[:, :-1] == 0).sum(1)).tolist()])
        texts = slice(int(begun[rows.start]), int(begun[rows.stop]))
        return replace(
            whole,
            texts=whole.texts[texts],
            ids=whole.ids[texts],
            windows=whole.windows[rows],
            evidence=whole.evidence[rows],
            asked=replace(whole.asked, **{name: each[rows] for name, each in vars(whole.asked).items()}),
        )


# ---- one cell -------------------------------------------------------------------------------------------------------


def cell(out: Path, kind: str, seed: int, material: Material, progress: Callable[[str], None]) -> Cell:
    """One model, trained and measured as far as it is not in `out` yet.

    Raises:
        UserError: where `out` has a cell of another spec.
    """
    name, spec = f"{kind}-{seed}", replace(material.spec, seed=seed, window=material.window, **KINDS[kind])
    path, folder = out / "cells" / f"{name}.json", out / "models" / name
    about = {"kind": kind, "spec": asdict(spec) | {"prompts_hash": material.prompts_hash}}
    if path.exists():
        return _agreeing(path, about)
    if not (folder / "trained.json").exists():
        progress(f"{name}: training")
        train(folder, about, spec, material)
    trained, began = _agreeing(folder / "trained.json", about), time.process_time()
    progress(f"{name}: measuring")
    subject = exam.stored(folder)
    loss, entropy = exam.losses(subject, material.examination), subject.entropy(material.prompts)
    result = {
        **trained,
        **measure(subject, material.prompts, spec.nulls),
        "parameters": subject.facts["parameters"],
        "loss": {"model": loss["held-out"]["model"], **trained["loss"]},
        "entropy_bits": {"mean": float(entropy.mean()), "sd": float(entropy.std())},
        "cpu_minutes": trained["cpu_minutes"] + (time.process_time() - began) / 60,
    }
    _keep(path, result)
    progress(f"{name}: {result['loss']['model']:.3f} nats held out, {result['cpu_minutes']:.1f} CPU minutes")
    return result


def train(folder: Path, about: Cell, spec: Spec, material: Material) -> None:
    """Train one model and keep it in `folder`; its curve and the losses of `exam.rivals` are in trained.json."""
    began = time.process_time()
    read, model = material.lessons(spec.seed), spec.start()
    curve = pocket.train(model, read, spec)
    once = sum(len(grammar.templates(domain)) - len(corpus.held_out(domain)) for domain in domains())
    rivals = exam.rivals(material.reader, material.examination, read.ids, once)["held-out"]
    trained = {
        **about,
        "windows_sha256": hashlib.sha256(read.windows.numpy().tobytes()).hexdigest(),
        "texts": len(read.texts),
        "tokens": read.windows.numel(),
        "curve": curve,
        "loss": {name: rivals[name] for name in ("trigram", "trigram_few", "fivegram_few", "unigram")},
        "cpu_minutes": (time.process_time() - began) / 60,
    }
    model.save_pretrained(folder)
    read.tokenizer.save_pretrained(folder)
    _keep(folder / "trained.json", trained)  # last: a folder without it is trained again


def measure(subject: Subject, prompts: Batch, nulls: int) -> dict[str, Any]:
    """Every metric by probe and name, of the probes that give the signatures, and why a probe gave none."""
    record = run_probes(
        subject, prompts, probes.known(sorted({s.probe for s in SIGNATURES} - {"kinds"})), controls=nulls
    )
    values = {name: {h.name: h.value for h in found.estimates} for name, found in record.results.items()}
    heads = subject.capture(prompts, {Site.VALUE}).layers(Site.VALUE)[-1].double().numpy()
    values["kinds"] = {PER_HEAD: float(np.mean([shares(head).pc12 for head in heads.swapaxes(0, 1)]))}
    if keys := record.results.get("key_orthogonality"):
        # Its metric is this mean, but needs five heads for an interval, and a grouped model has one a layer.
        values["kinds"][COLUMNS] = float(keys.arrays["columns"].mean())
    return {"values": values, "unmeasured": dict(record.unmeasured)}


def _agreeing(path: Path, about: Cell) -> Cell:
    """A file of this run. Raises UserError, naming the first field of the spec that differs."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    theirs, ours = stored["spec"], about["spec"]
    for name in theirs | ours:
        if theirs.get(name) != ours.get(name):
            what = f"{name} is {theirs.get(name)!r}, this one's {ours.get(name)!r}"
            raise UserError(f"{path} is of another run: {what}; choose another --out, or remove it")
    return stored


def _keep(path: Path, body: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


# ---- what the cells say ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """How much a signature changes with one factor, over seeds.

    Attributes:
        value, sd: of the change within a seed, in the unit of the signature.
        interval: 95 % (Student, seeds - 1 degrees of freedom).
        inner: 90 %, that of the two one-sided tests (Schuirmann, 1987).
        p, p_within: of no change; of a change of at least the effect of interest. `effects` adjusts both.
        needed: seeds that would decide for the declared effect with 90 % power.
    """

    signature: Signature
    factor: str
    seeds: int
    value: float
    sd: float
    interval: Interval
    inner: Interval
    p: float
    p_within: float
    needed: int

    @property
    def verdict(self) -> str:
        """Differs from 0: p < .05. Less than the effect of interest: p_within < .05. Neither: undecided.

        dynamic   changed: differs. not changed: less than the effect. Both: changed, by less than it.
        static    equivalent: less than the effect, whether it differs or not. different: differs, and not less.
        """
        s, differs, within = self.signature, self.p < 0.05, self.p_within < 0.05
        if s.nature == "dynamic" and differs:
            word = f"changed, by less than {s.effect:g}" if within else "changed"
        elif within:
            word = "not changed" if s.nature == "dynamic" else "equivalent"
        elif differs:
            word = "different"
        elif self.seeds < self.needed:
            return f"undecided (needs {self.needed} seeds)"
        else:
            return f"undecided ({self.needed} seeds suffice for {s.effect:g}; less is not excluded)"
        return f"{word} †" if s.width and self.factor != "window" else word


def contrasts(values: Float[np.ndarray, "seed grouped windowed"]) -> dict[str, Float[np.ndarray, " seed"]]:
    """What each factor changes in each seed, in the unit of the values.

    Returns:
        grouping, window: with less without it, mean over the other factor.
        interaction: what the window changes with grouped queries, less what it changes without.
    """
    by_window = values[:, :, 1] - values[:, :, 0]
    by_grouping = values[:, 1, :] - values[:, 0, :]
    interaction = by_window[:, 1] - by_window[:, 0]
    return {"grouping": by_grouping.mean(1), "window": by_window.mean(1), "interaction": interaction}


def effect(signature: Signature, factor: str, change: Float[np.ndarray, " seed"]) -> Effect:
    """Mean, intervals and tests of one change, paired by seed; p not yet adjusted."""
    n = len(change)
    mean, sd = float(change.mean()), float(change.std(ddof=1))

    def span(level: float) -> Interval:
        return Interval(*mean_intervals([change], level=level)[0].tolist(), level, "Student over seeds")

    p = two_sided_p(mean, sd / n**0.5, n)
    within = equivalence_p(mean, span(0.95), -signature.effect, signature.effect, n)
    # The two one-sided tests must both be won, at 5 % each.
    power, level = (0.9, 0.95) if signature.nature == "dynamic" else (0.95, 0.90)
    needed = needed_n_mean(signature.effect, max(sd, 1e-12), power, level)
    return Effect(signature, factor, n, mean, sd, span(0.95), span(0.90), p, within, needed)


def effects(values: Mapping[str, Float[np.ndarray, "seed grouped windowed"]]) -> list[Effect]:
    """Every factor's effect on every signature that has values, p adjusted by Holm over those of one nature."""
    results = []
    for nature in ("dynamic", "static"):
        known = [s for s in SIGNATURES if s.nature == nature and s.name in values]
        raw = [effect(s, factor, change) for s in known for factor, change in contrasts(values[s.name]).items()]
        p, within = holm([e.p for e in raw]).tolist(), holm([e.p_within for e in raw]).tolist()
        results += [replace(e, p=a, p_within=b) for e, a, b in zip(raw, p, within, strict=True)]
    return results


def analyse(cells: Sequence[Cell]) -> dict[str, Any]:
    """All numbers of the experiment, as plain data; cells by seed, then as in KINDS.

    Raises:
        UserError: where the cells of a seed did not read the same text.
    """
    seeds = sorted({c["spec"]["seed"] for c in cells})
    assert [(c["spec"]["seed"], c["kind"]) for c in cells] == [(seed, kind) for seed in seeds for kind in KINDS]
    for seed in seeds:
        if len({c["windows_sha256"] for c in cells if c["spec"]["seed"] == seed}) > 1:
            raise UserError(f"the cells of seed {seed} did not read the same text; remove them and run again")
    measured, absent = {LOSS: [c["loss"]["model"] for c in cells]}, {}
    for s in SIGNATURES:
        by_cell = [c["values"].get(s.probe, {}).get(s.estimate) for c in cells]
        if lacking := by_cell.count(None):
            whys = sorted({c["unmeasured"][s.probe] for c in cells if s.probe in c["unmeasured"]})
            absent[s.name] = "; ".join(whys) or f"{s.probe} gives no {s.estimate!r} in {lacking} cells"
        else:
            measured[s.name] = by_cell
    values = {name: np.array(numbers, dtype=np.float64).reshape(-1, 2, 2) for name, numbers in measured.items()}
    beside = Signature(LOSS, "", "", "dynamic", 0.1)  # no verdict: it says how far cells can be compared
    losses = [c["loss"] for c in cells]
    return {
        "spec": {k: v for k, v in cells[0]["spec"].items() if k not in ("grouped", "windowed", "seed")},
        "seeds": seeds,
        "parameters": {c["kind"]: c["parameters"] for c in cells},
        "absent": absent,
        "values": {name: numbers.reshape(-1, len(KINDS)).tolist() for name, numbers in values.items()},
        "loss_of_trigram": [loss["model"] / loss["trigram"] for loss in losses],
        "loss_of_few": [loss["model"] / min(loss["trigram_few"], loss["trigram"]) for loss in losses],
        "loss": [asdict(effect(beside, factor, change)) for factor, change in contrasts(values[LOSS]).items()],
        "effects": [asdict(e) | {"verdict": e.verdict} for e in effects(values)],
        "cells": list(cells),
        "cpu_minutes": sum(c["cpu_minutes"] for c in cells),
        "versions": {p: version(p) for p in ("llmgeom", "torch", "transformers", "tokenizers", "numpy")},
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as two tables of markdown: means of the cells, and what each factor changes."""
    spec, n = result["spec"], len(result["seeds"])
    means = changes = ""
    shown = {name: name.replace("|", "\\|") for name in result["values"]}  # |rho| would end a column
    for name, rows in result["values"].items():
        cells = (f"{np.mean(column):.3f} ({np.std(column, ddof=1):.3f})" for column in zip(*rows, strict=True))
        means += f"| {shown[name]} | {' | '.join(cells)} |\n"
    for e in (*result["effects"], *result["loss"]):
        s, span = e["signature"], e["interval"]
        change = f"{e['factor']} | {e['value']:+.3f} [{span['low']:+.3f}, {span['high']:+.3f}] | {e['p']:.2g}"
        if s["name"] == LOSS:
            changes += f"| {LOSS} | | {change} (alone) | | beside |\n"
        else:
            tested = f"{change} | {e['p_within']:.2g} | {e['verdict']}"
            changes += f"| {shown[s['name']]} ({s['nature']}) | {s['effect']:g} | {tested} |\n"
    absent = "".join(f"not measured: {name}: {why}\n" for name, why in result["absent"].items())
    ratios = (result["loss_of_trigram"], result["loss_of_few"])
    of_trigram, of_few = (f"{min(ratio):.3f} to {max(ratio):.3f}" for ratio in ratios)
    sizes = " or ".join(map(str, sorted({*result["parameters"].values()})))
    return f"""Mean over {n} seeds (sd).

| | {" | ".join(KINDS)} |
|---|---|---|---|---|
{means}
Change within a seed: mean [95 % interval], p of no change and of a change beyond the effect of
interest, each by Holm over the signatures of its nature; {n} seeds.

| signature | effect of interest | factor | change | p = 0 | p beyond | verdict |
|---|---|---|---|---|---|---|
{changes}
† depends on how many coordinates the values have, which grouping changes: partly arithmetic.
{absent}Held-out loss is {of_trigram} of the trigram's on the same text, {of_few} of the better of two.
{spec["prompts"]} prompts, a window of {spec["window"]} tokens, {sizes} parameters, \
{spec["steps"]} steps of {spec["batch"]} x {spec["context"]} tokens, {result["cpu_minutes"]:.0f} CPU minutes.
"""


# ---- the run --------------------------------------------------------------------------------------------------------


def run(
    out: Path, spec: Spec, seeds: int, kinds: Sequence[str] = tuple(KINDS), progress: Callable = lambda text: None
) -> dict[str, Any] | None:
    """Train and measure what is missing in `out`, then write kinds.json and kinds.md there; None while cells lack.

    Killed and called again it goes on: each cell is in `out` whole or not at all.

    Raises:
        UserError: for an unknown kind, fewer than 2 seeds, and an `out` that holds another spec.
    """
    if unknown := [name for name in kinds if name not in KINDS]:
        raise UserError(f"unknown kind {unknown[0]!r}: known are {', '.join(KINDS)}")
    if seeds < 2:
        raise UserError(f"--seeds {seeds}: give at least 2, {LEAST_SEEDS} for a verdict worth quoting")
    matched(spec)
    material, every = Material(spec, seeds), [(kind, seed) for seed in range(seeds) for kind in KINDS]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads, and so would the weights
    try:
        for kind, seed in every:
            if kind in kinds:
                cell(out, kind, seed, material, progress)
    finally:
        torch.set_num_threads(before)
    if not all((out / "cells" / f"{kind}-{seed}.json").exists() for kind, seed in every):
        return None
    found = analyse([cell(out, kind, seed, material, progress) for kind, seed in every])
    _keep(out / "kinds.json", found)
    write_whole(out / "kinds.md", table(found).encode())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m studies.attention_variants --out DIR [--seeds 5] [--steps N] [--cells ...]`: 0 done, 1 refused."""
    parser = argparse.ArgumentParser(prog="python -m studies.attention_variants", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder; a run that was stopped goes on from it")
    parser.add_argument("--seeds", type=int, default=LEAST_SEEDS, help="training seeds a kind [default: 5]")
    parser.add_argument("--steps", type=int, default=SPEC.steps, help=f"training steps [default: {SPEC.steps}]")
    parser.add_argument("--cells", nargs="+", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    args = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()

    def progress(text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    try:
        result = run(args.out, replace(SPEC, steps=args.steps), args.seeds, args.cells, progress)
    except UserError as refusal:
        print(f"llmgeom: {refusal}", file=sys.stderr)
        return 1
    lacking = f"{args.out} has the cells of {', '.join(args.cells)}; run again without --cells for the table\n"
    print(table(result) if result else lacking, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
