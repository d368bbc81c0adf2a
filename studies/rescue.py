"""Rescue transplant: does a state from within the horizon of the loss repair an answer past it?

`python -m studies.rescue --out FOLDER` trains a tunnel on `recurrence`, whose loss covers x_1 ... x_5 of x_0 ...
x_15, and writes FOLDER/metrics.json. Past the horizon its answers fail. One position's residual stream there becomes
that of a position within the horizon whose rule, last numbers and answer are the same (the code that accompanies Paper
I, construction boundary, July 2026). If the answer comes back, the later blocks still apply the rule, and what fails
lies below.

Donors are the same orbit, begun later, so that x_t stands at the last position with a loss. At the input of block l:

    whole       the donor's residual stream
    update      what the donor's blocks below wrote, on the position's own embedding
    mismatched  a donor of another rule with another answer: does the answer become the donor's?
    random      a random direction, as long as the donor's less the position's own
    embedding   `whole` at block 0: the donor's token and position embedding, nothing else
    lens        the donor's answer by the logit lens at that place: a state that holds the answer already needs no block
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Tokens
from llmgeom.model.intervention import Intervention, Runner, add, rescaled
from llmgeom.model.model import Model
from llmgeom.probe import Site
from llmgeom.stats.resampling import mean_intervals
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from llmgeom.wind_tunnels.worlds.recurrence import Recurrence

TRAINING = Training(
    "recurrence:modulus=5,horizon=5,program=0.9", "gpt2", width=64, layers=4, heads=4, steps=1000, lr="2e-3"
)
PUBLISHED = {0: 0.19, 1: 0.80, 2: 0.97, 3: 1.00}  # accuracy before, and with `whole` at blocks 1 to 3; update .79
N = 400


def orbits(world: Recurrence, n: int, seed: int) -> Tensor:
    """[sequence 2 + steps]: a, b, then numbers of rules that move (a is not 0, x_1 is not x_0)."""
    generator, p, kept = torch.Generator().manual_seed(seed), world.modulus, []
    while sum(map(len, kept)) < n:
        a, b, x = torch.randint(p, (3, n), generator=generator)
        numbers = [x]
        for _ in range(world.steps - 1):
            numbers.append((a * numbers[-1] + b) % p)
        drawn = torch.stack([a, b, *numbers], 1)
        kept.append(drawn[(a != 0) & (numbers[1] != x)])
    return torch.cat(kept)[:n]


def at_one(numbers: Tensor, place: Tensor, rule: Tensor) -> Batch:
    """Sequences [sequence position], each read at one place; a cluster is a rule."""
    query = torch.arange(numbers.shape[1]) == place[:, None]
    clusters = tuple(f"{a}x+{b}" for a, b in rule.tolist())
    lengths = torch.full((len(numbers),), numbers.shape[1])
    return Batch(Tokens(numbers, lengths), clusters, {"kind": "task", "name": "orbits"}, query=query)


def measure(subject: Model, world: Recurrence, n: int = N, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Accuracy of each arm by block, with 95 % intervals over rules."""
    drawn = orbits(world, n, seed)
    rule, numbers = drawn[:, :2], drawn[:, 2:]
    last, generator = world.horizon - 1, torch.Generator().manual_seed(seed + 1)
    place = torch.randint(world.horizon, world.steps - 1, (n,), generator=generator)
    answer = numbers.gather(1, place[:, None] + 1)[:, 0]
    begun = (place[:, None] - last + torch.arange(world.steps - 1)).clamp(max=world.steps - 1)
    shifted = numbers.gather(1, begun)  # later positions may repeat the end: nothing at `last` reads them
    here = at_one(numbers[:, :-1], place, rule)
    donors = at_one(shifted, torch.full((n,), last), rule)
    other = torch.stack([_other(i, rule, answer, generator) for i in range(n)])
    sites = (Site.RESIDUAL, Site.LOG_PROBS)
    own, donor = (subject.capture(batch, sites) for batch in (here, donors))
    streams = [own.layers(Site.RESIDUAL), donor.layers(Site.RESIDUAL)]

    def right(log_probs: Tensor, wanted: Tensor) -> np.ndarray:
        return (log_probs.argmax(-1) == wanted).double().numpy()

    runner = Runner(
        subject,
        here,
        here.query,
        lambda _, edited: {"own": right(edited[0], answer), "donor's": right(edited[0], answer[other])},
        compared=False,
    )
    edits = []
    for block in range(len(subject.blocks)):
        mine, theirs = (stream[block].double() for stream in streams)
        embedded, embedding = (stream[0].double() for stream in streams)
        step = theirs - mine
        noise = torch.randn(step.shape, generator=generator, dtype=torch.float64)
        steps = {
            "whole": step,
            "mismatched": theirs[other] - mine,
            "random": rescaled(noise, step),
        }
        if block:
            steps["update"] = (embedded + theirs - embedding) - mine
        edits += [Intervention(f"{name}, block {block}", {("residual", block): add(x)}) for name, x in steps.items()]
    effects = runner.run(edits)
    found = {"past the horizon, no edit": right(own.layers(Site.LOG_PROBS)[0], answer),
             "donors, within the horizon": right(donor.layers(Site.LOG_PROBS)[0], answer)}  # fmt: skip
    for block, stream in enumerate(streams[1][: len(subject.blocks)]):
        found[f"lens of the donor, block {block}"] = right(subject.unembed(stream), answer)
    for edit in edits:
        found[edit.name] = effects[f"{edit.name}/own"][0]
        if edit.name.startswith("mismatched"):
            found[f"{edit.name}: the donor's answer"] = effects[f"{edit.name}/donor's"][0]
    clusters = np.array(here.cluster)
    return {name: _mean(values, clusters) for name, values in found.items()}


def _other(i: int, rule: Tensor, answer: Tensor, generator: torch.Generator) -> Tensor:
    """A sequence of another rule with another answer."""
    fits = ((rule != rule[i]).any(1) & (answer != answer[i])).nonzero()[:, 0]
    return fits[torch.randint(len(fits), (), generator=generator)]


def _mean(values: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    low, high = mean_intervals(values[None], clusters)[0]
    ends = {"low": max(0.0, float(low)), "high": min(1.0, float(high))}
    return {"value": float(values.mean()), **ends, "n": len(values), "clusters": len(set(clusters.tolist()))}


def main(arguments: Sequence[str] | None = None, training: Training = TRAINING, n: int = N) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/rescue")
    out = Path(parser.parse_args(arguments).out)
    train(training, out / "tunnel", device="cpu")
    world = load_world(training.task)
    assert isinstance(world, Recurrence)
    found = measure(Model.load(str(out / "tunnel")), world, n)
    (out / "metrics.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, one in found.items():
        print(f"{name}: {one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}]")


if __name__ == "__main__":
    main()
