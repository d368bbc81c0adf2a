"""Pocket models: the pipeline from grammar to stored folder, what it demands and what it refuses."""

import gzip
import json
import re
from dataclasses import asdict
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors import safe_open

from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.model import Model
from llmgeom.probes.evidence.answers import RESOLUTION
from llmgeom.prompts.surfaces import LABELS
from llmgeom.wind_tunnels import names
from studies import corpus, evaluate, label_sequences, pocket, pocket_evidence
from studies.evaluate import Demands, missed, skill_by_count
from studies.label_sequences import Evidence
from studies.ngram import KneserNey
from studies.pocket import POCKETS, build
from studies.pocket_evidence import PARENT, TAUGHT
from studies.training_data import domains, examination, sha256, training_data
from tests.refusals import refused

TINY = {
    **{"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "batch": 8, "steps": 12, "fillings": 1},
    "context": 192,  # a tokenizer learnt on so little cuts text finer, and every prompt has to fit
    "tokenizer_texts": 3000,
}
ANYTHING = Demands(of_unigram=9, of_trigram=9, span=0, skills={})


PAIRS = 24  # of labels in a card of a tiny model; 200 take most of its time and show nothing more
OF_CARDS = evaluate.PAIRS


@pytest.fixture(autouse=True, scope="module")
def few_pairs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "PAIRS", PAIRS)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, few_pairs):
    """A tiny pocket model: its folder, its card, and the losses its progress reported."""
    seen: list[tuple[int, int, float]] = []
    folder = tmp_path_factory.mktemp("pocket") / "pythia"
    card = build("pythia", folder, demands=ANYTHING, progress=lambda *args: seen.append(args), **TINY)
    return folder, card, seen


# ---- the pipeline ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_build_gives_a_model_and_a_card_that_is_true_of_what_was_stored(tiny):
    folder, card, seen = tiny
    assert card == json.loads((folder / "card.json").read_text())
    assert [step for step, _, _ in seen] == list(range(1, 13))
    assert np.mean([loss for *_, loss in seen[-4:]]) < np.mean([loss for *_, loss in seen[:4]])
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    rows = examined(folder)
    again = evaluate.losses(evaluate.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-6)
    assert {p.name for p in folder.parent.iterdir()} == {"pythia"}


def test_what_cannot_be_built_is_refused_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    with refused(UserError, "pocket"):
        build("pythia", tmp_path)
    with refused(UserError, "pythia", "phi", "llama", "mistral", "llama-noicl"):
        build("pithia", tmp_path / "new")
    with refused(UserError, "--steps 0", 1):
        build("pythia", tmp_path / "new", steps=0)
    assert pocket.main(["pythia", "--out", str(tmp_path)]) == 1
    assert "not a pocket model" in capsys.readouterr().err


# ---- the text -------------------------------------------------------------------------------------------------------


OBSERVED = re.compile(r"(?::| is) (\w+)")


@pytest.mark.parametrize("informative", [True, False])
def test_what_a_label_ought_to_be_is_bayes_rule_on_the_text_before_it(informative):
    """Read off the decoded text by a regular expression; the prior of the share on a grid, or its two points."""
    read = training_data(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=informative)
    ids = {label: read.tokenizer(f" {label}")["input_ids"][0] for label in LABELS}
    priors = {":": np.array([0.9, 0.1]), " is": (np.arange(20_000) + 0.5) / 20_000}
    places = 0
    for row, labelled in enumerate(read.evidence.tolist()):
        window, begun = read.windows[row].tolist(), 0
        for t in range(len(window) - 1):
            begun = t if window[t] == 0 else begun
            before = read.tokenizer.decode([one for one in window[begun : t + 1] if one])
            link = next((link for link in priors if before.endswith(link)), None)
            labels = OBSERVED.findall(before) if labelled and link else []
            is_label = labelled and window[t + 1] in ids.values()
            assert read.targets.named[row, t] == (is_label and len(labels) < 2)
            if not is_label or len(labels) < 2:
                assert not read.targets.labels[row, t].any() and not read.targets.share[row, t].any()
                continue
            assert read.targets.labels[row, t].tolist() == [ids[label] for label in labels[:2]]
            n1, n2 = (labels[2:].count(label) for label in labels[:2])
            likelihood = priors[link] ** n1 * (1 - priors[link]) ** n2
            first = (likelihood * priors[link]).sum() / likelihood.sum() if informative else 0.5
            np.testing.assert_allclose(read.targets.share[row, t], [first, 1 - first], rtol=1e-5)
            places += 1
    assert places > 100


def test_held_out_templates_are_examined_and_never_trained_on():
    rows = examination(2, 1)
    unseen = frozenset().union(*(corpus.held_out(domain) for domain in domains()))
    assert {row["template"] for row in rows if row["set"] == "held-out"} == unseen
    assert not unseen & {row["template"] for row in rows if row["set"] == "seen"}
    training = frozenset(islice(corpus.texts(domains(), 0), 2000))
    assert not training & {row["text"] for row in rows if row["set"] == "held-out"}
    again = examination(2, 1, exclude=training)
    assert not training & {row["text"] for row in again}


# ---- what is shipped ------------------------------------------------------------------------------------------------


def examined(folder):
    lines = gzip.decompress((folder / "examination.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in lines.splitlines()]


def card_of(name):
    return json.loads((hub.POCKET / name / "card.json").read_text())


@pytest.fixture(scope="module", params=POCKETS)
def shipped(request):
    """A shipped folder and its card."""
    return hub.POCKET / request.param, card_of(request.param)


def test_what_is_shipped_can_be_rebuilt():
    assert set(hub.pockets()) == {*POCKETS, *TAUGHT}


# The weights of every card are compared by their hash; that a card says what they do, with one model and format each.
@pytest.mark.slow
def test_the_shipped_losses_are_those_of_its_card():
    folder, card = hub.POCKET / "pythia", card_of("pythia")
    rows = examined(folder)
    again = evaluate.losses(evaluate.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-3)
        assert again[which]["tokens"] == card["losses"][which]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [*zip(("llama", "phi"), sorted(label_sequences.FORMATS), strict=True)])
def test_the_shipped_skills_are_those_of_its_card(model, name, monkeypatch):
    folder, card = hub.POCKET / model, card_of(model)
    monkeypatch.setattr(label_sequences, "FORMATS", {name: label_sequences.FORMATS[name]})
    monkeypatch.setattr(evaluate, "PAIRS", OF_CARDS)
    again = evaluate.evidence(evaluate.stored(folder), card["spec"]["fillings"], sets=("held-out",))[name]["held-out"]
    assert again["skill"] == pytest.approx(card["skills"][name]["held-out"]["skill"], abs=1e-3)
    assert again["label_mass"] == pytest.approx(card["skills"][name]["held-out"]["label_mass"], abs=1e-3)
    for form in card["skills"]:
        assert abs(card["skills_at_step_0"][form]["held-out"]["skill"]) < 0.25


def test_a_shipped_model_has_no_unsaid_miss(shipped):
    folder, card = shipped
    assert card["misses_of_the_usual_demands"] == missed(card, POCKETS[folder.name].demands)
    assert not missed(card, Demands(**card["demands"]))
    for miss in card["misses_of_the_usual_demands"]:
        assert miss in (folder / "card.md").read_text()


def test_step_0_of_a_shipped_model_is_where_its_training_began(shipped):
    folder, card = shipped
    began = Model.of(pocket.Pocket(**card["spec"]).start()).weight_hash
    assert began == card["weights"]["start"]
    assert Model.load(f"pocket:{folder.name}@step0", device="cpu", offline=True).weight_hash == began


@cache
def beginnings(seed, told):
    streams = {"corpus": corpus.texts(domains(), seed), "evidence": label_sequences.sequences(seed, told)}
    return {name: sha256(list(islice(stream, 1000))) for name, stream in streams.items()}


def test_the_streams_still_say_what_a_shipped_model_was_trained_on(shipped):
    _, card = shipped
    seed, told = card["spec"]["text_seed"], card["spec"]["informative"]
    for name, now in beginnings(seed, told).items():
        assert now == card[name]["sha256_of_first_1000"], f"the {name} changed; rebuild: {card['command']}"


@pytest.mark.parametrize("name", TAUGHT)
def test_its_card_is_of_the_stored_weights_and_the_claims_hold(name):
    subject, folder, card = Model.load(f"pocket:{name}"), hub.POCKET / name, card_of(name)
    assert card["weights"]["stored"] == subject.weight_hash and card["parameters"] == subject.facts["parameters"]
    assert card["weights"]["parent"] == Model.load(f"pocket:{PARENT}").weight_hash
    assert all(card["evidence"][process][RESOLUTION]["word"] == "holds" for process in TAUGHT[name].holds)
    assert {*card["evidence"]} <= {*names(text=True)}
    assert (folder / "model.safetensors").stat().st_size < 2.1e6
    # JSON has lists where a course has tuples.
    assert json.loads(json.dumps([asdict(course) for course in TAUGHT[name].courses])) == card["courses"]
    assert (folder / "tokenizer.json").read_bytes() == (hub.POCKET / PARENT / "tokenizer.json").read_bytes()
    assert (folder / "card.md").read_text() == pocket_evidence.page(card)


def test_an_oracle_has_skill_1_and_the_best_constant_of_each_k_has_0():
    batch = Evidence("is").sample(8 * 95, seed=0)
    exact, k = batch.posterior.predictive[:, 0].numpy(), np.array(batch.columns["k"])
    assert skill_by_count(exact, exact, k) == 1
    mean = np.stack([np.log(np.exp(exact[k == one]).mean(0)) for one in k])
    assert skill_by_count(exact, mean, k) == pytest.approx(0, abs=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(20):  # no other constant does better, and the mean of ten with the answer does
        p = np.clip(np.exp(mean[:, 0]) + rng.normal(0, 0.05, 9)[k], 0.01, 0.99)
        assert skill_by_count(exact, np.log(np.stack([p, 1 - p], axis=1)), k) < 0
    assert 0 < skill_by_count(exact, np.log((np.exp(exact) + 9 * np.exp(mean)) / 10), k) < 1


@pytest.mark.slow
def test_answers_are_those_of_one_prompt_at_a_time(tiny):
    subject = evaluate.stored(tiny[0])
    batch = Evidence("colon").sample(40, seed=0)
    found, mass = evaluate.answers(subject, batch, at_once=7)
    for i in range(0, 40, 7):
        ids = torch.tensor([subject.tokenizer(batch.text[i])["input_ids"]])
        p = subject.model(ids).logits[0, -1].double().softmax(-1)
        two = p[[subject.tokenizer(f" {batch.columns[c][i]}")["input_ids"][0] for c in ("first", "second")]]
        np.testing.assert_allclose(np.exp(found[i]), (two / two.sum()).detach().numpy(), rtol=1e-5)
        assert np.exp(mass[i]) == pytest.approx(two.sum().item(), rel=1e-5)


# ---- n-grams that rival a model, and its loss -----------------------------------------------------------------------


def after(model: KneserNey, context: list[int]) -> np.ndarray:
    """P(token | context), token by token."""
    return np.exp([-model.nats([[*context, token]])[len(context)] for token in range(model.vocabulary)])


def test_kneser_ney_by_hand():
    # Bigrams of "1 2", "1 2", "1 3" (0 separates): 01 x3, 12 x2, 13, 20 x2, 30; two once, two twice: D = 2/(2+4) = 1/3.
    # Below: 0 follows two tokens, 1, 2 and 3 one each; three once, one twice: D = 3/(3+2) = 3/5.
    model = KneserNey.fit([[1, 2], [1, 2], [1, 3]], vocabulary=4, separator=0, order=2)
    unigram = np.array([(2 - 0.6) / 5, 0.4 / 5, 0.4 / 5, 0.4 / 5]) + 0.6 * 4 / 5 / 4
    np.testing.assert_allclose(after(model, [1]), np.array([0, 0, 5 / 9, 2 / 9]) + (1 / 3) * 2 / 3 * unigram)
    np.testing.assert_allclose(after(model, [0]), np.array([0, 8 / 9, 0, 0]) + (1 / 3) * 1 / 3 * unigram)
    np.testing.assert_allclose(model.nats([[1]]), -np.log([after(model, [0])[1], after(model, [1])[0]]))


def test_the_loss_of_a_label_is_the_mean_over_what_might_be_drawn():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 9, generator=rng, dtype=torch.float64, requires_grad=True)
    labels = torch.stack([torch.randperm(9, generator=rng)[:2] for _ in range(50)])
    first = torch.rand(50, generator=rng, dtype=torch.float64)
    share = torch.stack([first, 1 - first], 1)
    drawn = [torch.nn.functional.cross_entropy(logits, labels[:, i], reduction="none") for i in (0, 1)]
    mean = share[:, 0] * drawn[0] + share[:, 1] * drawn[1]
    found = pocket.expected(logits, labels, share)
    torch.testing.assert_close(found, mean)
    (wanted,) = torch.autograd.grad(mean.sum(), logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], wanted)
