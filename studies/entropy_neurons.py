"""Does the entropy axis act through the unembedding's null space and the final norm, as entropy neurons do?

`python -m studies.entropy_neurons MODEL --out FOLDER` writes FOLDER/metrics.json and prints it.

Stolfo et al. (2024, "Confidence regulation neurons", arXiv 2406.16254) found last-layer neurons that write where the
unembedding reads almost nothing: they change no logit directly, only the scale of the final norm, and with it entropy.
An entropy axis of that kind could be readable and yet, with the scale frozen, without use: a rival reading of Paper
III's "readable, not used". For a change d of the last residual x, with W the unembedding times the norm's gain:

    null share   |N d|^2 / |d|^2, N the 5 % of directions that W (less its mean over tokens) reads least; a random
                 direction has .05
    free         entropy of softmax(W (x + d) / rms(x + d)) less that of x, bits
    frozen       the same with rms(x): what the change does to the logits alone
    by the norm  1 - mean |frozen| / mean |free|

Axes are estimated on one half of the prompts and projected out on the other, in the last layer's values (as `llmgeom
ablate` does, at the last token, through the model's own MLP) and in the last residual. Neurons of the last MLP are
replaced by their mean. Random directions are as long as each change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import llmgeom
from llmgeom.batch import Batch
from llmgeom.errors import Unavailable
from llmgeom.model.model import Model
from llmgeom.model.weights import norm_gain
from llmgeom.probe import Site
from llmgeom.probes.interventions.axis import Axis
from llmgeom.probes.shared.rows import last_layer
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.stats.resampling import mean_intervals
from llmgeom.stats.tests import correlation_interval, spearman

SHARE = 0.05  # of the directions, which are called the near-null space


@torch.no_grad()
def near_null(weight: Tensor, gain: Tensor, share: float = SHARE) -> tuple[np.ndarray, Tensor]:
    """Singular values of an unembedding [token d] times the norm's gain, less its mean over tokens (which softmax does
    not see), smallest first; and the orthonormal directions [k d] of the smallest, k the share of d."""
    mean = weight.double().mean(0)
    square = sum((part.double() - mean).T @ (part.double() - mean) for part in weight.split(16384))
    values, vectors = torch.linalg.eigh(square * torch.outer(gain, gain))
    return values.clamp_min(0).sqrt().numpy(), vectors[:, : max(1, round(share * len(gain)))].T


def null_share(change: Tensor, null: Tensor) -> float:
    """The share of the squared length of changes [row d] that lies along `null`."""
    return float((change.double() @ null.T).square().sum() / change.double().square().sum())


@torch.no_grad()
def shifted(subject: Model, x: Tensor, change: Tensor, before: Tensor | None = None) -> dict[str, np.ndarray]:
    """Bits by row: the change of entropy `free` and `frozen`, and `kl`, KL(before || after), of the free one.

    Args:
        x: Last residuals [row d]. change: What is added to them.
        before: Log-probabilities of x, where they are known.
    """
    unembed, size = subject.unembed, lambda x: x.float().square().mean(-1, keepdim=True).sqrt()
    before = unembed(x) if before is None else before
    states, scale = unembed.norm((x + change)[:, None]), size(x + change) / size(x)
    logits, one = unembed.logits(states)[:, 0].float(), states[:1]
    linear = torch.allclose(unembed.logits(2 * one)[:, 0].float(), 2 * logits[:1], rtol=1e-3, atol=1e-3)  # no soft-cap
    kept = logits * scale if linear else unembed.logits(states * scale[:, None])[:, 0].float()

    def entropy(log_probs: Tensor) -> Tensor:
        return -(log_probs.exp() * log_probs).sum(-1)

    after = {"free": logits.log_softmax(-1), "frozen": kept.log_softmax(-1)}
    found = {name: entropy(log_probs) - entropy(before) for name, log_probs in after.items()}
    found["kl"] = (before.exp() * (before - after["free"])).sum(-1)
    return {name: rows.double().numpy() / np.log(2) for name, rows in found.items()}


def random_changes(change: Tensor, seed: int) -> Tensor:
    """One random direction, in each row as long as `change` [row d]."""
    direction = torch.randn(change.shape[1], generator=torch.Generator().manual_seed(seed))
    return change.norm(dim=1, keepdim=True) * direction / direction.norm()


def axis_changes(subject: Model, seen: Any, batch: Batch, first: np.ndarray) -> dict[str, tuple[Tensor, np.ndarray]]:
    """By axis: how projecting it out changes the last residual of the other half's prompts, and its score of them.

    `first` [prompt] bool is the half that the axis is estimated on.
    """
    entropy, clusters = seen.entropy.double().numpy(), np.array(batch.cluster)
    places, residual = np.flatnonzero(~first), seen.layers(Site.RESIDUAL)[-1].float()
    rest, found = batch.take(places.tolist()), {}
    for site in (Site.VALUE, Site.RESIDUAL):
        x = last_layer(seen, site) if site is Site.VALUE else residual.double().numpy()
        for direction in ("pc1", "ridge"):
            axis = Axis.estimate(x[first], entropy[first], clusters[first], direction, 0)
            move, here = axis.edit("project-out"), torch.from_numpy(x[~first])
            if site is Site.RESIDUAL:
                change = move(here, torch.arange(len(here))).float()
            else:
                edited = subject.edit("value", _moved(move), layers=-1, positions="query")
                after = edited.capture(rest, (Site.RESIDUAL,)).layers(Site.RESIDUAL)[-1].float()
                change = after - residual[places]
            found[f"{site} {direction}"] = change, (axis.z(here) @ axis.u).numpy()
    return found


def _moved(move: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def edit(x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).flatten(1).double()
        return (rows + move(rows, torch.arange(len(rows)))).view(x.shape).to(x)

    return edit


@torch.no_grad()
def neurons(subject: Model, seen: Any) -> tuple[Tensor, Tensor, nn.Module]:
    """Of the last gated MLP: activations [row neuron], what each neuron writes [neuron d], and the module or identity
    that takes their sum to the residual stream. Raises Unavailable where the layer's own code gives another sum."""
    block = subject.blocks[-1]
    written = seen.layers(Site.MLP_OUT)[-1].float()
    middle = seen.layers(Site.RESIDUAL)[-1].float() - written
    mlp, kept = getattr(block.layer, "mlp", None), []
    if (down := getattr(mlp, "down_proj", None)) is not None:
        post = block.mlp_writer if getattr(block.mlp_writer, "weight", down.weight).ndim == 1 else nn.Identity()
        handle = down.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0][:, 0].clone()))
        try:
            for norm in [part for name, part in block.layer.named_children() if "norm" in name]:
                kept.clear()
                again = post(mlp(norm(middle[:, None])))[:, 0]
                if torch.allclose(again, written, rtol=1e-3, atol=1e-3 * float(written.abs().max())):
                    return kept[0], down.weight.detach().T, post
        finally:
            handle.remove()
    raise Unavailable(f"{subject.name}: its last layer has no gated MLP that this study can take apart")


def neuron_changes(activations: Tensor, writes: Tensor, post: Callable[[Tensor], Tensor], one: int) -> Tensor:
    """How the residual changes if one neuron has its mean over the rows, [row d]."""
    whole, moved = activations @ writes, activations[:, one] - activations[:, one].mean()
    return post(whole - moved[:, None] * writes[one]) - post(whole)


def measure(subject: Model, n: int = 150, draws: int = 19, few: int = 16, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Every number by name, as `docs/results.py` stores it.

    Args:
        subject: A model with an RMS norm before its unembedding.
        n: Prompts; half of them are measured.
        draws: Random directions beside each axis.
        few: Neurons of the largest null share that are measured, and twice as many others.
        seed: Fixes prompts and draws.
    """
    if getattr(subject.unembed.norm, "bias", None) is not None:
        raise Unavailable(f"{subject.name}: its final norm has a bias; this study reads RMS norms")
    pool = Domain("mixed").sample(max(2 * n, 40), seed)
    batch = stratify(pool, subject.entropy(pool), n, seed=seed)
    seen = subject.capture(batch, (Site.VALUE, Site.RESIDUAL, Site.MLP_OUT, Site.ENTROPY), layers=-1)
    x, weight = seen.layers(Site.RESIDUAL)[-1].float(), subject.unembed.head.weight.detach().float()
    values, null = near_null(weight, norm_gain(subject.unembed.norm, x.shape[1]))
    order = np.random.default_rng(seed).permutation(sorted(set(batch.cluster)))
    first = np.isin(np.array(batch.cluster), order[: len(order) // 2])
    clusters = np.array(batch.cluster)[~first]
    middle = float(np.median(values))
    found: dict[str, dict[str, Any]] = {
        "least singular value over the median": {"value": float(values[0]) / middle, "n": len(values)},
        "singular value at 5 % over the median": {"value": float(values[len(null)]) / middle, "n": len(values)},
    }
    here = x[~first]
    before, entropy = subject.unembed(here), seen.entropy.double().numpy()[~first]

    def effects(changes: list[Tensor]) -> dict[str, np.ndarray]:
        """[change row] of each effect, bits, without sign."""
        every = [shifted(subject, here, change, before) for change in changes]
        return {kind: np.abs([one[kind] for one in every]) for kind in every[0]}

    for name, (change, score) in axis_changes(subject, seen, batch, first).items():
        drawn = [random_changes(change, i) for i in range(draws)]
        own, random = effects([change]), effects(drawn)
        shares = [null_share(one, null) for one in (change, *drawn)]
        found[f"{name}: null share"] = _beside(shares[0], np.array(shares[1:]), len(here))
        rho, ends = abs(spearman(score, entropy)), correlation_interval(score, entropy, clusters)
        found[f"{name}: |rho| with entropy"] = {"value": rho, "low": ends.low, "high": ends.high, "n": len(here)}
        for kind in own:
            span = mean_intervals(own[kind], clusters)[0]
            found[f"{name}: {kind}"] = _beside(own[kind].mean(), random[kind].mean(1), len(here), span)
    activations, writes, post = neurons(subject, seen)
    shares = np.array([null_share(write[None], null) for write in writes * norm_gain(post, x.shape[1]).float()])
    loud = np.flatnonzero(writes.norm(dim=1).numpy() >= float(writes.norm(dim=1).median()))
    ranked = loud[np.argsort(-shares[loud])]
    found["null share of a neuron, largest"] = {"value": float(shares[ranked[0]]), "n": len(loud)}
    found["null share of a neuron, median"] = {"value": float(np.median(shares[loud])), "n": len(loud)}
    others = np.random.default_rng(seed).choice(ranked[few:], 2 * few, replace=False)
    for name, some in {"neurons of the largest null share": ranked[:few], "other neurons": others}.items():
        changes = [neuron_changes(activations, writes, post, int(one))[~first] for one in some]
        own, random = effects(changes), effects([random_changes(change, i) for i, change in enumerate(changes)])
        for of in (own, random):
            of["by the norm"] = (1 - of["frozen"].mean(1) / of["free"].mean(1))[:, None]
        for kind in ("free", "frozen", "by the norm"):
            each = own[kind].mean(1)
            span = mean_intervals(each[None])[0]
            found[f"{name}: {kind}"] = _beside(each.mean(), random[kind].mean(1), len(some), span)
    return found


def _beside(value: float, random: np.ndarray, n: int, span: np.ndarray | None = None) -> dict[str, Any]:
    """One number with n, its interval where it has one, and the range of its random directions."""
    ends = {} if span is None else {"low": float(span[0]), "high": float(span[1])}
    control = {"control_low": float(random.min()), "control_high": float(random.max())}
    middle = {"control_centre": float(np.median(random)), "control": f"random directions ({len(random)} draws)"}
    return {"value": float(value), **ends, "n": n, **control, **middle}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--out", default="runs/entropy-neurons")
    for name, usual in (("n", 150), ("draws", 19), ("neurons", 16), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args(arguments)
    found = measure(llmgeom.load(asked.model), asked.n, asked.draws, asked.neurons, asked.seed)
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    Path(asked.out, "metrics.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, one in found.items():
        span = f" [{one['low']:.3f}, {one['high']:.3f}]" if "low" in one else ""
        random = f"; random {one['control_low']:.3f} to {one['control_high']:.3f}" if "control" in one else ""
        print(f"{name}: {one['value']:.3f}{span}{random}")


if __name__ == "__main__":
    main()
