"""Probes of an edited axis: its effect, the same at every layer, and a direction that must matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture, Site
from llmgeom.model.subject import Subject
from llmgeom.probe import Needs, Probe, ProbeInput
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Mode
from llmgeom.probes.interventions.axis_ablation import (
    BAND_DRAWS,
    AxisEffects,
    DoseEffects,
    axes_of,
    edit_axes,
    edit_each_layer,
    edit_readout_direction,
    patches_by_run,
)
from llmgeom.probes.interventions.axis_results import (
    CONTROL,
    measure_axis,
    measure_layers,
    measure_positive_control,
)
from llmgeom.probes.interventions.patching import copies
from llmgeom.probes.interventions.splits import ESTIMATION, PROMPT_SITES, Positions, PromptSplit, check_prompts, halves
from llmgeom.progress import Progress, prefixed
from llmgeom.record import Record
from llmgeom.result import Result
from llmgeom.run import Question

DIRECTIONS = ("pc1", "ridge")
Arrays = dict[str, np.ndarray]
# An edit is compared with other edits of the same model: no other control is captured.
EDITED = Needs(sites=PROMPT_SITES, untrained=False, shuffled=False, no_context=False, samples=frozenset({ESTIMATION}))


@dataclass(frozen=True)
class AxisProbe:
    """The edit of one axis in some layers at once. Its controls are other edits of the same model.

    Attributes:
        name: of the probe, under which its claims are declared.
        direction: how the axis is estimated; see `Axis.estimate`.
        controls: draws of each kind of control edit.
    """

    name: str
    direction: str
    mode: Mode
    layers: tuple[int, ...]
    positions: Positions
    controls: int
    seed: int
    batch_tokens: int
    progress: Progress | None = field(default=None, compare=False)

    @cached_property
    def NEEDS(self) -> Needs:
        return replace(
            EDITED,
            sites=PROMPT_SITES | {Site.VALUE},
            examine=self._examine,
            cost=lambda subject, batch: [(self._copies(subject, len(batch)), batch.tokens.lengths.numpy())],
        )

    def _split(self, subject: Subject, captures: Mapping[str, Capture]) -> PromptSplit:
        return PromptSplit.of(subject, captures, self.seed, self.batch_tokens)

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        split = self._split(subject, captures)
        axes, progress = axes_of(split, self.direction, self.layers), prefixed(self.progress, self.name)
        return edit_axes(split, axes, self.mode, self.positions, self.controls, progress).arrays

    def _copies(self, subject: Subject, inputs: int) -> int:
        return copies(inputs, *patches_by_run(self.mode, len((SIZE, VARIANCE)), self.controls), 1)

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError for few clusters."""
        given = (self.mode, self.layers, self.positions, data.clusters, data.observations)
        return measure_axis(self.name, AxisEffects.of_arrays(*given))


@dataclass(frozen=True)
class EachLayerProbe(AxisProbe):
    """The same edit at every layer, one at a time, with fewer controls: it decides nothing."""

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        split, progress = self._split(subject, captures), self.progress
        options = (self.direction, self.mode, self.positions, self.controls, progress)
        return {"by_layer": edit_each_layer(split, *options)}

    def _copies(self, subject: Subject, inputs: int) -> int:
        draws = patches_by_run(self.mode, len((SIZE, VARIANCE)), min(BAND_DRAWS, self.controls))
        return subject.facts["layers"] * copies(inputs, *draws, 1)

    def measure(self, data: ProbeInput) -> Result:
        return measure_layers(data.observations["by_layer"])


@dataclass(frozen=True)
class PositiveControlProbe(AxisProbe):
    """The read-out direction of two tokens, projected out of the last layer's values at the final token."""

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        split, progress = self._split(subject, captures), prefixed(self.progress, self.name)
        return edit_readout_direction(split, self.controls, progress).arrays

    def _copies(self, subject: Subject, inputs: int) -> int:
        return copies(inputs, *patches_by_run("project-out", 1, self.controls))

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError for few clusters."""
        return measure_positive_control(DoseEffects.of_arrays("project-out", data.observations), data.clusters)


def question(
    subject: Subject,
    batch: Batch,
    *,
    directions: Sequence[str] = DIRECTIONS,
    mode: Mode = "project-out",
    layers: Sequence[int] | Literal["last", "each"] = "last",
    positions: Positions = "query",
    controls: int = 199,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Question:
    """Edit the entropy axis: axes from the estimation half, effects on the evaluation half.

    Args:
        directions: how the axis is estimated, one after another.
        layers: edited together; "each": the last one, and then each alone.
        controls: draws of each kind of control edit.

    Raises:
        UserError: a layer that does not exist; fewer than 5 clusters in a half; a batch that has query positions.
    """
    last = len(subject.blocks) - 1
    chosen = tuple(sorted(set(layers))) if not isinstance(layers, str) else (last,)
    if wrong := [layer for layer in chosen if not 0 <= layer <= last]:
        raise UserError(f"--layers {wrong[0]}: {subject.name} has layers 0 to {last}; nothing was edited")
    check_prompts(batch)
    estimation, evaluation = halves(batch, seed)
    shared: tuple[Any, ...] = (mode, chosen, positions, controls, seed, batch_tokens, progress)
    probes: dict[str, Probe] = {CONTROL: PositiveControlProbe(CONTROL, "pc1", *shared)}
    for direction in directions:
        name = f"ablation_{direction}"
        probes[name] = AxisProbe(name, direction, *shared)
        if layers == "each":
            probes[f"{name}_layers"] = EachLayerProbe(f"{name}_layers", direction, *shared)
    about = {"directions": list(directions), "mode": mode, "layers": list(chosen), "positions": positions}
    return Question(
        evaluation,
        probes,
        controls,
        seed,
        batch_tokens,
        samples={ESTIMATION: estimation},
        facts={"estimated on": len(estimation), "axis": about},
        finish=with_doubts,
    )


def with_doubts(record: Record) -> Record:
    """A failed positive control overturns every result that finds no effect."""
    control = record.results.get(CONTROL)
    if control is not None and control.estimates[0].verdict in ("holds", "small"):
        return record
    doubt = "the positive control failed, so an axis that does no more than other edits proves nothing"
    return replace(record, warnings=(*record.warnings, doubt))
