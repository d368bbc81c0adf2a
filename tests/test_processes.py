"""Processes in text: exact answers against enumeration from the prompt's own words, and nothing else that predicts."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmgeom.cli import main
from llmgeom.commands.evidence import RunConfig, chosen_processes
from llmgeom.dynamics.gradients import targets
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.tokenizing import encode
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.probes.interventions.label_axis import _first_tokens
from llmgeom.probes.shared.targets import Target
from llmgeom.prompts import marks as words, nonce
from llmgeom.prompts.process import Draw, draws_of
from llmgeom.prompts.processes import load_process, names
from llmgeom.prompts.sula import Sula, available
from llmgeom.prompts.surfaces import SURFACES
from llmgeom.stats.information import best_constant, bits, kl
from tests import processes as oracle
from tests.refusals import refused

SPECS = (
    "two-point",
    "two-point:reliability=0.7",
    "beta",
    "beta:a=2",
    "dirichlet",
    "dirichlet:labels=4,a=2",
    "markov",
    "markov:labels=3,a=1",
    "hmm",
    "hmm:stays=0.8,0.3,0.05,weights=2,1,3,reliability=0.6",
    "hmm:labels=3",
    "recall",
    "recall:labels=3,stored=0.5",
    "bijection",
    "bijection:labels=4,stored=0.6",
    "stated",
    "stated:reliabilities=3,9,priors=1,7",
)


def answers(spec: str, text: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Predictive and belief of a prompt, by enumeration."""
    prompt, process = oracle.parse(text), load_process(spec)
    name = spec.partition(":")[0]
    if name == "two-point":
        return oracle.two_point(prompt, process.reliability)
    if name == "stated":
        return oracle.stated(prompt)
    if name == "beta":
        return oracle.dirichlet(prompt.seen, 2, process.a), oracle.beta_majority(prompt.seen, int(process.a))
    if name == "hmm":
        stays, weights = ([float(x) for x in text.split(",")] for text in (process.stays, process.weights))
        return oracle.hmm(prompt, stays, weights, process.reliability)
    simple = {
        "dirichlet": lambda: oracle.dirichlet(prompt.seen, process.labels, process.a),
        "markov": lambda: oracle.markov(prompt, process.a),
        "recall": lambda: oracle.recall(prompt),
        "bijection": lambda: oracle.bijection(prompt),
    }
    return simple[name](), None


@pytest.fixture(scope="module")
def pocket():
    return AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path)


def test_every_process_is_judged():
    assert {spec.partition(":")[0] for spec in SPECS} == set(names())


@pytest.mark.parametrize("spec", SPECS)
def test_exact_answers_are_those_of_enumeration_from_the_text(spec):
    process = load_process(spec)
    ks = [k for k in process.KS if k <= 6] + [3]
    batch = process.sample(9, 1, ks=sorted({*ks} if process.most >= 6 else {*ks} & {*range(process.most + 1)}))
    assert set(batch.columns["surface"]) == set(SURFACES)
    for i, text in enumerate(batch.text):
        predictive, belief = answers(spec, text)
        np.testing.assert_allclose(batch.exact.predictive[i, 0].exp().numpy(), predictive, rtol=0, atol=1e-12)
        if belief is None:
            assert batch.exact.belief is None
        else:
            np.testing.assert_allclose(batch.exact.belief[i, 0].exp().numpy(), belief, rtol=0, atol=1e-12)
        h = -sum(p * np.log2(p) for p in predictive if p > 0)
        assert batch.columns["exact_entropy"][i] == pytest.approx(h, abs=1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_what_follows_is_drawn_from_the_exact_answer(spec):
    """At each k the outcomes drawn less their probabilities sum to nothing, in total and along the probabilities."""
    process = load_process(spec)
    batch = process.sample(1500, 3, ks=(1, 2))
    p = batch.exact.predictive[:, 0].exp().numpy()
    drawn = np.eye(process.answers)[batch.target[:, 0].numpy()]
    for weight in (np.ones_like(p), p):
        excess, variance = ((drawn - p) * weight).sum(0), (p * (1 - p) * weight**2).sum(0)
        assert (np.abs(excess) <= 4.5 * np.sqrt(variance) + 1e-9).all()
    assert (p[np.arange(len(p)), batch.target[:, 0]] > 0).all()


@pytest.mark.parametrize("spec", names())
def test_prompts_with_one_statistic_have_one_answer(spec):
    batch = load_process(spec).sample(120, 0)
    p = batch.exact.predictive[:, 0].exp().numpy()
    by_statistic: dict[tuple, np.ndarray] = {}
    for k, statistic, row in zip(batch.columns["k"], batch.columns["statistic"], p, strict=True):
        np.testing.assert_allclose(by_statistic.setdefault((k, statistic), row), row, rtol=0, atol=1e-12)
    assert len(by_statistic) < len(p)


@pytest.mark.parametrize("spec", names())
def test_neither_position_nor_word_nor_surface_nor_length_predicts_the_answer(spec, pocket):
    """Within k: the exact probability of a mark does not depend on its place in the lead-in or on the word, and its
    entropy on surface or length. A permutation-free z of each difference, 4.5 allowed over some 40 of them."""
    process = load_process(spec)
    batch = process.sample(900, 5, pocket)
    p, k = batch.exact.predictive[:, 0].exp().numpy(), np.array(batch.columns["k"])
    h = np.array(batch.columns["exact_entropy"])
    lengths = np.array([len(ids) for ids in pocket(list(batch.text))["input_ids"]], dtype=float)
    surface = np.array(batch.columns["surface"])
    word = np.array([row.split() for row in batch.columns["marks"]])
    for number in np.unique(k):
        rows = k == number
        by_place = p[rows] - 1 / process.answers
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


@pytest.mark.parametrize("spec", names())
def test_surfaces_and_clusters_are_balanced_and_clusters_share_no_word(spec, pocket):
    process = load_process(spec)
    found = min(20, len(words.mark_sets(pocket, process.answers)))
    batch = process.sample(3 * found, 0, pocket)
    assert len(set(Counter(batch.columns["surface"]).values())) == 1
    crossed = Counter(zip(batch.columns["k"], batch.cluster, batch.columns["surface"], strict=True))
    sizes = Counter((k, cluster) for k, cluster, _ in crossed)
    assert set(crossed.values()) == {1} and set(sizes.values()) == {3}  # every set stands once in every surface
    sets = [set(cluster.split("-")) for cluster in dict.fromkeys(batch.cluster)]
    assert len(set.union(*sets)) == sum(map(len, sets)) and len(sets) >= words.LEAST_SETS
    together = nonce.pairs(nonce.Part.TRAINED)
    assert not [pair for pair in together for one in sets if {*pair} <= one]
    for i, marks in enumerate(batch.columns["marks"]):
        assert sorted(marks.split()) == sorted(batch.cluster[i].split("-"))


def test_few_prompts_still_have_the_five_clusters_of_an_interval(pocket):
    batch = load_process("beta").sample(10, 0, pocket)
    for k in set(batch.columns["k"]):
        here = [i for i, other in enumerate(batch.columns["k"]) if other == k]
        assert len({batch.cluster[i] for i in here}) == 5 and len({batch.columns["surface"][i] for i in here}) == 3


def test_a_seed_gives_the_same_sequences_whatever_the_tokenizer(pocket):
    plain, tokens, other = (load_process("hmm").sample(30, *more) for more in ((0,), (0, pocket), (1, pocket)))
    assert plain.columns["seen"] == tokens.columns["seen"] != other.columns["seen"]
    assert plain.exact.answers is None and tokens.exact.answers.shape == (150, 1, 2)


@pytest.mark.parametrize("spec", names())
def test_draws_are_read_back_from_the_columns(spec):
    process = load_process(spec)
    batch = process.sample(20, 0).take(range(7, 60))
    torch.testing.assert_close(process.predictive(draws_of(batch)), batch.exact.predictive[:, 0], rtol=0, atol=0)


NEARLY_EXACT = {("two-point", "majority")}  # at reliability .9 it is .0003 bits from exact


@pytest.mark.parametrize("spec", names())
def test_no_trivial_observer_is_exact_and_each_is_a_distribution(spec):
    process = load_process(spec)
    batch = process.sample(300, 0)
    exact, draws = batch.exact.predictive[:, 0].numpy(), draws_of(batch)
    guessing = bits(kl(exact, np.full_like(exact, -np.log(process.answers)))).mean()
    for name, log_p in process.trivial(draws).items():
        np.testing.assert_allclose(np.exp(log_p).sum(1), 1, rtol=0, atol=1e-12)
        lost = bits(kl(exact, log_p)).mean()
        assert (lost < 0.01) == ((spec, name) in NEARLY_EXACT), f"{name} loses {lost} bits"
        assert lost <= guessing, f"{name} is worse than guessing"


@pytest.mark.parametrize("spec", ["hmm:labels=3", "markov:labels=3"])
def test_unigram_is_the_best_function_of_all_counts(spec):
    """Every sequence of 4 marks with its probability, by the chain rule: the best function of counts is their mean.

    The own count alone lost .073 bits in hmm and .116 in markov, where all counts lose .052 and .110.
    """
    process, k = load_process(spec), 4
    sequences = list(itertools.product(range(3), repeat=k))
    chance = np.ones(len(sequences))
    for i in range(k):
        before = process.predictive([Draw(row[:i], 0) for row in sequences]).exp().numpy()
        chance *= before[np.arange(len(sequences)), [row[i] for row in sequences]]
    assert chance.sum() == pytest.approx(1)
    draws = [Draw(row, 0) for row in sequences]
    exact = process.predictive(draws).numpy()
    best = np.empty_like(exact)
    cells = [tuple(row.count(mark) for mark in range(3)) for row in sequences]
    for cell in set(cells):
        rows = [i for i, other in enumerate(cells) if other == cell]
        best[rows] = np.log(chance[rows] @ np.exp(exact[rows]) / chance[rows].sum())
    least = chance @ bits(kl(exact, best))
    answers = np.concatenate(
        [process.trivial([draw])["unigram"] for draw in draws]
    )  # one by one: none learns of others
    reached = chance @ bits(kl(exact, answers))
    assert reached == pytest.approx(least, rel=0.03)


def test_the_stated_numbers_part_equal_counts():
    """The same marks under different stated numbers have different answers; the best function of counts misses a
    third or more of all that there is to know."""
    process = load_process("stated")
    batch = process.sample(400, 0)
    exact, draws = batch.exact.predictive[:, 0].numpy(), draws_of(batch)
    constant = best_constant(exact, np.array(batch.columns["k"]))
    counted = kl(exact, process.trivial(draws)["counts"]).mean()
    assert counted > kl(exact, constant).mean() / 3
    by_counts: dict[tuple, set] = {}
    for k, n1, row in zip(batch.columns["k"], batch.columns["n1"], exact, strict=True):
        by_counts.setdefault((k, n1), set()).add(round(float(row[0]), 9))
    assert min(len(answers) for counts, answers in by_counts.items() if counts[0] > 0) >= 3


# ---- as the rest of llmgeom reads them ------------------------------------------------------------------------------


def test_answers_and_observers_stay_with_their_prompts(pocket):
    batch = load_process("markov").sample(12, 0, pocket)
    order = [30, 2, 17]
    taken, flat = batch.take(order).exact, batch.exact.flat
    for new, old in enumerate(order):
        words = pocket.convert_tokens_to_ids([f" {word}" for word in batch.columns["marks"][old].split()])
        assert taken.answers[new, 0].tolist() == flat.answers[old].tolist() == words
        for name, log_p in taken.trivial.items():
            assert torch.equal(log_p[new, 0], batch.exact.trivial[name][old, 0])
            assert torch.equal(flat.trivial[name][old], batch.exact.trivial[name][old, 0])


def test_the_target_of_gradients_is_the_token_of_the_outcome_drawn(pocket):
    batch = load_process("dirichlet").sample(6, 0, pocket)
    tokens = encode(batch, pocket, {"features": None, "vocabulary": len(pocket)}, "pocket")
    where, target = targets(batch, tokens)
    assert where.sum(1).tolist() == [1] * len(batch) and torch.equal(where.int().argmax(1), tokens.lengths - 1)
    drawn = [words.split()[i] for words, i in zip(batch.columns["marks"], batch.target[:, 0].tolist(), strict=True)]
    assert [pocket.decode([token]).strip() for token in target.tolist()] == drawn


@pytest.mark.parametrize(
    "source", [load_process("dirichlet"), Sula(nonce.LABELS[:16], ks=(1, 2, 4))], ids=["K", "SULA"]
)
def test_the_exact_entropy_is_that_of_outcomes_and_of_no_gaussian(source):
    batch = source.sample(40, 0)
    p = batch.exact.predictive[:, 0].exp().numpy()
    nats = batch.exact.entropy[:, 0].numpy()
    np.testing.assert_allclose(nats, -(p * np.log(p)).sum(1), rtol=1e-12)


def test_entropy_is_compared_among_prompts_with_as_many_observations(pocket):
    """The target has mean 0 at each k, though prompts of one k differ in length."""
    batch = load_process("dirichlet").sample(20, 0, pocket)
    lengths = [len(ids) for ids in pocket(list(batch.text))["input_ids"]]
    position = torch.tensor(lengths) - 1
    capture = SimpleNamespace(batch=batch, position=position, prompt=torch.arange(len(batch)))
    target, k = Target.of(capture, np.zeros(len(batch))), np.array(batch.columns["k"])
    h = np.array(batch.columns["exact_entropy"])
    assert target.exact and len(set(lengths)) > len(set(k))
    for number in set(k):
        np.testing.assert_allclose(target.values[k == number], h[k == number] - h[k == number].mean(), atol=2e-6)


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def _corpus() -> list[str]:
    lines = [text for name in names() for text in load_process(name).sample(20, 9).text]
    return lines + [f"{noun}: {mark}" for noun in nonce.carriers(nonce.Part.HELD_OUT) for mark in nonce.LABELS[:60]]


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


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_one_token_each_in_every_tokenizer(kind):
    """Judged by the tokenizer alone: the prompt with its answer is the prompt's tokens and the answer's."""
    tokenizer = KINDS[kind]()
    batch = load_process("dirichlet").sample(24, 0, tokenizer)
    assert batch.exact.answers.shape == (120, 1, 3)
    for text, marks, ids in zip(batch.text, batch.columns["marks"], batch.exact.answers[:, 0].tolist(), strict=True):
        for mark, token in zip(marks.split(), ids, strict=True):
            assert tokenizer(f"{text} {mark}")["input_ids"] == [*tokenizer(text)["input_ids"], token]
            assert tokenizer.decode([token]).strip() == mark
        assert len(set(ids)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_labels_have_the_tokens_that_they_have_after_a_text(kind):
    tokenizer = KINDS[kind]()
    batch = Sula(available(tokenizer)).sample(5, 0)
    for text, row, *pair in zip(
        batch.text, label_ids(tokenizer, batch).tolist(), batch.columns["first"], batch.columns["second"], strict=True
    ):
        for label, token in zip(pair, row, strict=True):
            assert tokenizer(f"{text} {label}")["input_ids"] == [*tokenizer(text)["input_ids"], token]
    answers = available(tokenizer)[:2]
    first = _first_tokens(SimpleNamespace(tokenizer=tokenizer, facts={}), answers)
    for answer, token in zip(answers, first, strict=True):
        before, after = (tokenizer(text)["input_ids"] for text in ("owl:", f"owl: {answer}"))
        assert after[: len(before) + 1] == [*before, token]


def test_a_tokenizer_of_characters_has_no_answers():
    letters = {"<unk>": 0, **{c: i + 1 for i, c in enumerate(" abcdefghijklmno")}}
    tokenizer = Tokenizer(models.WordLevel(letters, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with refused(UserError, 0, "sets of 2 labels", 5):
        load_process("two-point").sample(10, 0, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_a_mark_that_is_not_one_token_after_its_own_prompt_is_refused(pocket):
    with refused(UserError, "zubbaq", "owl:"):
        words.answer_tokens(pocket, ["First: dax. owl:"], [["dax", "zubbaq"]])


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("two-pint", ("two-pint", "two-point", "markov")),
        ("beta:a=0", ("beta:a=0.0", "mass")),
        ("dirichlet:a=0", ("dirichlet:a=0.0", 0.01, "mass")),
        ("markov:a=0", ("markov:a=0.0", 0.01, "mass")),
        ("hmm:weights=0,0", ("hmm:weights=0,0", "mass")),
        ("hmm:weights=1", ("hmm:weights=1", "weight")),
        ("stated:priors=0,5", ("stated:priors=0,5", 1, 9, "mass")),
        ("stated:priors=a", ("priors='a'",)),
        ("dirichlet:labels=9", ("dirichlet:labels=9", 2, 8)),
        ("two-point:reliability=1", ("two-point:reliability=1.0", 0.5)),
        ("hmm:stays=2,0.1", ("stays",)),
        ("recall:stored=2", ("recall:stored=2.0",)),
        ("bijection:stored=-1", ("bijection:stored=-1.0",)),
        ("beta:b=2", ("b=2", "float", 1.0)),
        ("beta:a=nan", ("a=",)),
    ],
)
def test_a_process_that_cannot_be(spec, values):
    with refused(UserError, *values):
        load_process(spec)


def test_samples_that_cannot_be(pocket):
    process = load_process("bijection")
    with refused(UserError, 5, "bijection", 4):
        process.sample(3, 0, ks=(5,))
    with refused(UserError, "lists", "list", "code"):
        process.sample(3, 0, surfaces=("lists",))
    with refused(UserError, "--n 0"):
        process.sample(0, 0)
    with refused(UserError, "--k 24", "beta", 60, "--k 1,2"):
        load_process("beta").sample(6, 0, pocket, ks=(1, 2, 24), positions=60)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_list_shows_an_example_of_each_process_with_its_exact_answer():
    shown = CliRunner().invoke(main, ["list", "processes"], catch_exceptions=False).stdout
    blocks = [block.splitlines() for block in shown.strip().split("\n\n")]
    assert [block[0].split()[0] for block in blocks] == list(names())
    for name, (*lines, exact) in zip(names(), blocks, strict=True):
        options = next(i for i, line in enumerate(lines) if "=" in line)  # below the title; the list follows
        predictive, _ = answers(name, " ".join(line.strip() for line in lines[options + 1 :]))
        shares = [float(part.split()[1]) for part in exact.split(":")[1].split(",")]
        np.testing.assert_allclose(shares, predictive, atol=0.005 + 1e-9)


def test_marks_of_a_pocket_model_are_words_that_it_was_trained_to_answer_with():
    tokenizer = AutoTokenizer.from_pretrained(hub.locate("pocket:llama").path)
    for size in (2, 3, 4, 5):
        sets = words.mark_sets(tokenizer, size)
        assert set().union(*sets) <= set(nonce.LABELS) and len(sets) >= words.LEAST_SETS


def test_fewer_labels_have_fewer_usual_numbers_of_observations():
    assert load_process("bijection:labels=3").usual == (0, 1, 2)
    assert set(load_process("bijection:labels=3").sample(5, 0).columns["k"]) == {0, 1, 2}


def test_one_process_under_two_spellings_is_read_once():
    config = RunConfig(processes=("hmm", "hmm:labels=2", "beta"), ks=(1, 2))
    assert [process.title for process in chosen_processes(config)] == ["hmm", "beta"]
