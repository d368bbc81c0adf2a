"""Analysis of the cells of `attention_variants`: changes with grouped queries and a window, their tests, and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, Literal, TypedDict

import numpy as np
from jaxtyping import Float

from llmgeom.errors import UserError
from llmgeom.stats.resampling import Interval, mean_intervals
from llmgeom.stats.tests import equivalence_p, holm, needed_n_mean, two_sided_p


class Kind(TypedDict):
    """The changes of a kind of attention to `Spec`."""

    grouped: bool
    windowed: bool


KINDS: dict[str, Kind] = {  # in the order of the axes [grouped windowed]
    "mha-full": {"grouped": False, "windowed": False},
    "mha-window": {"grouped": False, "windowed": True},
    "gqa-full": {"grouped": True, "windowed": False},
    "gqa-window": {"grouped": True, "windowed": True},
}
LOSS = "held-out loss, nats a token"
PER_HEAD, COLUMNS = "PC1+PC2 share, one kv head at a time", "columns of W_K, every kv head"
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Signature:
    """A number that is compared between kinds: `estimate` of `probe`, or one measured here where `probe` is "kinds".

    Attributes:
        nature: what Paper III takes it to be: "dynamic" changes with the kind of attention, "static" does not.
        effect: the smallest change of interest, declared before any model was trained, in the unit of the metric: that
            of its claim, save for focusing, where .1 is about the difference between the families that Paper III
            compares (31 and 20-30 %), not the 30 % that one model must reach.
        width: it depends on how many coordinates the values have, and grouping changes that: a change with grouping is
            partly arithmetic, and the verdict says so.
    """

    name: str
    probe: str
    estimate: str
    nature: Literal["dynamic", "static"]
    effect: float
    width: bool = False


_FOCUS, _VALUES = "attention_focus", "value_manifold"
_SHARE, _RHO, _R2 = "PC1+PC2 share", "|rho| of PC1 and entropy", "entropy decodability (held-out R2)"
SIGNATURES = (
    Signature("focusing", _FOCUS, "focusing", "dynamic", 0.1),
    Signature("focusing without the first token", _FOCUS, "focusing without the first token", "dynamic", 0.1),
    Signature("values: PC1+PC2 share", _VALUES, _SHARE, "static", 0.1, width=True),
    Signature("values: PC1+PC2 share, by kv head", "kinds", PER_HEAD, "static", 0.1),
    Signature("values: |rho| of PC1 and entropy", _VALUES, _RHO, "static", 0.3),
    Signature("values: R2 of entropy", _VALUES, _R2, "static", 0.1, width=True),
    Signature("writes: PC1+PC2 share", _VALUES, f"attn_out: {_SHARE}", "static", 0.1),
    Signature("writes: |rho| of PC1 and entropy", _VALUES, f"attn_out: {_RHO}", "static", 0.3),
    Signature("writes: R2 of entropy", _VALUES, f"attn_out: {_R2}", "static", 0.1),
    Signature("columns of W_K", "kinds", COLUMNS, "static", 0.01),
    Signature("token keys, by head", "key_orthogonality", "token keys, by head", "static", 0.01),
)


@dataclass(frozen=True)
class Effect:
    """How much a signature changes with one factor, over seeds.

    Attributes:
        value, sd: of the change within a seed, in the unit of the signature.
        interval: 95 % (Student, seeds - 1 degrees of freedom).
        inner: 90 %, that of the two one-sided tests (Schuirmann, 1987).
        p, p_within: of no change; of a change of at least the effect of interest. `effects` adjusts both.
        needed: seeds that would decide for the declared effect with 90 % power.
    """

    signature: Signature
    factor: str
    seeds: int
    value: float
    sd: float
    interval: Interval
    inner: Interval
    p: float
    p_within: float
    needed: int

    @property
    def verdict(self) -> str:
        """Differs from 0: p < .05. Less than the effect of interest: p_within < .05. Neither: undecided.

        dynamic   changed: differs. not changed: less than the effect. Both: changed, by less than it.
        static    equivalent: less than the effect, whether it differs or not. different: differs, and not less.
        """
        s, differs, within = self.signature, self.p < 0.05, self.p_within < 0.05
        if s.nature == "dynamic" and differs:
            word = f"changed, by less than {s.effect:g}" if within else "changed"
        elif within:
            word = "not changed" if s.nature == "dynamic" else "equivalent"
        elif differs:
            word = "different"
        elif self.seeds < self.needed:
            return f"undecided (needs {self.needed} seeds)"
        else:
            return f"undecided ({self.needed} seeds suffice for {s.effect:g}; less is not excluded)"
        return f"{word} †" if s.width and self.factor != "window" else word


def contrasts(values: Float[np.ndarray, "seed grouped windowed"]) -> dict[str, Float[np.ndarray, " seed"]]:
    """The effect of each factor in each seed, in the unit of the values.

    Returns:
        grouping, window: with less without it, mean over the other factor.
        interaction: what the window changes with grouped queries, less what it changes without.
    """
    by_window = values[:, :, 1] - values[:, :, 0]
    by_grouping = values[:, 1, :] - values[:, 0, :]
    interaction = by_window[:, 1] - by_window[:, 0]
    return {"grouping": by_grouping.mean(1), "window": by_window.mean(1), "interaction": interaction}


def effect(signature: Signature, factor: str, change: Float[np.ndarray, " seed"]) -> Effect:
    """Mean, intervals and tests of one change, paired by seed; p not yet adjusted."""
    n = len(change)
    mean, sd = float(change.mean()), float(change.std(ddof=1))

    def span(level: float) -> Interval:
        low, high = mean_intervals([change], level=level)[0].tolist()
        return Interval(low, high, level, "Student over seeds")

    p = two_sided_p(mean, sd / n**0.5, n)
    within = equivalence_p(mean, span(0.95), -signature.effect, signature.effect, n)
    # The two one-sided tests must both be won, at 5 % each.
    power, level = (0.9, 0.95) if signature.nature == "dynamic" else (0.95, 0.90)
    needed = needed_n_mean(signature.effect, max(sd, 1e-12), power, level)
    return Effect(signature, factor, n, mean, sd, span(0.95), span(0.90), p, within, needed)


def effects(values: Mapping[str, Float[np.ndarray, "seed grouped windowed"]]) -> list[Effect]:
    """Every factor's effect on every signature that has values, p adjusted by Holm over those of one nature."""
    results = []
    for nature in ("dynamic", "static"):
        known = [s for s in SIGNATURES if s.nature == nature and s.name in values]
        raw = [effect(s, factor, change) for s in known for factor, change in contrasts(values[s.name]).items()]
        p, within = holm([e.p for e in raw]).tolist(), holm([e.p_within for e in raw]).tolist()
        results += [replace(e, p=a, p_within=b) for e, a, b in zip(raw, p, within, strict=True)]
    return results


def analyse(cells: Sequence[Cell]) -> dict[str, Any]:
    """All numbers of the experiment, as plain data; cells by seed, then as in KINDS.

    Raises:
        UserError: where the cells of a seed did not read the same text.
    """
    seeds = sorted({c["spec"]["seed"] for c in cells})
    assert [(c["spec"]["seed"], c["kind"]) for c in cells] == [(seed, kind) for seed in seeds for kind in KINDS]
    for seed in seeds:
        if len({c["windows_sha256"] for c in cells if c["spec"]["seed"] == seed}) > 1:
            raise UserError(f"the cells of seed {seed} did not read the same text; remove them and run again")
    measured, absent = {LOSS: [c["loss"]["model"] for c in cells]}, {}
    for s in SIGNATURES:
        by_cell = [c["values"].get(s.probe, {}).get(s.estimate) for c in cells]
        if lacking := by_cell.count(None):
            whys = sorted({c["unmeasured"][s.probe] for c in cells if s.probe in c["unmeasured"]})
            absent[s.name] = "; ".join(whys) or f"{s.probe} gives no {s.estimate!r} in {lacking} cells"
        else:
            measured[s.name] = by_cell
    values = {name: np.array(numbers, dtype=np.float64).reshape(-1, 2, 2) for name, numbers in measured.items()}
    beside = Signature(LOSS, "", "", "dynamic", 0.1)  # no verdict: it says how far cells can be compared
    losses = [c["loss"] for c in cells]
    return {
        "spec": {k: v for k, v in cells[0]["spec"].items() if k not in ("grouped", "windowed", "seed")},
        "seeds": seeds,
        "parameters": {c["kind"]: c["parameters"] for c in cells},
        "absent": absent,
        "values": {name: numbers.reshape(-1, len(KINDS)).tolist() for name, numbers in values.items()},
        "loss_of_trigram": [loss["model"] / loss["trigram"] for loss in losses],
        "loss_of_few": [loss["model"] / min(loss["trigram_few"], loss["trigram"]) for loss in losses],
        "loss": [asdict(effect(beside, factor, change)) for factor, change in contrasts(values[LOSS]).items()],
        "effects": [asdict(e) | {"verdict": e.verdict} for e in effects(values)],
        "cells": list(cells),
        "cpu_minutes": sum(c["cpu_minutes"] for c in cells),
        "versions": {p: version(p) for p in ("llmgeom", "torch", "transformers", "tokenizers", "numpy")},
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as two tables of markdown: means of the cells, and what each factor changes."""
    spec, n = result["spec"], len(result["seeds"])
    means = changes = ""
    shown = {name: name.replace("|", "\\|") for name in result["values"]}  # |rho| would end a column
    for name, rows in result["values"].items():
        cells = (f"{np.mean(column):.3f} ({np.std(column, ddof=1):.3f})" for column in zip(*rows, strict=True))
        means += f"| {shown[name]} | {' | '.join(cells)} |\n"
    for e in (*result["effects"], *result["loss"]):
        s, span = e["signature"], e["interval"]
        change = f"{e['factor']} | {e['value']:+.3f} [{span['low']:+.3f}, {span['high']:+.3f}] | {e['p']:.2g}"
        if s["name"] == LOSS:
            changes += f"| {LOSS} | | {change} (alone) | | beside |\n"
        else:
            tested = f"{change} | {e['p_within']:.2g} | {e['verdict']}"
            changes += f"| {shown[s['name']]} ({s['nature']}) | {s['effect']:g} | {tested} |\n"
    absent = "".join(f"not measured: {name}: {why}\n" for name, why in result["absent"].items())
    ratios = (result["loss_of_trigram"], result["loss_of_few"])
    of_trigram, of_few = (f"{min(ratio):.3f} to {max(ratio):.3f}" for ratio in ratios)
    sizes = " or ".join(map(str, sorted({*result["parameters"].values()})))
    return f"""Mean over {n} seeds (sd).

| | {" | ".join(KINDS)} |
|---|---|---|---|---|
{means}
Change within a seed: mean [95 % interval], p of no change and of a change beyond the effect of
interest, each by Holm over the signatures of its nature; {n} seeds.

| signature | effect of interest | factor | change | p = 0 | p beyond | verdict |
|---|---|---|---|---|---|---|
{changes}
† depends on how many coordinates the values have, which grouping changes: partly arithmetic.
{absent}Held-out loss is {of_trigram} of the trigram's on the same text, {of_few} of the better of two.
{spec["prompts"]} prompts, a window of {spec["window"]} tokens, {sizes} parameters, \
{spec["steps"]} steps of {spec["batch"]} x {spec["context"]} tokens, {result["cpu_minutes"]:.0f} CPU minutes.
"""
