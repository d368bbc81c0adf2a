"""What three papers print, next to what is measured here: tunnels (I), the sticky chain (II), a language model (III).

    python -m studies.reproduce paper1 [--quick] [--out FOLDER]    an hour on two cores; --quick: five minutes
    python -m studies.reproduce paper2 [--quick] [--out FOLDER]    twenty minutes; a stopped run continues
    python -m studies.reproduce paper3 [--quick] [--model NAME]    the published definition and ours, side by side

docs/findings.md says what came out, and what the papers contradict in themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import llmgeom
from llmgeom import wind_tunnels
from llmgeom.batch import Batch, Text
from llmgeom.commands import ablate, evidence
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.prompts import text
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.run import Run, run_probes
from llmgeom.stats.resampling import mean_intervals
from llmgeom.wind_tunnels.training_config import Training
from studies import sticky_chain
from studies.published import focus, keys, sula, values
from studies.trainings import at_posterior, finished, seeded

SEEDS, GRADED = 3, 1000  # trainings of a cell; sequences graded
ARCHITECTURES = ("gpt2", "mamba2", "lstm", "mlp", "meanpool", "flat")
CELLS = {task: Training(task, steps=steps, parameters=100_000, lr="auto", snapshots=2)
         for task, steps in {"bijection": 1000, "hmm": 2000, "recall": 2000}.items()}  # fmt: skip
QUICK = {
    "bijection": Training("bijection:vocab=5,pairs=4", width=32, layers=1, steps=400, lr="1e-2", snapshots=2),
    "hmm": Training("hmm:states=2,symbols=2,steps=8", width=32, steps=500, lr="5e-3", snapshots=2),
    "recall": Training("recall:pairs=2,queries=2,keys=4,values=4", width=32, steps=300, lr="5e-3", snapshots=2),
}


def interval(sample: Any, log: bool = False) -> str:
    """Mean and Student's 95 % interval over seeds, of the logarithm for ratios."""
    x = np.asarray(sample, float)
    ends = mean_intervals(np.log(x)[None] if log else x[None])[0]
    mean, low, high = (np.exp if log else np.asarray)([np.log(x).mean() if log else x.mean(), *ends])
    return f"{mean:.3g} [{low:.2g}, {high:.2g}]"


# ---- Paper I ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """A sentence of Paper I as a number of the grades of one cell, with what was printed or its weak form.

    At small scale an absolute error means nothing: `kl`, `mae_mean` and `accuracy` are taken over a uniform answer's.
    """

    task: str
    arch: str
    number: str
    sentence: str
    bound: str


PRINTED = (
    Printed("bijection", "gpt2", "mae_mean", "a transformer infers", "below .1 (.0003 to .015 printed)"),
    Printed("bijection", "lstm", "mae_mean", "an LSTM is inferior", "below .1: it is not"),
    Printed("bijection", "mamba2", "mae_mean", "Mamba infers", "below .1"),
    Printed("bijection", "mlp", "mae_mean", "an MLP has 1.85 bits", "1.57 to 1.77; its result file has 1"),
    Printed("hmm", "lstm", "mae_mean", "an LSTM cannot transport", ".9 to 1.1"),
    Printed("hmm", "gpt2", "past", "smooth past the horizon", "below 2, times the KL within"),
    Printed("recall", "lstm", "accuracy", "an LSTM cannot bind", ".075 to .3 of the answers right"),
)


def paper1(out: Path, quick: bool) -> Iterator[str]:
    """Train every architecture on every task at equal size, or the cells that a sentence names with `quick`."""
    recipes = QUICK if quick else CELLS
    names = {f"{one.task}/{one.arch}" for one in PRINTED}
    names |= set() if quick else {f"{task}/{arch}" for task in recipes for arch in ARCHITECTURES}
    cells = {name: replace(recipes[name.split("/")[0]], arch=name.split("/")[1]) for name in sorted(names)}
    grades = seeded(cells, SEEDS, out, GRADED)
    of = {name: finished(grades, [f"{name}/seed{seed}" for seed in range(SEEDS)
                                  if f"{name}/seed{seed}" in grades]) for name in cells}  # fmt: skip
    yield f"{'cell':20} {'KL to the posterior, bits':28} reached (n = {SEEDS} trainings)"
    for name, trainings in of.items():
        if trainings:
            yield f"{name:20} {interval([one['kl'] for one in trainings]):28} {sum(map(at_posterior, trainings))}"
        else:
            yield f"{name:20} refused: {grades[f'{name}/seed0']['refused']}"
    yield f"\n{'sentence':44} {'here':24} printed, or its weak form"
    for one in PRINTED:
        if trainings := of[f"{one.task}/{one.arch}"]:
            number = _printed(one, trainings, out, cells[f"{one.task}/{one.arch}"])
            yield f"{one.task + ': ' + one.sentence:44} {number:24} {one.bound}"


def _printed(one: Printed, trainings: list[Mapping[str, Any]], out: Path, cell: Training) -> str:
    if one.number == "accuracy":
        return interval([of["accuracy"] for of in trainings])
    if one.number == "mae_mean":
        return interval([of["mae_mean"] / of["mae_mean_uniform"] for of in trainings], log=True)
    trained: Any = wind_tunnels.load_world(cell.task)  # a hidden Markov model, whose number of steps is a field
    longer, within = replace(trained, steps=round(2.5 * trained.steps)), trained.trained_queries
    ratios = []
    for seed in range(len(trainings)):
        by_query = grade(Model.load(str(out / one.task / one.arch / f"seed{seed}")), longer, GRADED).own.kl.mean(0)
        ratios.append(by_query[within:].mean() / by_query[:within].mean())
    return interval(ratios, log=True)


# ---- Paper II ------------------------------------------------------------------------------------------


def paper2(out: Path, quick: bool) -> Iterator[str]:
    """The schedules of the sticky chain, and how much faster the published one is: 2.3 times was printed."""
    methods, _, _ = sticky_chain.compare_methods(sticky_chain.SHAPES[quick], out)
    steps = {method.name: np.array(method.steps) for method in methods}
    yield from sticky_chain.lines(methods)
    for over in ("plain descent", "all, equal sum"):
        ratio = interval(steps[over] / steps["V, ten times"], log=True)
        yield f"W_V at ten times the rate against {over}: {ratio} times as fast (n = {len(methods[0].steps)} seeds)"


# ---- Paper III ------------------------------------------------------------------------------------------

Place = tuple[str, str, str]  # run, probe, metric
# What was printed, and the two places where it is measured: by the published definition, and by ours.
ROWS: tuple[tuple[str, Place, Place], ...] = (
    ("PC1 share, mixed: 37 to 80 %", ("mixed", "published_values", "PC1 share, not standardised"),
     ("mixed", "value_manifold", "PC1 share")),
    ("PC1+PC2 share, math: 64 to 100 %", ("math", "published_values", "PC1+PC2 share, not standardised"),
     ("math", "value_manifold", "PC1+PC2 share")),
    ("rho of PC1 and entropy, mixed: .32 to .59", ("mixed", "published_values", "|Pearson| of PC1 and entropy"),
     ("mixed", "value_manifold", "|rho| of PC1 and entropy")),
    ("|cos| of columns of W_K: .03 to .18", ("mixed", "published_keys", "columns of W_K, early layers"),
     ("mixed", "key_orthogonality", "columns of W_K")),
    ("keys by the code: .029 to .031", ("mixed", "published_keys", "token embeddings, no layer"),
     ("mixed", "key_orthogonality", "token keys, by head")),
    ("focusing: 31 to 86 %", ("mixed", "published_focus", "focusing, final token"),
     ("mixed", "attention_focus", "focusing without the first token")),
    ("SULA error of label entropy: .31 to .44 bits",
     ("sula-published", "published_sula", "error of H label, latent class, k = 0 included"),
     ("sula", "process", "weight of evidence")),
    ("SULA |rho| of PC1 and entropy: .65 to .80",
     ("sula-published", "published_sula", "|rho| of PC1 and latent entropy, k = 0 included"),
     ("sula", "sula_belief", "log odds along the labels, last layer")),
    ("axis cut: 0 after it",
     ("sula-published", "published_sula", "correlation of the axis and H label"),
     ("ablate", "ablation_pc1", "KL of the edit, against equal edits")),
)  # fmt: skip
PUBLISHED = {"published_focus": focus, "published_keys": keys, "published_values": values}


def runs(model: str, quick: bool) -> dict[str, Record]:
    """Scans of mixed and math prompts, by our definitions and by the published ones; evidence; an edit of the axis."""
    n, limit, controls = (30, 150, 39) if quick else (75, None, 199)
    subject = llmgeom.load(model)
    found: dict[str, Record] = {}
    for domain in ("mixed", "math"):
        scan = llmgeom.scan(subject, domain, n=n, limit=limit, nulls=8)
        same = Batch(Text(tuple(scan.prompts["text"])), tuple(scan.prompts["template"]), {"name": domain})
        own = run_probes(subject, same, PUBLISHED, controls=8)
        found[domain] = replace(scan, results={**scan.results, **own.results})
    asked = evidence.RunConfig(model=model, n=n, nulls=8)
    world = wind_tunnels.load_world("two-point", text=True)
    found["sula"] = Run(evidence.question(subject, world, asked)).record()
    main, remap = (text.sample(world, n, 0, subject.tokenizer, condition=condition) for condition in ("", "remap"))
    found["sula-published"] = run_probes(subject, main, {"published_sula": sula}, controls=8, samples={"remap": remap})
    edit = ablate.RunConfig(model=model, n=n, limit=limit, controls=controls, directions=("pc1",))
    found["ablate"] = Run(ablate.prepare(edit).ask(subject)).record()
    return found


def paper3(model: str, quick: bool) -> Iterator[str]:
    """Each printed number by the definition of the paper and by ours, each with its interval and its control."""
    every = runs(model, quick)
    yield f"{model}: {'quantity, as printed':46} {'by their definition; by ours':30}"
    for printed, theirs, ours in ROWS:
        yield f"{printed}"
        yield from (f"    {place[2]}: {_number(every, place)}" for place in (theirs, ours))


def _number(every: Mapping[str, Record], place: Place) -> str:
    run, probe, metric = place
    measured = every[run].results.get(probe)
    estimates: dict[str, Estimate] = {h.name: h for h in measured.estimates} if measured else {}
    if metric not in estimates:
        return f"not measured ({every[run].unmeasured.get(probe, 'the run has no such metric')})"
    h = estimates[metric]
    low, high = h.control_range
    control = f"; {h.null}: {low:.2g} to {high:.2g}" if h.null else ""
    return f"{h.value:.3g} [{h.low:.2g}, {h.high:.2g}] {h.unit}, n = {h.n}{control} {h.verdict}"


def main(words: list[str]) -> None:
    """Print one paper's lines as they are measured."""
    parser = argparse.ArgumentParser(prog="python -m studies.reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("paper", choices=("paper1", "paper2", "paper3"))
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer prompts: a few minutes")
    parser.add_argument("--model", default="pocket:pythia", help="of paper3: pocket:NAME, a folder or a hub id")
    parser.add_argument("--out", type=Path, help="of paper1 and paper2: where trainings are kept")
    asked = parser.parse_args(words)
    out = asked.out or Path(f"runs/{asked.paper}{'-quick' * asked.quick}")
    makes = {"paper1": lambda: paper1(out, asked.quick), "paper2": lambda: paper2(out, asked.quick)}
    for line in makes.get(asked.paper, lambda: paper3(asked.model, asked.quick))():
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
