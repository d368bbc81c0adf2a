"""The tables of the docs that have a stored source; `docs/results.py` puts them where <!-- table NAME --> stands."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Row of docs/calibration.md -> the probe and the metric.
CALIBRATED = {
    "belief read-out: skill over position": ("belief_readout", "skill over position"),
    "belief read-out: R2 of the belief": ("belief_readout", "belief: R2"),
    "interchange: frame at the embedding": ("interchange", "frame at the embedding"),
    "clusters: silhouette": ("belief_clusters", "silhouette"),
    "attention focusing": ("attention_focus", "focusing"),
    "values: entropy decodability": ("value_manifold", "entropy decodability (held-out R2)"),
    "values: abs. rho of PC1 and entropy": ("value_manifold", "|rho| of PC1 and entropy"),
    "values: PC1+PC2 share": ("value_manifold", "PC1+PC2 share"),
    "keys: orthogonality of token keys, by head": ("key_orthogonality", "token keys, by head"),
    "replaced blocks: MLPs over attentions": ("blocks_mean", "MLPs over attentions"),
    "replaced blocks: MLPs over attentions, by norm": ("blocks_mean", "MLPs over attentions, by norm"),
}
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
KINDS = ("no inference", "untrained", "stopped", "position only", "bag of values", "last observation", "wrong prior")


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


def calibration() -> list[str]:
    """AUC of the shipped calibration (`llmgeom calibrate`) against each kind of model, and each metric's word."""
    table = stored("llmgeom/calibrated.json")
    of = {(one["probe"], one["name"]): one for one in table["signatures"]}
    body = []
    for label, key in CALIBRATED.items():
        one, areas = of[key], of[key]["numbers"]["areas"]
        # The kind for which .75 is excluded, or the one of which least is known.
        word, end = one["word"], "high" if one["word"] in ("no", "reversed") else "low"
        kind, decisive = min(areas.items(), key=lambda item: item[1][end])
        word = word if word == "undecided" else f"**{word}**"
        tells = f"{word}, {kind} {short(decisive['low'])} to {short(decisive['high'])}"
        body.append([label, *(short(areas[kind]["value"]) if kind in areas else "–" for kind in KINDS), tells])
    about = table["bench"]
    models = about["models"]
    bench = (
        f"{sum(models.values())} models of {len(about['tasks'])} tasks in {len(about['cells'])} cells, "
        f"{models['trained']} of {models['untrained']} trainings at the posterior (the others count as stopped)."
    )
    return [*rows(["metric", *KINDS, "tells"], body), "", bench]


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


def answerers() -> list[str]:
    """What simulated answerers are called, from the numbers of `llmgeom evidence`: `python -m studies.answerers`."""
    found = stored("studies/answerers.json")["kinds"]
    total = {name: Counter() for name in found}
    for name, of in found.items():
        for called in of.values():
            total[name].update(called)
    columns = list(dict.fromkeys(kind for counts in total.values() for kind, _ in counts.most_common()))
    return rows(["", *columns], ([name, *(counts[kind] or "" for kind in columns)] for name, counts in total.items()))


def recovered() -> list[str]:
    """Planted and measured numbers of simulated answerers, and the coverage of their intervals: the same study."""
    body = []
    for one in stored("studies/answerers.json")["planted"]:
        planted, cover = one["planted"], one["covered"]
        given = (short(planted["slope"]), short(planted["bias"] / math.log(2)), short(planted["noise"]))
        got = (short(one[name]) for name in ("weight", "bias", "resolution", "calibration loss"))
        body.append([*given, *got, *(short(cover.get(name, 0)) for name in ("weight of evidence", "bias"))])
    head = ["slope", "bias, bits", "noise", "weight", "bias", "resolution", "loss", "weight covered", "bias covered"]
    return rows(head, body)


READING = (dynamics, chain, reproduced, pocket, patched)
RATES = (calibration, planted, answerers, recovered)
TABLES = {made.__name__: made for made in (*READING, *RATES)}
