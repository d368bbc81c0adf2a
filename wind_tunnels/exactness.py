"""Checks by simulation that a task's exact answers are exact; they hold for every correct posterior."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.answers import Categorical
from llmgeom.errors import UserError
from llmgeom.stats import information
from llmgeom.world import Sequences, World, held_out, seeded

ALARM = 1e-4  # the largest rate of false alarms of one check
ROUNDING = 1e-6
RAREST = math.log(1e-6)  # larger surprises are cut off here


@dataclass(frozen=True)
class Check:
    """One property of a correct posterior, whether it holds, and one sentence with the numbers."""

    name: str
    passed: bool
    detail: str


def check(task: World, n: int = 2000, seed: int = 0) -> tuple[Check, ...]:
    """Every check, on n sequences of the task."""
    sequences = task.draw_split(n, seeded("laws", seed))
    exact, discrete = task.log_predictive(sequences.inputs), isinstance(task.answers, Categorical)
    return (
        *_answers(task, sequences, exact, discrete),
        *_outcomes(sequences, exact, discrete),
        _past(task, sequences, exact, discrete),
        _future(task, sequences.inputs[:256]),
        _trivial(task, sequences, exact, discrete),
        _seed(task, sequences, seed),
        _held_out(task, n, seed),
    )


def require_exact(task: World) -> None:
    """Runs the checks on a task from the user's file; the shipped tasks are checked by the tests.

    Raises UserError: a check failed; the first one is named.
    """
    if not task.FILE_SPEC:
        return
    if len(getattr(task.answers, "tokens", (0, 1))) < 2:
        raise UserError(f"{task.title}: one symbol: nothing to predict; give a task of two symbols or more")
    for result in check(task):
        if not result.passed:
            raise UserError(
                f"{task.title}: its exact answer is not exact: {result.name!r} fails, {result.detail}; correct it"
            )


# ---- the answer itself -----------------------------------------------------------------------------------------------


def _answers(task: World, sequences: Sequences, exact: Tensor, discrete: bool) -> Iterator[Check]:
    """An answer is a distribution, and tells no less than the uniform one."""
    belief = task.log_belief(sequences.inputs)
    off = max(_unnormalised(exact, discrete), 0.0 if belief is None else _unnormalised(belief))
    what = "probabilities sum to one" if discrete else "means and log variances are finite"
    seen = f"on {len(exact)} sequences of {exact.shape[1]} queries"
    yield Check(what, off <= ROUNDING, f"off by at most {off:.1e}, {seen}")
    name = "entropy is between 0 and that of the uniform answer"
    if not discrete:
        yield Check(name, True, "not checked: the entropy of a real number may be negative")
        return
    entropy, most = information.bits(information.entropy(exact)), math.log2(exact.shape[-1])
    low, high = entropy.min().item(), entropy.max().item()
    yield Check(name, low >= -ROUNDING and high <= most + ROUNDING, f"{low:z.3f} to {high:.3f} of {most:.3f} bits")


# ---- the drawn outcomes ----------------------------------------------------------------------------------------------


def _outcomes(sequences: Sequences, exact: Tensor, discrete: bool) -> Iterator[Check]:
    """The mean of -log p(target) is the entropy, and at each query every outcome occurs with its predicted frequency;
    a standardised residual is N(0, 1)."""
    never = 0
    if discrete:
        # Holds for any score, also for -log p with the largest surprises cut off, which bounds the sum.
        target, p, score = sequences.target[..., None], exact.exp(), -exact.clamp_min(RAREST)
        entropy = (p * score).sum(-1)
        surprise, most = score.gather(-1, target)[..., 0] - entropy, -RAREST
        variance = (p * (score - entropy[..., None]).square()).sum()
        never = int(exact.gather(-1, target).isneginf().sum())
        off = one_hot(sequences.target, exact.shape[-1]) - p
        each = _excess(off.sum(0), (p * (1 - p)).sum(0), 1.0)
        frequency = "each outcome comes as often as it was probable"
        detail = f"off by {off.mean(0).abs().max().item():.3f} at worst"
    else:
        residual = _residual(sequences, exact)
        square, n = residual.square(), torch.tensor(float(len(residual)))
        # A squared normal variable: the tail is sub-gamma with scale 1 for half of it less its mean.
        surprise, variance, most = (square - 1) / 2, torch.tensor(square.numel() / 2), 3.0
        each = torch.cat([_excess(residual.sum(0), n, 0.0), _excess((square - 1).sum(0), 2 * n, 6.0)])
        frequency = "standardised residuals have mean 0 and mean square 1"
        detail = f"mean {residual.mean().item():.4f}, mean square {square.mean().item():.4f}"
    name = "the mean loss is the mean entropy"
    if never:
        yield Check(name, False, f"{never} of {sequences.target.numel()} targets have probability 0")
    else:
        gap = f"loss minus entropy {surprise.mean().item():.5f} nats a query"
        yield _by_simulation(name, _excess(surprise.sum(), variance, most), gap)
    yield _by_simulation(frequency, each, detail)


def _past(task: World, sequences: Sequences, exact: Tensor, discrete: bool) -> Check:
    """The target minus the answer is uncorrelated with functions of the inputs before it."""
    name = "nothing shown explains what the answer leaves open"
    few = max(1, min(len(exact), 20_000_000 // (task.length * exact.shape[-1] + 1)))
    sequences, exact = Sequences(sequences.inputs[:few], sequences.target[:few]), exact[:few]
    excess = []
    for seen in _rows_seen(task, sequences.inputs) if task.features else _tokens_seen(task, sequences.inputs):
        if not discrete:
            off, variance = _residual(sequences, exact) * seen[..., 0], seen[..., 0].square()
        else:
            p = exact.exp()
            mean = (p * seen).sum(-1)
            off = (seen.expand_as(p).gather(-1, sequences.target[..., None])[..., 0]) - mean
            variance = (p * (seen - mean[..., None]).square()).sum(-1)
        # A bound of at least 1: without variance, rounding does not count as a deviation.
        excess.append(_excess(off.sum(), variance.sum(), max(1.0, off.abs().max().item())))
    return _by_simulation(name, torch.stack(excess), f"{len(excess)} functions of what was shown")


def _tokens_seen(task: World, inputs: Tensor) -> Iterator[Tensor]:
    """Functions [sequence query outcome] of the tokens shown: the count of the outcome, whether it is the last token or
    the one before, and its count one or two places after an earlier copy of the query's token."""
    query = list(task.query)
    outcomes = torch.tensor(task.answers.tokens, device=inputs.device)
    shown = (inputs[..., None] == outcomes).float()
    yield shown.cumsum(1)[:, query]
    for lag in (0, 1):
        yield pad(shown, (0, 0, lag, 0))[:, query]
    at = torch.arange(task.length, device=inputs.device)
    for lag in (1, 2):
        # A token at s counts if the token at s - lag equals the query's.
        before = pad(inputs, (lag, 0), value=-1)[:, : task.length]
        same = (inputs[:, query, None] == before[:, None]) & (at <= at[query][:, None])
        yield same.float() @ shown


def _rows_seen(task: World, inputs: Tensor) -> Iterator[Tensor]:
    """Functions of the rows shown: a number at the query times a sum over earlier rows of products of two numbers from
    one row or neighbouring rows; [sequence query 1], for token answers times a number that grows with the outcome."""
    rows, query, width = inputs.double(), list(task.query), task.features
    triples = torch.cartesian_prod(torch.arange(width), torch.arange(width), torch.arange(width), torch.arange(2))
    for here, first, second, lag in triples[
        torch.randperm(len(triples), generator=seeded("laws/rows", 0))[:256]
    ].tolist():
        earlier = pad(rows[..., second], (lag, 0))[:, : rows.shape[1]]
        sums = (rows[..., first] * earlier).cumsum(1)
        # Clamped, so that no single sequence dominates.
        seen = (rows[:, query, here] * sums[:, query]).clamp(-100, 100)[..., None]
        yield seen * torch.linspace(-1, 1, len(task.answers.tokens)) if task.answers.tokens else seen


def _future(task: World, inputs: Tensor) -> Check:
    """The answer stays the same if everything after the query comes from other sequences."""

    def answers(inputs: Tensor) -> list[Tensor]:
        belief = task.log_belief(inputs)
        return [task.log_predictive(inputs), *task.trivial(inputs).values(), *(() if belief is None else (belief,))]

    moved, before = 0.0, answers(inputs)
    cuts = sorted({task.query[i * (len(task.query) - 1) // 7] + 1 for i in range(8)})
    for cut in cuts:
        answered = sum(at < cut for at in task.query)
        mixed = torch.cat([inputs[:, :cut], inputs.roll(1, 0)[:, cut:]], 1)
        for whole, changed in zip(before, answers(mixed), strict=True):
            a, b = whole[:, :answered], changed[:, :answered]
            moved = max(moved, (a - b).abs().masked_fill(a == b, 0).nan_to_num(nan=math.inf).max().item())
    return Check(
        "no answer depends on what comes after it",
        moved <= ROUNDING,
        f"replacing the tail at {len(cuts)} places moves log-probabilities before it by at most {moved:.1e} nats",
    )


# ---- the task ----------------------------------------------------------------------------------------------------


def _trivial(task: World, sequences: Sequences, exact: Tensor, discrete: bool) -> Check:
    """Under the exact answer the likelihood ratio of any other predictor has mean 1 at most, so the probability that it
    exceeds 1 / ALARM is at most ALARM (Ville 1939)."""
    name, answers = "no trivial predictor beats the exact answer", task.answers
    prediction, kls = answers.exact(exact), {}
    loss = answers.loss(prediction, sequences.target)
    trivial = task.trivial(sequences.inputs)
    for label, predictor in trivial.items():
        if predictor.shape != exact.shape:
            return Check(name, False, f"{label!r} has shape {tuple(predictor.shape)}, the answer {tuple(exact.shape)}")
        if (off := _unnormalised(predictor, discrete)) > ROUNDING:
            return Check(name, False, f"{label!r} is not normalised: off by {off:.1e}")
        other = answers.exact(predictor)
        ratio = (loss - answers.loss(other, sequences.target)).sum().item()
        if not ratio <= math.log(len(trivial) / ALARM):
            return Check(name, False, f"{label!r} predicts the targets better, by {ratio:.1f} nats in total")
        kls[label] = information.bits(answers.kl(prediction, other).mean().item())
        if not kls[label] >= -ROUNDING:
            return Check(name, False, f"KL(exact || {label}) is {kls[label]:.2e} bits")
    detail = ", ".join(f"{label} {bits:.3f}" for label, bits in kls.items())
    detail = f"KL(exact || trivial) in bits a query: {detail}" if detail else "not checked: the task names none"
    return Check(name, True, detail)


def _seed(task: World, sequences: Sequences, seed: int) -> Check:
    name, n = "the seed alone decides what is drawn", len(sequences.inputs)
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)
        drawn = (task.draw_split(n, seeded("laws", seed + step)) for step in (0, 1))
        again, other = (
            torch.equal(one.inputs, sequences.inputs) and torch.equal(one.target, sequences.target) for one in drawn
        )
    if not again:
        return Check(name, False, f"seed {seed} gave different sequences the second time")
    which = "too" if other else "different ones"
    return Check(name, not other, f"seed {seed} gives the same bits twice and seed {seed + 1} {which}")


def _held_out(task: World, n: int, seed: int) -> Check:
    name = "held-out hypotheses are in no training draw"
    if task.memorisable:
        return Check(name, True, f"not checked: it holds none out, since {task.memorisable}")
    try:
        seen, unseen = (task._hypotheses(n, seeded(f"laws/{split}", seed), split) for split in ("seen", "held-out"))
    except UserError as refusal:
        return Check(name, False, str(refusal))
    keys, unseen_keys = (set(map(tuple, task.split_key(hypotheses).tolist())) for hypotheses in (seen, unseen))
    first, second = (task.draw(hypotheses, seeded("laws/draw", seed)) for hypotheses in (seen, unseen))
    ignored = (first.inputs == second.inputs).flatten(1).all(1) & (first.target == second.target).all(1)
    if ignored.all():
        return Check(
            name, False, "`draw` does not use the hypothesis: a seen and a held-out one give the same sequences"
        )
    share = held_out(task.split_key(task.hypothesis(n, seeded("laws/share", seed)))).double().mean().item()
    return Check(
        name,
        not keys & unseen_keys,
        f"{len(keys & unseen_keys)} in both of {n} draws; {share:.3f} of the prior is held out",
    )


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def _unnormalised(answer: Tensor, discrete: bool = True) -> float:
    """The largest deviation of a sum of probabilities from 1; inf for a number that is not finite."""
    if not discrete:
        return 0.0 if answer.isfinite().all() else math.inf
    return (answer.exp().sum(-1) - 1).abs().nan_to_num(nan=math.inf).max().item()


def _residual(sequences: Sequences, exact: Tensor) -> Tensor:
    """(target - mean) / standard deviation."""
    return (sequences.target - exact[..., 0]) * (-exact[..., 1] / 2).exp()


def _excess(total: Tensor, variance: Tensor, largest: float) -> Tensor:
    """-log of a bound on the probability of a sum this large: s^2 / (2 (V + M s / 3)) (Freedman 1975).

    The terms have mean 0 given those before them, and are at most M = `largest`. The tail is normal if no term
    dominates, and one rare outcome gives no false alarm.
    """
    total = total.abs()
    return (total.square() / (2 * (variance + largest * total / 3)).clamp_min(1e-30)).nan_to_num(nan=math.inf)


def _by_simulation(name: str, excess: Tensor, detail: str) -> Check:
    """Passes unless the largest deviation is rarer than ALARM, corrected for the number of deviations."""
    worst, limit = (2 * excess.max()).sqrt().item(), math.sqrt(2 * math.log(2 * excess.numel() / ALARM))
    return Check(name, worst <= limit, f"{detail}; |z| at most {worst:.2f} ({limit:.2f} allowed)")
