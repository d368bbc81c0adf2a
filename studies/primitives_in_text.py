"""Which measure of `llmgeom evidence` tells small models that learnt a primitive in text from models that could not?

`python -m studies.primitives_in_text --out DIR` trains 20 models, {coin, markov, recall, noise} x 5 seeds, reads each
with three processes, and prints an area under the ROC curve for each measure; a stopped run continues.

Every model reads the same mixture: texts of our grammars, and lists of items with one of two marks in which items come
again in every other list. What the marks follow is all that differs:

    coin     Beta(1, 1), whatever the items
    markov   the mark before, by rows from Beta(1/2, 1/2)
    recall   the item: when it comes again it has its mark again
    noise    nothing: even odds

So of each process five models were given evidence to learn from, and fifteen were not: five whose marks say nothing,
and ten that learnt another process in the same lists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from torch import Tensor

from llmgeom.commands import evidence
from llmgeom.files import write_whole
from llmgeom.prompts import corpus, nonce
from llmgeom.prompts.marks import mark_sets
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.surfaces import SURFACES
from llmgeom.record import Record
from llmgeom.stats.auc import Area, area
from studies.training_data import domains

PROCESS = {"coin": "beta", "markov": "markov", "recall": "recall:labels=2"}  # what each course teaches
COURSES = (*PROCESS, "noise")
SEEDS = 5
SHOWN = 10  # observations of a training list
PRIOR = {"coin": 1.0, "markov": 0.5}  # of the marks' counts
READ = {"ks": (1, 2, 4, 8), "surfaces": ("list",), "nulls": 2}


@dataclass(frozen=True)
class Spec:
    """What is trained, the same for every course."""

    hidden: int = 64
    layers: int = 2
    steps: int = 400
    lists: int = 16  # of a step
    texts: int = 2
    longest: int = 80  # tokens of a row; the tokenizer's 1,024 tokens are those of pocket:llama
    learning_rate: float = 5e-3

    def model(self, seed: int) -> transformers.PreTrainedModel:
        """The model before its first step."""
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=1024,
                hidden_size=self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                intermediate_size=2 * self.hidden,
                max_position_embeddings=160,
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


# ---- lists ----------------------------------------------------------------------------------------------------------


@cache
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    """That of the pocket models."""
    folder = Path(evidence.__file__).parents[1] / "pocket" / "llama"
    return transformers.AutoTokenizer.from_pretrained(folder)


@cache
def tokens(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text)["input_ids"])


@cache
def asked_pairs() -> frozenset[frozenset[str]]:
    """The pairs of marks that `llmgeom evidence` asks about: never in one training list."""
    return frozenset(map(frozenset, mark_sets(tokenizer(), 2)))


def written(course: str, rng: Random) -> tuple[list[int], list[int], np.ndarray]:
    """Tokens of one list, where its observed marks are, and the exact probabilities there: [place vocabulary]."""
    while frozenset(marks := rng.sample(nonce.LABELS, 2)) in asked_pairs():
        pass
    nouns, surface = rng.sample(nonce.carriers(Part.TRAINED), SHOWN), SURFACES["list"]
    items = [rng.randrange(SHOWN) for _ in range(SHOWN)] if rng.random() < 0.5 else list(range(SHOWN))
    seen, p = drawn(course, items, rng)
    ids, places = [*tokens(surface.lead(marks))], []
    exact, answers = np.zeros((SHOWN, 1024), np.float32), [tokens(f" {mark}")[0] for mark in marks]
    for i, (item, mark) in enumerate(zip(items, seen, strict=True)):
        ids += [*tokens(f" {nouns[item]}{surface.link}"), answers[mark]]
        places.append(len(ids) - 1)
        exact[i, answers] = p[i]
        ids += tokens(surface.gap.rstrip())
    return ids, places, exact


def drawn(course: str, items: list[int], rng: Random) -> tuple[list[int], np.ndarray]:
    """The mark of each item, and the exact probability of either mark before it is shown: [observation mark]."""
    prior = PRIOR.get(course, 1.0)
    rows = [rng.betavariate(prior, prior) for _ in range(2)]  # P(first mark) after either mark
    counts, p, seen = np.zeros((2, 2)), np.full((len(items), 2), 0.5), []
    stored: dict[int, int] = {}
    for i, item in enumerate(items):
        state = 0 if course == "coin" else seen[-1] if seen and course == "markov" else None
        mark = int(rng.random() >= (0.5 if state is None else rows[state]))
        if state is not None:
            p[i] = (counts[state] + prior) / (counts[state] + prior).sum()
            counts[state, mark] += 1
        if course == "recall" and item in stored:
            mark = stored[item]
            p[i] = np.eye(2)[mark]
        stored[item] = mark
        seen.append(mark)
    return seen, p


# ---- training -------------------------------------------------------------------------------------------------------


def train(course: str, seed: int, spec: Spec) -> tuple[transformers.PreTrainedModel, list[float]]:
    """AdamW, a linear warm-up over 50 steps and a cosine; the model, and its loss over the marks by 100 steps.

    Lists are trained on their marks only, against exact probabilities in place of drawn marks, as the pocket models
    are (`studies.pocket.expected`); texts on every token.
    """
    model, rng = spec.model(seed), Random(f"primitives/{course}/{seed}")
    stream = corpus.texts(domains(), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / 50) * (0.05 + 0.95 * (1 + np.cos(np.pi * t / spec.steps)) / 2)
    )
    curve: list[float] = []
    for _ in range(spec.steps):
        rows = [written(course, rng) for _ in range(spec.lists)]
        ids = _padded([row[0] for row in rows], spec.longest)
        text = _padded([tokenizer()(next(stream))["input_ids"] for _ in range(spec.texts)], spec.longest)
        read = model.model(ids).last_hidden_state
        at = [(i, place - 1, j) for i, row in enumerate(rows) for j, place in enumerate(row[1]) if place < spec.longest]
        exact = torch.from_numpy(np.stack([rows[i][2][j] for i, _, j in at]))
        row, place = (torch.tensor([one[axis] for one in at]) for axis in (0, 1))
        of_marks = torch.nn.functional.cross_entropy(model.lm_head(read[row, place]), exact)
        logits = model(text).logits[:, :-1]
        of_texts = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        (of_marks + 0.2 * of_texts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        curve.append(of_marks.item())
    model.eval()
    return model, [float(np.mean(curve[i : i + 100])) for i in range(0, len(curve), 100)]


def _padded(rows: list[list[int]], longest: int) -> Tensor:
    """[row token], cut at `longest`, with 0 after the end."""
    ids = torch.zeros(len(rows), min(longest, max(map(len, rows))), dtype=torch.long)
    for to, row in zip(ids, rows, strict=True):
        to[: len(row)] = torch.tensor(row[:longest])
    return ids


# ---- reading --------------------------------------------------------------------------------------------------------


def measures(record: Record) -> dict[str, float]:
    """Every estimate of a record, and the read-outs that claim nothing, at the last layer."""
    found = {h.name: float(h.value) for measured in record.results.values() for h in measured.estimates}
    if simplex := record.results.get("simplex"):
        found["point of the simplex, R2 at the last layer"] = float(simplex.arrays["along"][-1])
    return found


def cell(out: Path, course: str, seed: int, spec: Spec) -> dict[str, dict[str, float]]:
    """Train one model and read it; or what was measured before."""
    path = out / f"{course}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())["measured"]
    began, folder = time.process_time(), out / f"{course}-{seed}"
    model, curve = train(course, seed, spec)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    trained = time.process_time() - began
    settings = evidence.RunConfig(
        model=str(folder), processes=tuple(PROCESS.values()), out=str(out / f"read-{course}-{seed}"), **READ
    )
    _, records = evidence.perform_processes(settings)
    shutil.rmtree(out / f"read-{course}-{seed}")
    measured = {record.source["name"]: measures(record) for record in records if record.source["name"] != "profile"}
    about = {"loss": curve, "seconds": [trained, time.process_time() - began - trained], "measured": measured}
    write_whole(path, json.dumps(about, indent=1).encode())
    return measured


def areas(cells: Mapping[tuple[str, int], Mapping[str, Mapping[str, float]]]) -> dict[tuple[str, str], Area]:
    """(process, measure) -> area between the models that the process was taught to and all others.

    Models are compared within a seed, which fixes initial weights and texts; the interval is over seeds.
    """
    found = {}
    for course, process in PROCESS.items():
        for name in sorted({name for of in cells.values() for name in of[process]}):
            have = [(key, of[process][name]) for key, of in cells.items() if name in of[process]]
            score, kind = np.array([value for _, value in have]), np.array([key[0] == course for key, _ in have])
            seeds = np.array([str(seed) for (_, seed), _ in have])
            if one := area(score, kind, seeds, seeds):
                found[process, name] = one
    return found


def table(cells: Mapping[tuple[str, int], Mapping[str, Mapping[str, float]]]) -> list[str]:
    """The areas as lines of Markdown, a row for each measure, and the mean of the measure by course."""
    found = areas(cells)
    heads = [f"{course}: AUC | taught | others" for course in PROCESS]
    lines = [f"| measure | {' | '.join(heads)} |", "|---" * (1 + 3 * len(PROCESS)) + "|"]
    for name in dict.fromkeys(name for _, name in found):
        row = [name]
        for course, process in PROCESS.items():
            if (one := found.get((process, name))) is None:
                row += ["", "", ""]
                continue
            means = [
                np.mean([of[process][name] for key, of in cells.items() if (key[0] == course) is taught])
                for taught in (True, False)
            ]
            row += [f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]", *(f"{mean:.3f}" for mean in means)]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.primitives_in_text", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=Spec.steps)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    spec = Spec(steps=asked.steps)
    cells = {(c, s): cell(asked.out, c, s, spec) for s in range(asked.seeds) for c in COURSES}
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
