"""The tables of the docs that have a stored source; `docs/results.py` puts them where <!-- table NAME --> stands."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
UNIFORM = "of a uniform answer's error"
ERROR = "entropy error of "
# Sentence of docs/reproduce.md -> the command, the metric, what was printed or is the bound, and the unit.
REPRODUCED = {
    "bijection: a transformer infers": ("paper1", f"{ERROR}the transformer, bijection", "below .1", UNIFORM),
    "bijection: an LSTM infers": ("paper1", f"{ERROR}the LSTM, bijection", "below .1", UNIFORM),
    "bijection: Mamba infers": ("paper1", f"{ERROR}Mamba, bijection", "below .1", UNIFORM),
    "bijection, MLP: 1.85 bits": (
        "paper1",
        f"{ERROR}the position-wise MLP, bijection, as printed",
        "1.57 to 1.77",
        UNIFORM,
    ),
    "HMM: an LSTM cannot": ("paper1", f"{ERROR}the LSTM, HMM: it learns nothing", ".9 to 1.1", UNIFORM),
    "HMM: smooth to K = 50": (
        "paper1",
        "smooth generalisation to two and a half times the length, HMM",
        "below 2",
        "times the error within",
    ),
    "recall: an LSTM cannot": (
        "paper1",
        "accuracy of the LSTM, associative recall: chance",
        ".075 to .3",
        "of the answers right",
    ),
    "keys become orthogonal": (
        "paper1",
        "|cos| of the keys of tokens, first layer, below untrained",
        "below .2",
        "mean abs. cosine",
    ),
    "each layer is needed": (
        "paper1",
        "error without the block that matters least, over that of the whole model, bijection",
        "above 10",
        "times the error",
    ),
    "the value step is the fast one, at an equal sum of rates": (
        "paper2",
        "value step against every control, equal sum of rates",
        "above 1",
        "times as fast",
    ),
}
TAUGHT = "studies/primitives_in_text.json"
SKILL, ALONG = "skill over the best constant", "log odds along the labels, last layer"
# What stands over a column of docs/observers.md -> the processes and the measure whose mean it is.
LEVELS = {
    "skill, what accumulates": (("beta", "dirichlet", "markov", "stated"), SKILL),
    "skill, `hmm`": (("hmm",), SKILL),
    "skill, what binds": (("recall", "bijection"), SKILL),
    "R2 along the labels, `beta`": (("beta",), ALONG),
}


def stored(path: str) -> Any:
    """What a JSON file of the repository holds."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def rows(head: Sequence[str], body: Iterable[Sequence[Any]]) -> list[str]:
    """A table in Markdown."""
    first, *rest = (f"| {' | '.join(map(str, row))} |" for row in (head, *body))
    return [first, "|---" * len(head) + "|", *rest]


def short(number: float) -> str:
    """.33, 1.00, -.05, 0."""
    text = f"{number:.2f}"
    return "0" if not float(text) else text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def judged(metric: dict[str, Any]) -> str:
    """.08 [.03, .14]: small"""
    return f"{short(metric['value'])} [{short(metric['low'])}, {short(metric['high'])}]: {metric['verdict']}"


def processes() -> list[str]:
    """How often observers of the other processes are called Bayesian: `python benchmarks/observers.py`."""
    found: dict[str, dict[str, str]] = {}
    for key, counts in stored("benchmarks/observers.json").items():
        design, name = key.split(": ", 1)
        called = counts["called"]
        if design not in ("stated", "two-point"):
            rate = f"{called.get('Bayesian', 0)} of {sum(called.values())}"
            parameter = name.removeprefix("Bayes, ")
            if parameter != name:
                name, rate = "Bayes with another parameter", f"{parameter}: {rate}"
            found.setdefault(design, {})[name] = rate
    columns = ("exact", "Bayes with another parameter", "forgetting")
    return rows(["process", *columns], ([design, *map(of.get, columns)] for design, of in found.items()))


def pocket() -> list[str]:
    """The MLPs' share and focusing in the pocket language models: commands of `results/commands.toml`."""
    body = []
    for model in ("pythia", "phi", "llama", "mistral"):
        cells = []
        for command, metric in (("blocks", "MLPs' share of the effects"), ("focus", "focusing")):
            cells.append(judged(stored(f"docs/results/{command}_{model}.json")["metrics"][metric]))
        body.append([model, *cells])
    return rows(["pocket model", "MLPs' share of the effects > .5", "attention focuses > .3"], body)


def patched() -> list[str]:
    """Bits that patches move in one training of `recall`: a command of `results/commands.toml`."""
    found, body = stored("docs/results/patched.json")["metrics"], []
    for layer, claim in enumerate(("frame at the embedding", "frame after the first layer")):
        curves = ("whole", "frame", "random", "placebo")
        *moved, placebo = (f"{found[f'{name}, layer {layer}']['value'] + 0:.1f}" for name in curves)
        as_far = f"{found[claim]['null_low']:.1f} to {found[claim]['null_high']:.1f}"
        body.append([layer, *moved, as_far, placebo])
    return rows(["input of layer", "`whole`", "`frame`", "`random`", "`as_far`", "`placebo`"], body)


def dynamics() -> list[str]:
    """Ratios of settling steps over five trainings of each task: commands of `results/commands.toml`."""
    metrics = {task: stored(f"docs/results/dynamics_{task}.json")["metrics"] for task in ("bijection", "hmm")}
    lines = {
        "frame over precision, 5 % of linear KL": "frame over precision",
        "frame over precision, half-way": "frame over precision, half-way",
        "total variation of attention over log precision, the papers' wording": (
            "total variation of attention over log precision"
        ),
        "frame over values, 5 %": "frame over values",
        "score over value gradient at the end": "scores over values, what is left",
    }

    def cell(ratio: dict[str, Any]) -> str:
        word = f": {ratio['verdict']}" if ratio["verdict"] else ""
        control = [f"{ratio[end]:.2f}" for end in ("null_low", "null_high")]
        random = "" if control == ["1.00", "1.00"] else f"; random targets {' to '.join(control)}"
        return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]{word}{random}"

    body = [[line, *(cell(of[name]) for of in metrics.values())] for line, name in lines.items()]
    return rows(["ratio of steps", *metrics], body)


def taught() -> list[str]:
    """Skill and read-outs of models taught a kind of inference: `python -m studies.primitives_in_text`."""
    levels: dict[str, list[list[float]]] = {}
    for model, result in stored(TAUGHT)["models"].items():
        read = result["read"]
        of = [
            sum(read[process][measure]["value"] for process in processes) / len(processes)
            for processes, measure in LEVELS.values()
        ]
        levels.setdefault(model.split("/")[1], []).append(of)

    def middle(values: Sequence[float]) -> str:
        ordered = sorted(values)
        return f"{short(ordered[len(ordered) // 2])} ({short(ordered[0])} to {short(ordered[-1])})"

    return rows(["course", *LEVELS], ([course, *map(middle, zip(*of, strict=True))] for course, of in levels.items()))


def taught_words() -> list[str]:
    """The words of claims in models that were taught what they are about, and in all others: the same study."""
    body = []
    for claim, groups in stored(TAUGHT)["words"].items():
        body.append([claim, *(", ".join(f"{word} {n}" for word, n in sorted(of.items())) for of in groups.values())])
    return rows(["claim", "taught it", "all others"], body)


def chain() -> list[str]:
    """Schedules of the sticky chain, as `llmgeom reproduce paper2` prints them."""
    names = {
        "plain descent": "plain descent",
        "V, ten times": "W_V ten times, as published",
        "O, ten times": "W_O ten times",
        "QK, ten times": "W_Q and W_K ten times",
        "all, ten times": "all ten times",
        "all, equal sum": "the same sum of rates, spent evenly",
        "values in closed form": "values in closed form (a ridge solve counts as one step)",
    }
    printed = {line[:24].strip(): line[24:].split() for line in stored("docs/results/paper2.json")["output"]}
    body = []
    for method, schedule in names.items():
        *_, training, fresh, _ = cells = printed[method]
        first, last = min(map(int, cells[5:10])), max(map(int, cells[5:10]))
        body.append([schedule, first if first == last else f"{first} to {last}", training, fresh])
    return rows(["schedule", "steps", "training", "fresh sequence"], body)


def reproduced() -> list[str]:
    """Sentences of Papers I and II on small models: `llmgeom reproduce paper1 --quick`, and `paper2`."""
    body = []
    for sentence, (command, name, range_, unit) in REPRODUCED.items():
        of = stored(f"docs/results/{command}.json")["metrics"][name]
        low, high = of["null_low"], of["null_high"]
        control = "–" if of["value"] == low == high else short(low) if low == high else f"{short(low)} to {short(high)}"
        value = f"{short(of['value'])} ({short(of['low'])} to {short(of['high'])}) {unit}"
        body.append([sentence, value, range_, control, of["verdict"]])
    return rows(["sentence", "ours", "printed, or bound", "control", "word"], body)


def planted() -> list[str]:
    """The label probe on planted truths, as `python -m studies.planted_labels` printed them, but folds by row."""
    printed = (ROOT / "studies/planted_labels.txt").read_text(encoding="utf-8").splitlines()
    body = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed[2:-1]]
    return rows(["planted", "prompts", "words", "holds", "score", "hardest control"], body)


READING = (dynamics, chain, reproduced, pocket, patched, taught, taught_words)
RATES = (processes, planted)
TABLES = {made.__name__: made for made in (*READING, *RATES)}
