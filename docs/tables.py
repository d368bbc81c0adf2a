"""The tables of the docs that have a stored source; `docs/results.py` puts them where <!-- table NAME --> stands."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


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


def patched() -> list[str]:
    """Bits that patches move in one training of `recall`: a command of `results/commands.toml`."""
    found, body = stored("docs/results/patched.json")["metrics"], []
    for layer, claim in enumerate(("frame at the embedding", "frame after the first layer")):
        curves = ("whole", "frame", "random", "placebo")
        *moved, placebo = (f"{found[f'{name}, layer {layer}']['value'] + 0:.1f}" for name in curves)
        as_far = f"{found[claim]['control_low']:.1f} to {found[claim]['control_high']:.1f}"
        body.append([layer, *moved, as_far, placebo])
    return rows(["input of layer", "`whole`", "`frame`", "`random`", "`as_far`", "`placebo`"], body)


def dynamics() -> list[str]:
    """Ratios of settling steps over five trainings of each task: commands of `results/commands.toml`."""
    metrics = {task: stored(f"docs/results/dynamics_{task}.json")["metrics"] for task in ("bijection", "hmm")}
    lines = {
        "frame over precision, 5 % of linear KL": "frame over precision",
        "total variation of attention over log precision, the papers' wording": (
            "total variation of attention over log precision"
        ),
        "frame over values, 5 %": "frame over values",
        "score over value gradient at the end": "scores over values, what is left",
    }

    def cell(ratio: dict[str, Any]) -> str:
        word = f": {ratio['verdict']}" if ratio["verdict"] else ""
        control = [f"{ratio[end]:.2f}" for end in ("control_low", "control_high")]
        random = "" if control == ["1.00", "1.00"] else f"; random targets {' to '.join(control)}"
        return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]{word}{random}"

    body = [[line, *(cell(of[name]) for of in metrics.values())] for line, name in lines.items()]
    return rows(["ratio of steps", *metrics], body)


def smollm2() -> list[str]:
    """Accuracy, weight and resolution of SmolLM2 in every process: a command of `results/commands.toml`."""
    found, body = stored("docs/results/smollm2_chat.json")["metrics"], []
    for process in sorted({name[1:].partition("]")[0] for name in found} - {"profile"}):
        of = [found[f"[{process}]{name}"] for name in ("weight of evidence", "resolution")]
        spans = (f"{short(one['value'])} [{short(one['low'])}, {short(one['high'])}]" for one in of)
        right = found[f"[{process}]accuracy"]
        body.append([f"`{process}`", f"{short(right['value'])} ({short(right['control_centre'])})", *spans])
    return rows(("process", "accuracy (exact observer's)", "weight", "resolution"), body)


TABLES = {made.__name__: made for made in (dynamics, patched, smollm2)}
