"""One direction of a layer's activations: its estimation, its edits, and control edits that match them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.model.intervention import Move, rescaled
from llmgeom.model.weights import norm_gain, output_weight
from llmgeom.probe import Model
from llmgeom.stats import ridge_probe

SIZE, VARIANCE = "same size", "same variance"  # the two kinds of control edit
Mode = Literal["project-out", "keep-only", "steer"]


class NoAxis(UserError):
    """Raised if there is no axis to edit, or no other direction to compare it with."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A direction u of one layer's values x at the final token, estimated on some prompts, in float64.

    With z = (x - mean) / sd per coordinate, a prompt's score is c = z . u. A coordinate that is constant over the
    prompts has sd = 0 here, and z = 0.

    Attributes:
        mean: [coordinate] over the prompts; the true kv heads are concatenated.
        sd: [coordinate] over the prompts.
        u: [coordinate] unit vector.
        spread: standard deviation of c over the prompts.
        others: [component coordinate] orthonormal principal components of z - c u. They are orthogonal to u; with u
            they span all prompts.
        variances: [component] variance of z along `others`.
        donor: [row coordinate] z of another prompt, the origin of edits; None for the mean. With donors, projecting out
            replaces the component of each prompt by that of its donor.
    """

    mean: Tensor
    sd: Tensor
    u: Tensor
    spread: float
    others: Tensor
    variances: Tensor
    donor: Tensor | None = None

    @classmethod
    def estimate(cls, x: np.ndarray, entropy: np.ndarray, clusters: Sequence[str], direction: str, seed: int) -> Axis:
        """Estimate the axis from values x [prompt coordinate] and entropies [prompt].

        Args:
            direction: "pc1", the first principal component of z, signed so that c does not fall with entropy; or
                "ridge", the weights of a ridge regression of entropy on z, scaled to length 1.
            seed: fixes the folds of the ridge regression.

        Raises:
            NoAxis: no coordinate varies, or the ridge regression finds no weight.
        """
        mean, sd, z = _standardised(x)
        if direction == "pc1":
            u = np.linalg.svd(z, full_matrices=False)[2][0]
            u = u * (np.sign(z @ u @ (entropy - entropy.mean())) or 1)
        else:
            u = ridge_probe.fit(z, entropy, ridge_probe.folds(clusters, seed))[0]
            if not u.any():
                raise NoAxis("entropy has no ridge weight on the values: there is no axis to edit")
            u = u / np.linalg.norm(u)
        return cls._of(mean, sd, z, u)

    @classmethod
    def along(cls, x: np.ndarray, w: np.ndarray) -> Axis:
        """The axis whose score orders prompts as w . x does, w [coordinate]: u = sd w / |sd w|, since x = mean + sd z.

        Raises:
            UserError: x and w have different coordinates. NoAxis: x does not vary along w.
        """
        if x.shape[1] != len(w):
            raise UserError(f"the direction has {len(w)} coordinates and the activations {x.shape[1]}: wrong model")
        mean, sd, z = _standardised(x)
        if not (length := float(np.linalg.norm(sd * w))):
            raise NoAxis(f"no activation of {len(x)} prompts varies along the direction: there is no axis to edit")
        return cls._of(mean, sd, z, sd * w / length)

    @classmethod
    def exchanged(cls, x: np.ndarray, other: np.ndarray, u: np.ndarray) -> Axis:
        """The axis of a unit vector u in unscaled coordinates, with rows of `other` as donors of rows of x.

        Projecting out then adds u u.(other - x). Mean and components are those of x [row coordinate].
        """
        mean, one = x.mean(0), np.ones(x.shape[1])
        return replace(cls._of(mean, one, x - mean, u), donor=torch.from_numpy(other - mean))

    @classmethod
    def _of(cls, mean: np.ndarray, sd: np.ndarray, z: np.ndarray, u: np.ndarray) -> Axis:
        """The axis of a unit vector u in z [prompt coordinate]."""
        _, size, others = np.linalg.svd(z - np.outer(z @ u, u), full_matrices=False)
        nonzero, spread = size > 1e-8 * np.linalg.norm(z), float(np.sqrt(np.square(z @ u).mean()))

        def tensor(a: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(a))

        variances = size[nonzero] ** 2 / len(z)
        return cls(tensor(mean), tensor(sd), tensor(u), spread, tensor(others[nonzero]), tensor(variances))

    @property
    def share(self) -> float:
        """Fraction of the variance of z that lies along u."""
        return self.spread**2 / float(self.spread**2 + self.variances.sum())

    @property
    def variance_left(self) -> float:
        """Variance of all other components over the axis's; below 1, no edit of them reaches the axis's variance."""
        return float(self.variances.sum()) / self.spread**2 if self.spread else np.inf

    def z(self, x: Tensor, row: Tensor | None = None) -> Tensor:
        """Standardised values; given rows, minus those of their donors, if any."""
        z = torch.where(self.sd > 0, (x - self.mean) / self.sd.clamp_min(1e-300), 0.0)
        return z if row is None or self.donor is None else z - self.donor[row]

    def edit(self, mode: Mode) -> Move:
        """The edit of the axis itself at dose 1; its displacement grows with the dose (`Intervention.dose`).

        project-out adds -sd (c u); keep-only adds -sd (z - c u); steer adds spread sd u.
        """
        return self._move(mode, lambda z: _along(z, self.u), self.spread * self.u)

    def _move(self, mode: Mode, part: Callable[[Tensor], Tensor], shift: Tensor) -> Move:
        """An edit of some directions, in z: `part` gives the component along them, `shift` is what steering adds."""

        def move(x: Tensor, row: Tensor) -> Tensor:
            z = self.z(x, row)
            if mode == "steer":
                return self.sd * shift.expand_as(z)
            return self.sd * (-part(z) if mode == "project-out" else part(z) - z)

        return move

    def controls(self, mode: Mode, count: int, seed: Sequence[int]) -> dict[str, list[Move]]:
        """`count` control edits of each kind at dose 1, fixed by the seed; the second kind only if it exists.

        SIZE: a random direction in the span of the others, with every displacement rescaled to the axis's Euclidean
        length in x. VARIANCE: other components, weighted so that the sum of weight^2 times variance is that of c.

        Raises NoAxis: the activations vary along the axis alone.
        """
        if not len(self.others):
            raise NoAxis("the activations vary along the axis alone: there is no other direction to compare it with")
        own, rng = self.edit(mode), np.random.default_rng([*seed, 0])
        r = torch.from_numpy(rng.standard_normal((count, len(self.others)))) @ self.others
        r, sign = r / r.norm(dim=1, keepdim=True), rng.choice([-1.0, 1.0], count)

        def same_size(direction: Tensor, sign: float) -> Move:
            other = self._move(mode, lambda z: _along(z, direction), sign * direction)
            return lambda x, row: rescaled(other(x, row), own(x, row))

        def same_variance(weight: Tensor, sign: Tensor) -> Move:
            basis = weight[:, None] * self.others
            return self._move(mode, lambda z: z @ self.others.T @ basis, (sign * self.variances.sqrt()) @ basis)

        draws = {SIZE: [same_size(r[i], float(sign[i])) for i in range(count)]}
        rng = np.random.default_rng([*seed, 1])
        if self.variance_left >= 1:
            weights = torch.from_numpy(matched_weights(self.variances.numpy(), self.spread**2, count, rng))
            signs = torch.from_numpy(rng.choice([-1.0, 1.0], weights.shape))
            draws[VARIANCE] = [same_variance(weights[i], signs[i]) for i in range(count)]
        return draws


def _standardised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, sd (0 where constant) and z of rows of x. Raises NoAxis if all coordinates are constant."""
    mean, sd = x.mean(0), np.where(x.max(0) == x.min(0), 0.0, x.std(0))
    if not sd.any():
        raise NoAxis(f"all {len(sd)} coordinates are constant over {len(x)} prompts: there is no axis to edit")
    return mean, sd, (x - mean) * np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)


def _along(z: Tensor, u: Tensor) -> Tensor:
    return (z @ u)[:, None] * u


def matched_weights(variances: np.ndarray, target: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """[draw component] weights with sum_j weight_j^2 variances_j = target.

    Components are added in random order until their variance reaches the target; the last one is added in part. A
    component scaled by w has w^2 of its variance.
    """
    order = rng.permuted(np.tile(np.arange(len(variances)), (count, 1)), axis=1)
    ordered = variances[order]
    share = ((target - (ordered.cumsum(1) - ordered)) / ordered).clip(0, 1)
    weights = np.empty_like(share)
    np.put_along_axis(weights, order, np.sqrt(share), 1)
    return weights


# ---- the direction that the output reads -----------------------------------------------------------------------------


def readout_direction(subject: Model, pair: Tensor) -> Tensor:
    """Direction d of the last layer's values that raises the log-odds of one token over another.

    For each kv head, d = sum over its query heads of W_O (g * (u_A - u_B)), with u the rows of the output embedding and
    g the gain of the final norm. Derived here; the last MLP and norms after attention are left out.

    Args:
        pair: [prompt 2] token ids A and B.

    Returns:
        [prompt coordinate] float64, kv heads concatenated.

    Raises:
        Unavailable: the layout of W_O is unknown (`model.weights`), or the module between the last layer and the output
            embedding is unknown or not a norm.
    """
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    output = [output_weight(subject, len(subject.blocks) - 1, head).double().cpu() for head in range(heads)]
    rows = subject.model.get_output_embeddings().weight.detach()
    u = rows[pair.to(rows.device)].double().cpu()
    target = norm_gain(subject.unembed.norm, subject.facts["d_model"]) * (u[:, 0] - u[:, 1])
    by_head = torch.stack([target @ w.T for w in output], 1)
    return by_head.unflatten(1, (kv_heads, heads // kv_heads)).sum(2).flatten(1)
