"""Which measure of `llmgeom evidence` tells networks that were taught a kind of inference from others?

    python -m studies.primitives_in_text [FOLDER]     a model on each core; a stopped run continues

Every pocket model is trained further on lists of one kind, a course each:

    accumulate   beta, dirichlet, markov and stated
    transport    hmm
    bind         recall and bijection
    nothing      all of them, with marks that say nothing: each is drawn evenly

and each of the 20 models, with the five as they ship, is read with every process. So of each claim five models were
taught what it is about, at least fifteen were not, and the four models of one parent differ in their lists alone.
Stores estimates, intervals and words in studies/primitives_in_text.json; `docs/tables.py` makes tables of them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from llmgeom.bench.resume import computed
from llmgeom.bench.sweep import spread
from llmgeom.commands.processes.request import RunConfig
from llmgeom.commands.processes.several import perform_processes
from llmgeom.model import hub
from llmgeom.prompts import nonce
from llmgeom.prompts.marks import CONSONANTS, VOWELS
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.process import Draw, Process
from llmgeom.prompts.processes import load_process
from llmgeom.prompts.surfaces import SURFACES
from llmgeom.stats.information import bits, entropy

STORED = Path(__file__).with_suffix(".json")
PARENTS = ("llama", "pythia", "llama-noicl", "phi", "mistral")  # one tokenizer, so one set of lists
SHIPPED = "shipped"  # in place of a course: the parent itself
AGAIN = 0.65  # probability that an item of a list comes again, where a new one is left
PROFILE = "profile"  # the record of `evidence --process all` with its three claims
KINDS = {"accumulate": "accumulates", "transport": "transports", "bind": "binds"}  # course -> claim
USES = "skill over the best constant"
LOWER = ("KL(", "lack of fit", "departure", "drift", "change under")  # measures that are near 0 where a model infers
READ = {"processes": ("all",), "nulls": 5}
Shown = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Course:
    """What is taught, and for how long.

    Attributes:
        processes: Their names.
        steps: Of AdamW, after which the curve of pocket:llama is nearly flat or, in bind, well past the plateau at
            which only the commonest mark is known (1 bit in recall, up to step 1,000).
        lists: Of a step.
        says: Whether marks follow the process; if not, each is drawn evenly.
    """

    processes: tuple[str, ...]
    steps: int
    lists: int = 24
    says: bool = True


COURSES = {
    "accumulate": Course(("beta", "dirichlet", "markov", "stated"), 1000),
    "transport": Course(("hmm",), 1400, lists=12),
    "bind": Course(("recall", "bijection"), 2400),
    "nothing": Course(("beta", "dirichlet", "markov", "stated", "hmm", "recall", "bijection"), 300, says=False),
}


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
    """That of all pocket models."""
    return transformers.AutoTokenizer.from_pretrained(hub.POCKET / PARENTS[0])


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


def lesson(process: Process, rng: Random, says: bool = True) -> Lesson:
    """One list, in any surface, with nouns that `llmgeom evidence` does not use, or with made-up words, each half of
    the time. Where the marks are to say nothing, each is drawn evenly.
    """
    draws = prefixes(process, rng)
    last, exact = draws[-1], process.predictive(draws).exp().numpy()
    outcomes = (*last.seen, last.following)
    if not says:
        outcomes = tuple(rng.randrange(process.answers) for _ in outcomes)
        exact = np.full_like(exact, 1 / process.answers)
    marks, count = rng.sample(nonce.LABELS, process.answers), max(last.items) + 1
    nouns = rng.sample(nonce.carriers(Part.TRAINED), count) if rng.random() < 0.5 else made_up(count, rng)
    surface = SURFACES[rng.choice(list(SURFACES))]
    statement = process.statement(last, marks)
    ids = list(_tokens((surface.remark.format(statement) if statement else "") + surface.lead(marks)))
    answers, places = [_tokens(f" {mark}")[0] for mark in marks], []
    for item, mark in zip(last.items, outcomes, strict=True):
        ids += _tokens(f" {nouns[item]}{surface.link}")
        places.append(len(ids) - 1)
        ids += [answers[mark], *_tokens(surface.gap.rstrip())]
    return Lesson(process.name, ids, places, answers, exact)


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
    parent: str, name: str, course: Course, shown: Shown | None = None
) -> tuple[transformers.PreTrainedModel, list[dict[str, float]]]:
    """A pocket model after AdamW on a course, with a warm-up over 100 steps and a cosine; and its curve.

    The loss is over marks alone, against their exact probabilities in place of drawn marks, as the pocket models are
    trained (`studies.pocket.expected`). The curve: bits from the exact answer by process, means of 100 steps.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.POCKET / parent, dtype=torch.float32)
    rng, processes = Random(f"primitives/{name}/{parent}"), list(map(load_process, course.processes))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, (0.9, 0.98), weight_decay=0.1, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 100, 0.05 + 0.95 * (1 + np.cos(np.pi * t / course.steps)) / 2)
    )
    curve: list[dict[str, float]] = []
    recent: dict[str, list[float]] = {process: [] for process in course.processes}
    for step in range(1, course.steps + 1):
        rows = [lesson(rng.choice(processes), rng, course.says) for _ in range(course.lists)]
        prompt = torch.tensor([i for i, row in enumerate(rows) for _ in row.places])
        place = torch.tensor([place for row in rows for place in row.places])
        exact = torch.cat([_over_vocabulary(row, model.config.vocab_size) for row in rows])
        read = model.base_model(_padded([row.ids for row in rows])).last_hidden_state
        logits = model.get_output_embeddings()(read[prompt, place])
        loss = torch.nn.functional.cross_entropy(logits, exact, reduction="none")
        optimizer.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        lost = bits(loss.detach() - entropy(exact.log()))
        for i, row in enumerate(rows):
            recent[row.process].append(lost[prompt == i].mean().item())
        if step % 100 == 0 or step == course.steps:
            curve.append({process: float(np.mean(values)) for process, values in recent.items() if values})
            recent = {process: [] for process in recent}
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


def cell(folder: str, parent: str, name: str) -> dict[str, Any]:
    """One model, trained and read: its curve, CPU seconds, and by process the estimates of `llmgeom evidence`."""
    if name == SHIPPED:
        return computed(Path(folder, "read.json"), READ, lambda: {"read": read(f"pocket:{parent}", folder)})
    course = COURSES[name]

    def taught() -> dict[str, Any]:
        began = time.process_time()
        model, curve = train(parent, name, course, lambda *now: print(parent, name, *now, file=sys.stderr, flush=True))
        model.save_pretrained(f"{folder}/model")
        tokenizer().save_pretrained(f"{folder}/model")
        return {"curve": curve, "cpu_seconds": time.process_time() - began}

    about = computed(Path(folder, "taught.json"), asdict(course), taught)
    spec = {**READ, **asdict(course)}
    return about | computed(Path(folder, "read.json"), spec, lambda: {"read": read(f"{folder}/model", folder)})


def read(model: str, folder: str) -> dict[str, dict[str, Any]]:
    """Process (or "profile") -> measure -> value, interval and word."""
    out = Path(folder, "evidence")
    shutil.rmtree(out, ignore_errors=True)
    _, records = perform_processes(RunConfig(model=model, out=str(out), **READ))
    shutil.rmtree(out)
    return {
        record.source["name"]: {
            one.name: {"value": one.value, "low": one.low, "high": one.high, "word": one.verdict}
            for measured in record.results.values()
            for one in measured.estimates
        }
        for record in records
    }


# ---- judging --------------------------------------------------------------------------------------------------------


def areas(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Course -> measure -> how well the measure tells models of that course from all others: see `area`.

    Args:
        models: "PARENT/COURSE" -> a result of `cell`.
    """
    parents, names = (list(dict.fromkeys(of)) for of in zip(*(model.split("/") for model in models), strict=True))
    table: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        scores: dict[str, list[list[list[float]]]] = {}
        for process in COURSES[kind].processes:
            for measure in models[f"{parents[0]}/{kind}"]["read"][process]:
                values = [
                    [models[f"{of}/{name}"]["read"][process][measure]["value"] for name in names] for of in parents
                ]
                scores.setdefault(measure, []).append(values)
        table[kind] = {
            measure: area(-np.abs(rows) if measure.startswith(LOWER) else np.array(rows), names.index(kind))
            for measure, rows in scores.items()
        }
    return table


def area(scores: np.ndarray, taught: int) -> dict[str, Any]:
    """The area under the ROC curve within process and parent: the mean over both of

        A = #{courses that the taught one exceeds, ties half} / (courses - 1)

    Args:
        scores: [process parent course].
        taught: Index of the course.

    Returns:
        The area, its ends over parents, and the two-sided p of no difference between courses. It is exact: every choice
        of one course a parent as the taught one counts (3,125 with 5 parents of 5 models). Processes of a parent move
        together.
    """
    more = np.sign(scores[..., None] - scores[..., None, :]) / 2 + 0.5
    by_parent = ((more.sum(-1) - 0.5) / (scores.shape[-1] - 1)).mean(0)  # [parent course], were it the taught one
    every = np.zeros(1)
    for row in by_parent:
        every = np.add.outer(every, row).ravel()
    own = by_parent[:, taught]
    p = np.mean(np.abs(every / len(own) - 0.5) >= abs(own.mean() - 0.5) - 1e-9)
    return {"value": own.mean(), "least": own.min(), "most": own.max(), "p": p, "parents": len(own)}


def words(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Claim -> "taught" or "others" -> word -> how many: the profile's claims by model, use of evidence by process."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for kind, claim in KINDS.items():
        tests = {claim: [(PROFILE, claim)], f"uses: {kind}": [(process, USES) for process in COURSES[kind].processes]}
        for name, asked in tests.items():
            counts = table[name] = {"taught": {}, "others": {}}
            for model, result in models.items():
                group = counts["taught" if model.endswith(f"/{kind}") else "others"]
                for process, measure in asked:
                    word = result["read"][process][measure]["word"]
                    group[word] = group.get(word, 0) + 1
    return table


def main(folder: Path) -> None:
    """Train and read what is missing, and store the numbers."""
    jobs = {
        f"{parent}/{name}": (str(folder / f"{parent}-{name}"), parent, name)
        for parent in PARENTS
        for name in (*COURSES, SHIPPED)
    }
    results = spread(
        cell, jobs, lambda done, name: print(f"{done} of {len(jobs)}: {name}", file=sys.stderr, flush=True)
    )
    models = {name: results[name] for name in jobs}
    stored = {"models": models, "areas": areas(models), "words": words(models)}
    STORED.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "primitives"))
