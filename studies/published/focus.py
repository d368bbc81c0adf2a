"""Attention focusing as Paper III defines it, at the final token and averaged over positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from llmgeom.claims import declared
from llmgeom.probe import SHUFFLED, UNTRAINED, Capture, Needs, Observer, ProbeInput, Site, Step
from llmgeom.probes.attention_focus import focusing
from llmgeom.probes.shared.nulls import HARDEST_BAND, compare, null_band
from llmgeom.result import Result, line
from llmgeom.stats.information import bits
from studies.published import CLAIMS_FOLDER

CLAIMS = declared("published_focus", CLAIMS_FOLDER)
FINAL, EVERY = "focusing, final token", "focusing, all positions"
THRESHOLD = 0.3


def everywhere(step: Step) -> dict[str, torch.Tensor]:
    """[row layer] nats: attention entropy, mean over heads and over all positions of the row's prompt."""
    sums = [step.sums(layer.double().mean(1)) for layer in step.everywhere(Site.ATTENTION_ENTROPY)]
    count = step.lengths.to(sums[0].device)
    return {"entropy": (torch.stack(sums, 1) / count[:, None])[step.prompt]}


def collect(captures: Mapping[str, Capture], _: Any = None) -> np.ndarray:
    """[layer prompt] bits."""
    return bits(captures[""].observed("everywhere.entropy").numpy().T)


NEEDS = Needs(
    frozenset({Site.ATTENTION_ENTROPY}),
    controls=frozenset({UNTRAINED, SHUFFLED}),
    observers=(Observer("everywhere", everywhere, everywhere=frozenset({Site.ATTENTION_ENTROPY}), version="1"),),
    collect=collect,
)


def measure(view: ProbeInput) -> Result:
    """Both forms with their nulls. Raises UserError if the first layer's attention has no entropy."""
    controls = {UNTRAINED: [*map(_final, view.untrained)], SHUFFLED: [*map(_final, view.shuffled)]}
    forms: dict[str, tuple[np.ndarray, Mapping[str, list[np.ndarray]]]] = {
        FINAL: (_final(view.capture), controls),
        EVERY: (view.observations, {UNTRAINED: list(view.control_observations)}),
    }
    estimates = tuple(
        compare(CLAIMS[name], focusing, own, view.clusters, nulls) for name, (own, nulls) in forms.items()
    )
    bands = {
        name: null_band({k: [x.mean(1) for x in null] for k, null in nulls.items()}, "lower")
        for name, (_, nulls) in forms.items()
    }
    word = "above" if estimates[0].value > THRESHOLD else "not above"
    (final, every), of_copies = (forms[name][0].mean(1) for name in (FINAL, EVERY)), "band of untrained copies"
    hardest, copies = (HARDEST_BAND, bands[FINAL]), (of_copies, bands[EVERY])
    return Result.of(
        "Attention focus, as published",
        {
            **line("final", final, "layer", "bits", "attention entropy, final token", null=hardest),
            **line("every", every, "layer", "bits", "attention entropy, all positions", null=copies),
        },
        __name__,
        estimates=estimates,
        notes=(f"{word} the published threshold of {THRESHOLD:g}",),
    )


def _final(capture: Capture) -> np.ndarray:
    """[layer row] bits, mean over heads."""
    return bits(np.stack([layer.double().numpy().mean(1) for layer in capture.layers(Site.ATTENTION_ENTROPY)]))
