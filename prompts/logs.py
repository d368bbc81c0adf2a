"""Logged answers of other programs: lm-eval's samples (`--log_samples`) and inspect_ai's JSON logs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError
from llmgeom.prompts.files import decoded, whole_bytes


@dataclass(frozen=True)
class AnswerLog:
    """Multiple-choice answers that another program scored.

    Attributes:
        name: of the task. model: as the log names it, or "".
        text: [prompt] what the model read. answers: [prompt] the text of each answer.
        log_prob: [prompt] the log-probability of each answer, nats.
        right: [prompt] index of the right answer.
        cluster: [prompt] what was drawn independently.
        notes: what a reader of the numbers should know.
    """

    name: str
    model: str
    text: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    log_prob: tuple[tuple[float, ...], ...]
    right: tuple[int, ...]
    cluster: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read(path: str, cluster: str | None = None) -> AnswerLog:
    """The answers of a log. JSON lines are lm-eval's samples, one JSON object inspect_ai's log.

    Args:
        path: samples_TASK_DATE.jsonl of `lm_eval --log_samples`, or a log of `inspect eval --log-format json` with
            `--logprobs --top-logprobs 20`.
        cluster: a key of lm-eval's "doc" or of a sample's metadata, whose equal values make a cluster; by default each
            document is its own.

    Raises:
        UserError: a file of another kind, no log-probabilities, several right answers; it names the sample.
    """
    name = f"--log {path}"
    whole = decoded(whole_bytes(path, name), name)
    try:
        rows = [json.loads(line) for line in whole.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        rows = []
    if rows and all(isinstance(row, dict) and "filtered_resps" in row for row in rows):
        return _read_samples(path, rows, cluster, _harness)
    try:
        body = json.loads(whole)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("samples"), list) or not body["samples"]:
        raise UserError(
            f"--log {path} is neither lm-eval's samples (JSON lines with filtered_resps) nor an inspect_ai log (JSON "
            "with samples): give the file that --log_samples or --log-format json wrote"
        )
    about = body.get("eval") or {}
    return _read_samples(
        path, body["samples"], cluster, _inspect, str(about.get("task", "")), str(about.get("model", ""))
    )


@dataclass(frozen=True)
class _Sample:
    text: str
    answers: Sequence[str]
    log_prob: Sequence[float]
    right: int
    id: str
    columns: Mapping[str, Any]
    bounded: int = 0  # answers that were not among the logged log-probabilities


def _read_samples(
    path: str,
    rows: Sequence[Any],
    cluster: str | None,
    parse: Callable[[Any], _Sample],
    name: str = "",
    model: str = "",
) -> AnswerLog:
    samples = []
    for number, row in enumerate(rows, 1):
        try:
            sample = parse(row)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, _Unusable) else f"{type(error).__name__}: {error}"[:120]
            raise UserError(
                f"--log {path}, sample {number}: {why}; expected a multiple-choice sample with the log-probability of "
                "every answer and one right answer"
            ) from None
        if cluster is not None and cluster not in sample.columns:
            names = ", ".join(map(str, sample.columns)) or "none"
            raise UserError(f"--cluster {cluster}: sample {number} of {path} has no such key; it has {names}")
        samples.append(sample)
    bounded = sum(one.bounded > 0 for one in samples)
    return AnswerLog(
        name=name or Path(path).stem,
        model=model,
        text=tuple(one.text for one in samples),
        answers=tuple(tuple(one.answers) for one in samples),
        log_prob=tuple(tuple(one.log_prob) for one in samples),
        right=tuple(one.right for one in samples),
        cluster=tuple(str(one.columns[cluster]) if cluster else one.id for one in samples),
        notes=(
            f"{bounded} of {len(samples)} samples lack an answer among the logged log-probabilities: it counts with "
            "the least that was logged, an upper bound",
        )
        * (bounded > 0),
    )


class _Unusable(ValueError):
    """What is wrong with a sample, in words."""


def _harness(row: Mapping[str, Any]) -> _Sample:
    """One line of lm-eval's samples: filtered_resps holds [log-probability, is greedy] of each answer."""
    log_prob = [_number(pair[0]) for pair in row["filtered_resps"] if isinstance(pair, list | tuple)]
    if len(log_prob) < 2:
        raise _Unusable("it was generated, not scored (filtered_resps holds no log-probabilities)")
    arguments = row["arguments"]
    if isinstance(arguments, dict):  # from version 0.4.8: gen_args_0 -> arg_0, arg_1
        arguments = [[one["arg_0"], one["arg_1"]] for one in arguments.values()]
    answers = [str(pair[1]).strip() for pair in arguments]
    if len(answers) != len(log_prob):
        raise _Unusable(f"{len(answers)} answers were asked and {len(log_prob)} scored")
    target = row["target"]
    # The gold answer is an index, as a number or as text, or else the answer itself.
    by_text = [i for i, answer in enumerate(answers) if answer == str(target).strip()]
    right = int(target) if str(target).strip().isdigit() and not by_text else by_text[0] if by_text else -1
    if not 0 <= right < len(answers):
        raise _Unusable(f"its target {target!r} is none of its {len(answers)} answers")
    doc = row.get("doc") if isinstance(row.get("doc"), dict) else {}
    return _Sample(str(arguments[0][0]), answers, log_prob, right, str(row["doc_id"]), doc or {})


def _inspect(row: Mapping[str, Any]) -> _Sample:
    """One sample of inspect_ai: the letter that was answered, and the likeliest tokens in its place."""
    target = row["target"] if isinstance(row["target"], list) else [row["target"]]
    choices = row.get("choices") or []
    letters = [chr(ord("A") + i) for i in range(len(choices))]
    if len(target) != 1 or len(choices) < 2 or target[0] not in letters:
        raise _Unusable(f"its target {row['target']!r} is not one letter of {len(choices)} choices")
    logged = row["output"]["choices"][0].get("logprobs") or {}
    said = [one for one in logged.get("content") or () if one["token"].strip(" .)(") in letters]
    if not said:
        raise _Unusable("it has no log-probabilities of a letter; run inspect with --logprobs --top-logprobs 20")
    likeliest: dict[str, float] = {}
    for one in (said[-1], *(said[-1].get("top_logprobs") or ())):
        letter, value = one["token"].strip(" .)("), _number(one["logprob"])
        likeliest[letter] = max(value, likeliest.get(letter, -math.inf))
    least = min(likeliest.values())
    log_prob = [likeliest.get(letter, least) for letter in letters]
    text = row["input"] if isinstance(row["input"], str) else str(row["input"][-1]["content"])
    missing = sum(letter not in likeliest for letter in letters)
    columns = row.get("metadata") or {}
    return _Sample(text, list(map(str, choices)), log_prob, letters.index(target[0]), str(row["id"]), columns, missing)


def _number(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise _Unusable(f"a log-probability is {value}")
    return found
