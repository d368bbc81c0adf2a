"""Does the profile of `llmgeom evidence` say *holds* of a trained network that infers, and of the right primitive?

`python -m studies.primitives_in_text --out DIR` trains pocket:llama further on lists of one kind, a course each:

    accumulate   beta, dirichlet, markov and stated
    transport    hmm
    bind         recall and bijection

and reads every model with every process. So of each claim one model was taught what it is about, and three (two other
courses and pocket:llama itself) were not. A stopped run continues with the next model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from llmgeom.commands import evidence
from llmgeom.files import write_whole
from llmgeom.model import hub
from llmgeom.prompts import nonce
from llmgeom.prompts.marks import CONSONANTS, VOWELS
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.process import Draw, Process
from llmgeom.prompts.processes import load_process
from llmgeom.prompts.surfaces import SURFACES
from llmgeom.stats.information import bits, entropy

COURSES = {
    "accumulate": ("beta", "dirichlet", "markov", "stated"),
    "transport": ("hmm",),
    "bind": ("recall", "bijection"),
}
PARENT = "llama"  # the pocket model that every course begins with
AGAIN = 0.65  # probability that an item of a list comes again, where a new one is left
READ = {"processes": ("all",), "nulls": 10}
Shown = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Spec:
    """How a course is taught."""

    steps: int = 4000
    lists: int = 24  # of a step
    learning_rate: float = 2e-3


@dataclass(frozen=True)
class Lesson:
    """One list as tokens.

    Attributes:
        process: Its name.
        ids: The tokens.
        places: Of the token before each mark.
        marks: The token of each outcome.
        exact: P(mark | what stands before), [place outcome].
    """

    process: str
    ids: list[int]
    places: list[int]
    marks: list[int]
    exact: np.ndarray


# ---- lists ----------------------------------------------------------------------------------------------------------


@cache
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    """That of the pocket model."""
    return transformers.AutoTokenizer.from_pretrained(hub.POCKET / PARENT)


@cache
def _tokens(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text)["input_ids"])


def made_up(count: int, rng: Random) -> list[str]:
    """Different words of two or three syllables; none begins with a mark, which would be cut off it as a token."""
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 3))))
        if not word.startswith(nonce.LABELS):
            words[word] = None
    return list(words)


def lesson(process: Process, rng: Random) -> Lesson:
    """One list, in any surface, with nouns that `llmgeom evidence` does not use, or with made-up words, each half of
    the time.
    """
    draws = prefixes(process, rng)
    last = draws[-1]
    marks, count = rng.sample(nonce.LABELS, process.answers), max(last.items) + 1
    nouns = rng.sample(nonce.carriers(Part.TRAINED), count) if rng.random() < 0.5 else made_up(count, rng)
    surface = SURFACES[rng.choice(list(SURFACES))]
    statement = process.statement(last, marks)
    ids = list(_tokens((surface.remark.format(statement) if statement else "") + surface.lead(marks)))
    answers, places = [_tokens(f" {mark}")[0] for mark in marks], []
    for item, mark in zip(last.items, (*last.seen, last.following), strict=True):
        ids += _tokens(f" {nouns[item]}{surface.link}")
        places.append(len(ids) - 1)
        ids += [answers[mark], *_tokens(surface.gap.rstrip())]
    return Lesson(process.name, ids, places, answers, process.predictive(draws).exp().numpy())


def prefixes(process: Process, rng: Random) -> list[Draw]:
    """What each mark of a list has before it. Where marks belong to items, items come again all along the list."""
    most = max(process.KS)
    if process.PRIMITIVE != "bind":
        draw = process.draw(most, rng)
        seen, items = (*draw.seen, draw.following), draw.items
    else:
        mark, order, new = process.draw(most, rng).seen, [0], 1
        for _ in range(most + 3):
            again = new == len(mark) or rng.random() < AGAIN
            order.append(rng.randrange(new) if again else new)
            new += not again
        seen, items, draw = tuple(mark[item] for item in order), tuple(order), Draw((), 0)
    return [Draw(seen[:k], seen[k], items[: k + 1], draw.stated) for k in range(len(seen))]


# ---- training -------------------------------------------------------------------------------------------------------


def train(
    course: str, seed: int, spec: Spec, shown: Shown | None = None
) -> tuple[transformers.PreTrainedModel, list[dict[str, float]]]:
    """pocket:llama after AdamW on a course, with a warm-up over 100 steps and a cosine; and its curve.

    The loss is over marks alone, against their exact probabilities in place of drawn marks, as the pocket models are
    trained (`studies.pocket.expected`). The curve: bits from the exact answer by process, means of 100 steps.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.POCKET / PARENT, dtype=torch.float32)
    rng, processes = Random(f"primitives/{course}/{seed}"), [load_process(name) for name in COURSES[course]]
    optimizer = torch.optim.AdamW(model.parameters(), spec.learning_rate, (0.9, 0.98), weight_decay=0.1, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 100, 0.05 + 0.95 * (1 + np.cos(np.pi * t / spec.steps)) / 2)
    )
    curve: list[dict[str, float]] = []
    recent: dict[str, list[float]] = {name: [] for name in COURSES[course]}
    for step in range(1, spec.steps + 1):
        rows = [lesson(rng.choice(processes), rng) for _ in range(spec.lists)]
        prompt = torch.tensor([i for i, row in enumerate(rows) for _ in row.places])
        place = torch.tensor([place for row in rows for place in row.places])
        exact = torch.cat([_over_vocabulary(row, model.config.vocab_size) for row in rows])
        read = model.model(_padded([row.ids for row in rows])).last_hidden_state
        loss = torch.nn.functional.cross_entropy(model.lm_head(read[prompt, place]), exact, reduction="none")
        optimizer.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        lost = bits(loss.detach() - entropy(exact.log()))
        for i, row in enumerate(rows):
            recent[row.process].append(lost[prompt == i].mean().item())
        if step % 100 == 0 or step == spec.steps:
            curve.append({name: float(np.mean(found)) for name, found in recent.items() if found})
            recent = {name: [] for name in recent}
            if shown:
                shown(step, curve[-1])
    model.eval()
    return model, curve


def _padded(rows: list[list[int]]) -> Tensor:
    """[row token] with 0 after the end."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for to, row in zip(ids, rows, strict=True):
        to[: len(row)] = torch.tensor(row)
    return ids


def _over_vocabulary(row: Lesson, size: int) -> Tensor:
    exact = torch.zeros(len(row.places), size)
    exact[:, row.marks] = torch.from_numpy(row.exact).float()
    return exact


# ---- reading --------------------------------------------------------------------------------------------------------


def cell(out: Path, course: str, seed: int, spec: Spec, shown: Shown | None = None) -> dict[str, Any]:
    """Train one model and read it; or what was measured before."""
    path, folder = out / f"{course}-{seed}.json", out / f"{course}-{seed}"
    if path.exists():
        return json.loads(path.read_text())
    began = time.process_time()
    model, curve = train(course, seed, spec, shown)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    trained = time.process_time() - began
    profile = read(str(folder), out / f"read-{course}-{seed}")
    about = {"curve": curve, "cpu_seconds": [trained, time.process_time() - began - trained], "profile": profile}
    write_whole(path, json.dumps(about, indent=1).encode())
    return about


def read(model: str, out: Path) -> dict[str, dict[str, Any]]:
    """The claims of the profile by their names: value, interval, band of the untrained controls, word; and the skill
    over the best constant and the best observer that does not infer, of each process."""
    shutil.rmtree(out, ignore_errors=True)
    _, records = evidence.perform_processes(evidence.RunConfig(model=model, out=str(out), **READ))
    return {
        record.source["name"]: {
            one.name: {"value": one.value, "low": one.low, "high": one.high, "word": one.verdict}
            for measured in record.results.values()
            for one in measured.estimates
        }
        for record in records
    }


def table(profiles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The claims of each model's profile as lines of Markdown."""
    lines = []
    for model, profile in profiles.items():
        claims = [
            f"{one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}], {one['word']}" for one in profile.values()
        ]
        lines.append(f"| {' | '.join([model, *claims])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.primitives_in_text", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--courses", nargs="+", choices=COURSES, default=list(COURSES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=Spec.steps)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    profiles = {}
    for seed in range(args.seeds):
        for course in args.courses:
            result = cell(
                args.out, course, seed, Spec(steps=args.steps), lambda step, lost: print(step, lost, flush=True)
            )
            profiles[f"{course}, seed {seed}"] = result["profile"]["profile"]
    print("\n".join(table(profiles)))


if __name__ == "__main__":
    main()
