"""Logged answers of lm-eval and inspect_ai: read as what they are, scored as scikit-learn scores them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics import brier_score_loss, roc_auc_score

from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.prompts import logs
from llmgeom.record import Record
from tests.refusals import refused

# The fields that lm-eval 0.4 writes of a multiple-choice sample; all values here are made up.
SAMPLE = {
    "doc_id": 3,
    "doc": {"question": "Which is wet?", "source": "book"},
    "target": "1",
    "arguments": {"gen_args_0": {"arg_0": "Q: Which is wet?\nA:", "arg_1": " sand"},
                  "gen_args_1": {"arg_0": "Q: Which is wet?\nA:", "arg_1": " water"}},
    "resps": [[["-4.0", "False"]], [["-1.5", "True"]]],
    "filtered_resps": [["-4.0", "False"], ["-1.5", "True"]],
    "acc": 1.0,
}  # fmt: skip
# Of an inspect_ai log, what is read of it.
INSPECTED = {
    "id": "q7",
    "input": "Which is wet?",
    "choices": ["sand", "water", "glass"],
    "target": "B",
    "output": {"choices": [{"logprobs": {"content": [
        {"token": "ANSWER", "logprob": -0.1, "top_logprobs": []},
        {"token": " B", "logprob": -0.4, "top_logprobs": [{"token": " B", "logprob": -0.4},
                                                         {"token": " A", "logprob": -1.3}]}]}}]},
    "metadata": {"source": "web"},
}  # fmt: skip


def samples(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def inspected(path, rows):
    path.write_text(json.dumps({"version": 2, "eval": {"task": "wet", "model": "m/1"}, "samples": rows}))
    return str(path)


def test_lm_evals_samples_are_read_in_both_forms_of_their_arguments(tmp_path):
    older = SAMPLE | {"doc_id": 4, "target": 0, "arguments": [["Q", " sand"], ["Q", " water"]],
                      "filtered_resps": [[-4.0, False], [-1.5, True]]}  # fmt: skip
    by_text = SAMPLE | {"doc_id": 5, "target": " sand"}
    log = logs.read(samples(tmp_path / "samples_wet.jsonl", [SAMPLE, older, by_text]))
    assert log.right == (1, 0, 0) and log.log_prob == ((-4.0, -1.5),) * 3 and log.cluster == ("3", "4", "5")
    assert log.text == ("Q: Which is wet?\nA:", "Q", "Q: Which is wet?\nA:") and log.answers[0] == ("sand", "water")
    assert logs.read(str(tmp_path / "samples_wet.jsonl"), "source").cluster == ("book",) * 3


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
        ({"filtered_resps": [["-inf", "False"], ["-1", "True"]]}, ("sample 2", "-inf")),
        ({"filtered_resps": [["-2", "False"]] * 3}, ("sample 2", "2 answers", "3")),
        ({"arguments": 7}, ("sample 2",)),
    ],
)
def test_refusals_of_samples(change, words, tmp_path):
    with refused(UserError, "--log", *words):
        logs.read(samples(tmp_path / "a.jsonl", [SAMPLE, SAMPLE | change]))


def test_refusals_of_logs(tmp_path):
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
                  "doc": {"source": f"s{i // 3}"}}
        for i, (row, r) in enumerate(zip(pairs.tolist(), right.tolist(), strict=True))
    ]  # fmt: skip
    out = tmp_path / "run"
    shown = CliRunner().invoke(
        main, ["probe", "--log", samples(tmp_path / "a.jsonl", rows), "--cluster", "source", "--out", str(out)]
    )
    assert shown.exit_code == 0, shown.output
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
