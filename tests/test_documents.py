"""Prompts from data sets: the opening of a document, one a document, from a folder and without a network."""

import json
import random
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from llmgeom.errors import UserError
from llmgeom.prompts.files import WORDS, read_documents

NOUNS = ("river", "stone", "light", "garden", "winter", "music", "paper", "window", "bread", "silver", "north")


def prose(seed: int, least: int = 12, most: int = 70) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(NOUNS) + str(rng.randrange(50)) for _ in range(rng.randint(least, most)))


DOCUMENTS = [prose(seed) for seed in range(60)]


def jsonl(folder: Path, rows: list[dict], name: str = "d.jsonl") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> str:
    return jsonl(tmp_path_factory.mktemp("set"), [{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)])


def test_other_columns_of_the_documents_are_kept(tmp_path):
    rows = [{"text": text, "label": i % 3, "who": "ab"[i % 2], "spans": [i]} for i, text in enumerate(DOCUMENTS)]
    batch = read_documents(jsonl(tmp_path / "labelled", rows), 20, seed=0)
    of = {row["text"]: row for row in rows}
    for prompt, label, who in zip(batch.text, batch.columns["label"], batch.columns["who"], strict=True):
        (row,) = (row for text, row in of.items() if text.startswith(prompt))
        assert (label, who) == (row["label"], row["who"])
    assert "spans" not in batch.columns and "spans" in batch.source["columns left out"]
    rows = [{"body": text, "domain": "law", "text": "x"} for text in DOCUMENTS]
    batch = read_documents(f"{jsonl(tmp_path / 'own', rows)}::body", 20, seed=0)
    uses = " is a name that llmgeom uses itself"
    assert batch.source["columns left out"] == f"'text'{uses}; 'domain'{uses}"


def test_a_prompt_is_the_opening_of_a_document_and_never_all_of_it(spec):
    batch = read_documents(spec, 60, seed=0)
    assert len(batch) == 60
    lengths = []
    for text in batch.text:
        (whole,) = [d for d in DOCUMENTS if d.startswith(text)]
        lengths.append(len(text.split()))
        assert whole[len(text)] == " " and WORDS[0] <= lengths[-1] <= min(WORDS[1], len(whole.split()) - 1)
    assert len(set(lengths)) > 15, "the length is drawn, not fixed"


def test_the_seed_decides_whatever_the_global_generators(spec):
    random.seed(1)
    np.random.seed(1)
    one = read_documents(spec, 30, seed=4)
    random.seed(2)
    np.random.seed(2)
    assert read_documents(spec, 30, seed=4) == one
    other = read_documents(spec, 30, seed=5)
    assert other.text != one.text
    assert {t[:20] for t in one.text} != {t[:20] for t in other.text}, "other documents, not only other lengths"


def test_what_is_short_empty_hostile_or_met_before_is_passed_over(tmp_path):
    good = DOCUMENTS[:10]
    control = " ".join([*good[0].split()[:-1], "else"])
    bad = ["", "only eight words are in this very text", "a\0b " + prose(99), control, good[1], None]
    found = read_documents(jsonl(tmp_path / "set", [{"text": text} for text in [*good, *bad]]), 16, seed=1)
    openings = [d for t in found.text for d in {*good, control} if d.startswith(t)]
    assert len(found) == 10
    assert len({" ".join(d.split()[:5]) for d in openings}) == 10
    assert not any("\0" in text for text in found.text)


def test_a_config_is_named_or_the_refusal_lists_them(tmp_path):
    jsonl(tmp_path, [{"text": d} for d in DOCUMENTS[:30]], "a.jsonl")
    whole = jsonl(tmp_path, [{"text": d} for d in DOCUMENTS[30:]], "b.jsonl")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n- config_name: two\n  data_files: b.jsonl\n---\n"
    )
    assert all(any(d.startswith(t) for d in DOCUMENTS[:30]) for t in read_documents(f"{whole}:one", 20).text)
    batch = read_documents(f"{whole}:two", 20)
    assert batch.source["config"] == "two"
    assert all(any(d.startswith(t) for d in DOCUMENTS[30:]) for t in batch.text)
    for asked, what in (("", "has several configs"), (":three", "has no such config")):
        with pytest.raises(UserError) as refusal:
            read_documents(whole + asked, 20)
        assert str(refusal.value) == f"{whole}{asked} {what} (it has 'one', 'two'); give hf:NAME:CONFIG"


def test_a_column_is_found_named_or_the_refusal_lists_them(tmp_path):
    only = jsonl(tmp_path / "only", [{"n": 1, "body": d} for d in DOCUMENTS])
    assert read_documents(only, 5).source["column"] == "body"
    several = jsonl(tmp_path / "several", [{"question": d, "answer": d[::-1], "n": 1} for d in DOCUMENTS])
    assert all(any(d[::-1].startswith(t) for d in DOCUMENTS) for t in read_documents(f"{several}::answer", 20).text)
    listed = "'question', 'answer', 'n'"
    remedy = "give hf:NAME:CONFIG:COLUMN (CONFIG may be empty)"
    for asked, sentence in (
        ("", f"which of its columns is the text is not clear ({listed}); {remedy}"),
        ("::n", f"column 'n' holds no text; its columns: {listed}; {remedy}"),
        ("::text", f"column 'text' holds no text; its columns: {listed}; {remedy}"),
    ):
        with pytest.raises(UserError) as refusal:
            read_documents(several + asked, 20)
        assert str(refusal.value) == f"{several}{asked}: {sentence}"


def test_a_missing_text_in_the_first_row_does_not_make_another_column_the_text(tmp_path):
    rows = [{"text": d if i % 2 else None, "title": "a title of more than eight words is no text"} for i, d in
            enumerate(DOCUMENTS)]  # fmt: skip
    spec = jsonl(tmp_path / "set", rows)
    found = [read_documents(spec, 60, seed) for seed in range(4)]
    assert [(batch.source["column"], len(batch)) for batch in found] == [("text", 30)] * 4


def test_what_holds_no_documents_is_refused(tmp_path):
    short = jsonl(tmp_path / "short", [{"text": "too few words"}] * 20)
    (tmp_path / "empty").mkdir()
    absent = "no such data set on the hub and no folder with data files; check the name"
    shape = "expected hf:NAME[:CONFIG[:COLUMN]], e.g. hf:ag_news or hf:wikitext:raw"
    for asked, sentence in (
        (short, f"{short} gave no document of 9 words or more in column 'text'; name another column"),
        (f"hf:{tmp_path}/empty", f"hf:{tmp_path}/empty: {absent}"),
        (f"hf:{tmp_path}/nowhere", f"hf:{tmp_path}/nowhere: {absent}"),
        ("hf:", f"hf:: {shape}"),
        ("hf:a:b:c:d", f"hf:a:b:c:d: {shape}"),
    ):
        with pytest.raises(UserError) as refusal:
            read_documents(asked, 20)
        assert str(refusal.value) == sentence


@pytest.mark.parametrize("case", ["refused", "asked for"])
def test_without_a_network_the_refusal_comes_within_four_seconds(case, monkeypatch, tmp_path):
    tried = []

    def refuse(*_, **__):
        tried.append(1)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    start = time.monotonic()
    with pytest.raises(UserError) as refusal:
        read_documents("hf:someone/something", 20, offline=case == "asked for")
    assert time.monotonic() - start < 4
    assert str(refusal.value) == (
        "hf:someone/something is neither in the cache nor reachable without a network; use --prompts FILE or --domain"
    )
    assert offline == datasets.config.HF_HUB_OFFLINE
    assert bool(tried) == (case == "refused")
