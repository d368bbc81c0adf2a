"""The laws that every exact posterior obeys, checked by simulation on any task, yours included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.answers import Categorical
from llmgeom.errors import UserError
from llmgeom.stats import information
from llmgeom.task import Sequences, Task, held_out, seeded

ALARM = 1e-4  # at most, how often a law fails where it holds
ROUNDING = 1e-6
RAREST = math.log(1e-6)  # a surprise counts as no more than this one


@dataclass(frozen=True)
class Law:
    """What must be so, whether it is, and one sentence with the numbers."""

    name: str
    holds: bool
    detail: str


def check(task: Task, n: int = 2000, seed: int = 0) -> tuple[Law, ...]:
    """Each law, on n sequences of the task."""
    drawn = task.draw_split(n, seeded("laws", seed))
    exact = task.log_predictive(drawn.inputs)
    laws: list[Callable[[Task, Sequences, Tensor, int], Law]] = [
        _normalised, _entropy, _score, _frequencies, _past, _future, _trivial, _seed, _held_out
    ]  # fmt: skip
    return tuple(law(task, drawn, exact, seed) for law in laws)


def obeyed(task: Task) -> tuple[Law, ...]:
    """The laws of a task of yours, before anything is trained or graded on it; none are asked of ours, whose tests ask.

    Raises UserError with the first that is broken.
    """
    if not task.from_file:
        return ()
    found = check(task)
    for law in found:
        if not law.holds:
            raise UserError(
                f"{task.title}: its exact answer is not exact: {law.name!r} is broken, {law.detail}; mend it"
            )
    return found


# ---- of the answer itself -------------------------------------------------------------------------------------------


def _normalised(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    belief = task.log_belief(drawn.inputs)
    off = max(_unnormalised(task, exact), 0.0 if belief is None else _sum_off(belief))
    what = "probabilities sum to one" if _categorical(task) else "means and log variances are finite"
    return Law(what, off <= ROUNDING, f"off by at most {off:.1e}, on {_counts(exact)}")


def _entropy(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    name = "entropy is between 0 and that of the uniform answer"
    if not _categorical(task):
        return Law(name, True, "not asked: the entropy of a real number may be negative")
    entropy, most = information.bits(information.entropy(exact)), math.log2(exact.shape[-1])
    low, high = entropy.min().item(), entropy.max().item()
    return Law(name, low >= -ROUNDING and high <= most + ROUNDING, f"{low:z.3f} to {high:.3f} of {most:.3f} bits")


# ---- of what was drawn ----------------------------------------------------------------------------------------------


def _score(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    """-log p(target) is the entropy in the mean."""
    name = "the mean loss is the mean entropy"
    if not _categorical(task):
        surprise = (_residual(drawn, exact).square() - 1) / 2
        # A squared normal variable: the tail is sub-gamma with scale 1 for half of it less its mean.
        excess = _excess(surprise.sum(), torch.tensor(surprise.numel() / 2), 3.0)
        return _by_simulation(name, excess, _gap(surprise))
    # The same for any score, -log p among them, so the largest surprises are cut off and the sum is bounded.
    p, score = exact.exp(), -exact.clamp_min(RAREST)
    entropy = (p * score).sum(-1)
    surprise = score.gather(-1, drawn.target[..., None])[..., 0] - entropy
    variance = (p * (score - entropy[..., None]).square()).sum()
    never = int(exact.gather(-1, drawn.target[..., None]).isneginf().sum())
    if never:
        return Law(name, False, f"{never} of {drawn.target.numel()} targets have probability 0")
    return _by_simulation(name, _excess(surprise.sum(), variance, -RAREST), _gap(surprise))


def _frequencies(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    """At each query every outcome comes as often as it was probable; a standardised residual is N(0, 1)."""
    name = "each outcome comes as often as it was probable"
    if not _categorical(task):
        residual = _residual(drawn, exact)
        n = torch.tensor(float(len(residual)))
        excess = torch.cat([_excess(residual.sum(0), n, 0.0), _excess((residual.square() - 1).sum(0), 2 * n, 6.0)])
        told = f"mean {residual.mean().item():.4f}, mean square {residual.square().mean().item():.4f}"
        return _by_simulation("standardised residuals have mean 0 and mean square 1", excess, told)
    off = _one_hot(drawn, exact) - exact.exp()
    excess = _excess(off.sum(0), (exact.exp() * (1 - exact.exp())).sum(0), 1.0)
    return _by_simulation(name, excess, f"off by {off.mean(0).abs().max().item():.3f} at worst")


def _past(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    """What is left of the target when the answer is subtracted has nothing to do with what was seen before."""
    name = "nothing seen explains what the answer leaves open"
    few = max(1, min(len(exact), 20_000_000 // (task.length * exact.shape[-1] + 1)))
    drawn, exact = Sequences(drawn.inputs[:few], drawn.target[:few]), exact[:few]
    excess = []
    for seen in _rows_seen(task, drawn.inputs) if task.features else _tokens_seen(task, drawn.inputs):
        if not _categorical(task):
            off, variance = _residual(drawn, exact) * seen[..., 0], seen[..., 0].square()
        else:
            p = exact.exp()
            mean = (p * seen).sum(-1)
            off = (seen.expand_as(p).gather(-1, drawn.target[..., None])[..., 0]) - mean
            variance = (p * (seen - mean[..., None]).square()).sum(-1)
        # At least 1, so that rounding where there is no variance is no deviation.
        excess.append(_excess(off.sum(), variance.sum(), max(1.0, off.abs().max().item())))
    return _by_simulation(name, torch.stack(excess), f"{len(excess)} functions of what was seen")


def _tokens_seen(task: Task, inputs: Tensor) -> Iterator[Tensor]:
    """For each query and outcome: how often it came before, whether it is the last token or the one before that, and
    how often it came one or two places after an earlier token like that at the query; [sequence query outcome]."""
    query = list(task.query)
    outcomes = torch.tensor(task.answers.tokens, device=inputs.device)
    shown = (inputs[..., None] == outcomes).float()
    yield shown.cumsum(1)[:, query]
    for lag in (0, 1):
        yield torch.nn.functional.pad(shown, (0, 0, lag, 0))[:, query]
    at = torch.arange(task.length, device=inputs.device)
    for lag in (1, 2):
        # A token at s counts where that at s - lag is the one at the query.
        before = torch.nn.functional.pad(inputs, (lag, 0), value=-1)[:, : task.length]
        same = (inputs[:, query, None] == before[:, None]) & (at <= at[query][:, None])
        yield same.float() @ shown


def _rows_seen(task: Task, inputs: Tensor) -> Iterator[Tensor]:
    """Products of a number at the query and a sum over earlier rows of two numbers, of one row or of neighbours;
    [sequence query 1], or where outcomes are counted these times the number of the outcome."""
    rows, query, width = inputs.double(), list(task.query), task.features
    triples = torch.cartesian_prod(torch.arange(width), torch.arange(width), torch.arange(width), torch.arange(2))
    for here, one, other, lag in triples[torch.randperm(len(triples), generator=seeded("laws/rows", 0))[:256]].tolist():
        earlier = torch.nn.functional.pad(rows[..., other], (lag, 0))[:, : rows.shape[1]]
        sums = (rows[..., one] * earlier).cumsum(1)
        # Cut off, so that no single sequence decides.
        seen = (rows[:, query, here] * sums[:, query]).clamp(-100, 100)[..., None]
        yield seen * torch.linspace(-1, 1, len(task.answers.tokens)) if _categorical(task) else seen


def _future(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    """The answer stays as it is when everything after the query comes from other sequences."""
    inputs = drawn.inputs[:256]
    moved = 0.0
    cuts = sorted({task.query[i * (len(task.query) - 1) // 7] + 1 for i in range(8)})
    answers = _answers(task, inputs)
    for cut in cuts:
        asked = sum(at < cut for at in task.query)
        mixed = torch.cat([inputs[:, :cut], inputs.roll(1, 0)[:, cut:]], 1)
        for whole, changed in zip(answers, _answers(task, mixed), strict=True):
            a, b = whole[:, :asked], changed[:, :asked]
            moved = max(moved, (a - b).abs().masked_fill(a == b, 0).nan_to_num(nan=math.inf).max().item())
    return Law(
        "no answer depends on what comes after it",
        moved <= ROUNDING,
        f"the tail replaced at {len(cuts)} places moves log-probabilities before it by at most {moved:.1e} nats",
    )


# ---- of the task ----------------------------------------------------------------------------------------------------


def _trivial(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    """Under the exact answer the likelihood ratio of any other has mean 1 at most, so it passes 1 / alarm no oftener
    than that (Ville 1939)."""
    name, answers = "no trivial predictor beats the exact answer", task.answers
    own, kls = answers.exact(exact), {}
    loss = answers.loss(own, drawn.target)
    trivial = task.trivial(drawn.inputs)
    for label, predictor in trivial.items():
        if predictor.shape != exact.shape:
            return Law(name, False, f"{label!r} has shape {tuple(predictor.shape)}, the answer {tuple(exact.shape)}")
        if (off := _unnormalised(task, predictor)) > ROUNDING:
            return Law(name, False, f"{label!r} is not normalised: off by {off:.1e}")
        form = answers.exact(predictor)
        ratio = (loss - answers.loss(form, drawn.target)).sum().item()
        if not ratio <= math.log(len(trivial) / ALARM):
            return Law(name, False, f"{label!r} explains the targets better, by {ratio:.1f} nats in all")
        kls[label] = information.bits(answers.kl(own, form).mean().item())
        if not kls[label] >= -ROUNDING:
            return Law(name, False, f"KL(exact || {label}) is {kls[label]:.2e} bits")
    told = ", ".join(f"{label} {bits:.3f}" for label, bits in kls.items())
    return Law(name, True, f"KL(exact || trivial) in bits a query: {told}" if told else "not asked: it names none")


def _seed(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    name = "the seed alone decides what is drawn"
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)
        again = task.draw_split(len(exact), seeded("laws", seed))
    if not (torch.equal(again.inputs, drawn.inputs) and torch.equal(again.target, drawn.target)):
        return Law(name, False, f"seed {seed} gave other sequences the second time")
    other = task.draw_split(len(exact), seeded("laws", seed + 1))
    same = torch.equal(other.inputs, drawn.inputs) and torch.equal(other.target, drawn.target)
    return Law(
        name, not same, f"seed {seed} gives the same bits twice and seed {seed + 1} {'too' if same else 'others'}"
    )


def _held_out(task: Task, drawn: Sequences, exact: Tensor, seed: int) -> Law:
    name, n = "held-out hypotheses are in no training draw", len(exact)
    if task.memorisable:
        return Law(name, True, f"not asked: it holds none out, since {task.memorisable}")
    try:
        seen, kept = (task._hypotheses(n, seeded(f"laws/{split}", seed), split) for split in ("seen", "held-out"))
    except UserError as refusal:
        return Law(name, False, str(refusal))
    both = {tuple(cell) for cell in task.split_key(seen).tolist()} & {tuple(cell) for cell in task.split_key(kept).tolist()}
    one, other = (task.draw(hypotheses, seeded("laws/draw", seed)) for hypotheses in (seen, kept))
    ignored = (one.inputs == other.inputs).flatten(1).all(1) & (one.target == other.target).all(1)
    if ignored.all():
        return Law(name, False, "`draw` does not use the hypothesis: a seen and a held-out one give the same sequences")
    share = held_out(task.split_key(task.hypothesis(n, seeded("laws/share", seed)))).double().mean().item()
    return Law(name, not both, f"{len(both)} in both of {n} draws each; {share:.3f} of the prior is held out")


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def _categorical(task: Task) -> bool:
    return isinstance(task.answers, Categorical)


def _counts(exact: Tensor) -> str:
    return f"{exact.shape[0]} sequences of {exact.shape[1]} queries"


def _sum_off(log_p: Tensor) -> float:
    """How far from 1 the probabilities sum at worst; inf where one is no number."""
    return (log_p.exp().sum(-1) - 1).abs().nan_to_num(nan=math.inf).max().item()


def _unnormalised(task: Task, answer: Tensor) -> float:
    if _categorical(task):
        return _sum_off(answer)
    return 0.0 if answer.isfinite().all() else math.inf


def _answers(task: Task, inputs: Tensor) -> list[Tensor]:
    belief = task.log_belief(inputs)
    return [task.log_predictive(inputs), *task.trivial(inputs).values(), *(() if belief is None else (belief,))]


def _one_hot(drawn: Sequences, exact: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(drawn.target, exact.shape[-1])


def _residual(drawn: Sequences, exact: Tensor) -> Tensor:
    """In standard deviations of the answer."""
    return (drawn.target - exact[..., 0]) * (-exact[..., 1] / 2).exp()


def _excess(total: Tensor, variance: Tensor, largest: float) -> Tensor:
    """-log of a bound on how often a sum of terms, each of mean 0 given those before and at most `largest`, strays this
    far to one side: s^2 / (2 (V + M s / 3)) (Freedman 1975). A normal tail where no term stands out, and no false
    alarm where one rare outcome does."""
    total = total.abs()
    return (total.square() / (2 * (variance + largest * total / 3)).clamp_min(1e-30)).nan_to_num(nan=math.inf)


def _gap(surprise: Tensor) -> str:
    return f"loss less entropy {surprise.mean().item():.5f} nats a query"


def _by_simulation(name: str, excess: Tensor, told: str) -> Law:
    """Holds unless the largest of several deviations is rarer than the alarm allows for all of them together."""
    worst, limit = (2 * excess.max()).sqrt().item(), math.sqrt(2 * math.log(2 * excess.numel() / ALARM))
    return Law(name, worst <= limit, f"{told}; |z| at most {worst:.2f}, and {limit:.2f} is allowed")
