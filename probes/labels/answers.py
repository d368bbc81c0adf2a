"""Accuracy and calibration of given answers, scored by their log-probability after each prompt, without generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import binomtest

from llmgeom.batch import Batch, Rows, Text, Tokens, recorded
from llmgeom.claims import Null, cut, declared, estimate
from llmgeom.columns import CHOICES, MESSAGES
from llmgeom.errors import NO_TOKENIZER, UserError, brief
from llmgeom.model.tokenizing import encode
from llmgeom.probe import MOST_PROMPTS, Model, Needs, Observer, ProbeInput, Step
from llmgeom.probes.shared.nulls import permutation_null
from llmgeom.record import Record
from llmgeom.result import Estimate, Result, labelled, line
from llmgeom.stats.label_scores import (
    BINS,
    brier,
    calibrated_errors,
    calibration_error,
    cluster_correlation,
    few_orders,
    moved,
    ranking,
    reliability,
)
from llmgeom.stats.resampling import LEAST_CLUSTERS, Transform, jackknife

PROBE, TITLE = "answers", "Given answers"
PROMPT, RIGHT = "prompt", "right"  # columns of the expanded batch
MOST_ANSWERS = 20  # different ones
DRAWS = 199
CLAIMS = declared(PROBE)
MOST = {"Brier score": 2.0}  # the largest value; 1 for every other score


def scored(
    log_prob: Sequence[Sequence[float]],
    right: np.ndarray,
    clusters: np.ndarray,
    seed: int,
    notes: Sequence[str],
    *,
    names: tuple[str, ...] = (),
    entropy: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
) -> Result:
    """Accuracy, calibration and ranking of answers, with intervals by cluster.

    The control of most scores permutes the right answers. If these have too few orders (`few_orders`; only one if all
    right answers have one index), the scores have no control, and a warning says why.

    Args:
        log_prob: [prompt][answer] nats.
        right: [prompt] index of the right answer.
        clusters: [prompt] the independently drawn cluster.
        notes: Notes on the answers.
        names: Names of the answers, if all prompts have the same.
        entropy: [prompt] bits, of the next token; by default that of the answers.
        tokens: [prompt] number of tokens.

    Raises:
        UserError: fewer than 5 clusters.
    """
    nats = np.full((len(log_prob), max(map(len, log_prob))), -np.inf)  # a prompt may have fewer answers than another
    for row, own in zip(nats, log_prob, strict=True):
        row[: len(own)] = own
    probability = np.exp(nats - np.logaddexp.reduce(nats, axis=1, keepdims=True))
    unsure = entropy
    if unsure is None:
        unsure = -(probability * np.log2(np.where(probability > 0, probability, 1))).sum(1)
    answer, sure = probability.argmax(1), probability.max(1)
    rows, why = np.arange(len(right)), few_orders(right, clusters)
    orders = moved(right, clusters, DRAWS, seed)[: 0 if why else DRAWS]

    def measured(name: str, statistic: Callable[[np.ndarray, np.ndarray], float], null: str = "") -> Estimate:
        """`statistic` of rows and of their right answers; its default null permutes the right answers."""
        value = statistic(rows, right)
        scale: Transform = "share" if name == "accuracy" else "identity"
        span = jackknife(lambda subset: statistic(subset, right[subset]), rows, clusters, scale)
        if null:
            correlation = cluster_correlation(sure, answer == right, clusters)
            draws = calibrated_errors(sure, DRAWS, seed, clusters, correlation)
        else:
            draws = np.array([statistic(rows, right[order]) for order in orders])
        kind, side = null or "right answers in another order", CLAIMS[name].side
        other = permutation_null(kind, value, draws, side) if len(draws) else Null.of(kind, draws, side)
        result = estimate(CLAIMS[name], value, span, [other], n=len(right), clusters=len(set(clusters.tolist())))
        return cut(result, 0.0, MOST.get(name, 1.0))

    mean, share, count = reliability(sure, answer == right)
    wilson = [binomtest(round(s * n), n).proportion_ci(method="wilson") for s, n in zip(share, count, strict=True)]
    regular, interval = len(set(map(len, log_prob))) == 1, ("prompts, taken as independent", np.array(wilson))
    said, each = "share of right answers, by confidence", "log2-probability of each answer, all its tokens"
    asked = "entropy of the next token; of the answers where only these are known"
    shown = {
        **line("share", share, "confidence", "fraction", said, interval=interval, beside="confidence"),
        "confidence": labelled(mean, "confidence", "fraction", "mean confidence: a calibrated model lies here"),
        "count": labelled(count.astype(np.float64), "confidence", "prompts", "prompts in each bin"),
        "log_prob": labelled(nats / np.log(2) if regular else None, "prompt answer", "bits", each),
        "likeliest": labelled(answer.astype(np.float64), "prompt", "index", "the likeliest answer, from 0"),
        "right_probability": labelled(
            probability[rows, right], "prompt", "fraction", "probability of the right among the answers"
        ),
        "entropy": labelled(unsure, "prompt", "bits", asked),
        "tokens": labelled(tokens, "prompt", "count", "tokens of each prompt"),
    }
    return Result.of(
        TITLE,
        shown,
        __name__,
        estimates=(
            measured("accuracy", lambda subset, truth: float((answer[subset] == truth).mean())),
            measured(
                "calibration error (ECE)",
                lambda subset, truth: calibration_error(sure[subset], answer[subset] == truth),
                "a calibrated model of these confidences",
            ),
            measured("Brier score", lambda subset, truth: brier(probability[subset], truth)),
            measured(
                "AUROC of the largest probability", lambda subset, truth: ranking(sure[subset], answer[subset] == truth)
            ),
            measured("AUROC of low entropy", lambda subset, truth: ranking(-unsure[subset], answer[subset] == truth)),
        ),
        notes=(*notes, f"at most {BINS} bins of equally many prompts"),
        warnings=(f"accuracy, Brier score and AUROC have no control: {why}",) if why else (),
        ticks={"confidence": tuple(f"{value:.2f}" for value in mean), **({"answer": names} if names else {})},
    )


# ---- answers of a model ----------------------------------------------------------------------------------------------


def next_token(step: Step) -> dict[str, torch.Tensor]:
    """[row] float32, nats: log-probability of the token that follows each queried position."""
    following = step.tokens[step.prompt, step.position + 1].to(step.log_probs.device)
    return {"log_prob": step.log_probs.gather(1, following[:, None])[:, 0]}


NEXT = Observer("answer", next_token, version="1", row_bytes=4)


@dataclass(frozen=True)
class AnswersProbe:
    """A probe that scores the answers of a batch from `expanded`.

    Attributes:
        answers: [prompt] its answers, in the order of the batch.
        column: the column of right answers.
    """

    answers: tuple[tuple[str, ...], ...]
    column: str

    @property
    def NEEDS(self) -> Needs:
        """Only the observer; controls come from the answers themselves."""
        return Needs(controls=frozenset(), control_prompts=MOST_PROMPTS, observers=(NEXT,))

    def measure(self, data: ProbeInput) -> Result:
        """Accuracy, calibration and ranking, with intervals by cluster."""
        capture, rows = data.capture, data.capture.prompt.numpy()
        inputs = len(capture.lengths)
        total = np.bincount(rows, capture.observed("answer.log_prob").double().numpy(), inputs)
        _, start = np.unique(capture.batch.columns[PROMPT], return_index=True)  # the first input of each prompt
        first = np.unique(rows, return_index=True)[1][start]  # and its row before the first answer
        right = np.array(capture.batch.columns[RIGHT], dtype=np.int64)[start]
        clusters = np.array(capture.batch.cluster)[start]
        alike = len(set(self.answers)) == 1
        said = ", ".join(map(repr, self.answers[0])) if alike else "of each prompt its own (choices)"
        what = "answer" if alike else "place of the right answer among the choices"
        notes = (
            f"answers: {said}; right ones in column {self.column!r}",
            f"the most common {what} is right for {np.bincount(right).max() / len(right):.2f} of the prompts",
        )
        log_prob = [part.tolist() for part in np.split(total, start[1:])]
        of_prompts = {"entropy": data.entropy[first], "tokens": capture.position.numpy()[first] + 1.0}
        names = self.answers[0] if alike else ()
        return scored(log_prob, right, clusters, data.seed, notes, names=names, **of_prompts)


def read_answers(batch: Batch, column: str) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """[prompt] its answers, and the index of the right one.

    Answers are the prompt's own in a column `choices` (a list, in CSV as JSON); the right one is then given by its
    text, a letter (A is the first), or its index from 0. Without such a column they are the different cells of
    `column`.

    Raises UserError: fewer than 2 answers or more than 20, a blank one, two that differ only in space, a right one that
    is no answer, or fewer than 5 clusters.
    """
    if MESSAGES in batch.columns:
        raise UserError(f"--answers {column}: answers follow a text, and these prompts are chats (messages): give text")
    cells, own = [str(cell) for cell in batch.column(column)], CHOICES in batch.columns and column != CHOICES
    every = sorted(set(cells))
    answers, right = [], []
    for row, cell in enumerate(cells, 1):
        given = _choices(batch.columns[CHOICES][row - 1], f"row {row}") if own else tuple(every)
        where = f"row {row} holds" if own else "the column holds"
        if not 2 <= len(given) <= MOST_ANSWERS:
            raise UserError(
                f"--answers {column}: {where} {len(given)} different answers; 2 to {MOST_ANSWERS} are expected, "
                "since every answer is scored after its prompt"
            )
        if any(not answer.strip() for answer in given):
            raise UserError(f"--answers {column}: one answer is blank ({where} it); write what the model should say")
        _refuse_alike(column, {answer: answer.strip() for answer in given}, "differ only in the space around them")
        place = {chr(ord("A") + i): i for i in range(len(given))} | {str(i): i for i in range(len(given))}
        place |= {answer: i for i, answer in enumerate(given)}
        if cell not in place:
            raise UserError(
                f"--answers {column}: row {row} holds {cell!r}, which is none of its choices: expected the text of "
                f"one, a letter A to {chr(ord('A') + len(given) - 1)}, or an index from 0"
            )
        answers.append(given)
        right.append(place[cell])
    if len(set(batch.cluster)) < LEAST_CLUSTERS:
        raise UserError(f"--answers {column}: {len(set(batch.cluster))} clusters; at least {LEAST_CLUSTERS} are needed")
    return tuple(answers), tuple(right)


def _choices(cell: object, where: str) -> tuple[str, ...]:
    """The answers of one prompt. Raises UserError for a cell that is no list of texts."""
    try:
        found = json.loads(str(cell))
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise UserError(f'column {CHOICES!r}, {where}: {brief(cell)}, expected a list of texts, e.g. ["yes", "no"]')
    if len(set(found)) < len(found):
        raise UserError(f"column {CHOICES!r}, {where}: an answer stands twice in {brief(cell)}; name each once")
    return tuple(found)


def expanded(
    subject: Model, batch: Batch, answers: Sequence[Sequence[str]], right: Sequence[int], column: str
) -> Batch:
    """Every prompt followed by each of its answers; queried at the positions whose next token belongs to the answer.

    An answer follows after one space. Its tokens are those of the whole text beyond the prompt's; if the tokenizer
    merges prompt and answer, the answer is tokenized alone and appended. In a chat template the answer is the
    assistant's text: tokenized alone, without a space, after the template. Raises UserError: a model without a
    tokenizer; an answer without tokens, with those of another answer, or with more than the model reads.
    """
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    chat, prompts = bool(subject.facts.get("chat")), [prompt.rstrip() for prompt in batch.text]
    rows = [(i, answer.strip()) for i, own in enumerate(answers) for answer in own]
    many = batch.take([i for i, _ in rows])
    before = _ids(subject.tokens(replace(batch, inputs=Text(tuple(prompts)))))
    joined = replace(many, inputs=Text(tuple(f"{prompts[i]} {answer}" for i, answer in rows)))
    together = [] if chat else _ids(encode(joined, subject.tokenizer, subject.facts, subject.name))
    alone = {
        answer: subject.tokenizer(f"{'' if chat else ' '}{answer}", add_special_tokens=False)["input_ids"]
        for answer in dict.fromkeys(answer for _, answer in rows)
    }
    for own in dict.fromkeys(map(tuple, answers)):
        same = f"{subject.name} reads as the same tokens"
        _refuse_alike(column, {answer: tuple(alone[answer.strip()]) for answer in own}, same)
    wholes, starts, limit = [], [], subject.facts["positions"]
    for at, (i, answer) in enumerate(rows):
        whole = [*before[i], *alone[answer]]
        if not chat and together[at][: len(before[i])] == before[i] and len(together[at]) > len(before[i]):
            whole = together[at]
        if len(whole) == len(before[i]):
            raise UserError(f"--answers {column}: {answer!r} has no tokens")
        if limit is not None and len(whole) > limit:
            raise UserError(
                f"--answers {column}: prompt {i + 1} with the answer {answer[:40]!r} has "
                f"{len(whole)} tokens; {subject.name} reads at most {limit}: shorten one of them"
            )
        wholes.append(torch.tensor(whole))
        starts.append(len(before[i]) - 1)
    padded, lengths = torch.nn.utils.rnn.pad_sequence(wholes, batch_first=True), torch.tensor([*map(len, wholes)])
    place = torch.arange(padded.shape[1])
    return Batch(
        Tokens(padded, lengths),
        many.cluster,
        {**batch.source, "answers": column},
        query=(place >= torch.tensor(starts)[:, None]) & (place < lengths[:, None] - 1),
        columns={PROMPT: tuple(i for i, _ in rows), RIGHT: tuple(right[i] for i, _ in rows)},
    )


def _ids(tokens: Tokens | Rows) -> list[list[int]]:
    assert isinstance(tokens, Tokens), "a model with a tokenizer reads tokens"
    return tokens.real


def _refuse_alike(column: str, answers: Mapping[str, Hashable], why: str) -> None:
    """Raises UserError if two answers have the same value: their probabilities would always tie."""
    first: dict[Hashable, str] = {}
    for answer, value in answers.items():
        if (other := first.setdefault(value, answer)) != answer:
            raise UserError(f"--answers {column}: {other!r} and {answer!r}, which {why}; write them alike")


def prompt_columns(
    batch: Batch, record: Record, answers: Sequence[Sequence[str]], right: Sequence[int]
) -> dict[str, tuple]:
    """The prompt table: the original prompts, the model's answer, and the probability of the right answer."""
    n = len(batch)
    columns = {name: recorded(column) for name, column in batch.columns.items()}
    table = {"tags": ("",) * n, "domain": ("",) * n, **columns, "template": batch.cluster, "text": batch.text}
    if PROBE not in record.results:
        return {**table, "entropy": (0.0,) * n, "tokens": (0,) * n}
    arrays = record.results[PROBE].arrays
    return {
        **table,
        "entropy": tuple(arrays["entropy"].round(6).tolist()),
        "tokens": tuple(arrays["tokens"].astype(int).tolist()),
        "likeliest answer": tuple(own[int(i)] for own, i in zip(answers, arrays["likeliest"], strict=True)),
        "right answer": tuple(own[i] for own, i in zip(answers, right, strict=True)),
        "p of the right answer": tuple(arrays["right_probability"].round(6).tolist()),
    }
