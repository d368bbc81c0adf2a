"""Which positions bear on the answer: every other content is tried at each, and the answer is looked at again."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from llmgeom.model.model import Model
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.worlds.keyed_hmm import KeyedHMM
from llmgeom.wind_tunnels.worlds.recall import Recall
from llmgeom.world import World
from tests.families import FAMILIES

Change = Callable[[World, list, int, int], Iterator[list]]  # task, sequence, position, query -> sequences changed there


def other_pairs(task: World, x: list, at: int, query: int) -> Iterator[list]:
    """Legal: what some one-to-one map could have shown, keys all different where they do not come again. A pair that
    was shown twice is changed in both places, for one alone cannot be. No pair becomes one of the key asked about."""
    v = task.vocab
    pairs = [tuple(x[i : i + 2]) for i in range(0, query, 2)]
    for content in range(v) if at % 2 == 0 else range(v, 2 * v):
        if content == x[at] or (at < query and content == x[query]):
            continue
        changed, asked = list(x), x[query]
        if at == query:
            changed[at] = asked = content
        else:
            mine = pairs[at // 2]
            for i, pair in enumerate(pairs):
                if pair == mine:
                    changed[2 * i + at % 2] = content
        shown = {tuple(changed[i : i + 2]) for i in range(0, query, 2)}
        keys, values = {k for k, _ in shown}, {value for _, value in shown}
        if len(keys) == len(values) == len(shown) and (task.replacement or asked not in keys):
            yield changed


def other_symbols(task: World, x: list, at: int, query: int) -> Iterator[list]:
    """Legal: every sequence is. No symbol becomes the one that the next step is taken from."""
    for content in range(task.symbols):
        if content != x[at] and (at == query or content != x[query]):
            yield [*x[:at], content, *x[at + 1 :]]


def other_tokens(task: Recall, x: list, at: int, query: int) -> Iterator[list]:
    """Legal: any key for a key, any value for a value; that all differ, that what is asked was stored, and that an
    answer agrees with what was stored are left aside, or hardly anything could be changed alone. Punctuation has no
    other content. No stored key becomes the one asked about."""
    first, after = task.first_key, task.first_value
    kind = range(first, after) if first <= x[at] < after else range(after, after + task.values)
    for content in kind if x[at] in kind else ():
        if content != x[at] and (at == query or content != x[query]):
            yield [*x[:at], content, *x[at + 1 :]]


def other_rows(task: KeyedHMM, x: list, at: int, query: int) -> Iterator[list]:
    """Legal: in a header row its two halves rotated, which still sum to 1; in a step any symbol and any key, but no
    step of another chain becomes one of the chain asked about."""
    s, o, c = task.states, task.symbols, task.chains
    if at < s:
        move, emit, rest = x[at][:s], x[at][s : s + o], x[at][s + o :]
        for by in range(1, o):
            i, j = by % s, by
            yield [*x[:at], [*move[i:], *move[:i], *emit[j:], *emit[:j], *rest], *x[at + 1 :]]
        return
    asked = x[query][-c:].index(1)
    for symbol in range(o):
        for key in range(c):
            if at == query or key != asked or x[at][-c:].index(1) == asked:
                row = [0.0] * (task.features - o - c) + [float(i == symbol) for i in range(o)]
                yield [*x[:at], row + [float(i == key) for i in range(c)], *x[at + 1 :]]


def by_trial(task: World, x: list, change: Change, answer: Callable[[Tensor], Tensor]) -> list[list[bool]]:
    whole = torch.tensor(x)[None]
    here = answer(whole)[0]
    found = []
    for number, query in enumerate(task.query):
        row = [False] * task.length
        for at in range(query + 1):
            others = list(change(task, x, at, query))
            if others:
                there = answer(torch.tensor(others))[:, number]
                row[at] = bool(((there.exp() - here[number].exp()).abs().amax(-1) > 1e-9).any())
        found.append(row)
    return found


def looked_up(task: Recall) -> Callable[[Tensor], Tensor]:
    """The value stored with the key, one-hot in logarithms, in plain Python; nothing where the key was not stored."""
    step = 4 if task.layout == "papers" else 2

    def answer(inputs: Tensor) -> Tensor:
        found = torch.full((len(inputs), task.queries, task.vocabulary), -torch.inf)
        for i, x in enumerate(inputs.tolist()):
            for j, query in enumerate(task.query):
                for k in range(task.pairs):
                    if x[k * step + step // 2 - 1] == x[query]:
                        found[i, j, x[k * step + step - 1]] = 0
        return found

    return answer


@pytest.mark.parametrize(
    ("spelt", "n", "change"),
    [
        ("bijection:vocab=5,pairs=5", 30, other_pairs),
        ("bijection:vocab=4,pairs=4,replacement=true", 80, other_pairs),
        ("markov:symbols=4,steps=5", 30, other_symbols),
        ("markov:symbols=3,steps=7,fixed=false", 80, other_symbols),
        ("recall:pairs=3,queries=2,keys=5,values=5", 20, other_tokens),
        ("recall:pairs=3,queries=3,filler=2,keys=4,values=4", 20, other_tokens),
        ("recall:pairs=3,queries=2,filler=2,keys=5,values=5,layout=papers", 20, other_tokens),
        ("keyed_hmm:states=2,symbols=4,steps=5,chains=2", 10, other_rows),
    ],
)
def test_a_position_bears_if_some_other_content_there_changes_the_answer(spelt, n, change):
    task = load_world(spelt)
    inputs = task.sample(n, 1).inputs.data
    answer = looked_up(task) if isinstance(task, Recall) else task.log_predictive
    found = task.bearing(inputs)
    assert found.dtype == torch.bool
    for x, row in zip(inputs.tolist(), found.tolist(), strict=True):
        assert row == by_trial(task, x, change, answer)


def test_tasks_without_contrast_say_none():
    for name in ("hmm", "hmm:encoding=tokens", "coin", "regression", "recurrence"):
        assert load_world(name).sample(3, 0).posterior.bearing is None


@pytest.mark.parametrize("spelt", ["recall", "bijection:replacement=true"])
def test_rows_of_a_capture_are_the_queries_of_its_sequences_whole_and_cut(spelt):
    task = load_world(spelt)
    subject = Model.of(FAMILIES["llama"].model(), None, "llama")
    whole, cut = task.sample(12, 3), task.truncated(12, 3)
    seen = subject.capture(whole, set())
    expected = task.bearing(whole.inputs.data)
    for row, (prompt, position) in enumerate(zip(seen.prompt.tolist(), seen.position.tolist(), strict=True)):
        assert torch.equal(seen.exact.bearing[row], expected[prompt, task.query.index(position)])
    ended = subject.capture(cut, set())
    for row, (prompt, position) in enumerate(zip(ended.prompt.tolist(), ended.position.tolist(), strict=True)):
        assert torch.equal(ended.exact.bearing[row], expected[prompt, task.query.index(position)])
