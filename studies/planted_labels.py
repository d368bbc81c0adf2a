"""The label probe on planted truths: `python -m studies.planted_labels` prints the table of docs/probe.md.

Activations are synthetic: one residual site of three layers with 12 dimensions, two prompts a cluster, 20 draws of each
control. `--runs 200` is the number of draws of the label that nothing carries.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from llmgeom import claims
from llmgeom.batch import Batch, Tokens
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import ProbeInput
from llmgeom.probes.labels.probe import LabelProbe
from llmgeom.result import Estimate
from llmgeom.stats.label_scores import coded
from llmgeom.stats.nested_probe import held_out, stratified_folds
from llmgeom.stats.power import Setting, needed_units

DIM = 12


@dataclass(frozen=True)
class World:
    """Synthetic activations of one residual site of three layers, with controls that hold noise alone."""

    n: int = 100
    strength: float = 0.0  # of the label along one direction in layer 2
    confounded: float = 0.0  # of a number that carries the label
    looked_up: float = 0.0  # of the label in the controls too
    per_template: int = 2
    controls: int = 20

    def data(self, seed: int, said: bool = False) -> ProbeInput:
        """What the runner would give; `said` puts the label into the tokens."""
        rng = np.random.default_rng(seed)
        cluster = np.arange(self.n) // self.per_template
        label = rng.permutation(np.arange(self.n) % 2)
        if self.confounded:
            carrier = rng.standard_normal(self.n)
            label = (carrier + 0.3 * rng.standard_normal(self.n) > 0).astype(int)
        else:
            carrier = rng.standard_normal(self.n)
        ids = torch.from_numpy(rng.integers(5, 400, (self.n, 8)))
        if said:
            ids[:, 3] = torch.from_numpy(label + 1)
        batch = Batch(
            Tokens(ids, torch.full((self.n,), 8)),
            tuple(map(str, cluster)),
            {"name": "synthetic"},
            columns={"label": tuple("ab"[i] for i in label), "carrier": tuple(carrier.tolist())},
        )

        def capture(signal: float, leak: float) -> Capture:
            layers = rng.standard_normal((3, self.n, DIM))
            layers[2, :, 0] += signal * (2 * label - 1)
            layers[1, :, 1] += leak * carrier
            tensors = {(Site.RESIDUAL, i): torch.from_numpy(x) for i, x in enumerate(layers)}
            rows = torch.arange(self.n)
            return Capture(batch, rows, torch.full((self.n,), 7), torch.full((self.n,), 8), tensors)

        draws = [capture(self.looked_up, self.confounded) for _ in range(2 * self.controls)]
        return ProbeInput(
            capture(self.strength, self.confounded),
            np.zeros(self.n),
            tuple(draws[: self.controls]),
            tuple(draws[self.controls :]),
            no_context=capture(self.looked_up, self.confounded),
            seed=seed,
        )


def judged(data: ProbeInput, given: tuple[str, ...] = ()) -> str:
    """The word of the claim, alone in its record."""
    result = LabelProbe("label", given=given).measure(data).lowered()
    return claims.judge({"label": result})["label"].estimates[0].verdict


def claim(data: ProbeInput, given: tuple[str, ...] = ()) -> Estimate:
    """The estimate of the claim."""
    (estimate, *_) = LabelProbe("label", given=given).measure(data).estimates
    return estimate


def leak(seed: int) -> tuple[float, float]:
    """AUROC with folds by row and by cluster; activations hold the template, and the label goes by template."""
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(20), 8)
    label = rng.permutation(np.arange(20) % 2)[cluster]
    x = rng.standard_normal((20, 40))[cluster] + 0.1 * rng.standard_normal((160, 40))
    by_row, by_cluster = (
        held_out("binary", coded("binary", label), [lambda: x], stratified_folds("binary", label, of, 0)).value
        for of in (np.arange(160), cluster)
    )
    return by_row, by_cluster


def planned(strength: float, pilots: int) -> int:
    """Prompts that the rule plans from pilots of 100, two a cluster."""
    pilot = [claim(World(strength=strength).data(seed)) for seed in range(pilots)]
    scale = 0.05 / np.mean([one.value - one.centre for one in pilot])  # the declared effect gives noise and spread
    plans = [needed_units(Setting(h.noise * scale, h.null_spread * scale, h.draws, h.noisy)) for h in pilot]
    return 2 * int(np.median(plans))


def rows(runs: int, few: int) -> Iterator[str]:
    """The rows of the table, one at a time."""

    def words(world: World, seed: int, count: int, given: tuple[str, ...] = (), said: bool = False) -> str:
        counted = Counter(judged(world.data(seed + i, said), given) for i in range(count))
        return ", ".join(f"{word} {n}" for word, n in counted.most_common()) + f" of {count}"

    yield f"| nothing | 60 | {words(World(n=60), 1000, runs)} |"
    n, found = planned(0.9, 6), "a direction, at the n that the rule plans from six pilots"
    yield f"| {found} | {n} | {words(World(n=n, strength=0.9), 5000, few)} |"
    confounded, given = World(confounded=2.0, n=160), ("carrier",)
    yield f"| a number that carries the label, named in --given | 160 | {words(confounded, 20, few, given)} |"
    both = [LabelProbe("label", given=given).measure(confounded.data(20 + i)).estimates[:2] for i in range(5)]
    own, left_in = np.mean([[one.value for one in estimates] for estimates in both], axis=0)
    yield f"| its AUROC | 160 | {left_in:.2f} left in, {own:.2f} given it, mean of 5 |"
    yield f"| a token that says the label | 100 | {words(World(strength=1.0), 40, few, said=True)} |"
    yield f"| the label in every control, too | 100 | {words(World(strength=1.0, looked_up=1.0), 60, few)} |"
    by_row, by_cluster = np.mean([leak(seed) for seed in range(few)], axis=0)
    yield f"| templates that leak | 160 | AUROC {by_row:.2f} by row, {by_cluster:.2f} by cluster, mean of {few} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--few", type=int, default=25)
    asked = parser.parse_args()
    print("| planted | prompts | verdicts |\n|---|---|---|", flush=True)
    for row in rows(asked.runs, asked.few):
        print(row, flush=True)


if __name__ == "__main__":
    main()
