"""Worlds as text: balance, tokens of the answers in every kind of tokenizer, and nothing else that predicts."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmgeom.commands.evidence import RunConfig, worlds
from llmgeom.dynamics.gradients import targets
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.tokenizing import encode
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.probes.interventions.label_axis import _first_tokens
from llmgeom.probes.shared.rows import Target
from llmgeom.prompts import surfaces as words, text as in_text
from llmgeom.prompts.surfaces import SURFACES
from llmgeom.stats.information import bits, entropy
from llmgeom.wind_tunnels import load_world, names
from tests.refusals import refused


def drawn(spec, *more, **named):
    return in_text.sample(load_world(spec, text=True), *more, **named)


@pytest.fixture(scope="module")
def pocket():
    return AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path)


@pytest.mark.parametrize("spec", ["two-point", "recall", "stated"])
def test_neither_position_nor_word_nor_surface_nor_length_predicts_the_answer(spec, pocket):
    """Within k: the exact probability of a mark does not depend on its place in the lead-in or on the word, and its
    entropy on surface or length. A permutation-free z of each difference, 4.5 allowed over some 40 of them."""
    batch = drawn(spec, 400, 5, pocket)
    p, k = batch.exact.predictive[:, 0].exp().numpy(), np.array(batch.columns["k"])
    h = np.array(batch.columns["exact_entropy"])
    lengths = np.array([len(ids) for ids in pocket(list(batch.text))["input_ids"]], dtype=float)
    surface = np.array(batch.columns["surface"])
    word = np.array([row.split() for row in batch.columns["marks"]])
    for number in np.unique(k):
        rows = k == number
        by_place = p[rows] - 1 / batch.exact.predictive.shape[-1]
        assert (np.abs(by_place.mean(0)) <= 4.5 * by_place.std(0) / np.sqrt(rows.sum()) + 1e-12).all()
        for one in np.unique(word[rows])[:12]:
            x = by_place[word[rows] == one]
            assert abs(x.mean()) <= 4.5 * by_place.std() / np.sqrt(len(x)) + 1e-12
        for one in SURFACES:
            here = rows & (surface == one)
            gap = h[here].mean() - h[rows].mean()
            assert abs(gap) <= 4.5 * h[rows].std() / np.sqrt(here.sum()) + 1e-12
            if h[here].std() > 0 and lengths[here].std() > 0:
                assert abs(np.corrcoef(h[here], lengths[here])[0, 1]) <= 4.5 / np.sqrt(here.sum())


@pytest.mark.parametrize("spec", ["two-point", "dirichlet", "recall", "bijection"])
def test_surfaces_and_clusters_are_balanced_and_clusters_share_no_word(spec, pocket):
    found = min(20, len(words.mark_sets(pocket, len(load_world(spec, text=True).answers.tokens))))
    batch = drawn(spec, 3 * found, 0, pocket)
    assert len(set(Counter(batch.columns["surface"]).values())) == 1
    crossed = Counter(zip(batch.columns["k"], batch.cluster, batch.columns["surface"], strict=True))
    sizes = Counter((k, cluster) for k, cluster, _ in crossed)
    assert set(crossed.values()) == {1} and set(sizes.values()) == {3}  # every set stands once in every surface
    sets = [set(cluster.split("-")) for cluster in dict.fromkeys(batch.cluster)]
    assert len(set.union(*sets)) == sum(map(len, sets)) and len(sets) >= words.LEAST_SETS
    together = words.pairs(words.Part.TRAINED)
    assert not [pair for pair in together for one in sets if {*pair} <= one]
    for i, marks in enumerate(batch.columns["marks"]):
        assert sorted(marks.split()) == sorted(batch.cluster[i].split("-"))


def test_few_prompts_still_have_the_five_clusters_of_an_interval(pocket):
    batch = drawn("coin", 10, 0, pocket)
    for k in set(batch.columns["k"]):
        here = [i for i, other in enumerate(batch.columns["k"]) if other == k]
        assert len({batch.cluster[i] for i in here}) == 5 and len({batch.columns["surface"][i] for i in here}) == 3


def test_a_seed_gives_the_same_sequences_whatever_the_tokenizer(pocket):
    plain, tokens, other = (drawn("hmm-mixture", 30, *more) for more in ((0,), (0, pocket), (1, pocket)))
    assert plain.columns["seen"] == tokens.columns["seen"] != other.columns["seen"]
    assert plain.exact.answers is None and tokens.exact.answers.shape == (150, 1, 2)


# ---- as text --------------------------------------------------------------------------------------------------------

IN_TEXT = [
    *names(text=True), "markov:symbols=3,a=1", "dirichlet:symbols=4", "bijection:vocab=4,replacement=false",
    "hmm-mixture:symbols=3", "edge-hmm:process=rrxor",
]  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def parsed(prompt):
    """What a person reads: stated numbers, the marks in the order named, pairs of item and mark, and the question."""
    stated = []
    if "of 10 lists" in prompt:
        numbers, prompt = prompt.removeprefix("/* ").split(" times in 10.", 1)
        stated = [int(word) for word in numbers.replace(",", "").split() if word.isdigit()]
        prompt = prompt.removeprefix(" */").strip()
    if " = " in prompt:
        *lines, last = (line.removesuffix(" =").split(" = ") for line in prompt.split("; "))
    elif prompt.startswith("The first is"):
        *lines, last = (line.removeprefix("The ").removesuffix(" is").split(" is ") for line in prompt.split(". "))
    else:
        opening, rest = prompt.split(". ", 1)
        *lines, last = (
            line.removesuffix(":").split(": ") for line in (*opening.lower().split(", "), *rest.split(", "))
        )
    marks = [mark for item, mark in lines if item in ORDINALS]
    assert [item for item, _ in lines[: len(marks)]] == list(ORDINALS[: len(marks)])
    return stated, marks, [tuple(line) for line in lines[len(marks) :]], last[0]


def tokens(name, stated, seen, items):
    """A sequence in the format of the world."""
    if name in ("bijection", "recall"):
        keys = {item: i for i, item in enumerate(dict.fromkeys(items))}
        after = 5 if name == "bijection" else 8
        pairs = [token for item, mark in zip(items, seen, strict=False) for token in (keys[item], after + mark)]
        return [*pairs, keys[items[-1]]]
    opening = {"coin": [2], "two-point": [2], "dirichlet": [3]}
    return [*(opening.get(name, []) if not stated else [stated[0] + 1, stated[-1] + 10]), *seen]


@pytest.mark.parametrize("spec", names(text=True))
def test_a_prompt_shows_a_sequence_and_has_its_exact_answer(spec):
    """The words are read back by hand into the tokens of the world, whose answers are those of every sequence."""
    world = load_world(spec, text=True)
    batch = in_text.sample(world, 9, 1, ks=[k for k in (3, 4, 6) if k in world.KS or k == 3])
    assert set(batch.columns["surface"]) == set(SURFACES)
    for i, prompt in enumerate(batch.text):
        stated, marks, pairs, asked = parsed(prompt)
        assert marks == batch.columns["marks"][i].split() and len(pairs) == batch.columns["k"][i]
        seen = [marks.index(mark) for _, mark in pairs]
        sequence = torch.tensor([tokens(spec, stated, seen, [item for item, _ in pairs] + [asked])])
        at_k = world.showing(len(pairs))
        torch.testing.assert_close(batch.exact.predictive[i], at_k.log_predictive(sequence)[0, -1:], rtol=0, atol=1e-12)
        for name, log_p in at_k.trivial(sequence).items():
            torch.testing.assert_close(batch.exact.trivial[name][i], log_p[0, -1:], rtol=0, atol=1e-12)
        h = bits(entropy(batch.exact.predictive[i, 0])).item()
        assert batch.columns["exact_entropy"][i] == pytest.approx(h, abs=1e-6)


@pytest.mark.parametrize("spec", IN_TEXT)
def test_what_follows_is_drawn_from_the_exact_answer(spec):
    """At each k the outcomes drawn less their probabilities sum to nothing, in total and along the probabilities."""
    world = load_world(spec, text=True)
    batch = in_text.sample(world, 1500, 3, ks=(3,))
    p = batch.exact.predictive[:, 0].exp().numpy()
    drawn = np.eye(p.shape[1])[batch.target[:, 0].numpy()]
    for weight in (np.ones_like(p), p):
        excess, variance = ((drawn - p) * weight).sum(0), (p * (1 - p) * weight**2).sum(0)
        assert (np.abs(excess) <= 4.5 * np.sqrt(variance) + 1e-9).all()
    assert (p[np.arange(len(p)), batch.target[:, 0]] > 0).all()


@pytest.mark.parametrize("spec", IN_TEXT)
def test_one_observation_is_changed_into_a_sequence_that_could_come(spec):
    """The exact answer to the changed sequence has the shift, without bound in recall; in a bijection no value comes
    twice."""
    world = load_world(spec, text=True)
    batch = in_text.sample(world, 6, 2, ks=(3,))
    changes = in_text.changes(world, batch, 0)
    assert changes
    for change in changes:
        drawn = in_text._Drawn.of(world, 6, 2, 3)
        before = drawn.inputs[change.prompt]
        after = before.clone()
        after[drawn.places[change.place]] = change.mark + world.answers.tokens[0]
        log_p = drawn.world.log_predictive(torch.stack([before, after]))[:, -1]
        old = before[drawn.places[change.place]].item() - world.answers.tokens[0]
        odds = log_p[:, change.mark] - log_p[:, old]
        if log_p.isfinite().all():
            assert change.shift == pytest.approx(bits((odds[1] - odds[0]).item()))
        if world.name == "recall":  # no other item bears on the answer
            items = batch.columns["items"][change.prompt].split()
            assert items[change.place] == items[-1] and change.shift == math.inf
        assert change.mark != old and (log_p[0] - log_p[1]).exp().ne(1).any()
        if world.name == "bijection":
            of = dict(zip(after[0::2].tolist(), after[1::2].tolist(), strict=False))
            assert len(set(of.values())) == len(of)


def test_conditions_change_one_thing_each():
    world = load_world("two-point", text=True)
    of = {name: in_text.sample(world, 30, 0, ks=(0, 2, 5), condition=name) for name in in_text.CONDITIONS}
    seen = {name: [list(map(int, row)) for row in batch.columns["seen"]] for name, batch in of.items()}
    assert seen["remap"] == seen[""] and of["remap"].text != of[""].text
    assert all(not {*a.split()} & {*b.split()} for a, b in zip(of["remap"].columns["marks"], of[""].columns["marks"],
                                                              strict=True))  # fmt: skip
    assert seen["swap"] == [[1 - x for x in row] for row in seen[""]]
    assert [sorted(row) for row in seen["permuted"]] == [sorted(row) for row in seen[""]] != seen["permuted"]
    assert seen["consistent"] == [row[:1] * len(row) for row in seen[""]]
    assert seen["alternating"] == [[(row[0] + j) % 2 for j in range(len(row))] for row in seen[""]]
    for name, batch in of.items():
        assert batch.cluster == of[""].cluster and batch.columns["items"] == of[""].columns["items"]
        n1, n2 = np.array([[row.count(0), row.count(1)] for row in seen[name]]).T
        rules = 1 / (1 + 9.0 ** (n2 - n1))
        np.testing.assert_allclose(batch.exact.predictive[:, 0, 0].exp(), 0.9 * rules + 0.1 * (1 - rules))


def test_prompts_that_cannot_be():
    with refused(UserError, "regression", "no form as text", "markov"):
        load_world("regression", text=True)
    markov = load_world("markov", text=True)
    with refused(UserError, "--k 0", "markov", "steps"):
        in_text.sample(markov, 3, 0, ks=(0, 2))
    with refused(UserError, 25, "markov", 24):
        in_text.sample(markov, 3, 0, ks=(25,))
    with refused(UserError, "lists", "list", "code"):
        in_text.sample(markov, 3, 0, surfaces=("lists",))
    with refused(UserError, "--n 0"):
        in_text.sample(markov, 0, 0)
    with refused(UserError, "dirichlet:symbols=9", 2, 8):
        in_text.sample(load_world("dirichlet:symbols=9", text=True), 3, 0)


# ---- as the rest of llmgeom reads them ------------------------------------------------------------------------------


def test_answers_and_observers_stay_with_their_prompts(pocket):
    batch = drawn("markov", 12, 0, pocket)
    order = [30, 2, 17]
    taken, flat = batch.take(order).exact, batch.exact.flat
    for new, old in enumerate(order):
        words = pocket.convert_tokens_to_ids([f" {word}" for word in batch.columns["marks"][old].split()])
        assert taken.answers[new, 0].tolist() == flat.answers[old].tolist() == words
        for name, log_p in taken.trivial.items():
            assert torch.equal(log_p[new, 0], batch.exact.trivial[name][old, 0])
            assert torch.equal(flat.trivial[name][old], batch.exact.trivial[name][old, 0])


def test_the_target_of_gradients_is_the_token_of_the_outcome_drawn(pocket):
    batch = drawn("dirichlet", 6, 0, pocket)
    tokens = encode(batch, pocket, {"features": None, "vocabulary": len(pocket)}, "pocket")
    where, target = targets(batch, tokens)
    assert where.sum(1).tolist() == [1] * len(batch) and torch.equal(where.int().argmax(1), tokens.lengths - 1)
    outcomes = [words.split()[i] for words, i in zip(batch.columns["marks"], batch.target[:, 0].tolist(), strict=True)]
    assert [pocket.decode([token]).strip() for token in target.tolist()] == outcomes


def test_entropy_is_compared_among_prompts_with_as_many_observations(pocket):
    """The target has mean 0 at each k, though prompts of one k differ in length."""
    batch = drawn("dirichlet", 20, 0, pocket)
    lengths = [len(ids) for ids in pocket(list(batch.text))["input_ids"]]
    position = torch.tensor(lengths) - 1
    capture = SimpleNamespace(batch=batch, position=position, prompt=torch.arange(len(batch)))
    target, k = Target.of(capture, np.zeros(len(batch))), np.array(batch.columns["k"])
    h = np.array(batch.columns["exact_entropy"])
    assert target.exact and len(set(lengths)) > len(set(k))
    for number in set(k):
        np.testing.assert_allclose(target.values[k == number], h[k == number] - h[k == number].mean(), atol=2e-6)


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def byte_level(prefix_space: bool = False, digits: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2 and GPT-NeoX; with digits apart as Qwen and Llama 3 split them."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split]) if digits else split
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=3000, show_progress=False,
                                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip


def metaspace(scheme: str = "always", bos: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2 and Mistral: a space is put before the text, and a BOS before that."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<s>"]
    made = _trained(tokenizer, trainers.UnigramTrainer(vocab_size=3000, show_progress=False, special_tokens=special,
                                                       unk_token="<unk>"))  # fmt: skip
    if bos:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.convert_tokens_to_ids("<s>"))]
        )
    return made


def replaced_spaces() -> PreTrainedTokenizerFast:
    """Gemma: spaces become a symbol by a normaliser, no space is put before the text, BPE over the whole."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=3000, show_progress=False, special_tokens=["<unk>"]))


def prepended() -> PreTrainedTokenizerFast:
    """Mistral and Phi-3 as transformers 5 reads their files: a space is put before every text, also before a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made = _trained(tokenizer, trainers.BpeTrainer(vocab_size=3000, show_progress=False, special_tokens=["<unk>"]))
    space = "\u2581"
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(space, "merged_with_next")
    made.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    made.backend_tokenizer.decoder = decoders.Replace(space, " ")
    return made


@cache
def _corpus() -> list[str]:
    lines = [text for name in names(text=True) for text in drawn(name, 20, 9).text]
    return lines + [f"{noun}: {mark}" for noun in words.carriers(words.Part.HELD_OUT) for mark in words.LABELS[:60]]


def _trained(tokenizer: Tokenizer, trainer) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = {
    "gpt-2, gpt-neox": byte_level,
    "a space in front": lambda: byte_level(prefix_space=True),
    "qwen, llama 3": lambda: byte_level(digits=True),
    "llama 2": metaspace,
    "llama 2, first only": lambda: metaspace("first"),
    "no space in front": lambda: metaspace("never", bos=False),
    "gemma": replaced_spaces,
    "mistral, phi 3": prepended,
}


@cache
def of_kind(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_one_token_each_in_every_tokenizer(kind):
    """Judged by the tokenizer alone: the prompt with its answer is the prompt's tokens and the answer's."""
    tokenizer = of_kind(kind)
    batch = drawn("dirichlet", 24, 0, tokenizer)
    assert batch.exact.answers.shape == (120, 1, 3)
    for text, marks, ids in zip(batch.text, batch.columns["marks"], batch.exact.answers[:, 0].tolist(), strict=True):
        for mark, token in zip(marks.split(), ids, strict=True):
            assert tokenizer(f"{text} {mark}")["input_ids"] == [*tokenizer(text)["input_ids"], token]
            assert tokenizer.decode([token]).strip() == mark
        assert len(set(ids)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_labels_have_the_tokens_that_they_have_after_a_text(kind):
    """Also where prompts of several samples are read together and the posterior is not at hand."""
    tokenizer = of_kind(kind)
    batch = drawn("two-point", 10, 0, tokenizer)
    assert torch.equal(label_ids(tokenizer, replace(batch, posterior=None)), batch.exact.answers[:, 0])
    answers = batch.columns["marks"][0].split()
    first = _first_tokens(SimpleNamespace(tokenizer=tokenizer, facts={}), answers)
    for answer, token in zip(answers, first, strict=True):
        before, after = (tokenizer(text)["input_ids"] for text in ("owl:", f"owl: {answer}"))
        assert after[: len(before) + 1] == [*before, token]


def test_a_tokenizer_of_characters_has_no_answers():
    letters = {"<unk>": 0, **{c: i + 1 for i, c in enumerate(" abcdefghijklmno")}}
    tokenizer = Tokenizer(models.WordLevel(letters, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with refused(UserError, 0, "sets of 2 labels", 5):
        drawn("two-point", 10, 0, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_a_prompt_longer_than_the_input_is_refused(pocket):
    with refused(UserError, "--k 24", "coin", 60, "--k 1,2"):
        drawn("coin", 6, 0, pocket, ks=(1, 2, 24), positions=60)


def test_a_mark_that_is_not_one_token_after_its_own_prompt_is_refused(pocket):
    with refused(UserError, "zubbaq", "owl:"):
        words.answer_tokens(pocket, ["First: dax. owl:"], [["dax", "zubbaq"]])


def test_one_process_under_two_spellings_is_read_once():
    config = RunConfig(processes=("markov", "markov:symbols=2", "coin"), ks=(1, 2))
    assert [in_text.title(world) for world in worlds(config)] == ["markov", "coin"]


def test_the_exact_entropy_is_that_of_outcomes_and_of_no_gaussian():
    batch = drawn("dirichlet", 40, 0)
    p = batch.exact.predictive[:, 0].exp().numpy()
    nats = batch.exact.entropy[:, 0].numpy()
    np.testing.assert_allclose(nats, -(p * np.log(p)).sum(1), rtol=1e-12)
