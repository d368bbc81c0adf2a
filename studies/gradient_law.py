"""Does the next step of descent follow Paper II's advantage? Five trainings of each tunnel, and the pocket models.

    python -m studies.gradient_law [FOLDER]     a training on each core; a stopped run continues

Stores each number with its interval and controls in studies/gradient_law.json; docs/findings.md
and docs/pictures/law.svg show them.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmgeom import wind_tunnels
from llmgeom.dynamics.processes import spread
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.prompts.domains import Domain
from llmgeom.run import run_probes
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from studies import routing_law
from studies.mechanism import SEEDS, TUNNELS
from studies.trainings import computed

STORED = Path(__file__).with_suffix(".json")
TRAININGS = {
    "recall, 2 layers": TUNNELS["recall"],
    "hmm, 3 layers": TUNNELS["hmm"],
    "bijection, 1 layer": TUNNELS["bijection"],
    "bijection, mamba2, 2 layers": Training("bijection", arch="mamba2", layers=2, steps=1500, lr="3e-3"),
}
POCKET = ("pythia", "phi", "llama", "mistral")
METRICS = (routing_law.NEXT, routing_law.BEYOND, routing_law.PART)
SEQUENCES = 200


def trained(folder: str, training: Training) -> dict[str, Any]:
    """The numbers of one training, and its KL to the posterior in bits."""
    os.environ["LLMGEOM_CACHE"] = f"{folder}/cache"
    train(training, f"{folder}/model", device="cpu")
    task = wind_tunnels.load_world(training.task)

    def read() -> dict[str, Any]:
        subject = Model.load(f"{folder}/model", device="cpu")
        return {"KL": grade(subject, task, 2000, training.seed).kl} | _numbers(
            subject, task.truncated(SEQUENCES, training.seed, "held-out"), training.seed
        )

    return computed(Path(folder, "law.json"), {**asdict(training), "n": SEQUENCES}, read)


def pocket(name: str) -> dict[str, Any]:
    """The numbers of a pocket model on math prompts."""
    return _numbers(Model.load(f"pocket:{name}"), Domain("math").sample(SEQUENCES, 0), 0)


def _numbers(subject: Model, batch: Any, seed: int) -> dict[str, Any]:
    record = run_probes(subject, batch, {routing_law.NAME: routing_law}, seed=seed)
    return {
        metric.name: {
            "value": metric.value,
            "interval": [metric.low, metric.high],
            "controls": list(metric.control_range),
            "n": metric.n,
            "clusters": metric.clusters,
        }
        for metric in record.results[routing_law.NAME].estimates
        if metric.name in METRICS
    }


def main(folder: Path) -> None:
    """Train and read what is missing, and store the numbers."""
    jobs = {
        f"{name}/{seed}": (str(folder / f"{name}-{seed}"), replace(training, seed=seed))
        for seed in range(SEEDS)
        for name, training in TRAININGS.items()
    }
    results = spread(
        trained, jobs, lambda done, name: print(f"{done} of {len(jobs)}: {name}", file=sys.stderr, flush=True)
    )
    found = {name: [results[f"{name}/{seed}"] for seed in range(SEEDS)] for name in TRAININGS}
    found |= {f"pocket:{name}": [pocket(name)] for name in POCKET}
    STORED.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "gradient-law"))
