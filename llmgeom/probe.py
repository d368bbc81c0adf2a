"""What a probe is: which activations it needs, and how it turns them into a result.

The names of other modules that a probe's file uses can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from llmgeom.batch import Batch
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.passes import Observer, Step
from llmgeom.model.self_check import probe_batch
from llmgeom.model.subject import Subject
from llmgeom.result import Measured, Result

__all__ = [
    "Batch", "Capture", "FunctionProbe", "Needs", "Observer", "Probe", "ProbeInput", "Sample", "Site", "Step",
    "Subject", "Unavailable", "UserError", "probe", "probe_batch",
]  # fmt: skip
UNSTRATIFIED, ONE_TOKEN, LENGTH = "unstratified", "one final token", "length-matched"
MIXED, MATCHED = "mixed", "mixed, as diverse"
WHOLE = "whole sequences"  # of a task, with every query, where the main sample queries one position of each


@dataclass(frozen=True)
class Needs:
    """What a probe reads; the runner captures the union over all probes in one pass of each model.

    Attributes:
        sites: at the queried positions of the main sample and of `samples`, in the model and in every control.
        optional: sites that are captured where the model has them.
        untrained, shuffled, no_context: which controls it compares with. The third is the trained model with what
            attention writes replaced by its mean over other prompts (`llmgeom.model.no_context`): whoever makes a claim
            about uncertainty or context needs it.
        samples: names of further samples that it reads too, where the source can give them.
        unclaimed: those of them that no claim is about. Only the first untrained controls (`llmgeom.plan.FEW`) read
            them: controls of numbers without a verdict were half of what untrained controls read.
        exact: whether it needs exact answers; without them nothing is captured for it.
        all_prompts: whether it measures any number of prompts and compares with controls of a subset
            (`ProbeInput.null_subset`); any other probe is given the subset alone where there are more than 1,000.
        observers: reduce large tensors during the pass; `Capture.observed` gives their arrays.
        inputs: name -> inputs of the probe's own, made from the main sample and captured like it (e.g. single tokens).
        check: raises UserError where the probe cannot read this model; asked before anything runs.
        examine: the declared exception to "a probe calls no model": reads weights, edits activations or takes
            gradients, of the model and of every untrained control. Arrays by name are cached.
        examine_control: what is taken of an untrained control instead; by default `examine`.
        cost: what `examine` runs, for `--dry-run`: (times, lengths of the inputs) of each kind of pass, for one model.
        control_cost: the same of `examine_control`.
        judged: whether a verdict on the claim of a name will be reached, as far as that is known without weights, for
            `--dry-run`; called with the name, the model, the main sample and the further ones. By default always.
        most_rows: how many rows of whole sequences it measures at most; 0 for all.
        follows_entropy: whether its target is the entropy at the query, so that it needs that to vary.
        chosen_layers: whether every number of it is of one layer alone, or of the last, so that it can measure chosen
            layers (`--layers`, `ProbeInput.layers`); any other probe that reads layers is then left out.
        collect: makes `ProbeInput.observations` from the captures by sample name ("" is the main one) and from what
            `examine` returned; by default the latter.
    """

    sites: frozenset[Site] = frozenset()
    optional: frozenset[Site] = frozenset()
    untrained: bool = True
    shuffled: bool = True
    no_context: bool = True
    samples: frozenset[str] = frozenset()
    unclaimed: frozenset[str] = frozenset()
    exact: bool = False
    all_prompts: bool = False
    observers: tuple[Observer, ...] = ()
    inputs: Mapping[str, Callable[[Subject, Batch], Batch | None]] = field(default_factory=dict)
    check: Callable[[Subject], None] | None = None
    examine: Callable[[Subject, Mapping[str, Capture]], Any] | None = None
    examine_control: Callable[[Subject, Mapping[str, Capture]], Any] | None = None
    cost: Callable[[Subject, Batch], list[tuple[int, Any]]] | None = None
    control_cost: Callable[[Subject, Batch], list[tuple[int, Any]]] | None = None
    judged: Callable[[str, Subject, Batch, Mapping[str, Batch]], bool] | None = None
    most_rows: int = 0
    follows_entropy: bool = False
    chosen_layers: bool = False
    collect: Callable[[Mapping[str, Capture], Any], Any] | None = None


@dataclass(frozen=True)
class Sample:
    """A further sample: its capture, its entropy (bits, [row]), and its capture in each untrained control that read it
    and without context (None where the model has no such control)."""

    capture: Capture
    entropy: np.ndarray
    untrained: tuple[Capture, ...]
    no_context: Capture | None = None

    @property
    def clusters(self) -> np.ndarray:
        """[row] str: the cluster of each row."""
        return _clusters(self.capture)


@dataclass(frozen=True)
class ProbeInput:
    """What `measure` is given: numpy-ready captures of the model and of its controls.

    Attributes:
        capture: the model on the main sample.
        entropy: [row] float64, bits: the trained model's next-token entropy at each queried position.
        untrained: the same sample in each untrained control.
        shuffled: the model on the prompts with all tokens but the final one in random order, one capture a draw.
        samples: further samples by name: those of NEEDS.samples that the source can give.
        observations: what NEEDS.collect made for the model; control_observations: for each untrained control.
        seed: for every draw that the probe makes itself.
        subset: of more than 1,000 prompts, for a probe of `all_prompts`: the input of those that controls read.
        no_context: the same sample in the trained model without context; None where the model has no such control.
        no_context_observations: what NEEDS.collect made of it, for a probe that examines nothing.
        layers: the numbers of the layers that were captured; None for all of them.
    """

    capture: Capture
    entropy: np.ndarray
    untrained: tuple[Capture, ...] = ()
    shuffled: tuple[Capture, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict)
    observations: Any = None
    control_observations: tuple[Any, ...] = ()
    seed: int = 0
    subset: ProbeInput | None = None
    no_context: Capture | None = None
    no_context_observations: Any = None
    layers: tuple[int, ...] | None = None

    @property
    def null_subset(self) -> ProbeInput:
        """The input restricted to the prompts that the controls read."""
        return self.subset or self

    @property
    def clusters(self) -> np.ndarray:
        """[row] str: the cluster (template, document, sequence) of each row."""
        return _clusters(self.capture)


class Probe(Protocol):
    """A module of probes/, an object made with `probe`, or a frozen dataclass whose fields are the probe's parameters.

    Fields of plain data are part of the cache key: probes of equal code and other parameters share no result.
    """

    @property
    def NEEDS(self) -> Needs: ...

    def measure(self, data: ProbeInput, /) -> Result | Measured: ...


@dataclass(frozen=True)
class FunctionProbe:
    """A probe made of a function; see `probe`."""

    NEEDS: Needs
    measure: Callable[[ProbeInput], Result | Measured]

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.measure.__doc__


def probe(needs: Needs) -> Callable[[Callable[[ProbeInput], Result | Measured]], FunctionProbe]:
    """Make a probe of a function in a notebook.

    Example:
        @probe(Needs(sites=frozenset({Site.RESIDUAL})))
        def norm(data):
            return Norm(mean=..., estimates=())
        llmgeom.run_probes(subject, batch, {"norm": norm})
    """
    return lambda measure: FunctionProbe(needs, measure)


def _clusters(capture: Capture) -> np.ndarray:
    return np.asarray(capture.batch.cluster)[capture.prompt.numpy()]
