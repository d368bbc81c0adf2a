"""Does the last token's attention narrow from the first layer to the last, beyond effects of length and sinks?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from llmgeom.claims import declared
from llmgeom.probe import (
    CONTROLS,
    MOST_PROMPTS,
    PERMUTED,
    SHUFFLED,
    UNTRAINED,
    Capture,
    Needs,
    Observer,
    ProbeInput,
    Site,
    Step,
    UserError,
)
from llmgeom.probes.shared.nulls import HARDEST_OF_THREE, Statistic, compare, null_band
from llmgeom.result import SENTENCE, Figure, Result, labelled, line
from llmgeom.stats.information import bits

LEAST_TOKENS = 3  # with fewer, a row without its first token cannot spread its attention
CLAIMS = declared("attention_focus")
FOCUSING = {"focusing": "all", "focusing without the first token": "rest"}  # metric -> its curve


@dataclass(frozen=True)
class Reach:
    """The reach of attention at each layer, from the attention weights on the longest prompt.

    Attributes:
        tokens: number of tokens with weight from its final query, whatever the config says: a sliding window's width,
            or all tokens.
        weight: the sum of those weights (fraction), smallest head: less than 1 if a head has a learned sink.
    """

    tokens: tuple[int, ...]
    weight: tuple[float, ...]


def visible(step: Step) -> dict[str, torch.Tensor]:
    """[row layer] the first position with weight from the queried token, and the smallest sum of weights over heads."""
    read = dict(zip(step.numbers(Site.ATTENTION), step.layers(Site.ATTENTION), strict=True))
    nothing = torch.zeros(len(step.prompt), device=step.logits.device)  # a layer without attention hides no token
    layers = range(max(read) + 1)
    first = [(read[n].amax(1) > 0).int().argmax(-1).float() if n in read else nothing for n in layers]
    weight = [read[n].sum(-1).amin(1) if n in read else nothing + 1 for n in layers]
    return {"first": torch.stack(first, 1), "weight": torch.stack(weight, 1)}


def collect(captures: Mapping[str, Capture], _: Any = None) -> Reach:
    """The reach of the final query of the longest prompt at each layer."""
    capture = captures[""]
    last = int((capture.prompt == int(capture.lengths.argmax())).nonzero()[-1, 0])
    first, weight = (capture.observed(f"visible.{name}")[last].tolist() for name in ("first", "weight"))
    return Reach(tuple(int(capture.position[last]) + 1 - int(at) for at in first), tuple(weight))


NEEDS = Needs(
    sites=frozenset({Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST, Site.ATTENTION_REST}),
    control_prompts=MOST_PROMPTS,
    observers=(Observer("visible", visible, frozenset({Site.ATTENTION}), version="2"),),
    collect=collect,
    controls=frozenset(CONTROLS),
    chosen_layers=True,
)


def measure(view: ProbeInput) -> Result:
    """Entropy maps, curves, focusing and the first token's weight with nulls.

    Raises UserError if too few prompts are long enough, or a layer sees a single token.
    """
    long, seen = _long(view)
    clusters = view.clusters[long]
    layers = len(view.capture.layers(Site.ATTENTION_ENTROPY))
    chosen = range(layers) if view.layers is None else view.layers
    limits = np.array([view.observations.tokens[n] for n in chosen] if view.observations else [seen.max()] * layers)
    if limits.min() < 2:
        raise UserError(
            f"layer {chosen[limits.argmin()]} sees a single token: its attention has no entropy to compare with"
        )
    main = _curves(view.capture, long, seen, limits)
    # A subset of the prompts has the same expected means, so nulls on the subset suffice.
    subset = view.null_subset
    subset_long, subset_seen = _long(subset)

    def of_subset(capture: Capture) -> dict[str, np.ndarray]:
        return _curves(capture, subset_long, subset_seen, limits)

    controls = {UNTRAINED: subset.untrained, PERMUTED: subset.permuted, SHUFFLED: subset.shuffled}
    # Packed weights are not permuted; the other controls decide then.
    nulls = {name: [*map(of_subset, of)] for name, of in controls.items() if of or name != PERMUTED}
    cut = None if subset.no_context is None else of_subset(subset.no_context)
    without = None if cut is None else (of_subset(subset.capture), cut, subset.clusters[subset_long])

    def band(name: str) -> np.ndarray | None:
        # A narrowing layer has less entropy than its null, so the lower end decides.
        return null_band({key: [c[name].mean(1) for c in draws] for key, draws in nulls.items()}, "lower")

    statistics: dict[str, Statistic] = {}
    unmeasured: dict[str, str] = {}
    if view.layers and view.layers[0]:
        read = ", ".join(map(str, view.layers))
        why = f"not measured: {read} are read (--layers, or the layers that have attention), not the first layer"
        unmeasured = dict.fromkeys(FOCUSING, why)
    elif layers > 1:
        statistics = {name: partial(lambda of, c, rows: focusing(c[of], rows), of) for name, of in FOCUSING.items()}
    statistics["weight on the first token"] = lambda c, rows: float(c["first"][-1, rows].mean())
    entropy, first = (  # [layer head] means over prompts
        np.stack([layer.double().numpy()[long].mean(0) for layer in view.capture.layers(site)])
        for site in (Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST)
    )
    unit, said = "fraction of log2 T", "attention entropy over log2 of tokens seen"
    of_t, of_rest = ((HARDEST_OF_THREE, band(name)) for name in ("all", "rest"))
    beside, without_first = "normalised_no_context", "attention entropy without the first token"
    return Result.of(
        "Attention focus",
        {
            **line(
                "normalised",
                main["all"].mean(1),
                "layer",
                unit,
                f"{said}; dashed: without context",
                beside=beside,
                null=of_t,
            ),
            beside: labelled(
                None if cut is None else cut["all"].mean(1), "layer", unit, f"{said}, trained model without context"
            ),
            "entropy": labelled(
                bits(entropy), "layer head", "bits", "attention entropy of the final query", Figure("heatmap")
            ),
            **line("rest", main["rest"].mean(1), "layer", "fraction of log2 (T-1)", without_first, null=of_rest),
            "first": labelled(first, "layer head", "fraction", "weight on the first token", Figure("heatmap")),
        },
        __name__,
        estimates=tuple(
            compare(CLAIMS[name], statistic, main, clusters, nulls, without=without)
            for name, statistic in statistics.items()
        ),
        warnings=tuple(_warnings(view.observations, long, seen, layers)),
        unmeasured=unmeasured,
        facts={SENTENCE: shape(main["all"].mean(1), list(chosen))} if layers > 2 else {},
    )


def shape(curve: np.ndarray, layers: Sequence[int]) -> str:
    """The curve over layers in one sentence: where it starts, where it is lowest, where it ends.

    Paper III's number compares the first layer with the last; in SmolLM2 attention is narrowest between them.
    """
    low, last = int(curve.argmin()), len(curve) - 1
    start = f"Attention entropy over log2 of the tokens seen is {curve[0]:.2f} in layer {layers[0]}"
    end = f"{curve[last]:.2f} in the last (layer {layers[last]})"
    if low == last:
        return f"{start} and falls to {end}."
    if low == 0:
        return f"{start}, nowhere lower, and {end}."
    return f"{start}, falls to {curve[low]:.2f} in layer {layers[low]} and rises to {end}."


def _long(view: ProbeInput) -> tuple[np.ndarray, np.ndarray]:
    """[row] whether a prompt is long enough; and the number of tokens of those that are."""
    seen = view.capture.position.numpy() + 1
    long = seen >= LEAST_TOKENS
    if long.sum() < 5:
        raise UserError(f"{long.sum()} prompts have {LEAST_TOKENS} tokens or more; attention focus needs at least 5")
    return long, seen[long]


def _curves(capture: Capture, long: np.ndarray, seen: np.ndarray, limits: np.ndarray) -> dict[str, np.ndarray]:
    """Curves [layer row], means over heads: entropy over log2 min(T, w); the same without the first token over
    log2 min(T - 1, w); the first token's weight. T tokens, w the layer's limit."""

    def over_heads(site: Site) -> np.ndarray:
        return np.stack([layer.double().numpy()[long].mean(1) for layer in capture.layers(site)])

    whole, rest = (bits(over_heads(site)) for site in (Site.ATTENTION_ENTROPY, Site.ATTENTION_REST))
    return {
        "all": whole / np.log2(np.minimum(seen, limits[:, None])),
        "rest": rest / np.log2(np.minimum(seen - 1, limits[:, None])),
        "first": over_heads(Site.ATTENTION_FIRST),
    }


def _warnings(reach: Reach | None, long: np.ndarray, seen: np.ndarray, layers: int) -> Iterator[str]:
    if not long.all():
        yield f"{int((~long).sum())} prompts of fewer than {LEAST_TOKENS} tokens were left out"
    if layers == 1:
        yield "1 layer: the first layer is also the last, and focusing is left out"
    if reach is None:
        return
    short = [(layer, tokens) for layer, tokens in enumerate(reach.tokens) if tokens < seen.max()]
    if short:
        where = ", ".join(str(layer) for layer, _ in short)
        yield (
            f"the final query sees at most {max(tokens for _, tokens in short)} tokens in layers {where}: entropy "
            "there is over log2 of that; its bits still fall with the window"
        )
    if min(reach.weight) < 0.99:
        yield (
            f"heads have a learned sink: weights on tokens sum to as little as {min(reach.weight):.2f}, and entropy "
            "falls with them; the form without the first token is renormalised"
        )


def focusing(curve: np.ndarray, rows: np.ndarray | slice) -> float:
    """1 - H(last layer) / H(first layer), means over `rows` of [layer row]; fraction."""
    first, last = curve[0, rows].mean(), curve[-1, rows].mean()
    if first <= 0:
        raise UserError("the first layer's attention has no entropy, so it cannot narrow")
    return float(1 - last / first)
