"""Lists with exact answers as tokens, and training a pocket model further on them: what studies of evidence share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np
import torch
import transformers
from torch import Tensor

from llmgeom.model import hub
from llmgeom.prompts.surfaces import LABELS, SURFACES, Part, carriers
from llmgeom.sampling import Lots
from llmgeom.stats.information import bits, entropy
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.worlds.recall import Recall
from llmgeom.world import World
from studies.training_data import training_data

Shown = Callable[[int, Mapping[str, float]], None]
CONSONANTS, VOWELS = "bdfgjklmnprstvwz", "aeiou"  # of words that are made up


@dataclass(frozen=True)
class Course:
    """The training data and its length.

    Attributes:
        processes: Their names; one that stands twice is drawn twice as often.
        steps: Of AdamW.
        lists: Of a step.
        says: Whether marks follow the process; if not, each is drawn evenly.
        rate: The largest learning rate.
        at_once: Steps whose lists are drawn together and sorted by length, so that little is padding.
        texts: Every so many steps read windows of the pocket models' texts instead; 0 for none.
    """

    processes: tuple[str, ...]
    steps: int
    lists: int = 24
    says: bool = True
    rate: float = 2e-3
    at_once: int = 1
    texts: int = 0


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


@cache
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    """That of all pocket models."""
    return transformers.AutoTokenizer.from_pretrained(hub.POCKET / "llama")


@cache
def _tokens(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text)["input_ids"])


def made_up(count: int, rng: Random) -> list[str]:
    """Different words of two or three syllables; none begins with a mark, which would be cut off it as a token."""
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 3))))
        if not word.startswith(LABELS):
            words[word] = None
    return list(words)


def lesson(world: World, rng: Random, says: bool = True) -> Lesson:
    """One list, in any surface, with nouns that `llmgeom evidence` does not use, or with made-up words, each half of
    the time. Where the marks are to say nothing, each is drawn evenly.

    The lists of a recall are asked about every item in turn; the items of a bijection come again as in its training.
    """
    most = max(world.KS)
    long = replace(world, pairs=most, queries=most) if isinstance(world, Recall) else world.showing(most)
    drawn = long.draw_split(1, Lots([rng]), training=True)
    outcomes = world.answers.tokens
    ids = [*drawn.inputs[0].tolist(), outcomes[int(drawn.target[0, -1])]]
    shown = [token - outcomes[0] for token in ids if token in outcomes]
    others = [token for token in ids if token not in outcomes]
    items = others if world.PRIMITIVE == "bind" else list(range(len(shown)))
    exact = long.log_predictive(drawn.inputs)[0].exp().numpy()  # of the last marks; the first may have no query
    if not says:
        shown = [rng.randrange(len(outcomes)) for _ in shown]
        exact = np.full_like(exact, 1 / len(outcomes))
    marks, count = rng.sample(LABELS, len(outcomes)), max(items) + 1
    nouns = rng.sample(carriers(Part.TRAINED), count) if rng.random() < 0.5 else made_up(count, rng)
    surface = SURFACES[rng.choice(list(SURFACES))]
    statement = world.statement(drawn.inputs[0], marks)
    ids = list(_tokens((surface.remark.format(statement) if statement else "") + surface.lead(marks)))
    answers, places = [_tokens(f" {mark}")[0] for mark in marks], []
    for item, mark in zip(items, shown, strict=True):
        ids += _tokens(f" {nouns[item]}{surface.link}")
        places.append(len(ids) - 1)
        ids += [answers[mark], *_tokens(surface.gap.rstrip())]
    return Lesson(world.name, ids, places[-len(exact) :], answers, exact)


# ---- training -------------------------------------------------------------------------------------------------------


def train(
    parent: str, name: str, *courses: Course, shown: Shown | None = None
) -> tuple[transformers.PreTrainedModel, list[dict[str, float]]]:
    """A pocket model after AdamW on some courses, each with a warm-up over 100 steps and a cosine; and its curve.

    The loss is over marks alone, against their exact probabilities in place of drawn marks, as the pocket models are
    trained (`studies.pocket.expected`); in texts, of every token. The curve: bits from the exact answer by process and
    of a token of the texts, means of 100 steps.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.POCKET / parent, dtype=torch.float32)
    curve: list[dict[str, float]] = []
    for i, course in enumerate(courses):
        rng = Random(f"primitives/{name}/{parent}" + f"/{i}" * bool(i))
        _follow(model, course, rng, curve, shown)
    model.eval()
    return model, curve


def _follow(
    model: transformers.PreTrainedModel, course: Course, rng: Random, curve: list[dict[str, float]], shown: Shown | None
) -> None:
    """One course; its curve is appended."""
    optimizer = torch.optim.AdamW(model.parameters(), course.rate, (0.9, 0.98), weight_decay=0.1, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 100, 0.05 + 0.95 * (1 + np.cos(np.pi * t / course.steps)) / 2)
    )
    recent: dict[str, list[float]] = {}
    lists, windows = _lists(course, rng), _windows(course)
    for step in range(1, course.steps + 1):
        if course.texts and step % course.texts == 0:
            loss = _of_texts(model, next(windows))
            recent.setdefault("texts", []).append(bits(loss.item()))
        else:
            loss, by_process = _of_lists(model, next(lists))
            for process, values in by_process.items():
                recent.setdefault(process, []).extend(values)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 100 == 0 or step == course.steps:
            curve.append({of: float(np.mean(values)) for of, values in recent.items()})
            recent = {}
            if shown:
                shown(step, curve[-1])


def _lists(course: Course, rng: Random) -> Iterator[list[Lesson]]:
    """The lists of each step."""
    processes = [load_world(name, text=True) for name in course.processes]
    while True:
        rows = [lesson(rng.choice(processes), rng, course.says) for _ in range(course.lists * course.at_once)]
        rows.sort(key=lambda row: len(row.ids))
        steps = [rows[i : i + course.lists] for i in range(0, len(rows), course.lists)]
        rng.shuffle(steps)
        yield from steps


def _of_lists(model: transformers.PreTrainedModel, rows: list[Lesson]) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss of a step in nats, and of each list the bits from its exact answers, by process."""
    prompt = torch.tensor([i for i, row in enumerate(rows) for _ in row.places])
    place = torch.tensor([place for row in rows for place in row.places])
    exact = torch.cat([_over_vocabulary(row, model.config.vocab_size) for row in rows])
    read = model.base_model(_padded([row.ids for row in rows])).last_hidden_state
    logits = model.get_output_embeddings()(read[prompt, place])
    loss = torch.nn.functional.cross_entropy(logits, exact, reduction="none")
    lost = bits(loss.detach() - entropy(exact.log()))
    by_process: dict[str, list[float]] = {}
    for i, row in enumerate(rows):
        by_process.setdefault(row.process, []).append(lost[prompt == i].mean().item())
    return loss.mean(), by_process


def _windows(course: Course) -> Iterator[Tensor]:
    """Ten windows of text a step, of those that the pocket models read first."""
    if course.texts:
        steps = course.steps // course.texts
        texts = training_data(10 * steps, context=160, vocabulary=len(tokenizer()), seed=0, at_once=20_000)
        yield from texts.windows.split(10)


def _of_texts(model: transformers.PreTrainedModel, windows: Tensor) -> Tensor:
    ids = windows.long()
    return torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[:, :-1].mT, ids[:, 1:])


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
