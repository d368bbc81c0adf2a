"""Do grouped queries or a sliding window change what attention does with depth, and leave the values as they are?

Models that differ in nothing else, {every head its own keys and values, one pair for all} x {full attention, a window},
in several seeds. Paper III (Table 2) tells the two apart by comparing production models, which differ in everything.

The folder of a run holds models/NAME, trained, and cells/NAME.json, measured: delete cells/ to measure them again, for
instance when a probe has changed.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.cache import keys
from llmgeom.errors import UserError
from llmgeom.files import write_whole
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.tokenizing import fitting
from llmgeom.prompts import pool
from llmgeom.prompts.domains import MIXED, templates
from llmgeom.run import run_probes
from llmgeom.stats.manifold import shares
from studies import corpus, evaluate, pocket
from studies.attention_contrasts import COLUMNS, KINDS, PER_HEAD, SIGNATURES, Cell, analyse, table
from studies.training_data import TrainingData, domains, examination, training_data

LEAST_SEEDS = 5  # 4 degrees of freedom: with 3 seeds Student's quantile alone is 4.3


@dataclass(frozen=True)
class Spec(pocket.Pocket):
    """The model, its training data and its examination: everything that a cell depends on.

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
        self.stream = training_data(
            windows, spec.context, spec.vocabulary,
            seed=spec.text_seed, at_once=spec.tokenizer_texts, split=spec.split, share=spec.share,
        )  # fmt: skip
        self.reader = Model.of(spec.start(), self.stream.tokenizer)
        batch = pool.plain(fitting(self.reader, evaluate.prompts(MIXED, spec.pool)), spec.prompts)
        tokens = self.reader.tokens(batch)
        self.prompts, self.prompts_hash = replace(batch, inputs=tokens), keys.of_tokens(tokens)
        self.window = max(1, round(float(np.median(tokens.lengths)) / 3))
        rows = [row for row in examination(spec.fillings, spec.examination_seed) if row["set"] == "held-out"]
        ids = self.reader.tokenizer([row["text"] for row in rows])["input_ids"]
        self.examination = [row for row, text in zip(rows, ids, strict=True) if len(text) <= spec.context]

    def training_data(self, seed: int) -> TrainingData:
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
            targets=replace(whole.targets, **{name: each[rows] for name, each in vars(whole.targets).items()}),
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
    subject = evaluate.stored(folder)
    loss, entropy = evaluate.losses(subject, material.examination), subject.entropy(material.prompts)
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
    """Train one model and keep it in `folder`; its curve and the losses of `evaluate.rivals` are in trained.json."""
    began = time.process_time()
    read, model = material.training_data(spec.seed), spec.start()
    curve = pocket.train(model, read, spec)
    once = sum(len(templates(domain)) - len(corpus.held_out(domain)) for domain in domains())
    rivals = evaluate.rivals(material.reader, material.examination, read.ids, once)["held-out"]
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


def measure(subject: Model, prompts: Batch, nulls: int) -> dict[str, Any]:
    """Every metric by probe and name, of the probes that give the signatures, and why a probe gave none."""
    record = run_probes(
        subject, prompts, probes.known(sorted({s.probe for s in SIGNATURES} - {"kinds"})), controls=nulls
    )
    values = {name: {h.name: h.value for h in found.estimates} for name, found in record.results.items()}
    heads = subject.capture(prompts, {Site.VALUE}).layers(Site.VALUE)[-1].double().numpy()
    values["kinds"] = {PER_HEAD: float(np.mean([shares(head).numbers[1] for head in heads.swapaxes(0, 1)]))}
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
