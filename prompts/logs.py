"""Logged answers of other programs: lm-eval's samples (`--log_samples`) and inspect_ai's logs.

Formats as lm_eval 0.4.13 and inspect_ai 0.3.285 write them, read in their sources.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError
from llmgeom.prompts.files import MOST, decoded, is_utf8, whole_bytes


@dataclass(frozen=True)
class AnswerLog:
    """Multiple-choice answers that another program scored.

    Attributes:
        name: name of the task. model: the model's name in the log, or "".
        text: [prompt] the model's input. answers: [prompt] the text of each answer.
        log_prob: [prompt] the log-probability of each answer, nats.
        right: [prompt] index of the right answer.
        cluster: [prompt] the independently drawn cluster.
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
    """The answers of a log. JSON lines are lm-eval's samples; one JSON object, or a zip archive, is inspect_ai's log.

    Args:
        path: samples_TASK_DATE.jsonl of `lm_eval --log_samples`, or a log of `inspect eval` with `--logprobs
            --top-logprobs 20`.
        cluster: a key of lm-eval's "doc" or of a sample's metadata, whose equal values make a cluster; by default each
            document is a cluster.

    Raises:
        UserError: a file of another kind, no log-probabilities, or several right answers; the message names the sample.
    """
    name = f"--log {path}"
    if path != "-" and (not Path(path).exists() or Path(path).is_dir()):
        raise UserError(f"{name} is no file: give the file that --log_samples or inspect eval wrote")
    blob = whole_bytes(path, name)
    body: Any = _unzipped(blob, path) if blob.startswith(b"PK\x03\x04") else _json(decoded(blob, name))
    if isinstance(body, dict) and "filtered_resps" in body:  # a single line
        body = [body]
    if isinstance(body, list) and body and all(isinstance(row, dict) and "filtered_resps" in row for row in body):
        first = body[0].get("filter")  # each filter of a task logs every document again
        rows = [row for row in body if row.get("filter") == first]
        note = f"filter {first!r} of several is read: {len(rows)} of {len(body)} logged samples"
        return _read_samples(path, rows, cluster, _harness, notes=(note,) * (len(rows) < len(body)))
    if not isinstance(body, dict) or not isinstance(body.get("samples"), list) or not body["samples"]:
        raise UserError(
            f"--log {path} is neither lm-eval's samples (JSON lines with filtered_resps) nor an inspect_ai log (JSON "
            "with samples): give the file that --log_samples or inspect eval wrote"
        )
    about = body.get("eval") or {}
    rows = [row for row in body["samples"] if not (isinstance(row, dict) and row.get("error"))]
    left = len(body["samples"]) - len(rows)
    if not rows:
        raise UserError(f"--log {path}: all {left} samples ended in an error: run the evaluation again")
    notes = (f"{left} of {len(body['samples'])} samples ended in an error and are left out",) * bool(left)
    return _read_samples(path, rows, cluster, _inspect, str(about.get("task", "")), str(about.get("model", "")), notes)


def _json(whole: str) -> Any:
    """One JSON value, or the list of JSON values on the lines; None if the text is neither."""
    try:
        return json.loads(whole)
    except (ValueError, RecursionError):
        pass
    try:  # not splitlines(): a document may hold U+2028 or U+0085, which JSON does not escape
        return [json.loads(line) for line in whole.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        return None


def _unzipped(blob: bytes, path: str) -> dict[str, Any]:
    """An inspect_ai log in its .eval format: header.json, and a file in samples/ for each sample and epoch."""
    packed = UserError(
        f"--log {path} is an .eval archive that is packed in a way that is not read here: give what `inspect log "
        "convert --to json --output-dir DIR FILE` makes of it"
    )
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            names = list(dict.fromkeys(archive.namelist()))
            size = sum(archive.getinfo(name).file_size for name in names)
            if size > MOST:
                raise UserError(f"--log {path} has more than {MOST >> 20} MiB unpacked: split it")
            header = json.loads(archive.read("header.json")) if "header.json" in names else {}
            samples = [name for name in names if re.fullmatch(r"samples/[^/]+\.json", name)]
            if any(re.fullmatch(r"samples/.+/sample\.json", name) for name in names):  # samples in chunks
                raise packed
            return {"eval": header.get("eval"), "samples": [json.loads(archive.read(name)) for name in samples]}
    except NotImplementedError:  # zstandard, which zipfile reads from Python 3.14 on
        raise packed from None
    except (zipfile.BadZipFile, zlib.error, ValueError, RecursionError, AttributeError, OSError, EOFError) as error:
        raise UserError(f"--log {path} is a damaged archive ({str(error)[:80]}): copy the log again") from None


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
    notes: tuple[str, ...] = (),
) -> AnswerLog:
    samples = []
    for number, row in enumerate(rows, 1):
        try:
            sample = parse(row)
            if not all(map(is_utf8, (sample.text, *sample.answers, sample.id))):
                raise _Unusable("it has a lone surrogate, which is no text")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, _Unusable) else f"{type(error).__name__}: {error}"[:120]
            raise UserError(
                f"--log {path}, sample {number}: {why}; expected a multiple-choice sample with the log-probability of "
                "every answer and one right answer"
            ) from None
        if cluster is not None and cluster not in sample.columns:
            names = ", ".join(map(str, sample.columns)) or "none"
            raise UserError(f"--cluster {cluster}: sample {number} of {path} has no such key; it has {names}")
        if cluster is not None and (not isinstance(cell := sample.columns[cluster], str | int | float) or cell != cell):
            raise UserError(
                f"--cluster {cluster}: sample {number} of {path} has {cell!r} there; expected text or a number"
            )
        samples.append(sample)
    bounded = sum(sample.bounded > 0 for sample in samples)
    return AnswerLog(
        name=name or Path(path).stem,
        model=model,
        text=tuple(sample.text for sample in samples),
        answers=tuple(tuple(sample.answers) for sample in samples),
        log_prob=tuple(tuple(sample.log_prob) for sample in samples),
        right=tuple(sample.right for sample in samples),
        cluster=tuple(str(sample.columns[cluster]) if cluster else sample.id for sample in samples),
        notes=(
            *notes,
            *(
                f"{bounded} of {len(samples)} samples lack an answer among the logged log-probabilities: it counts "
                "with the least that was logged, an upper bound",
            )
            * (bounded > 0),
        ),
    )


class _Unusable(ValueError):
    """Raised for a sample that cannot be used, with the reason in words."""


def _harness(row: Mapping[str, Any]) -> _Sample:
    """One line of lm-eval's samples: filtered_resps has [log-probability, is greedy] for each answer."""
    log_prob = [_number(pair[0]) for pair in row["filtered_resps"] if isinstance(pair, list | tuple)]
    if len(log_prob) < 2:
        raise _Unusable("it was generated, not scored (filtered_resps holds no log-probabilities)")
    arguments = row["arguments"]
    if isinstance(arguments, dict):  # from version 0.4.8: gen_args_0 -> arg_0, arg_1
        arguments = [[entry["arg_0"], entry["arg_1"]] for entry in arguments.values()]
    if len(arguments) != len(log_prob):
        raise _Unusable(f"{len(arguments)} answers were asked and {len(log_prob)} scored")
    half = len(arguments) // 2
    if [["", pair[1]] for pair in arguments[:half]] == [list(pair) for pair in arguments[half:]]:
        arguments, log_prob = arguments[:half], log_prob[:half]  # acc_mutual_info repeats each without its question
    text, answers = str(arguments[0][0]), [str(pair[1]).strip() for pair in arguments]
    if len(set(answers)) < len(answers):  # Winogrande: each answer has its own question, and all share their end
        text, answers = "", [str(pair[0]).strip() for pair in arguments]
    right = _gold(row, answers, log_prob)
    doc = row.get("doc") if isinstance(row.get("doc"), dict) else {}
    return _Sample(text, answers, log_prob, right, str(row["doc_id"]), doc or {})


def _gold(row: Mapping[str, Any], answers: Sequence[str], log_prob: Sequence[float]) -> int:
    """The index of the right answer, from "target" (an index or the answer, as text), checked with "acc" if present.

    "acc" is 1 if the likeliest answer is right. If questions differ and share their end, "target" is that end, and only
    "acc" shows which of two is right.
    """
    target, acc = str(row["target"]).strip(), row.get("acc")
    likeliest = max(range(len(answers)), key=lambda i: log_prob[i])
    possible = [int(target)] if target.isdigit() and int(target) < len(answers) else []
    possible += [i for i, answer in enumerate(answers) if answer == target]
    if not possible and len(answers) == 2 and acc in (0, 1) and not target.isdigit():
        possible = [0, 1]
    if not possible:
        raise _Unusable(f"its target {row['target']!r} is none of its {len(answers)} answers")
    agree = possible if acc is None else [i for i in possible if (i == likeliest) == acc]
    if not agree:
        raise _Unusable(f"its acc is {acc}, which does not follow from its target {target!r}: several may be right")
    return agree[0]


def _inspect(row: Mapping[str, Any]) -> _Sample:
    """One sample of inspect_ai: the answered letter, and the likeliest tokens at its place."""
    target = row["target"] if isinstance(row["target"], list) else [row["target"]]
    choices = row.get("choices") or []
    letters = [chr(ord("A") + i) if i < 26 else str(i - 25) for i in range(len(choices))]
    if len(target) != 1 or len(choices) < 2 or target[0] not in letters:
        raise _Unusable(f"its target {row['target']!r} is not one letter of {len(choices)} choices")
    logged = row["output"]["choices"][0].get("logprobs") or {}
    answered = [token for token in logged.get("content") or () if _letter(token) in letters]
    if not answered:
        raise _Unusable("it has no log-probabilities of a letter; run inspect with --logprobs --top-logprobs 20")
    written = re.findall(r"(?i)ANSWER\s*:\W*([A-Z]|\d+)\b", str(row["output"].get("completion") or ""))
    if written:
        answered = [token for token in answered if _letter(token) == written[-1].upper()]
    if not answered:
        raise _Unusable(
            f"its text answers {written[-1]!r}, which no logged token is: choices that the solver shuffled cannot be "
            "put back; shuffle them in the data set"
        )
    likeliest: dict[str, float] = {}
    for token in (answered[-1], *(answered[-1].get("top_logprobs") or ())):
        if math.isfinite(value := float(token["logprob"])):
            likeliest[_letter(token)] = max(value, likeliest.get(_letter(token), -math.inf))
    if not likeliest:
        raise _Unusable("no log-probability of it is finite")
    least = min(likeliest.values())
    log_prob = [likeliest.get(letter, least) for letter in letters]
    missing = sum(letter not in likeliest for letter in letters)
    text, columns = _text(row["input"]), row.get("metadata") or {}
    return _Sample(text, list(map(str, choices)), log_prob, letters.index(target[0]), str(row["id"]), columns, missing)


def _letter(logged: Mapping[str, Any]) -> str:
    """The word of a logged token, without the tokenizer's mark for a space."""
    return re.sub(r"[\W_ĠĊ]", "", logged["token"])


def _text(given: Any) -> str:
    """A question: a text, or the last of several messages, whose content is a text or parts."""
    if isinstance(given, str):
        return given
    content = given[-1]["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _number(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise _Unusable(f"a log-probability is {value}")
    return found
