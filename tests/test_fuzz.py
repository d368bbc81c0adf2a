"""The shortest evidence that breaks a model: planted failures whose shortest example is known, and a real prompt."""

import html
import json
import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.commands.search import Search, _simpler, search, search_facts
from llmgeom.model.subject import Subject
from llmgeom.prompts.process import Draw
from llmgeom.prompts.processes import load_process
from llmgeom.record import Record

FAILURES = {
    "two ones": lambda draw: sum(draw.seen) >= 2,
    "ends 1, 0": lambda draw: draw.seen[-2:] == (1, 0),
    "three alike": lambda draw: any(draw.seen[i : i + 3] in ((0, 0, 0), (1, 1, 1)) for i in range(len(draw.seen))),
    "from the start": lambda draw: True,
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_the_shortest_failure_is_found(name):
    """Against the shortest among all sequences."""
    fails = FAILURES[name]
    process = load_process("dirichlet:labels=2,a=1")
    result = search(process, lambda draws: np.array([2.0 * fails(d) for d in draws]), 1.0, n=60, most=6, seed=0)
    shortest = next(k for k in range(7) if any(fails(Draw(seen, 0)) for seen in product((0, 1), repeat=k)))
    assert result.draw is not None and fails(result.draw) and result.bits == 2.0
    assert len(result.draw.seen) == shortest
    # Nothing simpler fails: no observation can be left out or replaced.
    assert not any(fails(draw) for draw in _simpler(result.draw, 2))


def test_a_long_failure_is_made_shorter():
    """Draws of one length only: the search meets long evidence first and has to leave most of it out."""
    process = load_process("dirichlet:labels=3,a=1")
    fails = lambda draw: 2 in draw.seen and len(draw.seen) != 1  # noqa: E731
    result = search(process, lambda draws: np.array([1.0 * fails(d) for d in draws]), 0.5, n=1, most=12, seed=3)
    assert sorted(result.draw.seen) == [0, 2]


def test_where_nothing_fails_nothing_is_found_and_a_seed_repeats():
    process = load_process("markov")
    nothing = search(process, lambda draws: np.zeros(len(draws)), 0.5, n=20, most=4, seed=0)
    assert nothing.draw is None and 20 < nothing.tried <= 100  # at length 0 and 1 few sequences are different
    noise = {}

    def random(draws):
        return np.array([noise.setdefault(d.seen, np.random.default_rng(len(noise)).random()) for d in draws])

    first = search(process, random, 0.9, n=20, most=6, seed=1)
    noise_before, noise = noise, dict(noise)
    assert search(process, random, 0.9, n=20, most=6, seed=1) == first and noise == noise_before


def test_an_item_that_is_asked_for_stays_the_same_item():
    draw = Draw((3, 1, 2), 1, (0, 1, 2, 1))
    simpler = list(_simpler(draw, 4))
    assert [one.known for one in simpler[:3]] == [(1,), (), (1,)]  # without its own observation the item is new
    assert simpler[0].items == (0, 1, 0) and simpler[1].items == (0, 1, 2)


def test_the_printed_prompt_has_the_printed_answers(tmp_path):
    """Against a forward pass by itself and the forward algorithm written out; the record holds the same."""
    words = ["evidence", "--model", "pocket:llama", "--process", "markov", "--fuzz", "--bound", "0.3", "--n", "10"]
    done = CliRunner().invoke(main, [*words, "--json", "--out", str(tmp_path / "run")], catch_exceptions=False)
    (found,) = json.loads(done.stdout)["searches"]
    record = Record.load(tmp_path / "run")
    assert search_facts(record) == found and record.prompts["text"] == (found["prompt"],)
    assert (found["bound"], found["seed"]) == (0.3, 0) and record.facts["claims_hash"]
    assert found["prompt"] in html.unescape((tmp_path / "run/report.html").read_text())
    assert done.exit_code == 0 and found["bits"] > 0.3
    llama = Subject.load("pocket:llama", device="cpu")
    with torch.no_grad():
        logits = llama.model(**llama.tokenizer(found["prompt"], return_tensors="pt")).logits[0, -1].double()
    labels = [row["label"] for row in found["answers"]]
    ids = [llama.tokenizer(f"{found['prompt']} {label}")["input_ids"][-1] for label in labels]
    model = logits[ids].softmax(0).tolist()
    shown = [word.strip(",:.") for word in found["prompt"].split()]
    chain = [word for word in shown if word in labels][2:]  # the first two name the labels
    steps = [b for a, b in pairwise(chain) if a == chain[-1]] if chain else []
    exact = [(0.5 + steps.count(label)) / (1 + len(steps)) for label in labels]
    for row, p, q in zip(found["answers"], exact, model, strict=True):
        assert row["exact"] == pytest.approx(p, abs=1e-9) and row["model"] == pytest.approx(q, abs=1e-4)
    bits = sum(p * math.log2(p / q) for p, q in zip(exact, model, strict=True))
    assert found["bits"] == pytest.approx(bits, abs=1e-3) and found["observations"] == len(chain)


def test_a_search_of_two_processes_keeps_a_record_of_each_and_says_where_nothing_was_found(tmp_path, monkeypatch):
    monkeypatch.setattr("llmgeom.commands.search.search", lambda *_, **__: Search(None, 0.0, 7))
    words = ["evidence", "--model", "pocket:llama", "--process", "beta", "--process", "recall", "--fuzz", "--n", "10"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and done.stdout.count("none found in 7 sequences") == 2
    for name, record in Record.load_all(tmp_path).items():
        assert record.source["name"] == name and "none found" in record.unmeasured["breaking"] and not record.results


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--fuzz"], "--process"),
        (["--fuzz", "--process", "beta", "--bound", "0"], "--bound 0"),
        (["--process", "beta", "--bound", "0.4"], "--bound 0.4"),
        (["--process", "beta", "--k", "0"], "--k 0"),
        (["--process", "beta", "--fuzz", "--dry-run"], "--dry-run with --fuzz"),
        (["--process", "beta", "--fuzz", "--surface", "code,list"], "--surface code,list"),
        (["--process", "beta", "--fuzz", "--surface", "foo"], "'foo'"),
        (["--process", "beta", "--fuzz", "--k=-3"], "--k -3"),
        (["--process", "beta", "--process", "bijection", "--k", "2,8"], "--k 2,8: bijection"),
    ],
)
def test_a_search_that_cannot_be_is_one_sentence(words, named):
    done = CliRunner().invoke(main, ["evidence", "--model", "pocket:llama", *words])
    assert done.exit_code == 1 and named in done.stderr and done.stderr.count("\n") == 1
