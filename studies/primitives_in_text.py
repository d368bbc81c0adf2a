"""Which measure of `llmgeom evidence` tells networks that were taught a kind of inference from others?

    python -m studies.primitives_in_text [FOLDER]     a model on each core; a stopped run continues

Every pocket model is trained further on lists of one kind, a course each:

    accumulate   beta, dirichlet, markov and stated
    transport    hmm
    bind         recall and bijection
    nothing      all of them, with marks that say nothing: each is drawn evenly

and each of the 20 models, with the five as they ship, is read with every process. So of each claim five models were
taught what it is about, at least fifteen were not, and the four models of one parent differ in their lists alone.
Stores estimates, intervals and words in studies/primitives_in_text.json; `docs/tables.py` makes tables
of them, and `docs/study_pictures.py` a picture.
"""

import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.commands.evidence import RunConfig, perform_processes
from llmgeom.dynamics.resume import computed
from llmgeom.dynamics.sweep import spread
from studies.lists import Course, tokenizer, train

STORED = Path(__file__).with_suffix(".json")
PARENTS = ("llama", "pythia", "llama-noicl", "phi", "mistral")  # one tokenizer, so one set of lists
SHIPPED = "shipped"  # in place of a course: the parent itself
PROFILE = "profile"  # the record of `evidence --process all` with its three claims
KINDS = {"accumulate": "accumulates", "transport": "transports", "bind": "binds"}  # course -> claim
USES = "skill over the best constant"
LOWER = ("KL(", "lack of fit", "departure", "drift", "change under")  # measures that are near 0 where a model infers
READ = {"processes": ("all",), "nulls": 5}
# Until the curve of pocket:llama is nearly flat or, in bind, well past the plateau at which only the commonest mark is
# known (1 bit in recall, up to step 1,000).
COURSES = {
    "accumulate": Course(("beta", "dirichlet", "markov", "stated"), 1000),
    "transport": Course(("hmm",), 1400, lists=12),
    "bind": Course(("recall", "bijection"), 2400),
    "nothing": Course(("beta", "dirichlet", "markov", "stated", "hmm", "recall", "bijection"), 300, says=False),
}


# ---- reading --------------------------------------------------------------------------------------------------------


def cell(folder: str, parent: str, name: str) -> dict[str, Any]:
    """One model, trained and read: its curve, CPU seconds, and by process the estimates of `llmgeom evidence`."""
    if name == SHIPPED:
        return computed(Path(folder, "read.json"), READ, lambda: {"read": read(f"pocket:{parent}", folder)})
    course = COURSES[name]

    def taught() -> dict[str, Any]:
        began = time.process_time()
        model, curve = train(
            parent, name, course, shown=lambda *now: print(parent, name, *now, file=sys.stderr, flush=True)
        )
        model.save_pretrained(f"{folder}/model")
        tokenizer().save_pretrained(f"{folder}/model")
        return {"curve": curve, "cpu_seconds": time.process_time() - began}

    about = computed(Path(folder, "taught.json"), asdict(course), taught)
    spec = {**READ, **asdict(course)}
    return about | computed(Path(folder, "read.json"), spec, lambda: {"read": read(f"{folder}/model", folder)})


def read(model: str, folder: str, **asked: Any) -> dict[str, dict[str, Any]]:
    """Process (or "profile") -> measure -> value, interval and word; `asked` is of the RunConfig of `evidence`."""
    out = Path(folder, "evidence")
    shutil.rmtree(out, ignore_errors=True)
    _, records = perform_processes(RunConfig(model=model, out=str(out), **READ | asked))
    shutil.rmtree(out)
    return {
        record.source["name"]: {
            one.name: {"value": one.value, "low": one.low, "high": one.high, "word": one.verdict}
            for measured in record.results.values()
            for one in measured.estimates
        }
        for record in records
    }


# ---- judging --------------------------------------------------------------------------------------------------------


def areas(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Course -> measure -> how well the measure tells models of that course from all others: see `area`.

    Args:
        models: "PARENT/COURSE" -> a result of `cell`.
    """
    parents, names = (list(dict.fromkeys(of)) for of in zip(*(model.split("/") for model in models), strict=True))
    table: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        scores: dict[str, list[list[list[float]]]] = {}
        for process in COURSES[kind].processes:
            for measure in models[f"{parents[0]}/{kind}"]["read"][process]:
                values = [
                    [models[f"{of}/{name}"]["read"][process][measure]["value"] for name in names] for of in parents
                ]
                scores.setdefault(measure, []).append(values)
        table[kind] = {
            measure: area(-np.abs(rows) if measure.startswith(LOWER) else np.array(rows), names.index(kind))
            for measure, rows in scores.items()
        }
    return table


def area(scores: np.ndarray, taught: int) -> dict[str, Any]:
    """The area under the ROC curve within process and parent: the mean over both of

        A = #{courses that the taught one exceeds, ties half} / (courses - 1)

    Args:
        scores: [process parent course].
        taught: Index of the course.

    Returns:
        The area, its ends over parents, and the two-sided p of no difference between courses. It is exact: every choice
        of one course a parent as the taught one counts (3,125 with 5 parents of 5 models). Processes of a parent move
        together.
    """
    more = np.sign(scores[..., None] - scores[..., None, :]) / 2 + 0.5
    by_parent = ((more.sum(-1) - 0.5) / (scores.shape[-1] - 1)).mean(0)  # [parent course], were it the taught one
    every = np.zeros(1)
    for row in by_parent:
        every = np.add.outer(every, row).ravel()
    own = by_parent[:, taught]
    p = np.mean(np.abs(every / len(own) - 0.5) >= abs(own.mean() - 0.5) - 1e-9)
    return {"value": own.mean(), "least": own.min(), "most": own.max(), "p": p, "parents": len(own)}


def words(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Claim -> "taught" or "others" -> word -> how many: the profile's claims by model, use of evidence by process."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for kind, claim in KINDS.items():
        tests = {claim: [(PROFILE, claim)], f"uses: {kind}": [(process, USES) for process in COURSES[kind].processes]}
        for name, asked in tests.items():
            counts = table[name] = {"taught": {}, "others": {}}
            for model, result in models.items():
                group = counts["taught" if model.endswith(f"/{kind}") else "others"]
                for process, measure in asked:
                    word = result["read"][process][measure]["word"]
                    group[word] = group.get(word, 0) + 1
    return table


def main(folder: Path) -> None:
    """Train and read what is missing, and store the numbers."""
    jobs = {
        f"{parent}/{name}": (str(folder / f"{parent}-{name}"), parent, name)
        for parent in PARENTS
        for name in (*COURSES, SHIPPED)
    }
    results = spread(
        cell, jobs, lambda done, name: print(f"{done} of {len(jobs)}: {name}", file=sys.stderr, flush=True)
    )
    models = {name: results[name] for name in jobs}
    stored = {"models": models, "areas": areas(models), "words": words(models)}
    STORED.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "primitives"))
