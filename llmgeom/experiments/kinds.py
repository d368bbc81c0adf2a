"""Do grouped queries or a sliding window change what attention does with depth, and leave the values as they are?

Models that differ in nothing else, {every head its own keys and values, one pair for all} x {full attention, a window},
in several seeds. Paper III (Table 2) tells the two apart by comparing production models, which differ in everything.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from jaxtyping import Float

from llmgeom import probes
from llmgeom.batch import Batch, Tokens
from llmgeom.capture import Site
from llmgeom.errors import Refused
from llmgeom.experiments import exam, pocket
from llmgeom.experiments.lessons import Lessons, domains, examination, lessons, sha256
from llmgeom.information import bits
from llmgeom.prompts import corpus
from llmgeom.prompts.domains import MIXED, Domain
from llmgeom.prompts.grammar import templates
from llmgeom.prompts.pool import plain
from llmgeom.record import write_whole
from llmgeom.scan import prompts_hash, scan
from llmgeom.stats import Interval, equivalence_p, holm, needed_n_mean, shares
from llmgeom.subject import Subject

FACTORS = ("grouping", "window", "interaction")
PER_HEAD, COLUMNS = "PC1+PC2 share, one kv head at a time", "columns of W_K, every kv head"
LEAST_SEEDS = 5  # 4 degrees of freedom: with 3 seeds Student's quantile alone is 4.3
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Kind:
    """One kind of attention: grouped, all query heads read one kv head; windowed, a query sees the last tokens only."""

    grouped: bool
    windowed: bool

    @property
    def name(self) -> str:
        return f"{'gqa' if self.grouped else 'mha'}-{'window' if self.windowed else 'full'}"


KINDS = {kind.name: kind for kind in (Kind(g, w) for g, w in product((False, True), repeat=2))}


@dataclass(frozen=True)
class Signature:
    """A number that is compared between kinds: `headline` of `probe`, or one measured here where `probe` is "kinds".

    nature       what Paper III takes it to be: "dynamic" changes with the kind of attention, "static" does not.
    effect       the smallest change of interest, declared before any model was trained, in the unit of the headline:
                 that of its claim, save for focusing, where .1 is the difference between the families of Paper III
                 that are compared there (31 and 20-30 %), not the 30 % that one model must reach.
    width        it depends on how many coordinates the values have, and grouping changes that: a change with grouping
                 is partly arithmetic, and the verdict says so.
    """

    name: str
    probe: str
    headline: str
    nature: Literal["dynamic", "static"]
    effect: float
    width: bool = False


_FOCUS, _VALUES, _WRITES = "attention_focus", "value_manifold", "attention_write"
_SHARE, _RHO, _R2 = "PC1+PC2 share", "|rho| of PC1 and entropy", "entropy decodability (held-out R2)"
SIGNATURES = (
    Signature("focusing", _FOCUS, "focusing", "dynamic", 0.1),
    Signature("focusing without the first token", _FOCUS, "focusing without the first token", "dynamic", 0.1),
    Signature("monotonicity", _FOCUS, "monotonicity", "dynamic", 0.3),
    Signature("values: PC1+PC2 share", _VALUES, _SHARE, "static", 0.1, width=True),
    Signature("values: PC1+PC2 share, by kv head", "kinds", PER_HEAD, "static", 0.1),
    Signature("values: |rho| of PC1 and entropy", _VALUES, _RHO, "static", 0.3),
    Signature("values: R2 of entropy", _VALUES, _R2, "static", 0.1, width=True),
    Signature("writes: PC1+PC2 share", _WRITES, f"attention write: {_SHARE}", "static", 0.1),
    Signature("writes: |rho| of PC1 and entropy", _WRITES, f"attention write: {_RHO}", "static", 0.3),
    Signature("writes: R2 of entropy", _WRITES, f"attention write: {_R2}", "static", 0.1),
    Signature("columns of W_K", "kinds", COLUMNS, "static", 0.01),
    Signature("token keys, by head", "key_orthogonality", "token keys, by head", "static", 0.01),
)


@dataclass(frozen=True)
class Spec:
    """What is trained, on what, and what it is asked: all that a cell depends on besides its kind and seed.

    ffn          width of the MLP where heads have their own keys and values; grouped models get the width that makes up
                 for the parameters they lack. steps and the rest are as in `pocket.Pocket`; there is no dropout, so
                 that the noise drawn is the same in every kind.
    pool         prompts drawn, of which `prompts` are read, at most two of a template, without regard to entropy: to
                 spread them over the entropies of some model would favour its kind, and each kind has its own.
    """

    hidden: int = 96
    layers: int = 4
    heads: int = 4
    ffn: int = 256
    vocabulary: int = 1024
    context: int = 128
    batch: int = 12
    steps: int = 900
    learning_rate: float = 5e-3
    weight_decay: float = 0.01
    noise: float = 0.04
    split: float = 0.05
    text_seed: int = 0
    tokenizer_texts: int = 20_000
    domain: str = MIXED
    pool: int = 1000
    prompts: int = 150
    prompt_seed: int = 0
    nulls: int = 2
    fillings: int = 2
    examination_seed: int = 1

    def config(self, kind: Kind, window: int) -> transformers.MistralConfig:
        """One architecture for every kind: without a window, MistralForCausalLM computes what LlamaForCausalLM does."""
        head = self.hidden // self.heads
        # Keys and values of one head instead of all: 2 hidden (hidden - head) weights; an MLP unit has 3 hidden.
        more = round(2 * (self.hidden - head) / 3) if kind.grouped else 0
        return transformers.MistralConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn + more,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=1 if kind.grouped else self.heads,
            head_dim=head,
            sliding_window=window if kind.windowed else None,
            max_position_embeddings=self.context,
            tie_word_embeddings=False,
            attention_dropout=0.0,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )

    def start(self, kind: Kind, window: int, seed: int) -> transformers.PreTrainedModel:
        """The model before its first step, the same bits whatever ran before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(self.config(kind, window))

    def training(self, seed: int) -> pocket.Pocket:
        """What `pocket.train` reads."""
        same = ("batch", "steps", "learning_rate", "weight_decay", "noise", "vocabulary", "context")
        return pocket.Pocket("kinds", "mistral", seed=seed, **{name: getattr(self, name) for name in same})


class Material:
    """The text, tokenizer and prompts that all cells share; made when first asked for.

    folder   keeps the tokenizer once it is learnt: what is measured later reads the same prompts in the same tokens.
    window   a third of the median prompt, in tokens.
    """

    def __init__(self, spec: Spec, seeds: int, folder: Path) -> None:
        self.spec, self.seeds, self.folder = spec, seeds, folder
        self._rivals: dict[int, dict[str, float]] = {}

    def _read(self, windows: int) -> Lessons:
        s = self.spec
        return lessons(windows, s.context, s.vocabulary, seed=s.text_seed, at_once=s.tokenizer_texts, split=s.split)

    @cached_property
    def tokenizer(self):
        kept = self.folder / "tokenizer"
        if not kept.exists():
            temporary = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")
            self._read(1).tokenizer.save_pretrained(temporary)
            os.replace(temporary, kept)
        return transformers.AutoTokenizer.from_pretrained(kept, local_files_only=True)

    @cached_property
    def _all(self) -> Lessons:
        found = self._read(self.seeds * self.spec.steps * self.spec.batch)
        if found.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise Refused(f"the training text is no longer that of {self.folder}; choose another --out")
        return found

    def lessons(self, seed: int) -> Lessons:
        """The seed's own part of one stream: the same windows in the same order for every kind, others each seed."""
        size = self.spec.steps * self.spec.batch
        rows = slice(seed * size, (seed + 1) * size)
        # A window begins with a text, and each separator but one in the last column begins another.
        begun = np.cumsum([0, *(1 + (self._all.windows[:, :-1] == 0).sum(1)).tolist()])
        texts = slice(int(begun[rows.start]), int(begun[rows.stop]))
        return replace(
            self._all,
            windows=self._all.windows[rows],
            evidence=self._all.evidence[rows],
            texts=self._all.texts[texts],
            ids=self._all.ids[texts],
        )

    @cached_property
    def prompts(self) -> Batch:
        """Prompts as tokens, none longer than a training window."""
        spec = self.spec
        domain = Domain(spec.domain)
        pool = domain.sample(min(spec.pool, domain.size()), spec.prompt_seed)
        sizes = [len(row) for row in self.tokenizer(list(pool.text))["input_ids"]]
        fits = pool.take([i for i, size in enumerate(sizes) if size <= spec.context])
        batch = plain(fits, spec.prompts, spec.prompt_seed)
        ids = [torch.tensor(row) for row in self.tokenizer(list(batch.text))["input_ids"]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return replace(batch, inputs=Tokens(padded, torch.tensor([len(row) for row in ids])))

    @property
    def window(self) -> int:
        return max(1, round(float(np.median(self.prompts.inputs.lengths.numpy())) / 3))

    @cached_property
    def examination(self) -> list[dict[str, str]]:
        """Texts of templates never trained on, none longer than a training window."""
        rows = examination(self.spec.fillings, self.spec.examination_seed)
        rows = [row for row in rows if row["set"] == "held-out"]
        sizes = [len(ids) for ids in self.tokenizer([row["text"] for row in rows])["input_ids"]]
        return [row for row, size in zip(rows, sizes, strict=True) if size <= self.spec.context]

    def rivals(self, seed: int) -> dict[str, float]:
        """Losses on the examination in nats a token of n-grams fitted to the seed's texts, and its unigram entropy."""
        if seed not in self._rivals:
            once = sum(len(templates(domain)) - len(corpus.held_out(domain)) for domain in domains())
            reader = Subject.of(self.spec.start(KINDS["mha-full"], self.window, seed), self.tokenizer)
            self._rivals[seed] = exam.rivals(reader, self.examination, self.lessons(seed).ids, once)["held-out"]
        return self._rivals[seed]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The spec, and what it came to: cells of one run agree in it."""
        first = corpus.texts(domains(), self.spec.text_seed)
        return {
            **asdict(self.spec),
            "window": self.window,
            "prompts_hash": prompts_hash(self.prompts.inputs),
            "sha256_of_first_1000_texts": sha256([next(first) for _ in range(1000)]),
        }


# ---- one cell -------------------------------------------------------------------------------------------------------


def matched(spec: Spec, window: int) -> dict[str, int]:
    """Parameters of each kind. Raises Refused where they differ by more than 2 %."""
    with torch.device("meta"):
        models = {name: spec.start(kind, window, 0) for name, kind in KINDS.items()}
    found = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    if max(found.values()) > 1.02 * min(found.values()):
        raise Refused(f"parameters {found} differ by more than 2 %: choose a width that is a multiple of 3 x heads")
    return found


def cell(out: Path, kind: Kind, seed: int, material: Material, instrument: Instrument, progress: Progress) -> dict:
    """One model: trained where it is not in `out` yet, measured where it was not by these probes, and kept there.

    Raises Refused where `out` holds a cell of another spec.
    """
    name = f"{kind.name}-{seed}"
    path, folder = out / "cells" / f"{name}.json", out / "models" / name
    identity = {**material.identity, "kind": kind.name, "seed": seed}
    if path.exists():
        found = _agreeing(path, identity)
        if found["instrument"] == instrument.hashes:
            return found
    trained = folder / "trained.json"
    if not trained.exists():
        _train(folder, kind, seed, material, identity, lambda text: progress(f"{name}: {text}"))
    body = _agreeing(trained, identity)
    began = time.process_time()
    progress(f"{name}: measuring")
    subject = exam.stored(folder)
    values, unmeasured = instrument.measure(subject, material)
    loss = exam.losses(subject, material.examination)["held-out"]["model"]
    entropy = bits(subject.capture(material.prompts, {Site.ENTROPY}).entropy.double().numpy())
    minutes = {**body["cpu_minutes"], "measuring": (time.process_time() - began) / 60}
    body |= {
        "instrument": instrument.hashes,
        "parameters": subject.facts["parameters"],
        "loss": {"model": loss, **body["loss"]},
        "entropy_bits": {"mean": float(entropy.mean()), "sd": float(entropy.std())},
        "values": values,
        "unmeasured": unmeasured,
        "cpu_minutes": minutes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _json(body))
    progress(f"{name}: {loss:.3f} nats held out, {sum(minutes.values()):.1f} CPU minutes")
    return body


def _train(folder: Path, kind: Kind, seed: int, material: Material, identity: dict, progress: Progress) -> None:
    """Train one model and put it, its rivals' losses and its curve at `folder`, whole."""
    spec, began = material.spec, time.process_time()
    read = material.lessons(seed)
    text = time.process_time() - began
    model = spec.start(kind, material.window, seed)

    def step(done: int, steps: int, loss: float) -> None:
        if done % 100 == 0:
            progress(f"step {done} of {steps}, {loss:.3f} nats")

    began = time.process_time()
    curve = pocket.train(model, read, spec.training(seed), step)
    minutes = (time.process_time() - began) / 60
    rivals = material.rivals(seed)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        read.tokenizer.save_pretrained(temporary)
        body = {
            "spec": identity,
            "windows_sha256": hashlib.sha256(read.windows.numpy().tobytes()).hexdigest(),
            "texts": len(read.texts),
            "tokens": read.windows.numel(),
            "loss": {rival: rivals[rival] for rival in ("trigram", "trigram_few", "fivegram_few", "unigram")},
            "curve": curve,
            "cpu_minutes": {"text": text / 60, "training": minutes},
        }
        write_whole(temporary / "trained.json", _json(body))
        shutil.rmtree(folder, ignore_errors=True)  # a folder without trained.json is of nobody
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _agreeing(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A file of this run. Raises Refused, naming the first field of the spec that differs."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        theirs = found["spec"]
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise Refused(f"{path} cannot be read as a cell ({error}); remove it and run again") from error
    for name in {**theirs, **identity}:
        if theirs.get(name) != identity.get(name):
            raise Refused(
                f"{path} is of another run: {name} is {theirs.get(name)!r}, this one's {identity.get(name)!r}; "
                "choose another --out, or remove it"
            )
    return found


class Instrument:
    """The probes that give the signatures, as they were imported.

    hashes   of each probe's source with that of the llmgeom modules it names, and of this class.
    """

    def __init__(self, spec: Spec) -> None:
        names = sorted({s.probe for s in SIGNATURES} & set(probes.names()))
        self.spec, self.probes = spec, probes.known(names)
        self.hashes = {name: _hash(module) for name, module in self.probes.items()} | {"kinds": _hash(type(self))}

    def measure(self, subject: Subject, material: Material) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Every headline of every probe by name, and why a probe gave none."""
        record = scan(subject, material.prompts, self.probes, nulls=self.spec.nulls)
        values = {name: {h.name: h.value for h in found.headlines} for name, found in record.results.items()}
        heads = subject.capture(material.prompts, {Site.VALUE}).layers(Site.VALUE)[-1].double().numpy()
        values["kinds"] = {PER_HEAD: float(np.mean([shares(head).pc12 for head in heads.swapaxes(0, 1)]))}
        if keys := record.results.get("key_orthogonality"):
            # Its headline is this mean, but needs five heads for an interval, and a grouped model has one a layer.
            values["kinds"][COLUMNS] = float(keys.arrays["columns"].mean())
        return values, dict(record.unmeasured)


@cache
def _hash(what: Any) -> str:
    """12 hex digits for the source of a class or module; taken once, so that it stays that of what was imported."""
    used = {getattr(value, "__module__", "") or "" for value in vars(what).values()}
    named = sorted(name for name in used if name.startswith("llmgeom.") and name != __name__)
    sources = [inspect.getsource(what), *(inspect.getsource(sys.modules[name]) for name in named)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:12]


# ---- what the cells say ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """How much a signature changes with one factor, over seeds.

    value           mean over seeds of the change within a seed, in the unit of the signature.
    low, high       95 % interval (Student, seeds - 1 degrees of freedom); near, far: 90 %, that of the two one-sided
                    tests (Schuirmann, 1987).
    p, p_within     of no change; of a change of at least the effect of interest. Both are adjusted by Holm over all
                    effects on signatures of the same nature.
    needed          seeds that would decide for the declared effect with 90 % power.
    """

    signature: str
    factor: str
    value: float
    sd: float
    low: float
    high: float
    near: float
    far: float
    p: float
    p_within: float
    needed: int
    verdict: str = ""


def contrasts(values: Float[np.ndarray, "seed grouped windowed"]) -> dict[str, Float[np.ndarray, " seed"]]:
    """What each factor changes in each seed, in the unit of the values.

    grouping, window   with less without it, mean over the other factor.
    interaction        what the window changes with grouped queries, less what it changes without.
    """
    by_window = values[:, :, 1] - values[:, :, 0]
    by_grouping = values[:, 1, :] - values[:, 0, :]
    found = (by_grouping.mean(1), by_window.mean(1), by_window[:, 1] - by_window[:, 0])
    return dict(zip(FACTORS, found, strict=True))


def effect(signature: Signature, factor: str, change: Float[np.ndarray, " seed"]) -> Effect:
    """Mean, intervals and tests of one change, paired by seed; p not yet adjusted. Raises Refused for one seed."""
    from scipy.stats import t

    n = len(change)
    if n < 2:
        raise Refused(f"{signature.name}: {n} seed has every kind; at least 2 are needed for an interval")
    mean, sd = float(change.mean()), float(change.std(ddof=1))
    error = sd / n**0.5
    wide, narrow = (float(t.ppf(level, n - 1)) * error for level in (0.975, 0.95))
    p = 2 * float(t.sf(abs(mean) / error, n - 1)) if error > 0 else float(mean == 0)
    interval = Interval(mean - wide, mean + wide, 0.95, "Student over seeds")
    # The two one-sided tests must both be won, at 5 % each.
    power, level = (0.9, 0.95) if signature.nature == "dynamic" else (0.95, 0.90)
    return Effect(
        signature=signature.name,
        factor=factor,
        value=mean,
        sd=sd,
        low=interval.low,
        high=interval.high,
        near=mean - narrow,
        far=mean + narrow,
        p=p,
        p_within=equivalence_p(mean, interval, -signature.effect, signature.effect, n),
        needed=needed_n_mean(signature.effect, max(sd, 1e-12), power, level),
    )


def effects(values: Mapping[str, Float[np.ndarray, "seed grouped windowed"]]) -> list[Effect]:
    """Every factor's effect on every signature that has values, with verdicts.

    dynamic   changed: differs from 0. not changed: less than the effect of interest. Both: changed, by less than it.
    static    equivalent: less than the effect of interest, whether it differs from 0 or not. different: differs from 0.
    undecided, with the number of seeds for the declared effect: neither. Differs: p < .05; less than: p_within < .05.
    """
    found = []
    seeds = {name: len(one) for name, one in values.items()}
    for nature in ("dynamic", "static"):
        known = {s.name: s for s in SIGNATURES if s.nature == nature and s.name in values}
        raw = [effect(s, factor, one) for s in known.values() for factor, one in contrasts(values[s.name]).items()]
        p, within = holm([e.p for e in raw]), holm([e.p_within for e in raw])
        for e, zero, inside in zip(raw, p.tolist(), within.tolist(), strict=True):
            adjusted = replace(e, p=zero, p_within=inside)
            found.append(replace(adjusted, verdict=verdict(adjusted, known[e.signature], seeds[e.signature])))
    return found


def verdict(e: Effect, signature: Signature, seeds: int) -> str:
    """The word for one effect; see `effects`."""
    differs, within = e.p < 0.05, e.p_within < 0.05
    if signature.nature == "dynamic" and differs:
        word = f"changed, by less than {signature.effect:g}" if within else "changed"
    elif within:
        word = "not changed" if signature.nature == "dynamic" else "equivalent"
    elif differs:
        word = "different"
    elif seeds < e.needed:
        return f"undecided (needs {e.needed} seeds)"
    else:
        return f"undecided ({e.needed} seeds suffice for {signature.effect:g}; less is not excluded)"
    return f"{word} †" if signature.width and e.factor != "window" else word


def gather(cells: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], list[int], dict[str, str]]:
    """Each signature's values [seed grouped windowed], the seeds that have every kind, and why a signature has none.

    Raises Refused where the cells of a seed did not read the same text, or were not measured by the same probes.
    """
    by = {(c["spec"]["seed"], c["spec"]["kind"]): c for c in cells}
    seeds = sorted(s for s in {s for s, _ in by} if all((s, name) in by for name in KINDS))
    for seed in seeds:
        if len({by[seed, name]["windows_sha256"] for name in KINDS}) > 1:
            raise Refused(f"the cells of seed {seed} did not read the same text; remove them and run again")
    if len({json.dumps(c["instrument"], sort_keys=True) for c in cells}) > 1:
        raise Refused("the cells were measured by different probes; run again without --cells to measure them anew")

    def grid(read: Callable[[Mapping[str, Any]], float]) -> np.ndarray:
        flat = [[read(by[seed, name]) for name in KINDS] for seed in seeds]
        return np.array(flat, dtype=np.float64).reshape(-1, 2, 2)

    values, absent = {"held-out loss": grid(lambda c: c["loss"]["model"])}, {}
    for s in SIGNATURES:
        have = [s.headline in by[seed, name]["values"].get(s.probe, {}) for seed in seeds for name in KINDS]
        if all(have):
            values[s.name] = grid(lambda c, s=s: c["values"][s.probe][s.headline])
        else:
            whys = {by[seed, name]["unmeasured"].get(s.probe) for seed in seeds for name in KINDS} - {None}
            why = "; ".join(sorted(whys)) or f"{s.probe} gives no {s.headline!r} in {have.count(False)} cells"
            absent[s.name] = why
    return values, seeds, absent


def analyse(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All numbers of the experiment, as plain data. Raises Refused as `gather` and `effect` do."""
    values, seeds, absent = gather(cells)
    loss = contrasts(values["held-out loss"])
    beside = Signature("held-out loss", "", "", "dynamic", 0.1)  # no verdict: it says how far cells can be compared
    minutes = [sum(c["cpu_minutes"].values()) for c in cells]
    return {
        "spec": {k: v for k, v in cells[0]["spec"].items() if k not in ("kind", "seed")},
        "seeds": seeds,
        "kinds": list(KINDS),
        "parameters": {c["spec"]["kind"]: c["parameters"] for c in cells},
        "signatures": [asdict(s) for s in SIGNATURES if s.name in values],
        "absent": absent,
        "values": {name: one.reshape(len(seeds), 4).tolist() for name, one in values.items()},
        "loss_of_trigram": [c["loss"]["model"] / c["loss"]["trigram"] for c in cells],
        "loss_of_few": [c["loss"]["model"] / min(c["loss"]["trigram_few"], c["loss"]["trigram"]) for c in cells],
        "loss": [asdict(effect(beside, factor, one)) for factor, one in loss.items()],
        "effects": [asdict(e) for e in effects(values)],
        "cells": list(cells),
        "cpu_minutes": sum(minutes),
        "versions": {p: version(p) for p in ("llmgeom", "torch", "transformers", "tokenizers", "numpy")},
    }


def table(found: Mapping[str, Any]) -> str:
    """The result as two tables of markdown: means of the cells, and what each factor changes."""
    spec, n = found["spec"], len(found["seeds"])
    lines = [f"Mean over {n} seeds (sd).", "", f"| | {' | '.join(found['kinds'])} |", "|---" * 5 + "|"]
    for name, rows in found["values"].items():
        columns = np.array(rows)
        cells = (f"{m:.3f} ({s:.3f})" for m, s in zip(columns.mean(0), columns.std(0, ddof=1), strict=True))
        unit = ", nats a token" if name == "held-out loss" else ""
        lines.append(f"| {name}{unit} | {' | '.join(cells)} |")
    lines += ["", "Change within a seed: mean [95 % interval], p of no change and of a change beyond the effect of"]
    lines += [f"interest, each by Holm over the signatures of its nature; {n} seeds.", ""]
    lines += ["| signature | effect of interest | factor | change | p = 0 | p beyond | verdict |", "|---" * 7 + "|"]
    by = {s["name"]: s for s in found["signatures"]}
    for e in found["effects"]:
        s = by[e["signature"]]
        span = f"{e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}]"
        p = f"{e['p']:.2g} | {e['p_within']:.2g}"
        what = f"{s['name']} ({s['nature']}) | {s['effect']:g} | {e['factor']}"
        lines.append(f"| {what} | {span} | {p} | {e['verdict']} |")
    for e in found["loss"]:
        span = f"{e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}]"
        lines.append(f"| held-out loss, nats a token | | {e['factor']} | {span} | {e['p']:.2g} (alone) | | beside |")
    lines += ["", "† depends on how many coordinates the values have, which grouping changes: partly arithmetic."]
    lines += [f"not measured: {name}: {why}" for name, why in found["absent"].items()]
    low, high = min(found["loss_of_trigram"]), max(found["loss_of_trigram"])
    sizes = sorted(set(found["parameters"].values()))
    few = f"{min(found['loss_of_few']):.3f} to {max(found['loss_of_few']):.3f}"
    lines += [
        f"Held-out loss is {low:.3f} to {high:.3f} of the trigram's on the same text, {few} of the better of two.",
        f"{spec['prompts']} prompts, a window of {spec['window']} tokens, {' or '.join(map(str, sizes))} parameters, "
        f"{spec['steps']} steps of {spec['batch']} x {spec['context']} tokens, {found['cpu_minutes']:.0f} CPU minutes.",
    ]
    return "\n".join(lines) + "\n"


# ---- the run --------------------------------------------------------------------------------------------------------


def run(
    out: str | os.PathLike,
    *,
    spec: Spec | None = None,
    seeds: int = LEAST_SEEDS,
    kinds: Sequence[str] = tuple(KINDS),
    progress: Progress = lambda text: None,
) -> dict[str, Any] | None:
    """Train and measure what is missing in `out`, then write kinds.json and kinds.md there; None while cells lack.

    Killed and called again it goes on: each cell is in `out` whole or not at all. A cell that was measured by other
    versions of the probes is measured again, not trained again.
    Raises Refused for an unknown kind, fewer than 2 seeds, and an `out` that holds another spec.
    """
    if unknown := [name for name in kinds if name not in KINDS]:
        raise Refused(f"unknown kind {unknown[0]!r}: known are {', '.join(KINDS)}")
    if seeds < 2:
        raise Refused(f"--seeds {seeds}: give at least 2, {LEAST_SEEDS} for a verdict worth quoting")
    spec, out = spec or Spec(), Path(out)
    material, instrument = Material(spec, seeds, out), Instrument(spec)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads, and so would the weights
    try:
        matched(spec, material.window)
        for seed in range(seeds):
            for name in kinds:
                cell(out, KINDS[name], seed, material, instrument, progress)
    finally:
        torch.set_num_threads(before)
    have = [(out / "cells" / f"{name}-{seed}.json", name, seed) for seed in range(seeds) for name in KINDS]
    if not all(path.exists() for path, *_ in have):
        return None
    identity = material.identity
    found = analyse([_agreeing(path, {**identity, "kind": name, "seed": seed}) for path, name, seed in have])
    write_whole(out / "kinds.json", _json(found))
    write_whole(out / "kinds.md", table(found).encode())
    return found


def _json(body: Any) -> bytes:
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m llmgeom.experiments.kinds --out DIR [--seeds 5] [--steps N] [--cells ...]`: 0 done, 1 refused."""
    parser = argparse.ArgumentParser(prog="python -m llmgeom.experiments.kinds", description=__doc__)
    parser.add_argument("--out", required=True, help="folder; a run that was stopped goes on from it")
    parser.add_argument("--seeds", type=int, default=LEAST_SEEDS, help="training seeds a kind [default: 5]")
    parser.add_argument("--steps", type=int, default=Spec.steps, help=f"training steps [default: {Spec.steps}]")
    parser.add_argument("--cells", nargs="+", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    asked = parser.parse_args(arguments)

    transformers.utils.logging.disable_progress_bar()

    def progress(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    try:
        found = run(asked.out, spec=Spec(steps=asked.steps), seeds=asked.seeds, kinds=asked.cells, progress=progress)
    except Refused as refusal:
        print(f"llmgeom: {refusal}", file=sys.stderr)
        return 1
    if found is None:
        print(f"{asked.out} has the cells of {', '.join(asked.cells)}; run again without --cells for the table")
        return 0
    print(table(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
