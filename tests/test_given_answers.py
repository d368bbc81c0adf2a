"""Given answers: log-probabilities against a plain forward pass, calibration against scikit-learn and by hand."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, roc_auc_score
from tokenizers import Tokenizer, processors

from llmgeom.commands.probe import RunConfig, perform
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.probes.labels.answers import expanded, read_answers, scored
from llmgeom.prompts import files
from llmgeom.stats.label_scores import bins, brier, calibrated_errors, calibration_error, ranking, reliability
from tests.refusals import refused

ANSWERS = ("the river", "town", "water")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("answers") / "asked.jsonl"
    rows = [
        {"text": f"On day {i} {who} walked along to", "template": f"t{i // 2}", "right": str(rng.choice(ANSWERS))}
        for i, who in enumerate(["Ana", "the old man", "a friend", "my sister"] * 6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def subject():
    return RunConfig(model="pocket:llama").load()


@pytest.fixture(scope="module")
def run(prompts, subject, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMGEOM_CACHE", str(place / "cache"))
        asked = RunConfig(model="pocket:llama", prompts=str(prompts), answers="right", out=str(place / "run"))
        yield perform(asked, subject=subject)[1]


def test_log_probabilities_are_those_of_a_plain_forward_pass(run, prompts, subject):
    found = run.results["answers"].arrays["log_prob"]
    assert run.results["answers"].ticks["answer"] == ANSWERS
    for i, text in enumerate(files.read(str(prompts)).text):
        before = subject.tokenizer(text)["input_ids"]
        for k, answer in enumerate(ANSWERS):
            ids = subject.tokenizer(f"{text} {answer}")["input_ids"]
            assert ids[: len(before)] == before
            with torch.no_grad():
                log_p = subject.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = sum(float(log_p[at - 1, ids[at]]) for at in range(len(before), len(ids)))
            assert found[i, k] * math.log(2) == pytest.approx(expected, abs=1e-4)


def test_the_table_holds_prompts_with_the_models_answer(run, prompts):
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    assert run.prompts["text"] == tuple(row["text"] for row in rows)
    log_prob = run.results["answers"].arrays["log_prob"]
    p = np.exp2(log_prob) / np.exp2(log_prob).sum(1, keepdims=True)
    right = np.array([ANSWERS.index(row["right"]) for row in rows])
    np.testing.assert_allclose(run.prompts["p of the right answer"], p[np.arange(24), right], atol=1e-6)
    accuracy = next(e for e in run.results["answers"].estimates if e.name == "accuracy")
    said = [ANSWERS.index(one) for one in run.prompts["likeliest answer"]]
    assert accuracy.value == pytest.approx(np.mean(said == right)) and accuracy.clusters == 12
    assert accuracy.low <= accuracy.value <= accuracy.high


def test_answers_follow_the_text_where_the_tokenizer_appends_eos(run, prompts, tmp_path):
    """After an EOS they would be answers to nothing; the numbers are those of the tokenizer without it."""
    folder, end = shutil.copytree(hub.locate("pocket:llama").path, tmp_path / "eos"), "<|endoftext|>"
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, made.token_to_id(end))]
    )
    made.save(f"{folder}/tokenizer.json")
    again = perform(RunConfig(model=folder, prompts=str(prompts), answers="right", out=str(tmp_path / "run")))[1]
    found, expected = (one.results["answers"].arrays["log_prob"] for one in (again, run))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_answers_to_more_prompts_than_controls_read_are_all_scored(run, prompts, subject, monkeypatch, tmp_path):
    monkeypatch.setattr("llmgeom.probes.labels.answers.MOST_PROMPTS", 30)
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    asked = RunConfig(model="pocket:llama", prompts=str(prompts), answers="right", out=str(tmp_path / "run"))
    again = perform(asked, subject=subject)[1]
    found, expected = (one.results["answers"].arrays["log_prob"] for one in (again, run))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert again.prompts["likeliest answer"] == run.prompts["likeliest answer"]
    assert not [warning for warning in again.warnings if "controls read" in warning]


def test_scores_are_scikit_learns():
    rng = np.random.default_rng(1)
    p, right = rng.random(90).round(2), rng.random(90) < 0.4
    both = np.stack([1 - p, p], 1)
    # scikit-learn's binary score counts one of the two answers.
    assert brier(both, right.astype(int)) == pytest.approx(2 * brier_score_loss(right, p))
    assert ranking(p, right) == pytest.approx(roc_auc_score(right, p))


def test_the_calibration_error_by_hand():
    confidence = np.array([0.6] * 10 + [0.9] * 10)
    right = np.array([True] * 3 + [False] * 7 + [True] * 8 + [False] * 2)
    assert calibration_error(confidence, right) == pytest.approx((0.3 + 0.1) / 2)
    assert len(set(bins(confidence).tolist())) == 2  # equal confidences share a bin
    mean, share, count = reliability(confidence, right)
    assert (mean.round(12).tolist(), share.tolist(), count.tolist()) == ([0.6, 0.9], [0.3, 0.8], [10, 10])


def test_a_calibrated_model_lies_within_its_null_and_one_too_sure_above_it():
    rng = np.random.default_rng(2)
    p = rng.uniform(0.5, 1, 300)
    null = calibrated_errors(p, 199, 0)
    inside = [calibration_error(p, rng.random(300) < p) < np.quantile(null, 0.95) for _ in range(200)]
    assert 0.9 <= np.mean(inside) <= 0.99
    assert calibration_error(p, rng.random(300) < p - 0.2) > null.max()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["yes"] * 10, ("1 different",)),
        ([f"a{i}" for i in range(30)], ("30 different", "20")),
        (["yes", " "] * 5, ("blank",)),
        (["yes", " yes", "no"] * 5, ("' yes' and 'yes'", "only in the space around them")),
    ],
)
def test_answers_that_cannot_be_scored_are_refused(column, words):
    frame = {"text": [f"p {i}" for i in range(len(column))], "right": column}
    with refused(UserError, "right", *words):
        read_answers(files.from_frame(frame), "right")


def test_choices_of_each_question_are_scored_as_those_of_all_are(run, prompts, subject, tmp_path, monkeypatch):
    """Every prompt with the same three as `choices`, in an order of its own; the right one as text, letter or index."""
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    for i, row in enumerate(rows):
        row["choices"] = [ANSWERS[(i + k) % 3] for k in range(3)] + ["nowhere at all"] * (i == 5)
        place = row["choices"].index(row["right"])
        row["right"] = [row["right"], "ABC"[place], str(place)][i % 3]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = {"prompts": str(tmp_path / "own.jsonl"), "answers": "right", "out": str(tmp_path / "run")}
    own = perform(RunConfig(model="pocket:llama", **asked), subject=subject)[1]
    assert "log_prob" not in own.results["answers"].arrays  # one question has four answers
    for name in ("likeliest answer", "right answer", "p of the right answer"):
        for i, (one, other) in enumerate(zip(own.prompts[name], run.prompts[name], strict=True)):
            assert i == 5 or one == (pytest.approx(other, abs=1e-4) if name[0] == "p" else other)


@pytest.mark.parametrize(
    ("choices", "right", "words"),
    [
        ("yes", "yes", ("column 'choices', row 1: 'yes'", "a list of texts")),
        (["yes"], "yes", ("row 1 holds 1 different",)),
        (["yes", "yes"], "yes", ("stands twice",)),
        (["yes", "no"], "maybe", ("row 1 holds 'maybe'", "A to B")),
        (["yes", "no"], "C", ("row 1 holds 'C'",)),
    ],
)
def test_choices_that_cannot_be_scored_are_refused(choices, right, words):
    frame = {"text": [f"p {i}" for i in range(9)], "right": [right] * 9, "choices": [choices] * 9}
    with refused(UserError, *words):
        read_answers(files.from_frame(frame), "right")


def test_answers_that_the_model_cannot_tell_apart_or_read_are_refused(subject):
    """Equal tokens tie on every prompt, so that the order of answers decided which was right."""

    def lower(text, **options):
        return subject.tokenizer(text.lower() if isinstance(text, str) else [one.lower() for one in text], **options)

    batch = files.from_frame({"text": ["One day", "Another day", "Yesterday"], "right": ["Yes", "yes", "no"]})
    with refused(UserError, "--answers right: 'Yes' and 'yes', which pocket:llama reads as the same tokens"):
        expanded(replace(subject, tokenizer=lower), batch, [("Yes", "no", "yes")] * 3, (0, 2, 1), "right")
    long = "the river " * 200
    with refused(
        UserError, "--answers right: prompt 1 with the answer 'the river", "tokens; pocket:llama reads at most"
    ):
        expanded(subject, batch, [("no", long)] * 3, (0, 0, 0), "right")
    with refused(UserError, "prompt 2 has", "tokens"):
        expanded(
            subject, files.from_frame({"text": ["a", long], "right": ["a", "b"]}), [("a", "b")] * 2, (0, 1), "right"
        )


def test_answers_and_a_target_are_two_runs(prompts):
    with refused(UserError, "--answers", "--target"):
        perform(RunConfig(model="pocket:llama", prompts=str(prompts), answers="right", target="right"))


def test_a_calibrated_model_whose_clusters_are_right_together_is_not_called_miscalibrated(monkeypatch):
    """Twenty questions in ten wordings each: with prompts as independent p was below .05 in all of 60."""
    monkeypatch.setattr("llmgeom.probes.labels.answers.DRAWS", 99)
    p = []
    for seed in range(40):
        rng, cluster = np.random.default_rng(seed), np.repeat(np.arange(20), 10)
        confidence = rng.uniform(0.5, 0.95, 20)[cluster]
        right = rng.random(20)[cluster] > confidence
        log_prob = np.log(np.stack([confidence, 1 - confidence], 1)).tolist()
        (h,) = (h for h in scored(log_prob, right.astype(int), cluster, seed, ()).estimates if "ECE" in h.name)
        p.append(h.p)
    assert np.mean(np.array(p) <= 0.05) <= 0.15 and 0.25 < np.median(p) < 0.75


@pytest.mark.parametrize(("shift", "above"), [(0.0, False), (1.0, True)])
def test_accuracy_is_above_permuted_answers_only_where_the_model_knows(shift, above):
    rng = np.random.default_rng(3)
    right = rng.integers(0, 3, 120)
    log_prob = rng.standard_normal((120, 3)) + 2 * shift * (right[:, None] == np.arange(3))
    result = scored(log_prob.tolist(), right, np.arange(120) // 2, 0, (), names=ANSWERS, entropy=rng.random(120))
    accuracy, _, score, sure, _ = result.estimates
    assert (accuracy.p < 0.01) == above and (score.p < 0.01) == above and (sure.value > 0.6) == above
