"""Positions of a label probe inside chats and marked spans: the tokens are those that a plain template has there."""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

import llmgeom
from llmgeom.commands.probe import RunConfig, perform
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.capture import Site
from llmgeom.probes.labels.inputs import PLACES, located, pooled, queried, read_positions
from llmgeom.prompts import files
from tests.refusals import refused

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} says: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant says: {% endif %}"
)
CHATS = [
    [("user", "yes"), ("assistant", "yes")],
    [("user", "The river?"), ("assistant", "The town."), ("user", " The old river? "), ("assistant", "The old town.")],
]


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def batch(chats, **more):
    texts = [f"chat {i}" for i in range(len(chats))]
    return files.from_frame({"text": texts, "messages": [*map(messages, chats)], **more})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instruct") / "model"
    shutil.copytree(hub.locate("pocket:llama").path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return llmgeom.load(str(folder), device="cpu")


def test_parts_of_a_chat_are_the_tokens_of_their_text(model):
    found = located(model, batch(CHATS), PLACES[:6])
    for i, chat in enumerate(CHATS):
        ids = found.tokens.real[i]
        whole = "".join(f"{role} says: {content.strip()}\n" for role, content in chat)
        assert ids == model.tokenizer(whole, add_special_tokens=False)["input_ids"]
        for part in ("user", "assistant"):
            first, last = (found.columns[f"{part} {end}"][i] for end in ("first", "last"))
            content = [text for role, text in chat if role == part][-1].strip()
            assert model.tokenizer.decode(ids[first : last + 1]).strip() == content
    assert found.columns["user last"][0] < found.columns["assistant first"][0]  # both say yes


def test_each_place_reads_its_tokens_of_a_plain_capture(model):
    positions = read_positions(["last", *PLACES[:6]])
    asked = queried(model, batch(CHATS), positions)
    capture = model.capture(asked, "residual")
    every = model.capture(asked.tokens.real, "residual", positions="all")
    layers, rows = capture.layers(Site.RESIDUAL), every.layers(Site.RESIDUAL)[2].double().numpy()
    for position in positions:
        x = pooled(capture, layers, 2, position)
        for i in range(2):
            own = rows[every.prompt.numpy() == i]
            part, _, where = str(position).partition("-")
            first, last = (
                (asked.columns[f"{part} {end}"][i] for end in ("first", "last")) if where else (0, len(own) - 1)
            )
            at = {"first": own[first], "last": own[last], "mean": own[first : last + 1].mean(0), "": own[-1]}[where]
            np.testing.assert_allclose(x[i], at, atol=2e-5)


def test_a_span_is_found_where_it_stands_last_after_special_tokens(model):
    texts = files.from_frame({"text": ["The river by the old river bank", "A river"], "span": ["river", "river"]})
    found = located(model, texts, ("span-first", "span-mean"))
    for i, (ids, plain) in enumerate(zip(found.tokens.real, model.tokens(texts).real, strict=True)):
        assert ids == plain
        first, last = found.columns["span first"][i], found.columns["span last"][i]
        assert model.tokenizer.decode(ids[first : last + 1]).strip() == "river"
        assert "river" not in model.tokenizer.decode(ids[last + 1 :])


@pytest.mark.parametrize(
    ("frame", "position", "words"),
    [
        ({"messages": [messages(CHATS[0][:1])]}, "assistant-last", ("prompt 1 has no such part",)),
        ({"text": ["The river"], "span": ["town"]}, "span-mean", ("prompt 1 has no such part",)),
        ({"text": ["The river"]}, "span-mean", ("span",)),
    ],
)
def test_a_prompt_without_the_part_is_refused(frame, position, words, model):
    with refused(UserError, *words):
        queried(model, files.from_frame({"text": ["chat"]} | frame), read_positions([position]))


def test_chats_of_a_file_are_clustered_by_conversation_and_probed_in_their_answers(model, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    good, bad = "good great fine nice kind warm calm", "bad poor dull weak cold mean sad"
    rows = [
        {"messages": messages([("user", f"How was the {thing}?"), ("assistant", f"It was {word}, I think.")]),
         "conversation": word, "good": words is good}
        for words in (good, bad) for word in words.split() for thing in ("film", "meal")
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"target": "good", "positions": ("assistant-mean",), "given": ("none",), "nulls": 1}
    asked |= {"prompts": str(tmp_path / "chats.jsonl"), "out": str(tmp_path / "run")}
    _, record = perform(RunConfig(model="pocket:llama", **asked), subject=model)
    assert record.results["label"].estimates[0].clusters == 14 and "How was the film?" in record.prompts["text"][0]
    assert record.results["label"].ticks["position"] == ("assistant-mean",)
    probe = llmgeom.Probe.load(tmp_path / "run", model)
    chats, labels = [row["messages"] for row in rows], [row["good"] for row in rows]
    again = model.probe(
        chats, labels, [row["conversation"] for row in rows], position="assistant-mean", confounds=(), controls=1
    )
    np.testing.assert_allclose(probe.predict_proba(chats), again.predict_proba(chats))
