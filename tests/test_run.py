"""The runner reads every prompt once, computes nothing twice, and takes a probe from any file."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmgeom import probes
from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.model import controls, running
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer
from llmgeom.plan import MAIN, Plan
from llmgeom.probe import CONTROLS, NO_CONTEXT, PERMUTED, UNTRAINED, Needs, ProbeInput, probe
from llmgeom.probes import known
from llmgeom.result import Result
from llmgeom.run import Run, read_all, run_probes
from tests.refusals import refused
from tests.test_scan import seen as mean_of

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def texts(*rows: int) -> Batch:
    """Prompts by number; the same number is the same text."""
    return Batch(
        Text(tuple(" ".join(WORDS[: 4 + row % 8]) + f" {WORDS[row % 12]} {row}" for row in rows)),
        tuple(f"t{row}" for row in rows),
        {"kind": "texts"},
    )


@pytest.fixture
def passed(monkeypatch) -> Counter:
    """Prompts that went through each model, by its untrained seed (None: the trained one; NO_CONTEXT: that one,
    edited) and their tokens."""
    seen: Counter = Counter()
    inner = running.one_pass

    def count(self, work, members):
        for i in members:
            ids = work.tokens.data[i, : work.tokens.lengths[i]].tolist()
            seen[NO_CONTEXT if work.edits else self.facts.get("untrained"), tuple(ids)] += 1
        return inner(self, work, members)

    monkeypatch.setattr(running, "one_pass", count)
    return seen


def values(data) -> Result:
    return mean_of(np.array([layer.double().mean().item() for layer in data.capture.layers(Site.VALUE)]))


def test_every_model_reads_every_prompt_of_all_samples_once(pythia, passed):
    samples = {"a": texts(30, 31, 40, 41, 42, 43, 44), "b": texts(32, 44, 45, 46, 47, 48)}
    controls = {UNTRAINED, NO_CONTEXT}
    both = probe(Needs({Site.VALUE}, samples={"a", "b"}, controls=controls))(values)
    keys = probe(Needs({Site.KEY}, controls=controls))(lambda data: values(data))
    run_probes(pythia, texts(*range(12)), {"both": both, "keys": keys}, samples=samples, controls=2)
    union = {text for batch in (texts(*range(12)), *samples.values()) for text in batch.text}
    for seed in (None, 1, 2, NO_CONTEXT):
        of_model = {ids: n for (model, ids), n in passed.items() if model == seed}
        assert set(of_model.values()) == {1} and len(of_model) == len(union), seed
    assert {model for model, _ in passed} == {None, 1, 2, NO_CONTEXT}


def test_runs_that_are_read_together_draw_each_copy_once_and_are_what_they_are_alone(pythia, monkeypatch):
    def look(data):
        draws = (*data.untrained, *data.permuted, *data.shuffled, data.no_context)
        return mean_of(np.array([one.value[-1].double().mean().item() for one in draws]))

    every = {"look": probe(Needs({Site.VALUE}, controls={*CONTROLS}))(look)}
    plans = [Plan.of(pythia, texts(*rows), every, 6, 0) for rows in (range(12), range(20, 33))]
    alone, drawn = [Run(plan).record() for plan in plans], []
    for name in ("_drawn", "permute"):
        inner = getattr(controls, name)
        monkeypatch.setattr(controls, name, lambda *a, inner=inner, **o: drawn.append(a[1]) or inner(*a, **o))
    runs = {str(i): Run(plan) for i, plan in enumerate(plans)}
    read_all(runs)
    assert drawn == [*range(1, 7), *(f"permuted {seed}" for seed in range(1, 6))]
    for run, record in zip(runs.values(), alone, strict=True):
        found = run.record().results["look"].arrays["mean"]
        assert len(drawn) == 11 and np.array_equal(found, record.results["look"].arrays["mean"])
        assert len(found) == 6 + 5 + 6 + 1 == len(set(found))


def test_samples_that_overlap_hold_what_each_prompt_gives_alone(pythia):
    samples = {"a": texts(3, 4, 40, 41), "b": texts(44, 0, 45), "c": texts(5, 40), "d": texts(50, 51)}
    samples["c"] = replace(samples["c"], cluster=("of c", "too"))  # a prompt of two samples is of a cluster in each
    seen = {}

    def look(data):
        seen.update({MAIN: ProbeInput(data.capture, data.entropy, data.untrained), **data.samples})
        return values(data)

    needs = Needs({Site.VALUE, Site.ATTENTION}, samples=frozenset(samples), controls={UNTRAINED, NO_CONTEXT})
    run_probes(pythia, texts(*range(8)), {"look": probe(needs)(look)}, samples=samples, controls=1)
    for name, batch in {MAIN: texts(*range(8)), **samples}.items():
        for who, found in ((pythia, seen[name].capture), (pythia.untrained(1), seen[name].untrained[0])):
            alone = who.capture(batch, {Site.VALUE, Site.ATTENTION})
            assert found.batch.cluster == batch.cluster and torch.equal(found.lengths, alone.lengths)
            torch.testing.assert_close(found.value, alone.value, rtol=0, atol=1e-5)
            width = alone.attention.shape[-1]
            torch.testing.assert_close(found.attention[..., :width], alone.attention, rtol=0, atol=1e-5)
            assert not found.attention[..., width:].any()


def test_draws_of_permuted_weights_are_stored_apart(pythia, tmp_path):
    seen = []
    look = probe(Needs(["value"], controls={PERMUTED}))(lambda data: seen.append(data.permuted) or values(data))
    for _ in range(2):
        run_probes(pythia, texts(*range(8)), {"look": look}, controls=2, store=str(tmp_path))
    first, again = seen
    assert len(first) == 2 and not torch.equal(first[0].value, first[1].value)
    assert all(torch.equal(one.value, other.value) for one, other in zip(first, again, strict=True))


def test_a_repeated_run_reads_no_model_and_measures_again(pythia, tmp_path, monkeypatch):
    calls = []

    def measure(data):
        calls.append(len(data.untrained))
        return values(data)

    probes_of = known(["key_orthogonality"]) | {"values": probe(Needs(frozenset({Site.VALUE})))(measure)}
    options = {"controls": 2, "store": str(tmp_path / "captures")}
    first = run_probes(pythia, texts(*range(8)), probes_of, **options)
    monkeypatch.setattr(running, "one_pass", None)
    monkeypatch.setattr(Model, "untrained", None)
    monkeypatch.setattr(controls, "untrained", None)
    again = run_probes(pythia, texts(*range(8)), probes_of, **options)
    assert calls == [2, 2] and again.facts == first.facts
    assert again.arrays.keys() == first.arrays.keys() and again.prompts == first.prompts
    assert all(np.array_equal(again.arrays[name], first.arrays[name]) for name in first.arrays)
    with pytest.raises(TypeError):  # another seed is another run: it must pass prompts again
        run_probes(pythia, texts(*range(8)), probes_of, **options, seed=3)


def test_captures_that_an_observer_without_a_version_takes_part_in_are_not_stored(pythia, tmp_path):
    reading = Observer("length", lambda step: {"x": step.position.float()})
    needs = Needs(frozenset({Site.VALUE}), controls=frozenset(), observers=(reading,))
    for version, stored in (("", 0), ("1", 1)):
        one = replace(needs, observers=(replace(reading, version=version),))
        run_probes(pythia, texts(*range(8)), {"one": probe(one)(values)}, store=str(tmp_path / f"v{version}"))
        assert len([*(tmp_path / f"v{version}").rglob("*.safetensors")]) == stored


def test_another_cluster_or_posterior_of_the_same_prompts_is_measured_again(pythia, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path))
    calls, batch, needs = [], texts(*range(6)), Needs(frozenset({Site.VALUE}), controls=frozenset({NO_CONTEXT}))
    look = probe(needs)(lambda data: calls.append(tuple(data.clusters)) or values(data))
    for one in (batch, Batch(batch.inputs, ("x",) * 6, batch.source)):
        run_probes(pythia, one, {"look": look}, controls=1, store=str(tmp_path / "captures"))
    assert calls == [batch.cluster, ("x",) * 6]


def test_what_is_no_model_no_probe_or_no_result_is_one_sentence(pythia):
    batch = [" ".join(WORDS[i : i + 4]) for i in range(8)]
    means = probe(Needs(["value"], controls=frozenset()))(values)
    assert run_probes(pythia, batch, {"own": means}).results["own"].arrays["mean"].shape == (4,)
    with refused(UserError, "run_probes('pocket:pythia')", "llmgeom.load"):
        run_probes("pocket:pythia", batch, {"own": means})
    with refused(UserError, "'own'", "NEEDS and measure", "@llmgeom.probe.probe"):
        run_probes(pythia, batch, {"own": values})
    with refused(UserError, "controls=-1"):
        run_probes(pythia, batch, {"own": means}, controls=-1)
    with refused(UserError, "unknown site 'valu': did you mean 'value'?"):
        Needs(["valu"])
    with pytest.raises(TypeError, match=r"probe 'own' returned a str: expected what Result\.of gives"):
        run_probes(pythia, batch, {"own": SimpleNamespace(NEEDS=means.NEEDS, measure=lambda data: "1")})


def test_an_observer_that_returns_another_number_of_rows_is_an_error(pythia):
    wrong = Observer("wrong", lambda step: {"x": torch.zeros(len(step.prompt) + 1)})
    with pytest.raises(ValueError, match="wrong"):
        pythia.capture(texts(1, 2), {Site.VALUE}, observers=(wrong,))


def test_an_observer_sees_what_a_capture_of_all_positions_keeps(pythia):
    batch = texts(*range(9))
    sums = Observer("sums", lambda step: {"key": step.sums(step.everywhere(Site.KEY)[1])[step.prompt]},
                    everywhere=frozenset({Site.KEY}))  # fmt: skip
    found = pythia.capture(batch, (), observers=[sums]).observed("sums.key")
    whole = pythia.capture(batch, {Site.KEY}, positions="all")
    expected = torch.stack([whole.key[1][whole.prompt == i].sum(0) for i in range(9)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("NEEDS = 1", "no probe"),
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("def measure(): 1", "no probe"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_with_its_name(tmp_path, text, what):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(probes.UserError, match=what):
        probes.known([str(path)])
