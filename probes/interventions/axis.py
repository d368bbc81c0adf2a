"""A direction of a layer's values: found, edited, and held against other directions that are edited as much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.model import weights
from llmgeom.model.subject import Subject
from llmgeom.stats import ridge_probe

SIZE, VARIANCE = "same size", "same variance"
Mode = Literal["cut", "only", "shift"]
# x [row coordinate] float64 at the edited positions and the number of each among all of them, input after input (edited
# at its end alone, that of the prompt) -> what is added to x.
Move = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Axis:
    """A direction u of one layer's values x at the final token, estimated on some prompts, all in float64.

    z = (x - mean) / sd, coordinate by coordinate, c = z . u; a coordinate that is constant has sd = 0 here and z = 0.

    mean, sd   [coordinate] over the prompts; true kv heads side by side.   u  [coordinate] unit vector.
    spread     sd of c over the prompts.
    others     [component coordinate] orthonormal principal components of z - c u, and `variances` [component] of z
               along them: they are orthogonal to u and span with it all that the prompts span.
    """

    mean: Tensor
    sd: Tensor
    u: Tensor
    spread: float
    others: Tensor
    variances: Tensor

    @property
    def share(self) -> float:
        """Of the variance of z, that along u (fraction)."""
        return self.spread**2 / float(self.spread**2 + self.variances.sum())

    @classmethod
    def of(cls, x: np.ndarray, entropy: np.ndarray, clusters: Sequence[str], direction: str, seed: int) -> Axis:
        """pc1: first principal component of z, turned so that c does not fall with entropy. ridge: the weights of
        entropy on z, at length 1; the penalty with the least error over folds of whole units (`readout.PENALTIES`).

        Raises UserError where no coordinate varies, or ridge finds no weight.
        """
        mean, sd = x.mean(0), np.where(x.max(0) == x.min(0), 0.0, x.std(0))
        if not sd.any():
            raise UserError(f"all {len(sd)} coordinates are constant over {len(x)} prompts: there is no axis to edit")
        z = (x - mean) * np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
        if direction == "pc1":
            u = np.linalg.svd(z, full_matrices=False)[2][0]
            u = u * (np.sign(z @ u @ (entropy - entropy.mean())) or 1)
        else:
            u = ridge_probe.fit(z, entropy, ridge_probe.folds(clusters, seed))[0]
            if not u.any():
                raise UserError("entropy has no ridge weight on the values: there is no axis to edit")
            u = u / np.linalg.norm(u)
        _, size, others = np.linalg.svd(z - np.outer(z @ u, u), full_matrices=False)
        kept, spread = size > 1e-8 * np.linalg.norm(z), float(np.sqrt(np.square(z @ u).mean()))

        def tensor(a: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(a))

        return cls(tensor(mean), tensor(sd), tensor(u), spread, tensor(others[kept]), tensor(size[kept] ** 2 / len(x)))

    def z(self, x: Tensor) -> Tensor:
        return torch.where(self.sd > 0, (x - self.mean) / self.sd.clamp_min(1e-300), 0.0)

    def itself(self, mode: Mode, dose: float) -> Move:
        """The edit of the axis."""
        return lambda x, _: self.sd * _moved(z := self.z(x), _along(z, self.u), self.spread * self.u, mode, dose)

    def same_size(self, mode: Mode, r: Tensor, sign: float) -> Callable[[float], Move]:
        """The same edit of direction r, each displacement rescaled to the Euclidean length of the axis's, in x."""

        def at(dose: float) -> Move:
            def move(x: Tensor, prompt: Tensor) -> Tensor:
                z, length = self.z(x), self.itself(mode, dose)(x, prompt).norm(dim=-1, keepdim=True)
                return rescaled(self.sd * _moved(z, _along(z, r), sign * r, mode, dose), length)

            return move

        return at

    def same_variance(self, mode: Mode, weight: Tensor, sign: Tensor) -> Callable[[float], Move]:
        """The same edit of other components, each weighted: sum of weight^2 times variance is that of c."""
        basis = weight[:, None] * self.others
        step = (sign * self.variances.sqrt()) @ basis
        return lambda dose: lambda x, _: self.sd * _moved(z := self.z(x), z @ self.others.T @ basis, step, mode, dose)

    def draws(self, mode: Mode, count: int, seed: Sequence[int]) -> dict[str, list[Callable[[float], Move]]]:
        """Controls of both kinds, `count` of each, the same for a seed; the second only where it can be had."""
        rng = np.random.default_rng([*seed, 0])
        r = torch.from_numpy(rng.standard_normal((count, len(self.others)))) @ self.others
        r, sign = r / r.norm(dim=1, keepdim=True), rng.choice([-1.0, 1.0], count)
        found = {SIZE: [self.same_size(mode, r[i], float(sign[i])) for i in range(count)]}
        rng = np.random.default_rng([*seed, 1])
        if self.shortfall >= 1:
            chosen = torch.from_numpy(subsets(self.variances.numpy(), self.spread**2, count, rng))
            signs = torch.from_numpy(rng.choice([-1.0, 1.0], chosen.shape))
            found[VARIANCE] = [self.same_variance(mode, chosen[i], signs[i]) for i in range(count)]
        return found

    @property
    def shortfall(self) -> float:
        """Variance of all other components over the axis's; below 1 no edit of theirs has its variance."""
        return float(self.variances.sum()) / self.spread**2


def _along(z: Tensor, u: Tensor) -> Tensor:
    return (z @ u)[:, None] * u


def _moved(z: Tensor, kept: Tensor, step: Tensor, mode: Mode, dose: float) -> Tensor:
    """What is added to z: cut -dose kept, only -dose (z - kept), shift dose step; kept is z along a direction."""
    if mode == "shift":
        return (dose * step).expand_as(z)
    return -dose * (kept if mode == "cut" else z - kept)


def rescaled(move: Tensor, length: Tensor) -> Tensor:
    return move * (length / move.norm(dim=-1, keepdim=True).clamp_min(1e-300))


def subsets(variances: np.ndarray, target: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """[draw component] weights: components in random order until their variance reaches the target; the last in part.

    sum_j weight_j^2 variances_j = target: a component scaled by w has w^2 of its variance.
    """
    order = rng.permuted(np.tile(np.arange(len(variances)), (count, 1)), axis=1)
    ordered = variances[order]
    share = ((target - (ordered.cumsum(1) - ordered)) / ordered).clip(0, 1)
    found = np.empty_like(share)
    np.put_along_axis(found, order, np.sqrt(share), 1)
    return found


def readout_direction(subject: Subject, pair: Tensor) -> Tensor:
    """[prompt coordinate] what the last layer's output weights turn into the log-odds of a pair of tokens [prompt 2].

    For each kv head, sum over its query heads of W_O (g * (u_A - u_B)): u rows of the output embedding, g the `gain`.
    Derived here. Raises Unavailable where W_O is not known (`weights`).
    """
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    output = [weights.output_weight(subject, len(subject.blocks) - 1, head).double().cpu() for head in range(heads)]
    rows = subject.model.get_output_embeddings().weight.detach()
    u = rows[pair.to(rows.device)].double().cpu()
    wanted = gain(subject, u.shape[-1]) * (u[:, 0] - u[:, 1])
    each = torch.stack([wanted @ w.T for w in output], 1)
    return each.unflatten(1, (kv_heads, heads // kv_heads)).sum(2).flatten(1)


@torch.no_grad()
def gain(subject: Subject, width: int) -> Tensor:
    """[d_model] the final norm's weight, however the family stores it (Gemma counts from 1); ones where there is none.

    (N(v) - N(-v)) / 2v for v = 1, -1, 1, -1 ... of mean 0 and rms 1: bias and eps drop out. Derived here.
    """
    base, v = subject.model.base_model, 1 - 2.0 * (torch.arange(width) % 2)
    parts = {name: part for owner in (base, getattr(base, "decoder", base)) for name, part in owner.named_children()}
    norm = next((parts[one] for one in ("norm", "final_layer_norm", "final_layernorm", "ln_f") if one in parts), None)
    if norm is None:
        return torch.ones(width, dtype=torch.float64)
    at = v.to(next(norm.parameters()))
    return ((norm(at) - norm(-at)) / 2).double().cpu() * v
