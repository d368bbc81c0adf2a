"""An instruct model reads prompts as messages, in the template of its own tokenizer."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

import llmgeom
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.tokenizing import special_tokens
from llmgeom.plan import shuffle
from tests.refusals import refused

TEMPLATE = (
    "{% for m in messages %}Question from the {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}The answer is{% endif %}"
)
FEW = {"n": 15, "limit": 60, "nulls": 2, "probes": ("value_manifold",)}


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
    expected = plain.tokenizer("Question from the user: Two and two\nThe answer is", add_special_tokens=False)[
        "input_ids"
    ]
    assert chat.tokens(["Two and two"]).real == [expected] == chat.chat().tokens(["Two and two"]).real
    assert plain.tokens(["Two and two"]).real != [expected]
    assert chat.entropy("Two and two") == plain.entropy("Question from the user: Two and two\nThe answer is")


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


@pytest.mark.slow
def test_a_record_says_how_prompts_were_read(folder):
    read, asked = llmgeom.scan(folder, "math", **FEW), llmgeom.scan(folder, "math", chat=True, **FEW)
    assert [text for text in read.warnings if "--chat" in text] and not [t for t in asked.warnings if "--chat" in t]
    assert "--chat" in asked.facts["command"] and asked.subject["chat"] and "chat" not in read.subject
    assert {pieces[-1].strip() for pieces in asked.prompts["pieces"]} == {"is"}
    assert not any("Question" in text for text in asked.prompts["text"])
    again = llmgeom.scan(llmgeom.load(folder).chat(), "math", **FEW)
    assert again.facts["spec"] == asked.facts["spec"] and again.prompts == asked.prompts


def test_a_model_without_a_template_is_refused():
    with refused(UserError, "pocket:pythia", "chat template", "--chat"):
        llmgeom.load("pocket:pythia").chat()
    with refused(UserError, "--chat", "--task"):
        llmgeom.scan("pocket:pythia", tasks=("urn",), chat=True)
