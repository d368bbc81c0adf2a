"""Pocket models: the pipeline from grammar to shipped folder, what it refuses, and that the shipped card is true."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmgeom.errors import Refused
from llmgeom.experiments import exam, pocket
from llmgeom.experiments.exam import DEMANDS, Demands, missed
from llmgeom.experiments.lessons import domains, examination, lessons, pieces, sha256
from llmgeom.experiments.pocket import build
from llmgeom.experiments.trigram import KneserNey
from llmgeom.prompts import corpus
from llmgeom.subject import Subject

SHIPPED = Path(pocket.__file__).parents[1] / "pocket" / "pythia"
TINY = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "ffn": 64,
    "batch": 8,
    "steps": 12,
    "fillings": 1,
    "tokenizer_texts": 400,
}
ANYTHING = Demands(of_unigram=9, of_trigram=9, span=0)


def texts_of(rows):
    return [row["text"] for row in rows]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny pocket model: its folder, its card, and the losses its progress reported."""
    seen: list[tuple[int, int, float]] = []
    folder = tmp_path_factory.mktemp("pocket") / "pythia"
    card = build("pythia", folder, demands=ANYTHING, progress=lambda *args: seen.append(args), **TINY)
    return folder, card, seen


# ---- the rival ------------------------------------------------------------------------------------------------------


def test_kneser_ney_by_hand():
    # Bigrams of "1 2", "1 2", "1 3" (0 separates): 01 x3, 12 x2, 13, 20 x2, 30; two once, two twice: D = 2/(2+4) = 1/3.
    # Below: 0 follows two tokens, 1, 2 and 3 one each; three once, one twice: D = 3/(3+2) = 3/5.
    model = KneserNey.fit([[1, 2], [1, 2], [1, 3]], vocabulary=4, separator=0, order=2)
    unigram = np.array([(2 - 0.6) / 5, 0.4 / 5, 0.4 / 5, 0.4 / 5]) + 0.6 * 4 / 5 / 4
    np.testing.assert_allclose(model.next([1]), np.array([0, 0, 5 / 9, 2 / 9]) + (1 / 3) * 2 / 3 * unigram)
    np.testing.assert_allclose(model.next([0]), np.array([0, 8 / 9, 0, 0]) + (1 / 3) * 1 / 3 * unigram)
    np.testing.assert_allclose(model.nats([[1]]), -np.log([model.next([0])[1], model.next([1])[0]]))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_an_n_gram_sums_to_one_after_any_context(order):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 9, rng.integers(1, 7)).tolist() for _ in range(60)]
    model = KneserNey.fit(texts, vocabulary=12, separator=0, order=order)
    for context in rng.integers(0, 12, (50, max(order - 1, 1))).tolist():
        assert model.next(context).sum() == pytest.approx(1)
        assert model.next(context).min() > 0


def test_a_trigram_learns_nothing_across_texts():
    shuffled = [[1, 2, 3], [4, 5], [6], [7, 8]]
    there, back = (KneserNey.fit(t, 9, 0).nats([[1, 2, 3], [6]]) for t in (shuffled, shuffled[::-1]))
    np.testing.assert_array_equal(there, back)


def test_the_trigram_beats_the_unigram_on_grammar_text():
    texts = list(islice(corpus.texts(domains(), 0), 9000))
    vocabulary = {word: i for i, word in enumerate(sorted({w for t in texts for w in t.split()}), start=1)}
    ids = [[vocabulary[word] for word in text.split()] for text in texts]
    model = KneserNey.fit(ids[:8700], len(vocabulary) + 1, 0)
    tokens = [t for row in ids[8700:] for t in (*row, 0)]
    share = np.array(list(Counter(tokens).values())) / len(tokens)
    assert model.nats(ids[8700:]).mean() < 0.5 * -(share * np.log(share)).sum()


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


def test_windows_hold_whole_texts_from_their_first_position():
    read = lessons(40, 128, 512, seed=0, at_once=200)
    rest = iter(read.ids)
    for window in read.windows.tolist():
        at = 0
        while at < len(window):
            whole = [*next(rest), 0]
            assert window[at : at + len(whole)] == whole[: len(window) - at]
            at += len(whole)


def test_words_cut_in_two_say_the_same_text():
    read = lessons(8, 128, 512, seed=0, at_once=200)
    for text, whole in zip(read.texts, read.ids, strict=True):
        assert pieces(text, read.tokenizer, random.Random(0), 0.0) == whole
        broken = pieces(text, read.tokenizer, random.Random(0), 0.5)
        assert len(broken) > len(whole) and read.tokenizer.decode(broken) == text


def test_any_utf8_survives_the_tokenizer_and_nothing_is_put_before_it():
    tokenizer = lessons(8, 128, 512, seed=0, at_once=200).tokenizer
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


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def test_a_build_gives_a_model_and_a_card_that_is_true_of_what_was_stored(tiny):
    folder, card, seen = tiny
    assert card == json.loads((folder / "card.json").read_text())
    assert [step for step, _, _ in seen] == list(range(1, 13)) and seen[-1][2] < seen[0][2]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    rows = [json.loads(line) for line in (folder / "examination.jsonl").read_text().splitlines()]
    again = exam.losses(exam.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-6)
    assert {p.name for p in folder.parent.iterdir()} == {"pythia"}


def test_loss_is_that_of_transformers(tiny):
    folder, _, _ = tiny
    subject = exam.stored(folder)
    texts = ["The owl is grey.", "Ada has 3 apples and 4 pears in a box."]
    for text, found in zip(texts, exam.nats(subject, texts), strict=True):
        ids = torch.tensor([[*subject.tokenizer(text)["input_ids"], 0]])
        assert found.mean() == pytest.approx(subject.model(ids, labels=ids).loss.item(), rel=1e-5)
        assert len(found) == ids.shape[1] - 1


def test_step_0_is_the_twin_of_the_card_s_seed(tiny):
    folder, card, _ = tiny
    torch.manual_seed(99)
    assert exam.stored(folder).twin(card["seed"]).weight_hash == card["weights"]["start"]
    assert exam.stored(folder).weight_hash == card["weights"]["stored"] != card["weights"]["start"]


def test_the_same_build_gives_the_same_weights(tiny, tmp_path):
    torch.manual_seed(7)
    np.random.seed(7)
    again = build("pythia", tmp_path / "again", demands=ANYTHING, **TINY)
    assert again["weights"] == tiny[1]["weights"]


def test_a_model_that_misses_the_demands_is_not_shipped(tmp_path, capsys):
    with pytest.raises(Refused, match=r"not shipped: \d\.\d+ nats a token .* at most 0.6 of unigram's .* trigram"):
        build("pythia", tmp_path / "pythia", **TINY | {"steps": 2})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("model", 3.7, "unigram"),
        ("trigram", 3.1, "trigram"),
        ("trigram_few", 3.1, "trigram_few"),
        ("span", 2.9, "mixed"),
    ],
)
def test_each_demand_is_named_when_it_is_missed(name, value, what):
    good = {"model": 3.0, "unigram": 6.0, "trigram": 5.0, "trigram_few": 4.0}
    spans = {"math": {"span": 4.0}, "mixed": {"span": value if name == "span" else 4.0}}
    measured = {"losses": {"held-out": good | {name: value}}, "entropy_bits": spans}
    assert not missed({"losses": {"held-out": good}, "entropy_bits": {"math": {"span": 3.0}}}, DEMANDS)
    (miss,) = [miss for miss in missed(measured, DEMANDS) if what in miss.replace("'s", "").split()]
    assert "asked" in miss


def test_what_cannot_be_built_is_refused_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(Refused, match="not a pocket model"):
        build("pythia", tmp_path)
    with pytest.raises(Refused, match="known are pythia"):
        build("pithia", tmp_path / "new")
    with pytest.raises(Refused, match="--steps 0: give at least 1"):
        build("pythia", tmp_path / "new", steps=0)
    assert pocket.main(["pythia", "--out", str(tmp_path)]) == 1
    assert "not a pocket model" in capsys.readouterr().err


# ---- what is shipped ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def card():
    return json.loads((SHIPPED / "card.json").read_text())


def test_the_shipped_losses_are_those_of_its_card(card):
    rows = [json.loads(line) for line in (SHIPPED / "examination.jsonl").read_text().splitlines()]
    again = exam.losses(exam.stored(SHIPPED), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-3)
        assert again[which]["tokens"] == card["losses"][which]["tokens"]


def test_the_shipped_model_has_no_unsaid_miss(card):
    assert card["misses_of_the_usual_demands"] == missed(card, DEMANDS)
    assert not missed(card, Demands(**card["demands"]))
    for miss in card["misses_of_the_usual_demands"]:
        assert miss in (SHIPPED / "card.md").read_text()


def test_the_shipped_model_is_small_and_loads_from_its_folder():
    assert (SHIPPED / "model.safetensors").stat().st_size <= 2.1e6
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 2.7e6
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer) == 1024
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]


def test_the_shipped_model_has_the_settings_a_rebuild_would_use(card):
    assert pocket.Pocket(**card["spec"]) == pocket.POCKETS["pythia"]


def test_step_0_of_the_shipped_model_is_where_its_training_began(card):
    began = Subject.of(pocket.Pocket(**card["spec"]).start()).weight_hash
    assert Subject.load("pocket:pythia@step0", device="cpu", offline=True).weight_hash == began


def test_the_grammars_still_say_what_the_shipped_model_was_trained_on(card):
    first = list(islice(corpus.texts(domains(), card["spec"]["text_seed"]), 1000))
    assert sha256(first) == card["corpus"]["sha256_of_first_1000"], f"the grammars changed; rebuild: {card['command']}"
