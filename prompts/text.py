"""Worlds as text: the same sequences and exact answers, written with neutral words for a language model.

One prompt shows k observations, each an item with its mark, and queries the mark of one more item:
`First: dax, second: zok. owl: dax, fern: zok, bell:`. The next mark has one exact distribution under the world.

Clusters. All prompts with the same set of marks are one cluster, in every surface: they share a model's bias for a
word. Sets share no word, and every prompt draws its own hidden cause, sequence, items and order of the marks, so
prompts of different clusters have only the surfaces in common. Surfaces are few and chosen by us: they are not a
sample, and results are given within each. (With surface times set as the cluster, a word's bias would count once for
each surface; pairs of overlapping words would not be independent.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.errors import UserError, unknown
from llmgeom.flags import changed_fields
from llmgeom.prompts.domains import shuffled
from llmgeom.prompts.surfaces import LEAST_SETS, ORDINALS, SURFACES, Part, answer_tokens, carriers, mark_sets
from llmgeom.sampling import Lots
from llmgeom.stats.information import bits, entropy
from llmgeom.world import World

MOST = 24  # most observations of a prompt
DIFFER = 0.01  # least difference of a probability: closer exact answers cannot show which prompt was read
# Changes of a world of two exchangeable symbols (SULA); the exact answers are those to what the prompt then shows.
CONDITIONS = {
    "": "symbols drawn from the world",
    "remap": "the same symbols, written with another pair of words",
    "swap": "each symbol exchanged for the other, the lead-in as it was",
    "permuted": "the same symbols in another order",
    "consistent": "the first symbol throughout",
    "alternating": "the two symbols in turn",
}


def title(world: World) -> str:
    """NAME:field=value,... with the fields that differ from their defaults in text."""
    return changed_fields(world, world.name, world.TEXT)


def sample(
    world: World,
    n: int,
    seed: int,
    tokenizer: Any = None,
    *,
    ks: Sequence[int] = (),
    surfaces: Sequence[str] = (),
    positions: int | None = None,
    condition: str = "",
) -> Batch:
    """`n` prompts for each number of observations, in every surface in turn.

    Args:
        world: A world with text (`World.has_text`).
        n: Prompts for each k.
        seed: Seed of every draw; the same seed gives the same sequences whatever the tokenizer and condition.
        tokenizer: Tokenizer of the model; None leaves the answers' tokens out.
        ks: Numbers of observations; by default the world's KS.
        surfaces: Names of `surfaces.SURFACES`; by default all.
        positions: The longest input of the model, in tokens.
        condition: One of CONDITIONS.

    Returns:
        A batch with one query per prompt, its last token, the drawn outcome as target, and the exact posterior with
        the answers' tokens. Columns: k, surface, marks (in the order of outcomes, separated by spaces), seen, items,
        exact_entropy (bits), likeliest (outcome), and for two marks first, second, n1.

    Raises:
        UserError: An unknown surface; impossible numbers; a tokenizer without enough single-token words; a prompt
            longer than the model's input.
    """
    ks, surfaces = tuple(ks) or world.KS, tuple(surfaces) or tuple(SURFACES)
    check(world, n, ks, surfaces)
    sets = mark_sets(tokenizer, len(world.answers.tokens))
    rows, parts = [], []
    for k in ks:
        turn = shuffled(Random(f"llmgeom/process/{seed}/{k}"), range(len(sets)))
        turn = turn[: max(LEAST_SETS, -(-n // len(surfaces)))]  # only sets that every surface uses
        drawn = _Drawn.of(world, n, seed, k)
        inputs = drawn.changed(condition, seed)
        seen = (inputs[:, drawn.places] - world.answers.tokens[0]).tolist()
        for i, (rng, order) in enumerate(zip(drawn.rngs, drawn.orders, strict=True)):
            block, place = divmod(i, len(turn))
            own, written = (sets[turn[(place + step) % len(turn)]] for step in (0, condition == "remap"))
            marks, surface = [written[j] for j in order], surfaces[(block + place) % len(surfaces)]
            nouns, shown = shuffled(rng, carriers(Part.HELD_OUT)), [marks[outcome] for outcome in seen[i]]
            statement = world.statement(inputs[i], marks)
            items = [nouns[item] for item in drawn.items[i]]
            two = {"first": marks[0], "second": marks[1], "n1": seen[i].count(0)} if len(marks) == 2 else {}
            rows.append(
                {
                    "text": SURFACES[surface].prompt(statement, marks, items, shown),
                    "cluster": "-".join(sorted(own)),
                    "k": k,
                    "surface": surface,
                    "marks": " ".join(marks),
                    "seen": "".join(map(str, seen[i])),
                    "items": " ".join(map(str, drawn.items[i])),
                    **two,
                }
            )
        parts.append(_exact(drawn.world, inputs) | {"target": drawn.target})
    text, cluster = (tuple(row.pop(name) for row in rows) for name in ("text", "cluster"))
    answers = None
    if tokenizer is not None:
        check_fits(title(world), [row["k"] for row in rows], text, tokenizer, positions)
        answers = torch.tensor(answer_tokens(tokenizer, text, [row["marks"].split() for row in rows]))[:, None]
    exact = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    target, predictive, belief = exact.pop("target"), exact.pop("predictive"), exact.pop("belief", None)
    columns = {name: tuple(row[name] for row in rows) for name in rows[0]}
    columns["exact_entropy"] = tuple(np.abs(np.round(bits(entropy(predictive[:, 0])).numpy(), 6)).tolist())
    columns["likeliest"] = tuple((predictive if belief is None else belief)[:, 0].argmax(-1).tolist())
    about = {"primitive": world.PRIMITIVE, "ks": ks, "surfaces": surfaces, "n": n, "seed": seed, "available": len(sets)}
    source = {"kind": "process", "name": title(world), **about, "spec": asdict(world)}
    return Batch(
        inputs=Text(text),
        cluster=cluster,
        source=source | ({"condition": condition} if condition else {}),
        target=target,
        columns=columns,
        posterior=Posterior(predictive, belief, answers=answers, trivial=exact),
    )


def check(world: World, n: int, ks: Sequence[int], surfaces: Sequence[str]) -> None:
    """Raises UserError for a sample that cannot be drawn."""
    if n < 1:
        raise UserError(f"--n {n}: ask for at least 1 prompt for each number of observations")
    for surface in surfaces:
        if surface not in SURFACES:
            raise unknown("surface", surface, SURFACES)
    if len(set(ks)) < len(ks) or not all(0 <= k <= MOST for k in ks):
        raise UserError(
            f"--k {','.join(map(str, ks))}: {title(world)} takes different numbers of observations, 0 to {MOST}"
        )
    if world.features or not 2 <= len(world.answers.tokens) <= len(ORDINALS):
        raise UserError(f"{title(world)}: text takes tokens with 2 to {len(ORDINALS)} outcomes as answers")
    for k in ks:
        try:
            world.showing(k)
        except UserError as refusal:
            raise UserError(f"--k {k}: {refusal}") from None


def check_fits(name: str, k: Sequence[int], text: Sequence[str], tokenizer: Any, positions: int | None) -> None:
    """Raises UserError if a prompt is longer than the model's input."""
    if positions is None:
        return
    lengths = np.array([len(ids) for ids in tokenizer(list(text), verbose=False)["input_ids"]])
    longest = {number: int(lengths[np.array(k) == number].max()) for number in sorted(set(k))}
    too_long = [number for number in longest if longest[number] > positions]
    if too_long:
        fitting = [str(number) for number in longest if number not in too_long]
        raise UserError(
            f"--k {too_long[0]}: a prompt of {name} then has {longest[too_long[0]]} tokens, and the model reads at "
            f"most {positions}; "
            + (f"--k {','.join(fitting)} fits" if fitting else "give smaller numbers of observations")
        )


@dataclass(frozen=True, eq=False)
class _Drawn:
    """The sequences of prompts with k observations, one of Python's generators for each.

    Attributes:
        world: With k observations before the last query.
        orders: [prompt outcome] which mark of a set each outcome has.
        places: Positions of the observations' marks.
        items: [prompt k + 1] the item of each observation and of the question, by number.
        target: [prompt 1].
    """

    world: World
    rngs: Sequence[Random]
    orders: Sequence[Sequence[int]]
    inputs: Tensor
    places: Sequence[int]
    items: Sequence[Sequence[int]]
    target: Tensor

    @classmethod
    def of(cls, world: World, n: int, seed: int, k: int) -> _Drawn:
        rngs = [Random(f"llmgeom/process/{title(world)}/{seed}/{k}/{i}") for i in range(n)]
        answers, at_k = world.answers.tokens, world.showing(k)
        orders = [shuffled(rng, range(len(answers))) for rng in rngs]
        drawn = at_k.draw_split(n, Lots(rngs))
        places = [place for place, token in enumerate(drawn.inputs[0].tolist()) if token in answers]
        others = [place for place in range(at_k.length) if place not in places]
        items = drawn.inputs[:, others].tolist() if world.PRIMITIVE == "bind" else [list(range(k + 1))] * n
        return cls(at_k, rngs, orders, drawn.inputs, places, items, drawn.target[:, -1:])

    def changed(self, condition: str, seed: int) -> Tensor:
        """The inputs under a condition."""
        if condition in ("", "remap") or not self.places:
            return self.inputs
        seen, k = self.inputs[:, self.places], len(self.places)
        if condition == "permuted":
            order = [shuffled(Random(f"llmgeom/permuted/{seed}/{k}/{i}"), range(k)) for i in range(len(seen))]
            other = seen.gather(1, torch.tensor(order))
        else:
            turns = torch.arange(k) % 2
            other = {"swap": 1 - seen, "consistent": seen[:, :1].expand(-1, k), "alternating": seen[:, :1] ^ turns}[
                condition
            ]
        return self.inputs.index_copy(1, torch.tensor(self.places), other)


def _exact(world: World, inputs: Tensor) -> dict[str, Tensor]:
    """The exact answer to the last query, the belief if there is one, and the observers' answers, by name."""
    belief = world.log_belief(inputs)
    exact = {"predictive": world.log_predictive(inputs), **({} if belief is None else {"belief": belief})}
    return {name: log_p[:, -1:] for name, log_p in {**exact, **world.trivial(inputs)}.items()}


# ---- prompts with one observation changed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One observation of a prompt with another mark.

    Attributes:
        prompt: its number in the batch.
        place: the number of the observation.
        mark: the new mark, an outcome.
        shift: rise in bits of the exact log odds of the new mark over the old one; infinite if an exact answer excludes
            one of the two.
    """

    prompt: int
    place: int
    mark: int
    shift: float


def changes(world: World, batch: Batch, seed: int) -> list[Change]:
    """One random change for each prompt of `sample`'s batch in which some possible change affects the exact answer."""
    about: Mapping[str, Any] = batch.source
    found = []
    for group, k in enumerate(about["ks"]):
        drawn = _Drawn.of(world, about["n"], about["seed"], k)
        for i, inputs in enumerate(drawn.inputs):
            number = group * about["n"] + i
            change = _change(drawn, inputs, number, Random(f"llmgeom/change/{seed}/{number}"))
            found += [] if change is None else [change]
    return found


def _change(drawn: _Drawn, inputs: Tensor, prompt: int, rng: Random) -> Change | None:
    first, outcomes = drawn.world.answers.tokens[0], len(drawn.world.answers.tokens)
    seen = (inputs[drawn.places] - first).tolist()
    choices = [(i, mark) for i, old in enumerate(seen) for mark in range(outcomes) if mark != old]
    if not choices:
        return None
    choices = shuffled(rng, choices)
    every = inputs.repeat(len(choices) + 1, 1)
    for row, (place, mark) in zip(every[1:], choices, strict=True):
        row[drawn.places[place]] = mark + first
    log_p = drawn.world.log_predictive(every)
    # Every answer that is shown has been a query's outcome; where one of them is impossible, the sequence is.
    shown = every[:, drawn.places][:, len(seen) + 1 - log_p.shape[1] :] - first
    possible = log_p[:, :-1].gather(2, shown[..., None]).isfinite().flatten(1).all(1).tolist()
    before, *after = log_p[:, -1].double().numpy()
    for (place, mark), answer, can in zip(choices, after, possible[1:], strict=True):
        if can and np.abs(np.exp(before) - np.exp(answer)).max() > DIFFER:
            odds = np.array([[p[mark], p[seen[place]]] for p in (before, answer)])
            shift = bits(np.diff(odds[:, 0] - odds[:, 1])[0]) if np.isfinite(odds).all() else float("inf")
            return Change(prompt, place, mark, float(shift))
    return None
