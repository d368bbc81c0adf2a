"""Trains a pocket model: a causal LM of a million parameters on our own grammars, shipped with a card or not at all."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from llmgeom.errors import Refused
from llmgeom.experiments import exam
from llmgeom.experiments.exam import DEMANDS, Demands, missed, stored
from llmgeom.experiments.lessons import SETS, domains, examination, lessons, sha256
from llmgeom.prompts import corpus
from llmgeom.prompts.grammar import templates
from llmgeom.record import write_whole
from llmgeom.subject import Subject

RIVALS = ("model", "trigram", "trigram_few", "fivegram_few", "unigram")
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Pocket:
    """What is trained, on what, from which seed: everything a rebuild needs.

    ffn        496 and not four times `hidden`, so that the weights stay below 2.1 MB in bfloat16.
    context    tokens a training window holds, and the positions the model accepts.
    dropout    on what each block writes; noise, the fraction of input tokens replaced at random (never targets); split,
               of words cut in two (`lessons.pieces`). Without them the templates are learnt by heart and the loss
               on held-out ones rises from step 200 on; with more of each, little else is learnt either.
    seed       of the initial weights, drawn exactly as `Subject.twin` draws them: `@step0` is where this model began.
    fillings   of each template in the examination; the held-out half has only templates never trained on.
    """

    name: str = "pythia"
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    ffn: int = 496
    vocabulary: int = 1024
    context: int = 128
    batch: int = 24
    steps: int = 1500
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    dropout: float = 0.05
    noise: float = 0.08
    split: float = 0.1
    seed: int = 0
    text_seed: int = 0
    tokenizer_texts: int = 20_000
    examination_seed: int = 1
    fillings: int = 2

    def config(self) -> transformers.PreTrainedConfig:
        return transformers.GPTNeoXConfig(
            architectures=["GPTNeoXForCausalLM"],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.ffn,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            hidden_dropout=self.dropout,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )

    def start(self) -> transformers.PreTrainedModel:
        """The model before its first step, the same bits whatever ran before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return transformers.AutoModelForCausalLM.from_config(self.config())


POCKETS = {"pythia": Pocket()}


def build(
    name: str,
    out: str | os.PathLike,
    *,
    demands: Demands = DEMANDS,
    progress: Progress | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train the pocket model `name`, measure what was stored, and put it at `out`, whole; returns its card.

    changes    fields of Pocket to set otherwise, e.g. steps=500.
    Raises Refused: an unknown name, an `out` that holds something else, a model that misses the demands.
    """
    if name not in POCKETS:
        raise Refused(f"pocket model {name!r}: known are {', '.join(POCKETS)}")
    spec, out = replace(POCKETS[name], **changes), Path(out)
    if spec.steps < 1:
        raise Refused(f"--steps {spec.steps}: give at least 1; the model before its first step is pocket:{name}@step0")
    if out.exists() and not (out / "card.json").exists():
        raise Refused(f"{out} exists and is not a pocket model: give a new folder")
    began = time.process_time()
    with _one_thread():
        read = lessons(
            spec.steps * spec.batch,
            spec.context,
            spec.vocabulary,
            seed=spec.text_seed,
            at_once=spec.tokenizer_texts,
            split=spec.split,
        )
        sample = examination(spec.fillings, spec.examination_seed, exclude=frozenset(read.texts))
        model = spec.start()
        start = Subject.of(model).weight_hash
        curve = train(model, read.windows, spec, progress)
        temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            temporary.mkdir(parents=True)
            model.to(torch.bfloat16).save_pretrained(temporary)
            (temporary / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
            read.tokenizer.save_pretrained(temporary)
            lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in sample)
            write_whole(temporary / "examination.jsonl", lines.encode())
            subject = stored(temporary)
            once = sum(len(templates(domain)) - len(corpus.held_out(domain)) for domain in domains())
            measured = exam.sit(subject, sample, read.ids, few=once)
            if short := missed(measured, demands):
                raise Refused(f"not shipped: {'; '.join(short)}; the grammars need more templates, or --steps is off")
            card = {
                "name": name,
                "seed": spec.seed,
                "spec": dataclasses.asdict(spec),
                "parameters": subject.facts["parameters"],
                "tokens": read.windows.numel(),
                "texts": len(read.texts),
                "corpus": {
                    "domains": list(domains()),
                    "held_out": {domain: sorted(corpus.held_out(domain)) for domain in domains()},
                    "rule": "a fixed tenth of each domain's templates is in no training text (prompts/corpus.py)",
                    "sha256_of_first_1000": sha256(read.texts[:1000]),
                },
                **measured,
                "demands": dataclasses.asdict(demands),
                "misses_of_the_usual_demands": missed(measured, DEMANDS),
                "curve": curve,
                "weights": {"start": start, "stored": subject.weight_hash},
                "command": _command(name, demands, changes),
                "cpu_minutes": (time.process_time() - began) / 60,
                "versions": {p: version(p) for p in ("llmgeom", "torch", "transformers", "tokenizers", "numpy")},
            }
            write_whole(temporary / "card.json", (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode())
            write_whole(temporary / "card.md", _page(card).encode())
            _place(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return card


# ---- training -------------------------------------------------------------------------------------------------------


def train(model, windows: Tensor, spec: Pocket, progress: Progress | None = None) -> list[dict[str, float]]:
    """AdamW, warm-up over 100 steps, cosine to 5 %; every token's loss. Returns the curve, means of 100 steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=spec.weight_decay, fused=True
    )
    curve, recent = [], []
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        for step, ids in enumerate(windows.long().split(spec.batch), start=1):
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * _rate(step - 1, spec.steps)
            # The separator stays out of the noise: a text's start would be learnt where there is none.
            noisy = torch.where(torch.rand(ids.shape) < spec.noise, torch.randint(1, spec.vocabulary, ids.shape), ids)
            logits = model(torch.where(ids == 0, ids, noisy), use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recent.append(loss.item())
            if progress:
                progress(step, spec.steps, recent[-1])
            if step % 100 == 0 or step == spec.steps:
                curve.append({"step": step, "loss": float(np.mean(recent))})
                recent = []
    model.eval()
    return curve


def _rate(step: int, steps: int) -> float:
    return min((step + 1) / 100, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


# ---- the card -------------------------------------------------------------------------------------------------------


def _command(name: str, demands: Demands, changes: Mapping[str, Any]) -> str:
    out = f"llmgeom/pocket/{name}"
    if demands == DEMANDS and changes.keys() <= {"steps"}:
        steps = f" --steps {changes['steps']}" if changes else ""
        return f"python -m llmgeom.experiments.pocket {name} --out {out}{steps}"
    given = "".join(f", {key}={value!r}" for key, value in {"demands": demands, **changes}.items())
    return f"python -c \"from llmgeom.experiments.pocket import *; build('{name}', '{out}'{given})\""


def _place(temporary: Path, out: Path) -> None:
    """Rename the finished folder to `out`; what was there before goes only when the new one is in place."""
    old = temporary.with_name(f"{temporary.name}.old")
    if out.exists():
        os.replace(out, old)
    os.replace(temporary, out)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _one_thread():
    """The order of a sum depends on the number of threads, and so would the weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _page(card: Mapping[str, Any]) -> str:
    """The card for people."""
    held, seen = (card["losses"][which] for which in SETS)
    rows = "".join(f"| {who} | {held[who]:.3f} | {seen[who]:.3f} |\n" for who in RIVALS)
    spans = "".join(
        f"Next-token entropy over {e['prompts']} prompts of {name}: {e['quantiles']['0%']:.2f} to "
        f"{e['quantiles']['100%']:.2f} bits (5-95 %: {e['quantiles']['5%']:.2f} to {e['quantiles']['95%']:.2f}).\n"
        for name, e in card["entropy_bits"].items()
    )
    misses = "".join(f"Misses what is usually asked: {miss}.\n" for miss in card["misses_of_the_usual_demands"])
    return f"""# pocket:{card["name"]}

A causal language model of {card["parameters"]:,} parameters (GPT-NeoX, {card["spec"]["layers"]} layers, width
{card["spec"]["hidden"]}), trained from scratch in {card["cpu_minutes"]:.0f} CPU minutes on {card["tokens"]:,} tokens
of llmgeom's own grammars. It exists to check the instrument offline; it is no evidence about larger models.

Loss in nats a token, measured on the stored weights (bfloat16 loaded to float32); `examination.jsonl` has the texts.

| | {held["templates"]} templates never trained on | {seen["templates"]} trained templates, filled afresh |
|---|---|---|
{rows}
Standard error of the model's loss by template: {held["model_se"]:.3f} and {seen["model_se"]:.3f}.
{spans}{misses}
All numbers, seeds and versions: `card.json`. Rebuild: `{card["command"]}`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m llmgeom.experiments.pocket NAME --out DIR [--steps N]`: 0 shipped, 1 refused with a sentence."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    parser = argparse.ArgumentParser(prog="python -m llmgeom.experiments.pocket", description=__doc__)
    parser.add_argument("name", choices=sorted(POCKETS), help="which pocket model")
    parser.add_argument("--out", required=True, help="its folder; an older model there is replaced when all is done")
    parser.add_argument("--steps", type=int, default=None, help="training steps [default: as shipped]")
    asked = parser.parse_args(arguments)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    try:
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("generating text", total=None)
            card = build(
                asked.name,
                asked.out,
                progress=lambda step, steps, loss: bar.update(
                    task, completed=step, total=steps, description=f"loss {loss:.3f} nats"
                ),
                **({} if asked.steps is None else {"steps": asked.steps}),
            )
    except Refused as refusal:
        print(f"llmgeom: {refusal}", file=sys.stderr)
        return 1
    print(_page(card))
    return 0


if __name__ == "__main__":
    sys.exit(main())
