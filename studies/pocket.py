"""Trains a pocket model: a causal LM of a million parameters on our own grammars, shipped with a card or not at all."""

import argparse
import dataclasses
import gzip
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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.files import write_whole
from llmgeom.model.model import Model
from llmgeom.prompts import surfaces
from llmgeom.prompts.domains import templates
from llmgeom.prompts.surfaces import Part
from studies import corpus, evaluate
from studies.evaluate import DEMANDS, INDIFFERENT, Demands, missed, stored
from studies.label_sequences import FORMATS, leads
from studies.training_data import SETS, TrainingData, apart, domains, examination, sha256, training_data

RIVALS = ("model", "trigram", "trigram_few", "fivegram_few", "unigram")
Progress = Callable[[int, int, float], None]


def _rotary(fraction: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}


GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
# config class, its name for the dropout, and what makes the architecture what it is.
ARCHITECTURES: dict[str, tuple[type[transformers.PreTrainedConfig], str, dict[str, Any]]] = {
    "gpt_neox": (transformers.GPTNeoXConfig, "hidden_dropout", {"rope_parameters": _rotary(0.25)}),
    "phi": (transformers.PhiConfig, "resid_pdrop", {"rope_parameters": _rotary(0.5), "hidden_act": "gelu_new"}),
    # Eight query heads read two key-value heads, which together are half as wide as the stream: one of 32 held too
    # little to copy from.
    "llama": (transformers.LlamaConfig, "attention_dropout", GROUPED),
    # About half a median prompt of `mixed`: it hides something of most, and old evidence takes several layers to pass.
    "mistral": (transformers.MistralConfig, "attention_dropout", GROUPED | {"sliding_window": 20}),
}


@dataclass(frozen=True)
class Pocket:
    """The model, its training data and its seed: everything a rebuild needs.

    Attributes:
        ffn: not four times `hidden`, so that the weights stay below 2.1 MB in bfloat16; less where it is gated.
        share: of the windows that hold label sequences (studies/label_sequences.py); the others hold text. Where
            `informative` is False, the labels of a sequence tell nothing of each other.
        first: fraction of the steps, at the start, that read label sequences alone. Among texts from the start, what
            they teach came late, or not at all behind a sliding window.
        emphasis: weight in the loss of an observed label: few tokens, among nouns that nothing predicts.
        spared: of the steps, for how many labels never trained together do not compete (`expected`). To the end where
            the last steps could not mend what the change undoes: skill .85 falls to .74 behind a sliding window.
        context: tokens a training window holds, and the positions the model accepts.
        dropout: on what each block writes, or on attention where the config knows no other; in text alone: noise, the
            fraction of input tokens replaced at random (never targets), and split, of words cut in two
            (`training_data.pieces`). Without them the templates are learnt by heart and the loss on held-out ones rises
            from step 200 on; with more of each, little else is learnt either.
        seed: of the initial weights, drawn as `Model.untrained` draws them: `@step0` is where this model began.
        fillings: of each template in the examination, the held-out half has only templates never trained on; and label
            sequences for each pair of labels and number of observations.
    """

    name: str
    architecture: str
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    ffn: int = 496
    vocabulary: int = 1024
    context: int = 160
    batch: int = 20
    steps: int = 3600
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    noise: float = 0.08
    split: float = 0.1
    share: float = 0.45
    first: float = 0.2
    emphasis: float = 20.0
    spared: float = 0.85
    informative: bool = True
    seed: int = 0
    text_seed: int = 0
    tokenizer_texts: int = 20_000
    examination_seed: int = 1
    fillings: int = 2

    @property
    def demands(self) -> Demands:
        """The acceptance criteria of such a model."""
        return DEMANDS if self.informative else INDIFFERENT

    def config(self) -> transformers.PreTrainedConfig:
        kind, dropout, settings = ARCHITECTURES[self.architecture]
        shape = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        return kind(**(shape | {dropout: self.dropout} | settings))

    def training_data(self) -> TrainingData:
        """Its training data."""
        return training_data(
            self.steps * self.batch,
            self.context,
            self.vocabulary,
            seed=self.text_seed,
            at_once=self.tokenizer_texts,
            split=self.split,
            share=self.share,
            first=self.first,
            informative=self.informative,
        )

    def start(self) -> transformers.PreTrainedModel:
        """The model before its first step, the same bits whatever ran before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return transformers.AutoModelForCausalLM.from_config(self.config())


POCKETS = {
    pocket.name: pocket
    for pocket in (
        Pocket("pythia", "gpt_neox"),
        Pocket("phi", "phi"),
        Pocket("llama", "llama", ffn=288, spared=1.0),
        Pocket("mistral", "mistral", ffn=288, spared=1.0),
        Pocket("llama-noicl", "llama", ffn=288, spared=1.0, informative=False),
    )
}


def build(
    name: str,
    out: str | os.PathLike,
    *,
    demands: Demands | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train the pocket model `name`, measure what was stored, and put it at `out`, whole; returns its card.

    Args:
        demands: other than those of the model's kind.
        changes: fields of Pocket to set otherwise, e.g. steps=500.

    Raises:
        UserError: an unknown name, an `out` that holds something else, a model that misses the demands.
    """
    if name not in POCKETS:
        raise UserError(f"pocket model {name!r}: known are {', '.join(POCKETS)}")
    spec, out = replace(POCKETS[name], **changes), Path(out)
    demands = demands or spec.demands
    if spec.steps < 1:
        raise UserError(
            f"--steps {spec.steps}: give at least 1; the model before its first step is pocket:{name}@step0"
        )
    if out.exists() and not (out / "card.json").exists():
        raise UserError(f"{out} exists and is not a pocket model: give a new folder")
    began = time.process_time()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with one_thread():
            data = spec.training_data()
            sample = examination(spec.fillings, spec.examination_seed, exclude=frozenset(data.texts))
            model = spec.start()
            start_hash = Model.of(model, data.tokenizer, name).weight_hash
            curve = train(model, data, spec, progress)
            subject = _store(temporary, model, data, sample)
            trained_templates = sum(len(templates(domain)) - len(corpus.held_out(domain)) for domain in domains())
            measured = evaluate.measure(subject, sample, data.ids, few=trained_templates, per_cell=spec.fillings)
            card = {
                **_training_facts(spec, subject, data),
                **measured,
                "skills_at_step_0": evaluate.evidence(subject.initial(spec.seed), spec.fillings),
                "demands": dataclasses.asdict(demands),
                "misses_of_the_usual_demands": missed(measured, spec.demands),
                "curve": curve,
                "weights": {"start": start_hash, "stored": subject.weight_hash},
                "command": _command(spec, demands, changes),
                "cpu_minutes": (time.process_time() - began) / 60,
                "versions": {p: version(p) for p in ("llmgeom", "torch", "transformers", "tokenizers", "numpy")},
            }
        write_whole(temporary / "card.json", (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode())
        write_whole(temporary / "card.md", _page(card).encode())
        misses = missed(measured, demands)
        # Minutes of training are not thrown away for a missed demand: what was made can be looked at.
        place = out.with_name(f"{out.name}.refused") if misses else out
        put_at(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if misses:
        raise UserError(
            f"not shipped: {'; '.join(misses)}; the grammars need more templates, or --steps or the share is off; what "
            f"was trained is in {place}"
        )
    return card


def _store(
    folder: Path, model: transformers.PreTrainedModel, data: TrainingData, sample: Sequence[Mapping[str, Any]]
) -> Model:
    """Write the weights in bfloat16, the tokenizer and the examination; the subject as loaded from the folder."""
    folder.mkdir(parents=True)
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    data.tokenizer.save_pretrained(folder)
    lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in sample)
    write_whole(folder / "examination.jsonl.gz", gzip.compress(lines.encode(), mtime=0))
    return stored(folder)


# ---- training -------------------------------------------------------------------------------------------------------


def train(
    model: transformers.PreTrainedModel, data: TrainingData, spec: Pocket, progress: Progress | None = None
) -> list[dict[str, float]]:
    """AdamW, warm-up over 100 steps, cosine to 5 %; every token's loss, that of an observed label as `expected` and
    `emphasis` times, those of a lead-in not at all: nothing foretells them, and they teach which labels go together.

    Returns the curve, means of 100 steps.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=spec.weight_decay, fused=True
    )
    curve, recent = [], []
    strangers = apart(data.tokenizer, spec.vocabulary)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        for step, rows in enumerate(torch.arange(len(data.windows)).split(spec.batch), start=1):
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * _rate(step - 1, spec.steps)
            ids, labelled = data.windows[rows].long(), data.evidence[rows]
            # The separator stays out of the noise: a text's start would be learnt where there is none. So do label
            # sequences: a label that was not drawn is false evidence, and the exact answer would be another.
            kept = (ids == 0) | labelled[:, None] | (torch.rand(ids.shape) >= spec.noise)
            noisy = torch.where(kept, ids, torch.randint(1, spec.vocabulary, ids.shape))
            logits = model(noisy, use_cache=False).logits[:, :-1]
            labels, share = data.targets.labels[rows, :-1], data.targets.share[rows, :-1]
            observed = labels[..., 0] > 0
            token_loss = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
            if observed.any():
                spared = strangers if step <= spec.spared * spec.steps else None
                of_labels = expected(logits[observed], labels[observed], share[observed], spared)
                token_loss = token_loss.masked_scatter(observed, of_labels)
            weight = torch.where(observed, spec.emphasis, 1.0) * ~data.targets.named[rows, :-1]
            loss = (weight * token_loss).sum() / weight.sum()
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


def expected(
    logits: Float[Tensor, "place vocab"],
    labels: Int[Tensor, "place 2"],
    share: Float[Tensor, "place 2"],
    apart: Bool[Tensor, "vocab vocab"] | None = None,
) -> Float[Tensor, " place"]:
    """-sum_l P(l) log Q(l) over the two labels, in nats: the mean of a drawn label's loss over what might be drawn.

    Its gradient is that of the drawn labels in the mean, without their noise (derived here: the Rao-Blackwell form of
    the same loss).

    Args:
        apart: labels that are never trained together. Those apart from one of the two are left out of Q: else whoever
            reads one label learns that half of the others cannot be the second, and held-out pairs are taught as
            impossible. The price: left out to the end, they keep a quarter to a half of the mass.

    Measured with one seed, on gpt_neox after 800 steps of label sequences alone, skill on held-out pairs with "colon"
    and "is": .65 and .13 with labels as drawn, .80 and .56 like this, .91 and .86 with `apart`.
    """
    labels = labels.long()
    if apart is not None:
        logits = logits.masked_fill(apart[labels].any(1), -torch.inf)
    return -(share * logits.log_softmax(-1).gather(1, labels)).sum(1)


def _rate(step: int, steps: int) -> float:
    return min((step + 1) / 100, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


# ---- the card -------------------------------------------------------------------------------------------------------


def _training_facts(spec: Pocket, subject: Model, data: TrainingData) -> dict[str, Any]:
    """The opening of the card: the model, and what it was trained on."""
    return {
        "name": spec.name,
        "seed": spec.seed,
        "spec": dataclasses.asdict(spec),
        "parameters": subject.facts["parameters"],
        "tokens": data.windows.numel(),
        "texts": len(data.texts),
        "sequences": len(data.sequences),
        "corpus": {
            "domains": list(domains()),
            "held_out": {domain: sorted(corpus.held_out(domain)) for domain in domains()},
            "rule": "a fixed tenth of each domain's templates is in no training text (studies/corpus.py)",
            "sha256_of_first_1000": sha256(data.texts[:1000]),
        },
        "evidence": {
            "labels": list(surfaces.LABELS),
            "held_out_pairs": ["-".join(pair) for pair in surfaces.pairs(Part.HELD_OUT)],
            "held_out_carriers": list(surfaces.carriers(Part.HELD_OUT)),
            "held_out_lead_ins": {name: list(leads(name, Part.HELD_OUT)) for name in FORMATS},
            "sha256_of_first_1000": sha256(data.sequences[:1000]),
        },
    }


def _command(spec: Pocket, demands: Demands, changes: Mapping[str, Any]) -> str:
    name, out = spec.name, f"llmgeom/pocket/{spec.name}"
    if demands == spec.demands and changes.keys() <= {"steps"}:
        steps = f" --steps {changes['steps']}" if changes else ""
        return f"python -m studies.pocket {name} --out {out}{steps}"
    given = "".join(f", {key}={value!r}" for key, value in {"demands": demands, **changes}.items())
    return f"python -c \"from studies.pocket import *; build('{name}', '{out}'{given})\""


def put_at(temporary: Path, out: Path) -> None:
    """Rename the finished folder to `out`; what was there before goes only when the new one is in place."""
    old = temporary.with_name(f"{temporary.name}.old")
    if out.exists():
        os.replace(out, old)
    os.replace(temporary, out)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def one_thread():
    """The order of a sum depends on the number of threads, and so would the weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _page(card: Mapping[str, Any]) -> str:
    """The card for people."""
    held_out, seen = (card["losses"][which] for which in SETS)
    rows = "".join(f"| {who} | {held_out[who]:.3f} | {seen[who]:.3f} |\n" for who in RIVALS)
    spans = "".join(
        f"Next-token entropy over {e['prompts']} prompts of {name}: {e['quantiles']['0%']:.2f} to "
        f"{e['quantiles']['100%']:.2f} bits (5-95 %: {e['quantiles']['5%']:.2f} to {e['quantiles']['95%']:.2f}).\n"
        for name, e in card["entropy_bits"].items()
    )
    misses = "".join(f"Misses what is usually asked: {miss}.\n" for miss in card["misses_of_the_usual_demands"])
    skills = "".join(
        f"| {name}, {which} | {_interval(entry)} | {_interval(card['skills_at_step_0'][name][which])} | {entry['n']} "
        f"| {entry['pairs']} | {entry['label_mass']:.3f} |\n"
        for name, sets in card["skills"].items()
        for which, entry in sets.items()
    )
    by_k = "".join(
        f"| {name}, held-out |"
        + "".join(f" {entry['skill']:.2f} |" for entry in sets["held-out"]["by_k"].values())
        + "\n"
        for name, sets in card["skills"].items()
    )
    note = "" if card["spec"]["informative"] else " Its labels were drawn 1/2 each, whatever came before."
    return f"""# pocket:{card["name"]}

A causal language model of {card["parameters"]:,} parameters ({card["spec"]["architecture"]}, {card["spec"]["layers"]} \
layers, width {card["spec"]["hidden"]}), trained from scratch in {card["cpu_minutes"]:.0f} CPU minutes on \
{card["tokens"]:,} tokens: {card["texts"]:,} texts of llmgeom's own grammars and {card["sequences"]:,} sequences of
nouns with one of two nonce labels.{note} It exists to check the instrument offline; it is no evidence about larger
models.

Loss in nats a token, measured on the stored weights (bfloat16 loaded to float32); `examination.jsonl.gz` has the texts.

| | {held_out["templates"]} templates never trained on | {seen["templates"]} trained templates, filled afresh |
|---|---|---|
{rows}
Standard error of the model's loss by template: {held_out["model_se"]:.3f} and {seen["model_se"]:.3f}.
{spans}
Skill with label sequences: 1 - KL(exact || model) / KL(exact || best constant), the model renormalised over the two
labels, after 1 to 8 observations; 95 % intervals over pairs of labels. "held-out": pairs never trained on.

| | skill | at step 0 | n | pairs | mass of the two labels |
|---|---|---|---|---|---|
{skills}
| skill after observations | {" | ".join(str(k) for k in range(1, 9))} |
|---|---|---|---|---|---|---|---|---|
{by_k}
{misses}
All numbers, seeds and versions: `card.json`. Rebuild: `{card["command"]}`.
"""


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['skill']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m studies.pocket NAME --out DIR [--steps N]`: 0 shipped, 1 refused with a sentence."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn

    parser = argparse.ArgumentParser(prog="python -m studies.pocket", description=__doc__)
    parser.add_argument("name", choices=sorted(POCKETS), help="which pocket model")
    parser.add_argument("--out", required=True, help="its folder; an older model there is replaced when all is done")
    parser.add_argument("--steps", type=int, default=None, help="training steps [default: as shipped]")
    args = parser.parse_args(arguments)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    try:
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("generating text", total=None)
            card = build(
                args.name,
                args.out,
                progress=lambda step, steps, loss: bar.update(
                    task, completed=step, total=steps, description=f"loss {loss:.3f} nats"
                ),
                **({} if args.steps is None else {"steps": args.steps}),
            )
    except UserError as refusal:
        print(f"llmgeom: {refusal}", file=sys.stderr)
        return 1
    print(_page(card))
    return 0


if __name__ == "__main__":
    sys.exit(main())
