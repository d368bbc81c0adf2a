"""Where a model's answer is computed from what it holds, evidence exchanged there is worth the counterfactual."""

import re
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom import claims, wind_tunnels
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Where
from llmgeom.model.intervention import Runner
from llmgeom.model.model import Model
from llmgeom.probes.interventions import interchange
from llmgeom.probes.interventions.interchange import (
    AS_FAR,
    DECLARED_LAYERS,
    PROBE,
    RANDOM,
    SUBSPACES,
    TOTAL,
    InterchangeProbe,
    Pairs,
    evidence_frame,
    exchange,
    question,
    random_subspaces,
)
from llmgeom.record import Record
from llmgeom.result import Result
from llmgeom.run import Run
from llmgeom.stats.ridge_probe import folds
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from llmgeom.world import seeded
from tests.brute_force import filtered, hmm_of_rows, hot
from tests.refusals import refused
from tests.words import beyond

TASK = wind_tunnels.load_world("bijection:vocab=4,pairs=4")
LEAK = 0.01
FRAME = f"frame {DECLARED_LAYERS[0]}"


# ---- a model that is Bayes' rule ------------------------------------------------------------------------------------


def pairs_of(shown: tuple[int, ...]) -> list[tuple[int, int]]:
    return [*zip(shown[0:-1:2], shown[1::2], strict=True)]


@cache
def answer(shown: tuple[int, ...]) -> tuple[float, ...]:
    """What is asked at the last token of k v k v ... k, by writing out all maps of 4 keys; of 8 tokens, LEAK astray."""
    left = [pi for pi in permutations(range(4)) if all(pi[k] + 4 == v for k, v in pairs_of(shown))]
    hits = [sum(pi[shown[-1]] + 4 == token for pi in left) / max(len(left), 1) for token in range(8)]
    even = not left  # what was decoded agrees with no map
    return tuple(LEAK / 8 + (1 - LEAK) * (1 / 8 if even else hit) for hit in hits)


class Bayes:
    """Layer 0 holds each token at its own position, in 64 dimensions; layer 1 reads them there, all at once, and puts
    the answer at every position: by then, what a position of evidence holds is read by nobody."""

    name, tokenizer, blocks = "Bayes", None, (0, 1)
    facts: ClassVar = {"vocabulary": 8, "features": None, "positions": None, "name": "Bayes"}
    embedding = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0][:8]

    def __init__(self, deaf: bool = False):
        self.deaf = deaf

    def untrained(self, seed: int) -> "Bayes":
        return Bayes(deaf=True)

    def capture(self, batch, sites, edits=(), *, positions="query", **_):
        ids, at = batch.inputs.ids, batch.query
        stream = [self.embedding[ids]]
        where = Where(torch.arange(len(ids)), at, 0)
        edited = {layer: [edit for edit in edits if layer in edit.layers] for layer in (0, 1)}
        for edit in edited[0]:
            stream[0] = edit.apply(stream[0], where)
        read = (stream[0] @ self.embedding.T).argmax(-1)
        said = torch.full((*ids.shape, 8), 1 / 8)
        for row, tokens in zip(said, read.tolist(), strict=True):
            for place in range(0, len(tokens), 2):
                if not self.deaf:
                    row[place] = torch.tensor(answer(tuple(tokens[: place + 1])))
        stream.append(torch.cat([said.log(), torch.zeros(*ids.shape, 56)], -1))
        for edit in edited[1]:
            stream[1] = edit.apply(stream[1], where)
        stream.append(stream[1])
        prompt, position = at.nonzero(as_tuple=True)
        log_probs = stream[1][..., :8].log_softmax(-1)[at]
        tensors = {(Site.RESIDUAL, n): x[at] for n, x in enumerate(stream)}
        tensors |= {(Site.LOG_PROBS, -1): log_probs, (Site.ENTROPY, -1): -(log_probs.exp() * log_probs).sum(-1)}
        return Capture(batch, prompt, position, batch.inputs.lengths, tensors)


def judged(subject: Bayes, nulls: int, layers: tuple[int, ...] = (0, 1)) -> Result:
    """What the probe measures of a model that is no transformer, and of its controls, without the runner."""
    probe = InterchangeProbe(TASK, 60, layers, SUBSPACES, 0, 4096)
    needs = probe.NEEDS
    own = needs.examine(subject, {})
    controls = tuple(needs.examine(subject.untrained(i), {}) for i in range(nulls))
    result = probe.measure(SimpleNamespace(observations=own, control_observations=controls))
    return claims.judge({PROBE: result})[PROBE]


@pytest.fixture(scope="module")
def measured() -> Result:
    return judged(Bayes(), 3)


def ways(pairs: Pairs) -> list[float]:
    """KL(p' || q(x)) - KL(p' || q(x')) in bits, written out."""
    found = []
    for x, other in zip(pairs.x.inputs.ids.tolist(), pairs.other.inputs.ids.tolist(), strict=True):
        (j,) = [i for i in range(len(x)) if x[i] != other[i]]
        total = []
        for t in range(j + 1, len(x), 2):
            p = [(q - LEAK / 8) / (1 - LEAK) for q in answer(tuple(other[: t + 1]))]
            q, then = answer(tuple(x[: t + 1])), answer(tuple(other[: t + 1]))
            if max(abs(a - b) for a, b in zip(q, then, strict=True)) > 0.01:
                total.append(sum(p[i] * np.log2(then[i] / q[i]) for i in range(8) if p[i] > 1e-9))
        found.append(np.mean(total))
    return found


def test_of_bayes_rule_the_swap_goes_the_whole_way_and_nothing_else_goes_any(measured):
    a = measured.arrays
    pairs = Pairs.of(TASK, 60, 0, "any" if TASK.memorisable else "held-out")
    half = folds(pairs.x.cluster, 0, 2)
    way = np.mean(ways(pairs.take(np.flatnonzero(half == 1).tolist())))
    assert way > 2
    np.testing.assert_allclose(a["total"], way, rtol=1e-5)
    np.testing.assert_allclose(a["whole"], [way, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a["frame"], [way, 0], rtol=1e-5, atol=1e-6)
    assert a["dimensions"][0] == 3, "four values, three differences"
    for name in ("rest", "placebo", "placebo_lost", "random", "as_far"):
        np.testing.assert_allclose(a[name], 0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(a["frame_null"], 0, atol=1e-6)
    assert measured.notes[0].endswith("up to the input of layer 0: 1.00, 0.00")


def test_its_claim_passes_and_after_the_first_layer_nothing_is_left(measured):
    found = {h.name: h for h in measured.estimates}
    assert found[FRAME].verdict == "open" and found[FRAME].p == 0.5, "three untrained controls decide nothing"
    assert found[f"{FRAME}, over the total effect"].value == pytest.approx(1)
    assert beyond(found[f"frame {DECLARED_LAYERS[1]}"]) != "yes"
    assert found[f"frame {DECLARED_LAYERS[1]}, over the total effect"].value == pytest.approx(0, abs=1e-6)
    passed = judged(Bayes(), 20, layers=(0,))
    assert {h.name: h.verdict for h in passed.estimates}[FRAME] == "holds"


def test_of_a_model_that_does_not_follow_the_evidence_nothing_is_claimed():
    made = judged(Bayes(deaf=True), 2, layers=(0,))
    assert {h.name for h in made.estimates} == {TOTAL, FRAME} and not any(h.claim for h in made.estimates)
    assert made.estimates[0].value == 0 and "holds" not in {h.verdict for h in made.estimates}
    assert "the answers do not follow the evidence: the total effect is 0 bits" in made.notes[0]
    assert made.warnings[0].startswith("the total effect is 0 bits, too little for 'frame at the embedding'")


def test_a_placebo_brings_what_its_donor_holds_there_more_than_one_s_own():
    pairs, seen = Pairs.of(TASK, 30, 0, "held-out"), []

    class Late(Bayes):
        """Donors hold 5 more in every coordinate than what they show."""

        def capture(self, batch, sites, edits=(), **options):
            if not edits:
                made = super().capture(batch, sites, (), **options)
                more = 0 if batch.source else 5
                tensors = {key: x + more if key[0] is Site.RESIDUAL else x for key, x in made.tensors.items()}
                return Capture(batch, made.prompt, made.position, made.lengths, tensors)
            for edit in edits:
                x = torch.zeros(len(batch), 7, 64)
                seen.append(edit.function(x, Where(torch.arange(len(batch)), batch.query, 0)))
            return super().capture(batch, sites, edits, **options)

    exchange(Late(), pairs, pairs, (0,), donors=pairs.donors(0, "held-out"))
    # Whole, frame, rest, placebo and the clean model are five copies, in one pass.
    placebo = seen[-1].unflatten(0, (5, 30))[3]
    torch.testing.assert_close(placebo, 5.0 * pairs.at[..., None].expand(-1, -1, 64))


# ---- trained models, by plain hooks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, root = {}, tmp_path_factory.mktemp("swap")

    def get(task: str, arch: str):
        if (task, arch) not in made:
            given = Training(task, arch=arch, width=32, layers=2, heads=2, steps=40, batch=32, lr="1e-2", snapshots=2)
            made[task, arch] = train(given, root / f"{len(made)}").out
        return made[task, arch]

    return get


@pytest.mark.parametrize(("task", "arch"), [("recall", "neox"), ("hmm:steps=5", "gpt2"), ("hmm:steps=5", "lstm")])
def test_what_is_moved_is_what_a_hook_moves_that_writes_the_other_run_s_residual(folder, task, arch):
    subject, task = Model.load(str(folder(task, arch))), wind_tunnels.load_world(task)
    pairs = Pairs.of(task, 12, 0, "held-out")
    made = exchange(subject, pairs, pairs, (0, 1), 2, batch_tokens=40)
    np.testing.assert_allclose(made["whole/moved"][0, 0], made["total"], atol=2e-5)
    model, query = subject.model, list(task.query)
    layer = subject.blocks[1].layer
    key = "rows" if task.features else "input_ids"
    outcomes = list(task.answers.tokens)

    def run(inputs, write=None, at=None):
        seen = []

        def hook(module, args, kwargs):
            x = (args[0] if args else kwargs["hidden_states"]).clone()
            seen.append(x.clone())
            if write is not None:
                x[:, at] = write[:, at]
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

        handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
        with torch.no_grad():
            logits = model(**{key: inputs[None]}).logits[0, query].double().log_softmax(-1)[:, outcomes]
        handle.remove()
        return logits, seen[0]

    for i in range(len(pairs.x)):
        clean, _ = run(pairs.x.inputs.data[i])
        _, theirs = run(pairs.other.inputs.data[i])
        edited, _ = run(pairs.x.inputs.data[i], theirs, pairs.at[i])
        p = task.log_predictive(pairs.other.inputs.data[i : i + 1])[0].exp().double()
        gain = (p * (edited - clean)).sum(-1)[pairs.counted[i]].mean() / np.log(2)
        assert made["whole/moved"][1, 0, i] == pytest.approx(float(gain), abs=2e-5)


def test_frame_and_rest_make_the_whole_and_random_ones_go_as_far(folder, monkeypatch):
    subject, task = Model.load(str(folder("recall", "neox"))), wind_tunnels.load_world("recall")
    pairs, kept = Pairs.of(task, 12, 0, "held-out"), {}

    def run(self, copies, stage=""):
        ((place, _),) = copies[0].moves.items()
        rows = int(self.at.sum())
        zero, number = torch.zeros(rows, 32, dtype=torch.float64), torch.arange(rows)
        kept[place[1]] = [copy.moves[place](zero, number) for copy in copies]
        names = [copy.name for copy in copies]
        return {f"{name}/moved": np.zeros((names.count(name), len(self.batch))) for name in dict.fromkeys(names)}

    monkeypatch.setattr(Runner, "run", run)
    made = exchange(subject, pairs, pairs, (0, 1), 3)
    kinds = ("whole", "frame", "rest", RANDOM, AS_FAR)
    assert {f"{kind}/moved" for kind in kinds} < set(made) and made[f"{RANDOM}/moved"].shape[:2] == (2, 3)
    for layer, (whole, inside, rest, *random) in kept.items():
        torch.testing.assert_close(inside + rest, whole)
        torch.testing.assert_close((inside * rest).sum(1), torch.zeros(len(whole), dtype=torch.float64))
        assert (rest.norm() < 1e-5 * whole.norm()) == (layer == 0), "a token's difference lies in the frame"
        for plain, far in zip(random[:3], random[3:], strict=True):
            torch.testing.assert_close(far.norm(dim=1), inside.norm(dim=1))
            torch.testing.assert_close(far / far.norm(dim=1, keepdim=True), plain / plain.norm(dim=1, keepdim=True))
            assert torch.linalg.matrix_rank(plain) <= made["dimensions"][layer] and plain.norm() < whole.norm()


def test_a_frame_is_found_where_its_effect_is_not_measured(folder):
    """One pair of sequences exchanges two pieces of evidence and spans one direction, whatever the measured ones do."""
    subject, task = Model.load(str(folder("recall", "neox"))), wind_tunnels.load_world("recall")
    pairs = Pairs.of(task, 12, 0, "held-out")
    one, many = (exchange(subject, fit, pairs.take(range(6, 12)), (0,)) for fit in (pairs.take([0]), pairs))
    assert one["dimensions"] == [1] and many["dimensions"] > [3]
    np.testing.assert_array_equal(one["whole/moved"], many["whole/moved"])
    assert (one["frame/moved"] != many["frame/moved"]).any()


def test_what_was_examined_before_is_loaded_and_other_parameters_are_examined_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path))
    subject, task = Model.load(str(folder("recall", "neox"))), wind_tunnels.load_world("recall")
    asked, store = {"n": 24, "nulls": 2, "controls": 3}, str(tmp_path / "captures")
    whole = Run(question(subject, task, **asked)).record()
    built, controls, of = [], Model.controls, interchange.exchange

    @contextmanager
    def counted(self, *options):
        with controls(self, *options) as draw:
            yield lambda seed: (seed and built.append(seed)) or draw(seed)  # None is the model itself

    monkeypatch.setattr(Model, "controls", counted)

    def stopped(subject, *args, **options):
        if subject.facts.get("untrained") == 2:
            raise KeyboardInterrupt
        return of(subject, *args, **options)

    monkeypatch.setattr(interchange, "exchange", stopped)
    with pytest.raises(KeyboardInterrupt):
        Run(question(subject, task, **asked), store).record()
    assert built == [1, 2]
    monkeypatch.setattr(interchange, "exchange", of)
    record = Run(question(subject, task, **asked), store).record()
    assert built == [1, 2, 1, 2], "the frames of weights are read again, the first control's patches are not"
    assert record.results[PROBE].estimates == whole.results[PROBE].estimates
    monkeypatch.setattr(interchange, "exchange", None)
    again = Run(question(subject, task, **asked), store).record()
    assert all(np.array_equal(again.arrays[name], x) for name, x in record.arrays.items())
    with pytest.raises(TypeError):
        Run(question(subject, task, **{**asked, "controls": 4}), store).record()


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_request_ends_in_a_record_and_a_page(folder, tmp_path):
    asked = ["patch", "--model", str(folder("hmm:steps=5", "lstm")), "--out", str(tmp_path / "run")]
    few = "--n 40 --layers 1 --control-models 2 --random-edits 3 -qv"
    done = CliRunner().invoke(main, [*asked, *few.split()])
    assert done.exit_code == 0, done.output
    assert "every edited pass is a full one (it reads numbers)" in done.stderr
    record = Record.load(tmp_path / "run")
    assert record.facts["interchange"]["layers"] == [1] and record.results[PROBE].ticks["layer"] == (1,)
    assert record.source["split"] == "held-out" and record.source["name"] == "hmm:steps=5"
    assert record.facts["command"].endswith("--n 40 --layers 1 --random-edits 3 --control-models 2")
    assert any("only 2 draws of each control" in warning for warning in record.warnings)
    after = f"frame {DECLARED_LAYERS[1]}"
    named = {h.name for h in record.results[PROBE].estimates}
    assert {TOTAL, after} <= named <= {TOTAL, after, f"{after}, over the total effect"}
    assert "Interchange of evidence" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--task", "regression"], "regression asks for real numbers; an interchange is measured on answers among"),
        (["--layers", "last"], "--layers last: expected all, or numbers and slices with commas between"),
        (["--layers", "2"], "--layers 2: expected 0 to 1, or -2 to -1 from the end"),
        (["--model", "pocket:pythia"], "pocket:pythia was trained on no task"),
    ],
)
def test_what_cannot_be_swapped_is_refused_in_one_sentence(folder, tmp_path, options, says):
    asked = ["patch", "--model", str(folder("recall", "neox")), "--offline", "-q", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(main, [*asked, *options], prog_name="llmgeom")
    assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1
    assert re.search(says, done.stderr), done.stderr


def test_a_task_without_counterfactuals_is_refused():
    with refused(UserError, "bijection:pairs=1"):
        Pairs.of(wind_tunnels.load_world("bijection:pairs=1"), 20, 0, "any")
    with refused(UserError, "markov", 0, 10):
        question(SimpleNamespace(blocks=(0,), name="x"), wind_tunnels.load_world("markov"), n=40)
    certain = wind_tunnels.load_world("coin:prior=list:0.0,0.5")
    assert certain.counterfactual(torch.zeros(2, 24, dtype=torch.int64), seeded("x", 0)) is None


# ---- the pairs ------------------------------------------------------------------------------------------------------


def counterfactual(spec: str, n: int = 300):
    task = wind_tunnels.load_world(spec)
    inputs = task.draw_split(n, seeded("inputs", 0)).inputs
    other = task.counterfactual(inputs, seeded("other", 0))
    at = (other != inputs).reshape(n, task.length, -1).any(-1)
    assert other.dtype == inputs.dtype and other.shape == inputs.shape
    return task, inputs, other, at


@pytest.mark.parametrize(
    "spec", ["bijection", "bijection:replacement=true", "bijection:vocab=3,pairs=9,replacement=true"]
)
def test_another_bijection_shows_the_same_keys(spec):
    task, inputs, other, at = counterfactual(spec)
    assert (other[:, 0::2] == inputs[:, 0::2]).all() and at.any(1).all()
    for row in other.tolist():
        pairs = {*zip(row[0:-1:2], row[1::2], strict=True)}
        keys, values = zip(*pairs, strict=True)
        assert len({*keys}) == len(pairs) == len({*values}) and min(values) >= task.vocab, "one to one"
    if spec == "bijection":
        assert (at.sum(1) == 1).all() and at.any(0).tolist() == [False, True] * 6 + [False]


@pytest.mark.parametrize("spec", ["recall", "recall:layout=papers,filler=2,queries=2", "recall:filler=3"])
def test_two_stored_values_change_places_and_their_answers_with_them(spec):
    task, inputs, other, at = counterfactual(spec)
    stored = 4 * task.pairs if task.layout == "papers" else 2 * task.pairs
    assert (at[:, :stored].sum(1) == 2).all()
    step = 4 if task.layout == "papers" else 2
    for x, row in zip(inputs.tolist(), other.tolist(), strict=True):
        before, held = ({o[i - (2 if step == 4 else 1)]: o[i] for i in range(step - 1, stored, step)} for o in (x, row))
        assert before.keys() == held.keys() and {*before.values()} == {*held.values()} and before != held
        if step == 2:
            shown = [(row[q], row[q + 1]) for q in task.query[:-1]]
            assert all(held[key] == value for key, value in shown)


def test_another_observation_at_one_step_under_the_same_matrices():
    task, _, other, at = counterfactual("hmm:steps=5")
    assert (at.sum(1) == 1).all() and at.any(0).tolist() == [False] * 3 + [True] * 4 + [False]
    for row in other[:20].tolist():
        move, emit, shown = hmm_of_rows(row, 3, 3)
        exact = filtered([hot(one) for one in shown], move, emit)
        np.testing.assert_allclose(task.log_predictive(torch.tensor([row]))[0].exp(), exact, atol=1e-6)
    _, _, other, at = counterfactual("hmm:encoding=tokens,steps=4")
    assert (at.sum(1) == 1).all() and at[:, -7::2].sum() == len(at) and (other[:, -7::2] >= 100).all()
    assert counterfactual("hmm:fixed=true,steps=4")[3].sum(1).eq(1).all()


@pytest.mark.parametrize(
    ("spec", "first", "many"), [("coin", 1, 2), ("markov:fixed=false", 0, 8), ("recurrence", 0, 17)]
)
def test_one_symbol_is_another(spec, first, many):
    task, _, other, at = counterfactual(spec)
    anywhere = [False] * first + [True] * (task.length - first - 1) + [False]
    assert (at.sum(1) == 1).all() and at.any(0).tolist() == anywhere
    assert {*other[:, first:].unique().tolist()} == {*range(many)}


def test_the_evidence_that_is_swapped_is_drawn_evenly():
    _, inputs, other, at = counterfactual("bijection", 6000)
    np.testing.assert_allclose(at.double().mean(0)[1::2], 1 / 6, atol=0.02)
    _, inputs, other, at = counterfactual("markov:fixed=false", 8000)
    step = (other - inputs)[at] % 8
    np.testing.assert_allclose(torch.bincount(step, minlength=8).double() / 8000, [0] + [1 / 7] * 7, atol=0.02)


def test_queries_count_that_come_later_and_have_another_answer():
    task = wind_tunnels.load_world("hmm:steps=6")
    pairs = Pairs.of(task, 50, 0, "held-out")
    for at, counted, x, other in zip(
        pairs.at, pairs.counted, pairs.x.inputs.values.tolist(), pairs.other.inputs.values.tolist(), strict=True
    ):
        exact = []
        for rows in (x, other):
            move, emit, shown = hmm_of_rows(rows, 3, 3)
            exact.append(np.array(filtered([hot(one) for one in shown], move, emit)))
        differ = abs(exact[0] - exact[1]).max(1) > 0.01
        differ[: int(at.nonzero()) - 3 + 1] = False
        assert counted.tolist() == differ.tolist() and counted.any()
    late = Pairs.of(wind_tunnels.load_world("hmm:steps=6,horizon=3"), 50, 0, "held-out")
    assert late.counted.any() and not late.counted[:, 3:].any()


def test_a_donor_shows_the_same_at_the_same_position():
    pairs = Pairs.of(wind_tunnels.load_world("recall"), 30, 0, "held-out")
    batch, position = pairs.donors(0, "held-out")
    rows = torch.arange(len(position))
    assert (batch.inputs.ids[rows, position] == pairs.evidence(pairs.x)).all()
    own = pairs.x.inputs.ids[pairs.at.nonzero()[:, 0]]
    assert (batch.inputs.ids != own).any(1).all() and len({*map(tuple, batch.inputs.ids.tolist())}) > 0.9 * len(rows)


# ---- the frame ------------------------------------------------------------------------------------------------------


def test_the_frame_is_the_span_of_the_means_of_the_pieces_of_evidence():
    rng = torch.Generator().manual_seed(0)
    means = torch.randn(4, 20, generator=rng, dtype=torch.float64)
    before, further = torch.randint(4, (400,), generator=rng), torch.randint(1, 4, (400,), generator=rng)
    after = (before + further) % 4
    noise = 1e-3 * torch.randn(400, 20, generator=rng, dtype=torch.float64)
    basis = evidence_frame(means[after] - means[before], before * 7, after * 7)
    torch.testing.assert_close(basis @ basis.T, torch.eye(3, dtype=torch.float64))
    spanned = means[1:] - means[0]
    torch.testing.assert_close(spanned @ basis.T @ basis, spanned)
    noisy = evidence_frame(means[after] - means[before] + noise, before, after)
    assert len(noisy) == 3
    torch.testing.assert_close(noisy.T @ noisy, basis.T @ basis, atol=1e-3, rtol=0)
    rows = torch.nn.functional.one_hot(torch.tensor([before.tolist(), after.tolist()]), 5).float()
    torch.testing.assert_close(
        evidence_frame(means[after] - means[before], *rows).abs(), basis.abs(), msg="rows of numbers are pieces, too"
    )


def test_random_subspaces_are_orthonormal_even_and_fixed_by_their_seed():
    some = random_subspaces(400, 3, 12, (0, 1))
    for one in some[:5]:
        torch.testing.assert_close(one @ one.T, torch.eye(3, dtype=torch.float64))
    mean = torch.stack([one.T @ one for one in some]).mean(0)
    torch.testing.assert_close(mean, torch.eye(12, dtype=torch.float64) / 4, atol=0.06, rtol=0)
    torch.manual_seed(3)
    np.random.seed(3)
    assert all(torch.equal(a, b) for a, b in zip(some, random_subspaces(400, 3, 12, (0, 1)), strict=True))
    assert not torch.allclose(some[0], random_subspaces(1, 3, 12, (0, 2))[0])
