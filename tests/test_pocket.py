"""Pocket models: the pipeline from grammar to shipped folder, what it refuses, and that the shipped card is true."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.prompts import corpus, nonce
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.grammar import templates
from llmgeom.prompts.nonce import Evidence
from llmgeom.stats.information import skill_by_count
from studies import evaluate as exam
from studies import pocket
from studies.evaluate import DEMANDS, INDIFFERENT, Demands, missed
from studies.ngram import KneserNey
from studies.pocket import POCKETS, build
from studies.training_data import domains, examination, lessons, pieces, sha256
from tests.refusals import refused

TINY = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "ffn": 64,
    "batch": 8,
    "steps": 12,
    "fillings": 1,
    "context": 192,  # a tokenizer learnt on so little cuts text finer, and every prompt has to fit
    "tokenizer_texts": 3000,
}
shared = cache(lessons)  # a tokenizer is learnt once for all tests that read the same text
ANYTHING = Demands(of_unigram=9, of_trigram=9, span=0, skills={})


def texts_of(rows):
    return [row["text"] for row in rows]


def examined(folder):
    lines = gzip.decompress((folder / "examination.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny pocket model: its folder, its card, and the losses its progress reported."""
    seen: list[tuple[int, int, float]] = []
    folder = tmp_path_factory.mktemp("pocket") / "pythia"
    card = build("pythia", folder, demands=ANYTHING, progress=lambda *args: seen.append(args), **TINY)
    return folder, card, seen


# ---- the rival ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_an_n_gram_sums_to_one_after_any_context(order):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 9, rng.integers(1, 7)).tolist() for _ in range(60)]
    model = KneserNey.fit(texts, vocabulary=12, separator=0, order=order)
    for context in rng.integers(0, 12, (50, max(order - 1, 1))).tolist():
        assert after(model, context).sum() == pytest.approx(1)
        assert after(model, context).min() > 0


def test_a_trigram_learns_nothing_across_texts():
    shuffled = [[1, 2, 3], [4, 5], [6], [7, 8]]
    there, back = (KneserNey.fit(t, 9, 0).nats([[1, 2, 3], [6]]) for t in (shuffled, shuffled[::-1]))
    np.testing.assert_array_equal(there, back)


def test_the_trigram_beats_the_unigram_on_grammar_text():
    rounds = 9 * sum(len(templates(domain)) - len(corpus.held_out(domain)) for domain in domains())
    texts = list(islice(corpus.texts(domains(), 0), rounds + 300))
    vocabulary = {word: i for i, word in enumerate(sorted({w for t in texts for w in t.split()}), start=1)}
    ids = [[vocabulary[word] for word in text.split()] for text in texts]
    model = KneserNey.fit(ids[:rounds], len(vocabulary) + 1, 0)
    tokens = [t for row in ids[rounds:] for t in (*row, 0)]
    share = np.array(list(Counter(tokens).values())) / len(tokens)
    assert model.nats(ids[rounds:]).mean() < 0.5 * -(share * np.log(share)).sum()


# ---- the text -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_windows_whatever_ran_before():
    def read(disturb):
        torch.manual_seed(disturb)
        random.seed(disturb)
        np.random.seed(disturb)
        return lessons(40, 128, 512, seed=0, at_once=200, split=0.1)

    one, two = read(1), read(2)
    assert torch.equal(one.windows, two.windows)
    assert one.tokenizer.get_vocab() == two.tokenizer.get_vocab()
    assert not torch.equal(one.windows, lessons(40, 128, 512, seed=1, at_once=200, split=0.1).windows)


def test_windows_hold_whole_items_of_one_stream_from_their_first_position():
    read = lessons(60, 128, 512, seed=0, at_once=200, share=0.5)
    assert 15 < read.evidence.sum() < 45
    streams = {False: iter(read.ids), True: iter(read.tokenizer(list(read.sequences))["input_ids"])}
    for window, labelled in zip(read.windows.tolist(), read.evidence.tolist(), strict=True):
        at = 0
        while at < len(window):
            whole = [*next(streams[labelled]), 0]
            assert window[at : at + len(whole)] == whole[: len(window) - at]
            at += len(whole)
    assert not list(streams[False]) and not list(streams[True])


def test_without_information_only_the_labels_differ():
    told, untold = (shared(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=i) for i in (True, False))
    assert told.tokenizer.get_vocab() == untold.tokenizer.get_vocab()
    differ = told.windows != untold.windows
    labels = [told.tokenizer(f" {label}")["input_ids"][0] for label in nonce.LABELS]
    assert differ.any() and told.evidence[differ.any(1)].all()
    assert torch.isin(told.windows[differ], torch.tensor(labels, dtype=torch.int16)).all()


def test_noise_falls_on_texts_and_never_on_label_sequences():
    read = shared(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=True)
    seen = []

    class Listener(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1024))

        def forward(self, ids, use_cache):
            seen.append(ids)
            return type("Out", (), {"logits": self.bias.expand(*ids.shape, -1)})

    spec = pocket.Pocket("any", "llama", batch=8, steps=5, noise=0.3)
    pocket.train(Listener(), read, spec)
    changed = (torch.cat(seen) != read.windows).float().mean(1)
    assert (changed[read.evidence] == 0).all() and (changed[~read.evidence] > 0.1).all()


OBSERVED = re.compile(r"(?::| is) (\w+)")


@pytest.mark.parametrize("informative", [True, False])
def test_what_a_label_ought_to_be_is_bayes_rule_on_the_text_before_it(informative):
    """Read off the decoded text by a regular expression; the prior of the share on a grid, or its two points."""
    read = shared(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=informative)
    ids = {label: read.tokenizer(f" {label}")["input_ids"][0] for label in nonce.LABELS}
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
            assert read.asked.named[row, t] == (is_label and len(labels) < 2)
            if not is_label or len(labels) < 2:
                assert not read.asked.labels[row, t].any() and not read.asked.share[row, t].any()
                continue
            assert read.asked.labels[row, t].tolist() == [ids[label] for label in labels[:2]]
            n1, n2 = (labels[2:].count(label) for label in labels[:2])
            likelihood = priors[link] ** n1 * (1 - priors[link]) ** n2
            first = (likelihood * priors[link]).sum() / likelihood.sum() if informative else 0.5
            np.testing.assert_allclose(read.asked.share[row, t], [first, 1 - first], rtol=1e-5)
            places += 1
    assert places > 100


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


def test_labels_never_trained_together_do_not_compete():
    read = shared(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=True)
    apart = pocket.apart(read.tokenizer, 1024)
    at = {label: read.tokenizer(f" {label}")["input_ids"][0] for label in nonce.LABELS}
    assert int(apart.sum()) == 2 * len(nonce.pairs(nonce.Part.HELD_OUT)) and torch.equal(apart, apart.T)
    one, other = nonce.pairs(nonce.Part.TRAINED)[0]
    logits = torch.zeros(1, 1024, requires_grad=True)
    asked = torch.tensor([[at[one], at[other]]]), torch.tensor([[0.7, 0.3]])
    pocket.expected(logits, *asked, apart).sum().backward()
    strangers = {label for pair in nonce.pairs(nonce.Part.HELD_OUT) if {one, other} & {*pair} for label in pair}
    spared = {at[label] for label in strangers - {one, other}}
    assert {i for i, slope in enumerate(logits.grad[0].tolist()) if slope == 0} == spared
    assert pocket.expected(logits, *asked).item() > pocket.expected(logits, *asked, apart).item() + 0.03


def test_words_cut_in_two_say_the_same_text():
    read = shared(8, 128, 512, seed=0, at_once=200)
    for text, whole in zip(read.texts, read.ids, strict=True):
        assert pieces(text, read.tokenizer, random.Random(0), 0.0) == whole
        broken = pieces(text, read.tokenizer, random.Random(0), 0.5)
        assert len(broken) > len(whole) and read.tokenizer.decode(broken) == text


def test_any_utf8_survives_the_tokenizer_and_nothing_is_put_before_it():
    tokenizer = shared(8, 128, 512, seed=0, at_once=200).tokenizer
    for text in ("The owl", " spaces  and\ttabs\n", "naïve Ωμέγα 日本 🦉", "\x00\x7f"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert 0 not in ids
    assert tokenizer.decode([0]) == "<|endoftext|>"


def test_held_out_templates_are_examined_and_never_trained_on():
    rows = examination(2, 1)
    unseen = frozenset().union(*(corpus.held_out(domain) for domain in domains()))
    assert {row["template"] for row in rows if row["set"] == "held-out"} == unseen
    assert not unseen & {row["template"] for row in rows if row["set"] == "seen"}
    training = frozenset(islice(corpus.texts(domains(), 0), 2000))
    assert not training & {row["text"] for row in rows if row["set"] == "held-out"}
    again = examination(2, 1, exclude=training)
    assert not training & set(texts_of(again))


# ---- the use of evidence --------------------------------------------------------------------------------------------


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
    subject = exam.stored(tiny[0])
    batch = Evidence("colon").sample(40, seed=0)
    found, mass = exam.answers(subject, batch, at_once=7)
    for i in range(0, 40, 7):
        ids = torch.tensor([subject.tokenizer(batch.text[i])["input_ids"]])
        p = subject.model(ids).logits[0, -1].double().softmax(-1)
        two = p[[subject.tokenizer(f" {batch.columns[c][i]}")["input_ids"][0] for c in ("first", "second")]]
        np.testing.assert_allclose(np.exp(found[i]), (two / two.sum()).detach().numpy(), rtol=1e-5)
        assert np.exp(mass[i]) == pytest.approx(two.sum().item(), rel=1e-5)


def test_a_label_of_several_tokens_is_refused(monkeypatch):
    read = shared(8, 128, 512, seed=0, at_once=200)
    subject = Subject.of(pocket.Pocket("any", "llama", hidden=32, vocabulary=512).start(), read.tokenizer)
    batch = Evidence().sample(2, seed=0)
    monkeypatch.setattr(nonce, "LABELS", (*nonce.LABELS, "incomprehensible"))
    with refused(UserError, "incomprehensible"):
        exam.answers(subject, batch)


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
    again = exam.losses(exam.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-6)
    assert {p.name for p in folder.parent.iterdir()} == {"pythia"}


@pytest.mark.slow
def test_the_card_tells_the_skills_of_what_was_stored_and_of_its_first_step(tiny):
    folder, card, _ = tiny
    subject = exam.stored(folder)
    again = exam.evidence(subject, 1, sets=("held-out",)), exam.evidence(subject.initial(0), 1, sets=("held-out",))
    page = (folder / "card.md").read_text()
    for name in nonce.FORMATS:
        for found, key in zip(again, ("skills", "skills_at_step_0"), strict=True):
            told = card[key][name]["held-out"]
            again_by_k = found[name]["held-out"].pop("by_k")
            assert found[name]["held-out"] == pytest.approx({key: told[key] for key in told if key != "by_k"})
            assert told["n"] == 200 * 8 and told["pairs"] == 200
            assert {one["n"] for one in told["by_k"].values()} == {200}
            for k, one in again_by_k.items():
                assert one == pytest.approx(told["by_k"][k])
            assert f"{told['skill']:.3f} ({told['low']:.3f} to {told['high']:.3f})" in page
    assert card["sequences"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", POCKETS)
def test_every_architecture_learns_and_is_what_its_name_says(name, tiny):
    spec = replace(POCKETS[name], **TINY | {"hidden": 64, "heads": 4, "steps": 4})
    read = shared(32, 192, 1024, seed=0, at_once=3000, share=0.5, informative=spec.informative)
    model = spec.start()
    curve = pocket.train(model, read, spec)
    assert read.tokenizer.get_vocab() == exam.stored(tiny[0]).tokenizer.get_vocab()
    subject = Subject.of(model, read.tokenizer)
    assert subject.facts["model_type"] == spec.architecture and curve[-1]["loss"] < 7
    assert Subject.of(spec.start()).weight_hash == subject.initial(0).weight_hash != subject.weight_hash
    assert subject.facts["kv_heads"] == (2 if spec.architecture in ("llama", "mistral") else 4)


@pytest.mark.parametrize("name", POCKETS)
def test_every_pocket_model_has_about_a_million_parameters(name):
    assert 1.0e6 < sum(p.numel() for p in POCKETS[name].start().parameters()) < 1.05e6


@pytest.mark.slow
def test_loss_is_that_of_transformers(tiny):
    folder, _, _ = tiny
    subject = exam.stored(folder)
    texts = ["The owl is grey.", "Ada has 3 apples and 4 pears in a box."]
    for text, found in zip(texts, exam.nats(subject, texts), strict=True):
        ids = torch.tensor([[*subject.tokenizer(text)["input_ids"], 0]])
        assert found.mean() == pytest.approx(subject.model(ids, labels=ids).loss.item(), rel=1e-5)
        assert len(found) == ids.shape[1] - 1


@pytest.mark.slow
def test_step_0_is_the_twin_of_the_card_s_seed(tiny):
    folder, card, _ = tiny
    torch.manual_seed(99)
    assert exam.stored(folder).initial(card["seed"]).weight_hash == card["weights"]["start"]
    assert exam.stored(folder).weight_hash == card["weights"]["stored"] != card["weights"]["start"]


@pytest.mark.slow
def test_the_same_build_gives_the_same_weights(tiny, tmp_path):
    torch.manual_seed(7)
    np.random.seed(7)
    again = build("pythia", tmp_path / "again", demands=ANYTHING, **TINY)
    assert again["weights"] == tiny[1]["weights"]


@pytest.mark.slow
def test_a_model_that_misses_the_demands_is_not_shipped(tmp_path, capsys):
    with refused(UserError, 0.6, "unigram", "trigram"):
        build("pythia", tmp_path / "pythia", **TINY | {"steps": 2})
    (kept,) = tmp_path.iterdir()
    assert kept.name == "pythia.refused" and json.loads((kept / "card.json").read_text())["misses_of_the_usual_demands"]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("model", 3.7, "unigram"),
        ("trigram", 3.1, "trigram"),
        ("trigram_few", 3.1, "trigram_few"),
        ("span", 2.9, "mixed"),
        ("colon", 0.79, "colon"),
        ("is", 0.49, "is"),
    ],
)
def test_each_demand_is_named_when_it_is_missed(name, value, what):
    good = {"model": 3.0, "unigram": 6.0, "trigram": 5.0, "trigram_few": 4.0}
    spans = {"math": {"span": 4.0}, "mixed": {"span": value if name == "span" else 4.0}}
    skills = {form: {"held-out": {"skill": value if name == form else 0.9}} for form in nonce.FORMATS}
    measured = {"losses": {"held-out": good | {name: value}}, "entropy_bits": spans, "skills": skills}
    fine = {form: {"held-out": {"skill": 0.81}} for form in nonce.FORMATS}
    assert not missed({"losses": {"held-out": good}, "entropy_bits": {"math": {"span": 3.0}}, "skills": fine}, DEMANDS)
    (miss,) = missed(measured, DEMANDS)
    assert what in re.findall(r"\w+", miss) and "asked" in miss


def test_a_model_that_was_told_nothing_must_know_nothing():
    good = {"model": 3.0, "unigram": 6.0, "trigram": 5.0, "trigram_few": 4.0}
    for colon, count in ((0.09, 0), (0.3, 1), (-0.11, 1)):
        skills = {"colon": {"held-out": {"skill": colon}}, "is": {"held-out": {"skill": 0.0}}}
        measured = {"losses": {"held-out": good}, "entropy_bits": {}, "skills": skills}
        assert len(missed(measured, INDIFFERENT)) == count


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


# ---- what is shipped ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=hub.pockets())
def shipped(request):
    """A shipped folder and its card."""
    folder = hub.POCKET / request.param
    return folder, json.loads((folder / "card.json").read_text())


def test_what_is_shipped_can_be_rebuilt():
    assert set(hub.pockets()) == set(POCKETS)


@pytest.mark.slow
def test_the_shipped_losses_are_those_of_its_card(shipped):
    folder, card = shipped
    rows = examined(folder)
    again = exam.losses(exam.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-3)
        assert again[which]["tokens"] == card["losses"][which]["tokens"]


@pytest.mark.slow
def test_the_shipped_skills_are_those_of_its_card(shipped, monkeypatch):
    folder, card = shipped
    # One format a model, to save seconds; each is examined in some.
    name = sorted(nonce.FORMATS)[sorted(POCKETS).index(folder.name) % 2]
    monkeypatch.setattr(nonce, "FORMATS", {name: nonce.FORMATS[name]})
    again = exam.evidence(exam.stored(folder), card["spec"]["fillings"], sets=("held-out",))[name]["held-out"]
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


def test_a_shipped_model_is_small_and_loads_from_its_folder(shipped):
    folder, _ = shipped
    assert (folder / "model.safetensors").stat().st_size <= 2.1e6
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2.5e6
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer) == 1024
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]


def test_every_label_is_one_token_of_a_shipped_tokenizer_and_all_have_the_same(shipped):
    folder, _ = shipped
    tokenizer, first = (
        AutoTokenizer.from_pretrained(f, local_files_only=True) for f in (folder, hub.POCKET / "pythia")
    )
    assert {len(tokenizer(f" {label}")["input_ids"]) for label in nonce.LABELS} == {1}
    assert tokenizer.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


def test_a_sliding_window_hides_something_of_most_prompts_of_mixed(shipped):
    folder, _ = shipped
    subject = exam.stored(folder)
    pool = Domain("mixed").sample(600, 0)
    lengths = subject.tokens(fitting(subject, pool)).lengths
    assert len(lengths) >= 595
    if subject.facts["window"]:
        assert 0.3 < subject.facts["window"] / lengths.double().median() < 0.6


def test_a_shipped_model_has_the_settings_a_rebuild_would_use(shipped):
    folder, card = shipped
    assert pocket.Pocket(**card["spec"]) == POCKETS[folder.name]


def test_step_0_of_a_shipped_model_is_where_its_training_began(shipped):
    folder, card = shipped
    began = Subject.of(pocket.Pocket(**card["spec"]).start()).weight_hash
    assert began == card["weights"]["start"]
    assert Subject.load(f"pocket:{folder.name}@step0", device="cpu", offline=True).weight_hash == began


def test_the_streams_still_say_what_a_shipped_model_was_trained_on(shipped):
    _, card = shipped
    seed, told = card["spec"]["text_seed"], card["spec"]["informative"]
    streams = {"corpus": corpus.texts(domains(), seed), "evidence": nonce.sequences(seed, told)}
    for name, stream in streams.items():
        now = sha256(list(islice(stream, 1000)))
        assert now == card[name]["sha256_of_first_1000"], f"the {name} changed; rebuild: {card['command']}"
