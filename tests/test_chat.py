"""An instruct model reads prompts as messages, in the template of its own tokenizer."""

import copy
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import llmgeom
from llmgeom.commands import probe
from llmgeom.commands.evidence import RunConfig, perform
from llmgeom.commands.patch import question_of_text
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.tokenizing import Chat, shuffle, special_tokens
from llmgeom.probes.interventions.label_axis import _first_tokens
from llmgeom.probes.interventions.text_pairs import ROLES
from llmgeom.probes.interventions.text_patching import PROBE
from llmgeom.prompts import text as in_text
from llmgeom.prompts.surfaces import QUESTION, SURFACES
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.worlds.two_point import TwoPoint
from tests.refusals import refused

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Question from the user: {{ m['content'] }}\n"
    "{% else %}The answer is {{ m['content'] }}.\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}The answer is{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pocket model as an instruct model: its tokenizer has a template."""
    folder = tmp_path_factory.mktemp("instruct") / "model"
    shutil.copytree(hub.locate("pocket:pythia").path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(folder):
    return llmgeom.load(folder)


def test_a_prompt_is_a_message_in_the_template(plain):
    chat = plain.chat()
    written = "Question from the user: Two and two\nThe answer is"
    expected = plain.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert chat.tokens(["Two and two"]).real == [expected] == chat.chat().tokens(["Two and two"]).real
    assert plain.tokens(["Two and two"]).real != [expected]
    assert chat.entropy("Two and two") == plain.entropy(written)


def test_a_shuffle_leaves_the_template_in_place(plain):
    chat = plain.chat()
    before, after = special_tokens(chat.tokenizer)
    text = "one two three four five six seven"
    tokens = chat.tokens([text])
    assert plain.tokenizer.decode(tokens.real[0][:before]).endswith("user:")
    assert plain.tokenizer.decode(tokens.real[0][-after:]).endswith("answer is")
    ids, mixed = np.array(tokens.real[0]), np.array(shuffle(tokens, before, 0, after).real[0])
    kept = np.r_[:before, len(ids) - after : len(ids)]
    assert (ids[kept] == mixed[kept]).all() and (ids != mixed).any() and sorted(ids) == sorted(mixed)


def test_a_shuffle_leaves_a_system_prompt_in_place_that_holds_the_words_of_a_text():
    """SentencePiece writes " a" within a template as it writes "a" alone."""
    words = ["<unk>", *(f"▁{word}" for word in ("a", "b", "You", "are", "bot.", "User:", "Bot:"))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = "You are a bot. User: {{ messages[0]['content'] }} Bot:"
    assert fast.tokenize("You are a bot.") == ["▁You", "▁are", "▁a", "▁bot."] and fast.tokenize("a") == ["▁a"]
    assert special_tokens(Chat(fast, "a model")) == (5, 1)


def test_a_model_without_a_template_is_refused():
    with refused(UserError, "pocket:pythia", "chat template", "--chat"):
        llmgeom.load("pocket:pythia").chat()
    with refused(UserError, "--chat", "--task"):
        llmgeom.scan("pocket:pythia", tasks=("urn",), chat=True)


def test_given_answers_are_what_the_assistant_says(plain, folder, tmp_path):
    rows = [{"text": f"Is {i} even?", "right": ("yes", "no")[i % 2]} for i in range(12)]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = probe.RunConfig(model=folder, prompts=str(path), answers="right", chat=True, out=str(tmp_path / "run"))
    record = probe.perform(asked, subject=plain)[1]
    assert record.subject["chat"] and "--chat" in record.facts["command"]
    answers, measured = record.results["answers"].ticks["answer"], record.results["answers"].arrays["log_prob"]
    for i, row in enumerate(rows):
        before = plain.tokenizer(f"Question from the user: {row['text']}\nThe answer is", add_special_tokens=False)
        for k, answer in enumerate(answers):
            after = plain.tokenizer(answer, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                ids = torch.tensor([before["input_ids"] + after])
                log_p = plain.model(ids).logits[0].double().log_softmax(-1)
            start = ids.shape[1] - len(after)
            expected = sum(float(log_p[at - 1, ids[0, at]]) for at in range(start, ids.shape[1]))
            assert measured[i, k] * math.log(2) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_last_item_of_a_list_begins_the_answer(plain, surface, k):
    chat, form = plain.chat(QUESTION), SURFACES[surface]
    text = form.prompt("", ("dax", "zok"), ("owl", "fern", "bell", "cup")[: k + 1], ("dax", "zok", "dax")[:k])
    question = ("owl", "fern", "bell", "cup")[k] + form.link
    asked = text.removesuffix(question).rstrip()
    written = f"Question from the user: {asked}\nThe answer is {question}"
    assert chat.tokens([text]).real == [plain.tokenizer(written, add_special_tokens=False)["input_ids"]]
    with_mark = plain.tokenizer(f"{written} dax", add_special_tokens=False)["input_ids"]
    assert chat.tokens([f"{text} dax"]).real == [with_mark], "the mark follows the same tokens"


@pytest.mark.parametrize("rule", ["{{ raise_exception('users only') }}", "The answer is {{ m['content'][:2] }}"])
def test_a_template_without_a_place_for_the_answer_is_refused(plain, rule):
    tokenizer = copy.deepcopy(plain.tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("The answer is {{ m['content'] }}", rule)
    chat = Chat(tokenizer, "a model", QUESTION)
    assert chat("Two and two")["input_ids"]
    with refused(UserError, "a model", "'fern:'", "--chat"):
        chat("owl: dax, fern:")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('give a system message') }}", "give a system message"),
        ("{% for m in messages %}{{ m['content']", "unexpected"),
        ({"rag": TEMPLATE, "tool_use": TEMPLATE}, "rag"),
        ("{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}Answer:", "not in"),
        ("User: {{ messages[0]['content'][:3] }} Answer:", "not in"),
    ],
)
def test_a_template_that_does_not_show_the_message_is_refused(plain, template, why):
    tokenizer = copy.deepcopy(plain.tokenizer)
    tokenizer.chat_template = template
    with refused(UserError, "a model", why, "--chat"):
        Chat(tokenizer, "a model")("Two and two")


def test_answers_to_a_list_are_what_the_assistant_says(plain, folder, tmp_path):
    """By hand: the template with the list as the message, then the last item, and the next token's probabilities."""
    asked = RunConfig(model=folder, processes=("coin",), n=10, ks=(1, 2), nulls=1, out=str(tmp_path / "run"))
    (record,) = perform(asked, subject=plain)[1]
    assert record.subject["chat"] and not [text for text in record.warnings if "--chat" in text]
    process = load_world("coin", text=True)
    batch = in_text.sample(process, 10, 0, plain.tokenizer, ks=(1, 2))
    lost = []
    for i, text in enumerate(batch.text):
        start = QUESTION.search(text).start()
        written = f"Question from the user: {text[:start].rstrip()}\nThe answer is {text[start:]}"
        with torch.no_grad():
            ids = torch.tensor([plain.tokenizer(written, add_special_tokens=False)["input_ids"]])
            log_p = plain.model(ids).logits[0, -1].double().log_softmax(-1)
        marks = [f" {mark}" for mark in batch.columns["marks"][i].split()]
        first = [ids[0] for ids in plain.tokenizer(marks, add_special_tokens=False)["input_ids"]]
        own = log_p[first].softmax(0).numpy()
        exact = batch.exact.predictive[i, 0].double().exp().numpy()
        lost.append(float((exact * (np.log(exact) - np.log(own))).sum() / math.log(2)))
    heard = {h.name: h.value for h in record.results["process"].estimates}
    assert heard["KL(exact || answer)"] == pytest.approx(np.mean(lost), abs=1e-4)
    (read,) = perform(replace(asked, plain=True, out=str(tmp_path / "plain")), subject=plain)[1]
    assert "chat" not in read.subject and "--plain" in read.facts["command"]


def test_counterfactuals_of_a_list_differ_in_one_word_of_the_message(plain):
    pairs = question_of_text(plain.chat(QUESTION), TwoPoint(), n=24, ks=(2, 4)).probes[PROBE].pairs
    for i in range(len(pairs.x)):
        texts = [plain.tokenizer.decode(batch.tokens.real[i]) for batch in (pairs.x, pairs.other)]
        words = [re.findall(r"\w+", text) for text in texts]
        assert sum(a != b for a, b in zip(*words, strict=True)) == 1
        for text in texts:
            assert text.startswith("Question from the user: ")
            assert QUESTION.fullmatch(text.split("The answer is ")[1]), "the answer begins with the last item"
        assert ROLES[pairs.role[i, pairs.x.tokens.lengths[i] - 1]] == "last token"
        asked = plain.tokenizer("\nThe answer is", add_special_tokens=False)["input_ids"]
        at = next(j for j in range(10**6) if pairs.x.tokens.real[i][j : j + len(asked)] == asked)
        assert {ROLES[role] for role in pairs.role[i, at : at + len(asked)]} == {"question"}


def test_the_pair_of_an_edit_is_what_the_assistant_says(plain):
    """The tokens of `expanded`: no space before an answer in a chat, one elsewhere."""
    for subject, space in ((plain, " "), (plain.chat(), "")):
        ids = [plain.tokenizer(f"{space}{one}", add_special_tokens=False)["input_ids"][0] for one in ("yes", "no")]
        assert list(_first_tokens(subject, ("yes", "no"))) == ids
