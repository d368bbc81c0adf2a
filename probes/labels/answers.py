"""Accuracy and calibration of given answers, scored by their log-probability after each prompt, without generation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import binomtest

from llmgeom.batch import Batch, Rows, Text, Tokens, recorded
from llmgeom.claims import Null, cut, declared, estimate
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.model.tokenizing import encode
from llmgeom.probe import MOST_PROMPTS, Model, Needs, Observer, ProbeInput, Step
from llmgeom.probes.shared.nulls import permutation_null
from llmgeom.record import Record
from llmgeom.result import Curve, Estimate, Result, curve, quantity
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

PROBE = "answers"
PROMPT, RIGHT = "prompt", "right"  # columns of the expanded batch
MOST_ANSWERS = 20  # different ones
DRAWS = 199
CLAIMS = declared(PROBE)
MOST = {"Brier score": 2.0}  # the largest value; 1 for every other score


@dataclass(frozen=True, kw_only=True)
class Answers(Result):
    """Probability, accuracy and calibration of the answers."""

    TITLE = "Given answers"

    share: Curve = curve(
        "confidence",
        "fraction",
        "share of right answers, by confidence",
        interval="prompts, taken as independent",
        beside="confidence",
    )
    confidence: np.ndarray = quantity("confidence", "fraction", "mean confidence: a calibrated model lies here")
    count: np.ndarray = quantity("confidence", "prompts", "prompts in each bin")
    log_prob: np.ndarray | None = quantity("prompt answer", "bits", "log2-probability of each answer, all its tokens")
    entropy: np.ndarray = quantity(
        "prompt", "bits", "entropy of the next token; of the answers where only these are known"
    )
    tokens: np.ndarray | None = quantity("prompt", "count", "tokens of each prompt")


def probabilities(log_prob: Sequence[Sequence[float]]) -> np.ndarray:
    """[prompt answer] probabilities among the answers of a prompt; 0 beyond its last answer."""
    x = np.full((len(log_prob), max(map(len, log_prob))), -np.inf)
    for i, row in enumerate(log_prob):
        x[i, : len(row)] = row
    x = np.exp(x - x.max(1, keepdims=True))
    return x / x.sum(1, keepdims=True)


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
) -> Answers:
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
    probability = probabilities(log_prob)
    if entropy is None:
        entropy = -(probability * np.log2(np.where(probability > 0, probability, 1))).sum(1)
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
    regular = len(set(map(len, log_prob))) == 1
    return Answers(
        share=Curve(share, interval=np.array(wilson)),
        confidence=mean,
        count=count.astype(np.float64),
        log_prob=np.array(log_prob, dtype=np.float64) / np.log(2) if regular else None,
        entropy=entropy,
        tokens=None if tokens is None else tokens.astype(np.float64),
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
            measured("AUROC of low entropy", lambda subset, truth: ranking(-entropy[subset], answer[subset] == truth)),
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
        answers: the answers, in the order of the batch.
        column: the column of right answers.
    """

    answers: tuple[str, ...]
    column: str

    @property
    def NEEDS(self) -> Needs:
        """Only the observer; controls come from the answers themselves."""
        return Needs(controls=frozenset(), control_prompts=MOST_PROMPTS, observers=(NEXT,))

    def measure(self, data: ProbeInput) -> Answers:
        """Accuracy, calibration and ranking, with intervals by cluster."""
        capture, width = data.capture, len(self.answers)
        inputs = len(capture.lengths)
        rows = capture.prompt.numpy()
        total = np.bincount(rows, capture.observed("answer.log_prob").double().numpy(), inputs).reshape(-1, width)
        first = np.unique(rows, return_index=True)[1][::width]  # the row before each prompt's first answer
        right = np.array(capture.batch.columns[RIGHT], dtype=np.int64)[::width]
        clusters = np.array(capture.batch.cluster)[::width]
        tokens = capture.position.numpy()[first] + 1
        common = int(np.bincount(right, minlength=width).max())
        notes = (
            f"answers: {', '.join(map(repr, self.answers))}; right ones in column {self.column!r}",
            f"the most common answer is right for {common / len(right):.2f} of the prompts",
        )
        of_prompts = {"entropy": data.entropy[first], "tokens": tokens}
        return scored(total.tolist(), right, clusters, data.seed, notes, names=self.answers, **of_prompts)


def read_answers(batch: Batch, column: str) -> tuple[str, ...]:
    """The different answers of a column.

    Raises UserError: one answer, more than 20, a blank one, two that differ only in space, or fewer than 5 clusters.
    """
    cells = [str(cell) for cell in batch.column(column)]
    answers = tuple(sorted(set(cells)))
    if not 2 <= len(answers) <= MOST_ANSWERS:
        raise UserError(
            f"--answers {column}: the column holds {len(answers)} different answers; 2 to {MOST_ANSWERS} are expected, "
            "since every answer is scored after every prompt"
        )
    if any(not answer.strip() for answer in answers):
        raise UserError(f"--answers {column}: one answer is blank; write what the model should say")
    _refuse_alike(column, {answer: answer.strip() for answer in answers}, "differ only in the space around them")
    if len(set(batch.cluster)) < LEAST_CLUSTERS:
        raise UserError(f"--answers {column}: {len(set(batch.cluster))} clusters; at least {LEAST_CLUSTERS} are needed")
    return answers


def expanded(subject: Model, batch: Batch, answers: Sequence[str], column: str) -> Batch:
    """Every prompt followed by every answer; queried at the positions whose next token belongs to the answer.

    An answer follows after one space. Its tokens are those of the whole text beyond the prompt's; if the tokenizer
    merges prompt and answer, the answer is tokenized alone and appended. In a chat template the answer is the
    assistant's text: tokenized alone, without a space, after the template. Raises UserError: a model without a
    tokenizer; an answer without tokens, with those of another answer, or with more than the model reads.
    """
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    many = batch.take([i for i in range(len(batch)) for _ in answers])
    pairs = _tokenized(subject, batch, many, answers, column)
    limit = subject.facts["positions"]
    for i, (prompt, whole) in enumerate(pairs):
        number, answer = i // len(answers) + 1, answers[i % len(answers)]
        if len(whole) == len(prompt):
            raise UserError(f"--answers {column}: {answer!r} has no tokens")
        if limit is not None and len(whole) > limit:
            raise UserError(
                f"--answers {column}: prompt {number} with the answer {answer[:40]!r} has "
                f"{len(whole)} tokens; {subject.name} reads at most {limit}: shorten one of them"
            )
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(whole) for _, whole in pairs], batch_first=True)
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in pairs])
    lengths = torch.tensor([len(whole) for _, whole in pairs])
    place = torch.arange(padded.shape[1])
    query = (place >= starts[:, None]) & (place < lengths[:, None] - 1)
    cells = [str(cell) for cell in batch.column(column)]
    return Batch(
        Tokens(padded, lengths),
        many.cluster,
        {**batch.source, "answers": column},
        query=query,
        columns={
            PROMPT: tuple(i for i in range(len(batch)) for _ in answers),
            RIGHT: tuple(answers.index(cell) for cell in cells for _ in answers),
        },
    )


def _tokenized(
    subject: Model, batch: Batch, many: Batch, answers: Sequence[str], column: str
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt, and of this prompt followed by each answer; see `expanded`. `many` repeats prompts."""
    chat, prompts = bool(subject.facts.get("chat")), [prompt.rstrip() for prompt in batch.text]
    space = "" if chat else " "
    before = _ids(subject.tokens(_with_text(batch, prompts)))
    joined = _with_text(many, [f"{prompt} {answer.strip()}" for prompt in prompts for answer in answers])
    together = [] if chat else _ids(encode(joined, subject.tokenizer, subject.facts, subject.name))
    alone = {
        answer: subject.tokenizer(f"{space}{answer.strip()}", add_special_tokens=False)["input_ids"]
        for answer in answers
    }
    _refuse_alike(
        column, {answer: tuple(ids) for answer, ids in alone.items()}, f"{subject.name} reads as the same tokens"
    )
    pairs = []
    for i in range(len(many)):
        prompt, appended = before[i // len(answers)], alone[answers[i % len(answers)]]
        continues = not chat and together[i][: len(prompt)] == prompt and len(together[i]) > len(prompt)
        pairs.append((prompt, together[i] if continues else [*prompt, *appended]))
    return pairs


def _with_text(batch: Batch, strings: Sequence[str]) -> Batch:
    """The batch with other texts instead of its prompts."""
    return replace(batch, inputs=Text(tuple(strings)))


def _ids(tokens: Tokens | Rows) -> list[list[int]]:
    assert isinstance(tokens, Tokens), "a model with a tokenizer reads tokens"
    return tokens.real


def _refuse_alike(column: str, answers: Mapping[str, Hashable], why: str) -> None:
    """Raises UserError if two answers have the same value: their probabilities would always tie."""
    first: dict[Hashable, str] = {}
    for answer, value in answers.items():
        if (other := first.setdefault(value, answer)) != answer:
            raise UserError(f"--answers {column}: {other!r} and {answer!r}, which {why}; write them alike")


def prompt_columns(batch: Batch, record: Record, answers: Sequence[str], column: str) -> dict[str, tuple]:
    """The prompt table: the original prompts, the model's answer, and the probability of the right answer."""
    n = len(batch)
    columns = {name: recorded(column) for name, column in batch.columns.items()}
    table = {"tags": ("",) * n, "domain": ("",) * n, **columns, "template": batch.cluster, "text": batch.text}
    if PROBE not in record.results:
        return {**table, "entropy": (0.0,) * n, "tokens": (0,) * n}
    arrays = record.results[PROBE].arrays
    log_prob = arrays["log_prob"]
    probability = np.exp2(log_prob - np.logaddexp2.reduce(log_prob, axis=1, keepdims=True))
    right = [answers.index(str(cell)) for cell in batch.column(column)]
    return {
        **table,
        "entropy": tuple(arrays["entropy"].round(6).tolist()),
        "tokens": tuple(arrays["tokens"].astype(int).tolist()),
        "likeliest answer": tuple(answers[i] for i in probability.argmax(1)),
        "p of the right answer": tuple(probability[np.arange(n), right].round(6).tolist()),
    }
