"""What two real models say: `python -m studies.findings` writes the first part of docs/findings.md, and its figure.

Every number comes from docs/results/NAME.json. `python docs/results.py --run NAME` makes one of them again, by the
command that docs/results/commands.toml has for it (`python -m studies.beliefs` makes beliefs.json). A sentence that
says more than a number has the condition under which it is true: `said` refuses to write it where the stored numbers
no longer meet it.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmgeom.stats.resampling import least_at_best

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURE, REST = DOCS / "findings.md", DOCS / "pictures" / "findings.svg", "## In small models of known truth"
MODELS = {"smollm2": "SmolLM2", "gemma": "Gemma"}
SCANS = {"smollm2": "smollm2", "gemma": "gemma_seed0"}  # with controls; the other scans are replicates of values
# What the page calls a claim: record ("" for the scan), metric, format, and the claimed effect (0: none is drawn).
PREDICTED = {
    "**1** Values lie near a plane: share of PC1+PC2": ("", "[mixed]PC1+PC2 share", ".2f", 0.1),
    "ordered by entropy: \\|rho\\| of PC1": ("", "[mixed]|rho| of PC1 and entropy", ".2f", 0.3),
    "flatter within one domain (maths): gain": ("", "[math]gain in PC1+PC2 share, as diverse", ".3f", 0.1),
    "**2** Keys are orthogonal: \\|cos\\| of columns of W_K": ("", "[mixed]columns of W_K", ".3f", -0.01),
    "**3** Attention narrows with depth: focusing": ("", "[mixed]focusing", ".2f", 0.3),
    "and without the first token, the sink": ("", "[mixed]focusing without the first token", ".2f", 0.3),
    "**4** Evidence in context is used: resolution": ("evidence", "resolution", ".2f", 0.1),
    "and weighed by Bayes' rule (1)": ("evidence", "weight of evidence", ".2f", 0),
}
SEEDS = ("seed0", "seed1", "seed2", "float32")
NONE: dict[str, Any] = {"verdict": "not measured"}
LEAST = "neurons of the largest null share"
AXES = ("value pc1", "value ridge", "residual pc1", "residual ridge")


def stored(name: str) -> dict[str, Any]:
    """A stored result; an empty one where there is none."""
    path = DOCS / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def metrics(name: str) -> dict[str, dict[str, Any]]:
    """The numbers of a stored result; SmolLM2 in float32 is the record of README."""
    found: dict[str, dict[str, Any]] = stored("smollm2" if name == "smollm2_float32" else name).get("metrics", {})
    return found


def number(x: float, form: str) -> str:
    """.41, -.05, .00, 1.00, 41%."""
    text = format(x, form)
    if not float(text.rstrip("%")):
        return text.lstrip("-").replace("0.", ".", 1)
    return text.replace("0.", ".", 1) if abs(x) < 1 else text


def value(one: dict[str, Any], form: str) -> str:
    """value [low, high]."""
    ends = f" [{number(one['low'], form)}, {number(one['high'], form)}]" if "low" in one else ""
    return number(one["value"], form) + ends


def control(one: dict[str, Any], form: str) -> str:
    """The range of a control, and whose it is."""
    low, high = (number(one[f"control_{end}"], form) for end in ("low", "high"))
    return f"{one['control'].split(' (')[0]} {low if low == high else f'{low} to {high}'}"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, with empty lines around it."""
    first, *rest = (f"| {' | '.join(row)} |" for row in (head, *body))
    return ["", first, "|---" * len(head) + "|", *rest, ""]


def said(sentence: str, *conditions: bool) -> str:
    """A sentence, if the stored numbers meet its conditions. Raises ValueError where they do not."""
    if not all(conditions):
        raise ValueError(f"the stored numbers do not say: {sentence}")
    return sentence


def apart(one: dict[str, Any]) -> int:
    """1 where the interval lies above the control's range, -1 where below, else 0."""
    return (one["low"] > one["control_high"]) - (one["high"] < one["control_low"])


def claimed(model: str, claim: str, scan: str = "") -> dict[str, Any]:
    """The stored numbers of one claim of PREDICTED, of the model's scan with controls or of another one."""
    name, metric, *_ = PREDICTED[claim]
    found = metrics(f"{model}_{scan or name}" if scan or name else SCANS[model])
    return found.get(metric) or found.get(metric.removeprefix("[mixed]")) or NONE  # one set of prompts has no name


def predictions() -> list[str]:
    """Each claim with its word, value, interval and hardest control."""

    def cell(model: str, claim: str, form: str) -> str:
        one = claimed(model, claim)
        return one["verdict"] if one is NONE else f"**{one['verdict']}** {value(one, form)}; {control(one, form)}"

    body = [[claim, *(cell(model, claim, where[2]) for model in MODELS)] for claim, where in PREDICTED.items()]
    return table(["Paper III says", *MODELS.values()], body)


def evidence() -> list[str]:
    """Two labels in context (SULA): the conditions of both models."""
    names = {
        "accuracy": ("accuracy of the first choice", ".2f"),
        "mass of the answers": ("probability of both labels", ".2f"),
        "bias": ("bias, bits", ".1f"),
        "movement: remap": ("answer moves with other labels", ".2f"),
        "consistent against alternating": ("consistent against alternating labels, of the exact fall", ".2f"),
    }
    every = {model: metrics(f"{model}_evidence") for model in MODELS}

    def cell(one: dict[str, Any], form: str) -> str:
        if one is NONE:
            return one["verdict"]
        return value(one, form) + (f"; {control(one, form)}" if "control_low" in one else "")

    body = [
        [of, *(cell(found.get(name, NONE), form) for found in every.values())] for name, (of, form) in names.items()
    ]
    return table(["200 prompts with evidence", "SmolLM2", "Gemma"], body)


def heads(model: str) -> list[str]:
    """What `llmgeom heads` prints in sentences."""
    lines = stored(f"{model}_heads").get("output", ["not measured.", ""])
    return textwrap.wrap(f"- {MODELS[model]}: {' '.join(lines[: lines.index('')])}", 132, subsequent_indent="  ")


def beliefs() -> dict[str, dict[str, Any]]:
    """The runs that the page shows, by model and process: of tunnels, and of models in bfloat16 reading letters."""
    found = {}
    for run in stored("beliefs")["runs"]:
        tunnel = run["model"] == "tunnel"
        if (run["dtype"] == "bfloat16" or tunnel) and run["rendering"] == "spaces" and not run["seed"]:
            name = next((one for key, one in MODELS.items() if key[:4] in run["model"].lower()), "a tunnel")
            found[f"{name}, {run['run'].removeprefix('tunnel, ').replace('tunnel', 'mess3')}"] = run
    return found


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """A stored triple as value, low and high."""
    return dict(zip(("value", "low", "high"), numbers, strict=True))


def moved(run: dict[str, Any], of: str) -> dict[str, float]:
    """How far the stream of another or the same belief moved the answer, at the first layer where it was put in."""
    return next((spread(edit["moved"]) for name, edit in run["used"].items() if name.endswith(f"{of} belief")), {})


def neurons() -> list[str]:
    """Axes beside the unembedding's near-null space."""

    def cell(one: dict[str, Any] | None) -> str:
        if one is None:
            return ""
        ends = [number(one[f"control_{end}"], ".3f") for end in ("low", "high")] if "control_low" in one else []
        return value(one, ".3f") + (f"; {' to '.join(ends)}" if ends else "")

    kinds = ("|rho| with entropy", "null share", "free", "frozen")
    body = [
        [f"{name}, {MODELS[model]}", *(cell(metrics(f"{model}_neurons").get(f"{name}: {kind}")) for kind in kinds)]
        for name in ("value pc1", "residual ridge")  # the others are stored, too
        for model in MODELS
        if metrics(f"{model}_neurons")
    ]
    head = ["removed", "\\|rho\\| with entropy", "null share; random", "free, bits; random", "frozen, bits; random"]
    return table(head, body)


def figure() -> Any:
    """Each claim of both models on one scale: 0 is the hardest control, 1 the claimed effect beyond it."""
    sys.path.insert(0, str(DOCS))  # the pictures of the docs are no package
    from plotly.graph_objects import Figure
    from study_pictures import WORDS

    from llmgeom.reports.figures import TEMPLATE

    drawn = Figure(layout={"template": TEMPLATE})
    shown = [claim for claim, where in PREDICTED.items() if where[3]]
    for model, symbol, shift in (("smollm2", "circle", -0.14), ("gemma", "diamond", 0.14)):
        for row, claim in enumerate(shown):
            one, effect = claimed(model, claim), PREDICTED[claim][3]
            if one is NONE:
                continue
            at, low, high = ((one[end] - one["control_centre"]) / effect for end in ("value", "low", "high"))
            ends = {"symmetric": False, "array": [max(low, high) - at], "arrayminus": [at - min(low, high)], "width": 0}
            drawn.add_scatter(
                x=[at], y=[row + shift], mode="markers", name=MODELS[model], showlegend=row == 0, error_x=ends,
                marker={"symbol": symbol, "size": 11, "color": WORDS[one["verdict"]]},
            )  # fmt: skip
            word = {"text": one["verdict"], "x": max(low, high) + 0.1, "y": row + shift, "font": {"size": 11}}
            drawn.add_annotation(xanchor="left", showarrow=False, **word)
    for x, text, anchor in ((0, "hardest control", "right"), (1, "claimed effect", "left")):
        drawn.add_vline(x=x, line={"width": 1, "color": "#555"})
        drawn.add_annotation(text=text, x=x, y=-0.8, xanchor=anchor, showarrow=False)
    names = [claim.split("** ")[-1].replace("\\", "") for claim in shown]
    return drawn.update_layout(
        yaxis={"tickvals": list(range(len(shown))), "ticktext": names, "autorange": "reversed", "showgrid": False},
        xaxis={"title": {"text": "effect beyond the control, in units of the claimed one"}, "zeroline": False},
        legend={"orientation": "h", "y": 1.12}, margin={"l": 330, "t": 40, "r": 20},
    )  # fmt: skip


def prose(text: str) -> list[str]:
    """A paragraph in lines of 132 columns, and an empty one."""
    return [*textwrap.wrap(" ".join(text.split()), 132, break_long_words=False, break_on_hyphens=False), ""]


def four() -> list[str]:
    """What the two models say of the four predictions."""
    every = {model: [claimed(model, claim) for claim in PREDICTED] for model in MODELS}
    (plane, order, gain, keys, focus, rest, used, _), (plane2, order2, gain2, keys2, focus2, rest2, used2, _) = (
        every.values()
    )
    layers = [one for name, one in metrics("smollm2_seed0").items() if name.startswith("[mixed]pc12, layer")]
    narrows = said(
        f"**Attention narrows**: in SmolLM2 by {number(focus['value'], '.0%')}, beyond every control and by less than "
        f"claimed; in Gemma by {number(focus2['value'], '.0%')}, above all five draws, which leave it open. **Without "
        "the first token, the sink, permuted weights narrow more**, and the claim is ruled out.",
        focus["verdict"] == "small" and focus2["verdict"] == "open" and apart(focus2) == 1,
        *(one["verdict"] == "ruled out" and one["value"] < one["control_high"] for one in (rest, rest2)),
    )
    flat = said(
        f"**Values lie near no plane**: PC1 and PC2 have {number(plane['value'], '.0%')} and "
        f"{number(plane2['value'], '.0%')} of the variance, no more than controls, and one domain flattens "
        f"SmolLM2's no further, Gemma's by {number(gain2['value'], '.2f')}: open. SmolLM2's first layer has the "
        f"largest share of all, {number(layers[0]['value'], '.2f')} (`smollm2_seed0`), and an untrained copy the same, "
        f"{number(layers[0]['control_high'], '.2f')}: the tokens'.",
        *(apart(one) < 1 and one["value"] < one["control_high"] for one in (plane, plane2)),
        gain["verdict"] == "ruled out" and gain2["verdict"] == "open" and gain2["low"] > 0,
        plane["verdict"] == "ruled out" and plane2["verdict"] == "open",
        layers[0]["value"] == max(one["value"] for one in layers),
        abs(layers[0]["value"] - layers[0]["control_high"]) < 0.005,
    )
    rests = said(
        "**Keys overlap more than before training. Both models use labels in context.** Whether PC1 follows entropy is "
        "open.",
        *(one["verdict"] == "opposite" for one in (keys, keys2)),
        *(one["verdict"] == "holds" for one in (used, used2)),
        *(one["verdict"] == "open" for one in (order, order2)),
    )
    return [*prose(narrows), *prose(flat), *prose(rests), *predictions()]


def replicated() -> list[str]:
    """Other prompts and another precision."""
    shown = []
    for model, name in MODELS.items():
        ranges = []
        for claim, (of, _, form, _) in PREDICTED.items():
            each = [one["value"] for seed in SEEDS if (one := claimed(model, claim, seed)) is not NONE and not of]
            if len(each) > 1:
                low, high = (number(end(each), form) for end in (min, max))
                claim = claim.split("** ")[-1].split(": ")[-1].removeprefix("and ").replace("\\", "")
                ranges.append(f"{claim} {low if low == high else f'{low} to {high}'}")
        shown.append(f"{name}: {'; '.join(ranges)}")
    return prose(
        f"Other seeds of prompts, and precision (`smollm2_seed0`, `gemma_seed1` ...; values without controls): "
        f"{'. '.join(shown)}."
    )


def axis() -> list[str]:
    """What projecting the entropy axis out of the last layer's values does."""
    shown = []
    for model, name in MODELS.items():
        one = metrics(f"{model}_ablate").get("ablation_pc1: KL of the edit", NONE)
        if one is NONE:
            continue
        shown.append(
            said(
                f"{name} {value(one, '.4f')} (equal edits {number(one['control_low'], '.4f')} to "
                f"{number(one['control_high'], '.4f')})",
                apart(one) == 0,
            )
        )
    return [
        *prose(
            f"Without PC1 of the last layer's values (`llmgeom ablate`, records `smollm2_ablate`, `gemma_ablate`; "
            f"37 prompts) the next token changes by a KL in bits of {' and '.join(shown)}, no more than by equal "
            "random edits."
        ),
    ]


def weighed() -> list[str]:
    """Two labels in context."""
    slopes = [metrics(f"{model}_evidence")["weight of evidence"] for model in MODELS]
    shown = " and ".join(value(one, ".1f") for one in slopes)
    return [
        *prose(
            said(
                f"**Both weigh labels about twice as much as Bayes' rule says**: log odds grow {shown} times as fast.",
                *(one["low"] < 2.1 and one["high"] > 1.9 and one["low"] > 1.5 for one in slopes),
            )
            + " SmolLM2 on more worlds: [evidence](evidence.md#smollm2-135m-instruct)."
        ),
        *evidence(),
    ]


def induction() -> list[str]:
    """Heads on repeated random tokens."""
    lead = (
        "Random tokens, repeated; intervals over 8 sequences (`llmgeom heads`; records `smollm2_heads`, `gemma_heads`):"
    )
    printed = " ".join(stored("gemma_heads")["output"][:2])
    lost, low, high, again, first = map(float, re.findall(r"-?\d+\.\d+", printed.partition(" loses ")[2])[:5])
    whole = said(
        "**Three heads do all of Gemma's copying**: without them a repeated token is as unlikely as the first time.",
        abs(again - lost - first) < 0.5 and high - low < 2,
    )
    return [lead, "", *heads("smollm2"), *heads("gemma"), "", *prose(whole)]


def believed() -> list[str]:
    """Beliefs about a hidden state in long contexts."""
    found, body = beliefs(), []
    for name, run in found.items():
        numbers, rivals = run["numbers"], run["rivals"]
        untrained = numbers.get("untrained beyond all rivals")
        away = (run["positions"][of][-1] for of in ("KL to the exact next symbol", "KL of an even answer"))
        another, same = moved(run, "another"), moved(run, "the same")
        body.append([
            name, value(spread(numbers["R2"]), ".3f"), number(rivals["last 6 symbols"], ".2f"),
            number(rivals["all of these together"], ".2f"), value(spread(numbers["beyond all rivals"]), ".2f"),
            number(untrained[0], ".2f") if untrained else "–",
            f"{value(another, '.2f')}; {number(same['value'], '.2f')}" if another and same else "–",
            "; ".join(number(x, ".2f") for x in away),
        ])  # fmt: skip
    beyond = {name: spread(run["numbers"]["beyond all rivals"]) for name, run in found.items()}
    known, taught, *asked = (
        beyond[name] for name in ("a tunnel, mess3", "a tunnel, slow", "SmolLM2, slow", "Gemma, slow")
    )
    slow = [found[f"{model}, slow"] for model in MODELS.values()]
    copies = [run["numbers"]["untrained beyond all rivals"][0] for run in slow]
    others = {run["run"].removeprefix("slow, "): run["numbers"]["beyond all rivals"]
              for run in stored("beliefs")["runs"]
              if "SmolLM2" in run["model"] and run["run"].startswith("slow, ")}  # fmt: skip
    again = ", ".join(f"{name} {number(x[0], '.2f')}" for name, x in others.items())
    mixed = found["SmolLM2, mixture"]["numbers"]
    answers, other = [moved(run, "another") for run in slow], moved(found["SmolLM2, hmm"], "another")
    away = [
        [run["positions"][of][-1] for of in ("KL to the exact next symbol", "KL of an even answer")] for run in slow
    ]
    return [
        *prose(
            said(
                f"**mess3 cannot tell a belief from a short memory**: even a tunnel trained on it has only "
                f"{value(known, '.2f')} beyond all rivals. **The slow chain can, and both models hold something of its "
                f"belief**: SmolLM2 {value(asked[0], '.2f')} ({again}) and Gemma {value(asked[1], '.2f')} beyond all "
                f"rivals, untrained copies {number(copies[0], '.2f')}, a tunnel {value(taught, '.2f')}. **It is not "
                f"seen to be used**: put in another's place it moves the answer by {value(answers[0], '.2f')} and "
                f"{value(answers[1], '.2f')} of the way (that of `hmm` in SmolLM2 by {value(other, '.2f')}), and both "
                "answer worse than an even guess. Where a sequence follows one of three matrices, the belief under "
                f"the right one and under their exact mixture are read alike, R2 {number(mixed['R2'][0], '.3f')} and "
                f"{number(mixed['mixture'][0], '.3f')}.",
                abs(mixed["R2"][0] - mixed["mixture"][0]) < 0.01,
                known["value"] < 0.1,
                taught["low"] > 0.5,
                *(
                    least_at_best(one["value"], one["low"], len(run["layers"]["R2"])) > max(copies)
                    for one, run in zip(asked, slow, strict=True)
                ),
                *(one["high"] < taught["low"] for one in asked),
                *(x[1] > max(copies) for x in others.values()),
                max(copies) < 0.005,
                *(answer["low"] < 0 < answer["high"] < 0.3 for answer in answers),
                other["low"] > 0 and other["high"] < 0.5,
                *(exact > even for exact, even in away),
            )
        ),
        *prose(
            """Ridge read-outs of the exact belief, at the layer that reads best (intervals are not widened for that
            choice), held out by sequence; both models in bfloat16, 16 sequences of 512 symbols; tunnels of the process,
            64 of 64 (`python -m studies.beliefs`, record
            `beliefs`; [method](evidence.md#beliefs-in-long-contexts)). *Beyond all rivals*: partial R2, of what readers
            of the last 1 to 6 symbols, counts and exponential filters together leave. *Moved*: by the residual
            stream of another belief at equal last symbols (1: as far as the exact answers are apart); of the same
            belief. *Bits*: of the answers from the exact ones; of even answers."""
        ),
        *table(
            ["model, process", "R2 of the belief", "last 6 symbols", "all rivals", "beyond all rivals", "untrained",
             "moved; same", "bits; even"],
            body,
        ),
    ]  # fmt: skip


def regulated() -> list[str]:
    """The entropy axis and the unembedding's near-null space."""
    body, every = neurons(), [metrics(f"{model}_neurons") for model in MODELS]
    frozen = [
        [number(found[f"residual ridge: {how}"]["value"], ".2f") for how in ("frozen", "free")] for found in every
    ]
    ridges = " and ".join(f"{less} instead of {free}" for less, free in frozen)
    parts = [value(found[LEAST + ": by the norm"], ".2f") for found in every]
    return [
        "## Entropy neurons",
        "",
        *prose(
            """Do entropy axes, as the neurons of Stolfo et al. (2024, arXiv 2406.16254), lie where the unembedding
            reads least, and act through the final norm's scale (nothing, with it *frozen*)? `python -m
            studies.entropy_neurons` (records `smollm2_neurons`, `gemma_neurons`): axes of one half of the prompts are
            projected out on the other; mean size of the change of entropy; beside random directions as long."""
        ),
        *prose(
            said(
                "**In both models entropy is readable where the unembedding reads least**, along the ridge axis of the "
                "residual stream; removed from the values, an axis moves entropy less than random directions do. **No "
                "part of the norm is certain**: with its scale frozen the value axes do no less, and the residual "
                f"stream's ridge axis moves it by {ridges} bits, within the intervals; of the 16 neurons of the "
                f"largest null share the norm's part is {parts[0]} and {parts[1]}. Not excluded: that all directions "
                "along which streams vary lie there.",
                *(found[f"{of}: null share"]["value"] > found[f"{of}: null share"]["control_high"]
                  for of in AXES for found in every),
                *(found["residual ridge: |rho| with entropy"]["low"] > 0 for found in every),
                *(apart(found[f"value {of}: free"]) == -1 for of in ("pc1", "ridge") for found in every),
                *(found[f"{of} ridge: frozen"]["high"] > found[f"{of} ridge: free"]["low"]
                  for of in ("value", "residual") for found in every),
                *(found[LEAST + ": by the norm"]["low"] < 0 for found in every),
            )
        ),
        *body,
    ]  # fmt: skip


def rescued() -> list[str]:
    """A state from within the horizon, past it."""
    found = metrics("rescue")

    def arm(name: str) -> list[dict[str, Any]]:
        return [found[f"{name}, block {block}"] for block in (2, 3)]

    def both(each: Sequence[dict[str, Any]]) -> str:
        return " and ".join(value(one, ".2f") for one in each)

    before, within = found["past the horizon, no edit"], found["donors, within the horizon"]
    whole, update, random, lens = (arm(name) for name in ("whole", "update", "random", "lens of the donor"))
    wrong = [found[f"mismatched, block {block}: the donor's answer"] for block in (2, 3)]
    return prose(
        f"""A GPT-2 of 4 blocks, trained on `recurrence` modulo 5 with a loss on the first 5 of 15 queries (`python -m
        studies.rescue`, record `rescue`; 400 sequences, intervals over 20 rules), is right in
        {value(within, ".2f")} of the cases within that horizon and in {value(before, ".2f")} past it (published:
        .19)."""
        + said(
            f" **A state from within repairs the answer past it**: put in before blocks 2 and 3, in {both(whole)} "
            f"(published: .97 and 1.00); what the donor's blocks wrote, in {both(update)}; random directions of that "
            f"length, in {both(random)}. A mismatched donor brings its own answer, in {both(wrong)}.",
            *(one["low"] > before["high"] for one in whole + update),
            *(one["low"] < before["high"] for one in random),
            *(one["low"] > 0.7 for one in wrong),
        )
        + said(
            f" **But the donor's state holds the answer already**: its logit lens alone is right in {both(lens)}. A "
            "rescue shows that an answer can be carried over, not that later blocks still apply the rule.",
            *(abs(one["value"] - there["value"]) < 0.15 for one, there in zip(whole, lens, strict=True)),
        )
    )


def page() -> str:
    """The page above `REST`."""
    lines = [
        "# What two real models say",
        "",
        *prose(
            """SmolLM2-135M-Instruct (30 layers; 9 query heads share 3 of keys and values) and Gemma-3-270M (base; 18
            layers; 4 share 1; mostly a window of 512 tokens), from 4-bit files. `python -m studies.findings` writes
            this page, down to "In small models of known truth", from `docs/results/`; `python docs/results.py --run
            NAME` measures a record again. Intervals are 95 %, over templates, sets of labels, or heads; the control is
            the hardest that a claim names; the [word](claims.md) comes from both."""
        ),
        "![Both models on one scale: 0 is the hardest control, 1 the claimed effect beyond it](pictures/findings.svg)",
        "",
        "## The four predictions",
        "",
        *prose(
            """Paper III (Agarwal et al. 2025, arXiv 2512.23752). 75 mixed and 75 maths prompts: records `smollm2`
            (float32, 8 draws of each control) and `gemma_seed0` (bfloat16, 5); 200 prompts of two labels:
            `smollm2_evidence`, `gemma_evidence` (bfloat16)."""
        ),
        *four(), *replicated(), *axis(),
        "## Evidence in context", "", *weighed(),
        "## Induction heads", "", *induction(),
        "## Beliefs in context", "", *believed(),
        *regulated(),
        "## Rescue transplant", "", *rescued(),
        "## What nobody can tell from this", "", *limits(),
    ]  # fmt: skip
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n\n"


def limits() -> list[str]:
    """What two trainings, read once, leave open."""
    each = (
        "Whether a property is one of language models, of size, or of grouped queries. What a window does: no prompt "
        "is as long as Gemma's. Whether rounding to 4 bits matters.",
        "Whether an answer to two labels comes from a belief or from a count: the exact log odds depend on the "
        "difference of the counts alone.",
    )
    return [line for one in each for line in textwrap.wrap(f"- {one}", 132, subsequent_indent="  ")] + [""]


def digest() -> str:
    """What the figure ends in: a hash of the numbers that it draws."""
    drawn = [claimed(model, claim) for model in MODELS for claim in PREDICTED]
    return f"<!-- of {sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:16]} -->"


def main() -> None:
    """Write the page above `REST`, and the figure."""
    rest = PAGE.read_text(encoding="utf-8").partition(REST)[2]
    PAGE.write_text(page() + REST + rest, encoding="utf-8")
    drawn = figure()
    from pictures import svg

    FIGURE.write_text(svg(drawn, 860, 400) + digest() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
