"""Logged answers of lm-eval and inspect_ai: read as what they are, scored as scikit-learn scores them."""

import json
import math
import re
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics import brier_score_loss, roc_auc_score

from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.exports import export
from llmgeom.prompts import logs
from llmgeom.record import Record
from tests.refusals import refused

# The fields that lm_eval 0.4.13 writes of a multiple-choice sample; all values here are made up.
SAMPLE = {
    "doc_id": 3,
    "doc": {"question": "Which is wet?", "source": "book"},
    "target": "1",
    "arguments": {"gen_args_0": {"arg_0": "Q: Which is wet?\nA:", "arg_1": " sand"},
                  "gen_args_1": {"arg_0": "Q: Which is wet?\nA:", "arg_1": " water"}},
    "resps": [[["-4.0", "False"]], [["-1.5", "True"]]],
    "filtered_resps": [["-4.0", "False"], ["-1.5", "True"]],
    "filter": "none",
    "metrics": ["acc"],
    "doc_hash": "d", "prompt_hash": "p", "target_hash": "t",
    "acc": 1.0,
}  # fmt: skip
# Of a log of inspect_ai 0.3.285, what is read of it.
INSPECTED = {
    "id": "q7",
    "epoch": 1,
    "input": "Which is wet?",
    "choices": ["sand", "water", "glass"],
    "target": "B",
    "output": {"completion": "ANSWER: B", "choices": [{"logprobs": {"content": [
        {"token": "ANSWER", "logprob": -0.1, "top_logprobs": []},
        {"token": " B", "logprob": -0.4, "top_logprobs": [{"token": " B", "logprob": -0.4},
                                                         {"token": " A", "logprob": -1.3}]}]}}]},
    "metadata": {"source": "web"},
}  # fmt: skip


def samples(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def inspected(path, rows):
    path.write_text(json.dumps({"version": 2, "eval": {"task": "wet", "model": "m/1"}, "samples": rows}))
    return str(path)


def test_lm_evals_samples_are_read_in_both_forms_of_their_arguments(tmp_path):
    older = SAMPLE | {"doc_id": 4, "target": 0, "acc": 0.0, "arguments": [["Q", " sand"], ["Q", " water"]],
                      "filtered_resps": [[-4.0, False], [-1.5, True]]}  # fmt: skip
    by_text = SAMPLE | {"doc_id": 5, "target": " sand", "acc": 0.0, "doc": {"source": "book", "note": "a\u2028b\x85"}}
    log = logs.read(samples(tmp_path / "samples_wet.jsonl", [SAMPLE, older, by_text]))
    assert log.right == (1, 0, 0) and log.log_prob == ((-4.0, -1.5),) * 3 and log.cluster == ("3", "4", "5")
    assert log.text == ("Q: Which is wet?\nA:", "Q", "Q: Which is wet?\nA:") and log.answers[0] == ("sand", "water")
    assert logs.read(str(tmp_path / "samples_wet.jsonl"), "source").cluster == ("book",) * 3


def asked(*pairs, **more):
    """A sample with these contexts and endings, all as likely as in SAMPLE."""
    arguments = {f"gen_args_{i}": {"arg_0": context, "arg_1": end} for i, (context, end) in enumerate(pairs)}
    return SAMPLE | {"arguments": arguments} | more


@pytest.mark.parametrize(("acc", "right"), [(1.0, 1), (0.0, 0)])
def test_of_two_contexts_with_one_ending_acc_says_which_is_right(acc, right, tmp_path):
    """Winogrande: the logged target is the ending that both share."""
    row = asked(("The cup", " was full."), ("The jug", " was full."), target="was full.", acc=acc)
    log = logs.read(samples(tmp_path / "a.jsonl", [row]))
    assert log.right == (right,) and log.answers == (("The cup", "The jug"),)


@pytest.mark.parametrize(("target", "acc", "right"), [("1", 1.0, 1), ("1", 0.0, 0), ("0", 0.0, 0)])
def test_a_number_is_an_index_or_an_answer_as_acc_says(target, acc, right, tmp_path):
    row = asked(("Q", " 1"), ("Q", " 2"), target=target, acc=acc)
    assert logs.read(samples(tmp_path / "a.jsonl", [row])).right == (right,)


def test_answers_without_their_question_are_not_further_answers(tmp_path):
    """With acc_mutual_info every answer is scored a second time, after nothing."""
    row = asked(("Q", " a"), ("Q", " b"), ("", " a"), ("", " b"), filtered_resps=[["-4", ""], ["-1.5", ""]] * 2)
    log = logs.read(samples(tmp_path / "a.jsonl", [row]))
    assert log.answers == (("a", "b"),) and log.log_prob == ((-4.0, -1.5),)


def test_a_task_of_two_filters_is_read_once(tmp_path):
    log = logs.read(samples(tmp_path / "a.jsonl", [SAMPLE, SAMPLE | {"filter": "second"}]))
    assert len(log.text) == 1 and log.notes == ("filter 'none' of several is read: 1 of 2 logged samples",)


def archive(path, rows, compression=zipfile.ZIP_DEFLATED):
    """A log in inspect_ai's default format: .eval, a zip archive."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("_journal/start.json", json.dumps({"version": 2, "eval": {"task": "wet", "model": "m/1"}}))
        for row in rows:
            file.writestr(f"samples/{row['id']}_epoch_{row['epoch']}.json", json.dumps(row))
        file.writestr("summaries.json", json.dumps([{"id": row["id"]} for row in rows]))
        file.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "wet", "model": "m/1"}}))
    return str(path)


def test_an_eval_archive_is_read_as_its_json_is(tmp_path):
    rows = [
        INSPECTED,
        INSPECTED | {"epoch": 2},
        INSPECTED | {"id": "q8", "input": [{"role": "user", "content": "Wet?"}]},
    ]
    log = logs.read(archive(tmp_path / "a.eval", rows))
    assert log == logs.read(inspected(tmp_path / "a.json", rows))
    assert log.cluster == ("q7", "q7", "q8") and log.text[2] == "Wet?"  # epochs of one sample are one cluster


def test_an_archive_that_cannot_be_unpacked_names_the_way_out(tmp_path):
    path = tmp_path / "a.eval"
    archive(path, [INSPECTED], zipfile.ZIP_STORED)
    whole = path.read_bytes()
    zstandard = bytearray(whole)  # method 93, which inspect_ai writes: at byte 8 and 10 of the two headers
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        for found in re.finditer(re.escape(mark), whole):
            zstandard[found.start() + place] = 93
    path.write_bytes(bytes(zstandard))
    with refused(UserError, "inspect log convert --to json"):
        logs.read(str(path))
    path.write_bytes(whole[: len(whole) // 2])
    with refused(UserError, "damaged"):
        logs.read(str(path))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("samples/q7_epoch_1/sample.json", "{}")
    with refused(UserError, "inspect log convert --to json"):
        logs.read(str(path))


def test_samples_that_ended_in_an_error_are_left_out_and_counted(tmp_path):
    broken = INSPECTED | {"id": "q8", "error": {"message": "timeout"}, "output": {"choices": [], "completion": ""}}
    log = logs.read(inspected(tmp_path / "a.json", [INSPECTED, broken]))
    assert log.cluster == ("q7",) and log.notes[0] == "1 of 2 samples ended in an error and are left out"
    with refused(UserError, "all 1 samples"):
        logs.read(inspected(tmp_path / "a.json", [broken]))


def spoken(*tokens, text="ANSWER: B"):
    """INSPECTED with these tokens, each with its likeliest ones."""
    content = [
        {"token": top[0][0], "logprob": top[0][1], "top_logprobs": [{"token": t, "logprob": p} for t, p in top]}
        for top in tokens
    ]
    return INSPECTED | {"output": {"completion": text, "choices": [{"logprobs": {"content": content}}]}}


def test_the_letter_is_the_one_that_was_answered(tmp_path):
    """Tokens as a tokenizer writes them, an article after the answer, and an impossible token."""
    row = spoken(
        [("ĠB", -0.4), ("ĠA", -1.3), ("▁C", -math.inf)], [(".", -0.1)], [("ĠA", -0.2), ("ĠB", -3.0)], [("Ġdrop", -0.1)],
        text="ANSWER: B. A drop",
    )  # fmt: skip
    log = logs.read(inspected(tmp_path / "a.json", [row]))
    assert log.log_prob == ((-1.3, -0.4, -1.3),)
    with refused(UserError, "sample 1", "'C'", "shuffled"):
        logs.read(inspected(tmp_path / "a.json", [spoken([("ĠB", -0.4)], text="ANSWER: C")]))


def test_inspects_log_gives_the_letters_in_the_place_of_the_answer(tmp_path):
    log = logs.read(inspected(tmp_path / "a.json", [INSPECTED]), "source")
    assert (log.name, log.model, log.right, log.cluster) == ("wet", "m/1", (1,), ("web",))
    assert log.log_prob == ((-1.3, -0.4, -1.3),)  # C was not logged: at most the least that was
    assert log.notes[0].startswith("1 of 1 samples lack an answer")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"filtered_resps": ["water"]}, ("sample 2", "generated")),
        ({"target": "7"}, ("sample 2", "'7'", "2 answers")),
        ({"acc": 0.37}, ("sample 2", "acc is 0.37", "several may be right")),
        ({"filtered_resps": [["-inf", "False"], ["-1", "True"]]}, ("sample 2", "-inf")),
        ({"filtered_resps": [["-2", "False"]] * 3}, ("sample 2", "2 answers", "3")),
        ({"arguments": 7}, ("sample 2",)),
    ],
)
def test_refusals_of_samples(change, words, tmp_path):
    with refused(UserError, "--log", *words):
        logs.read(samples(tmp_path / "a.jsonl", [SAMPLE, SAMPLE | change]))


def test_refusals_of_logs(tmp_path):
    with refused(UserError, f"--log {tmp_path / 'none.jsonl'} is no file", "--log_samples"):
        logs.read(str(tmp_path / "none.jsonl"))
    half = SAMPLE | {"arguments": [["Q: \ud800", "sand"], ["Q: \ud800", "water"]]}
    (tmp_path / "half.jsonl").write_text(json.dumps(half), encoding="utf-8")
    with refused(UserError, "sample 1: it has a lone surrogate"):
        logs.read(str(tmp_path / "half.jsonl"))
    for cell in (None, ["book"], math.nan):
        rows = [SAMPLE, SAMPLE | {"doc": {"source": cell}}]
        with refused(UserError, "--cluster source: sample 2 of", f"has {cell!r} there"):
            logs.read(samples(tmp_path / "a.jsonl", rows), "source")
    bare = {"output": {"choices": [{"message": {"content": "ANSWER: B"}}]}}
    with refused(UserError, "sample 1", "--top-logprobs"):
        logs.read(inspected(tmp_path / "a.json", [INSPECTED | bare]))
    with refused(UserError, "sample 1", "['A', 'B']"):
        logs.read(inspected(tmp_path / "a.json", [INSPECTED | {"target": ["A", "B"]}]))
    with refused(UserError, "neither", "filtered_resps"):
        logs.read(inspected(tmp_path / "a.json", []))
    with refused(UserError, "--cluster", "nothere", "source"):
        logs.read(inspected(tmp_path / "a.json", [INSPECTED]), "nothere")


def test_a_log_is_scored_without_a_model(tmp_path, monkeypatch):
    """Accuracy, Brier and AUROC of 60 samples of 2 answers by scikit-learn; an unequal number of answers too."""
    rng = np.random.default_rng(0)
    pairs = np.log(rng.dirichlet([1, 1], 60))
    right = (rng.random(60) < np.exp(pairs[:, 1])).astype(int)
    rows = [
        SAMPLE | {"doc_id": i, "target": str(r), "filtered_resps": [[str(v), "False"] for v in row],
                  "doc": {"source": f"s{i // 3}"}, "acc": float(np.argmax(row) == r)}
        for i, (row, r) in enumerate(zip(pairs.tolist(), right.tolist(), strict=True))
    ]  # fmt: skip
    out = tmp_path / "run"
    shown = CliRunner().invoke(
        main, ["probe", "--log", samples(tmp_path / "a.jsonl", rows), "--cluster", "source", "--out", str(out)]
    )
    assert shown.exit_code == 0, shown.output
    with refused(UserError, "read from a log, without a model", "llmgeom probe"):
        export(str(out), "activations")
    found = {h.name: h for h in Record.load(out).results["answers"].estimates}
    p = np.exp(pairs[:, 1])
    correct = (p > 0.5) == right
    assert found["accuracy"].value == pytest.approx(correct.mean()) and found["accuracy"].clusters == 20
    assert found["Brier score"].value == pytest.approx(2 * brier_score_loss(right, p))
    auroc = roc_auc_score(correct, np.maximum(p, 1 - p))
    assert found["AUROC of the largest probability"].value == pytest.approx(auroc)
    assert found["AUROC of low entropy"].value == pytest.approx(auroc)  # of two answers the order is the same
    assert (out / "report.html").stat().st_size > 10_000
    three = SAMPLE | {"arguments": [["Q", " a"], ["Q", " b"], ["Q", " c"]], "target": 2, "doc_id": 99,
                      "filtered_resps": [["-1", ""], ["-1", ""], [str(-1 + math.log(2)), ""]]}  # fmt: skip
    shown = CliRunner().invoke(
        main, ["probe", "--log", samples(tmp_path / "b.jsonl", [*rows, three]), "--out", str(tmp_path / "other")]
    )
    assert shown.exit_code == 0, shown.output
    assert Record.load(tmp_path / "other").prompts["p of the right answer"][-1] == pytest.approx(0.5)
    shown = CliRunner().invoke(main, ["probe", "--log", str(tmp_path / "a.jsonl"), "--target", "x"])
    assert shown.exit_code == 1 and "--target x" in shown.stderr
