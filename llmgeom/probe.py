"""The protocol of a probe: the activations that it needs, and how it turns them into a result.

A probe's file can import all names that it uses from here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from llmgeom.batch import Batch, Posterior, Rows, Tokens
from llmgeom.errors import Unavailable, UserError, brief, unknown
from llmgeom.model.capture import Capture, Site
from llmgeom.model.forward import probe_batch
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer, Step
from llmgeom.result import FIGURE, Estimate, Result
from llmgeom.stats.controls import Control, Null
from llmgeom.stats.resampling import in_groups, jackknife
from llmgeom.stats.verdict import Claim

__all__ = [
    "Batch", "Capture", "FunctionProbe", "Model", "Needs", "Observer", "Posterior", "Probe", "ProbeInput", "Result",
    "Rows", "Site", "Step", "Tokens", "Unavailable", "UserError", "probe", "probe_batch",
]  # fmt: skip
MIXED, MATCHED = "mixed", "mixed, as diverse"
WHOLE = "whole sequences"  # sequences of a task with every query; the main sample queries one position of each
LEAST_SEQUENCES = 20  # of those, at least, are measured
# Prompts that controls read, unless a probe needs fewer: distances and permutations grow with the square.
MOST_PROMPTS = 1000
UNTRAINED, SHUFFLED, NO_CONTEXT, PERMUTED = CONTROLS = (
    "untrained", "shuffled prompts", "without context", "permuted weights"
)  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """The needs of a probe; the runner captures the union over all probes in one pass of each model.

    Attributes:
        sites: sites at the queried positions of the main sample and of `samples`, in the model and in every control.
        optional: sites that are captured if the model has them.
        observers: functions that reduce large tensors during the pass; `Capture.observed` gives their arrays.
        controls: some of CONTROLS. Without context the trained model's attention writes are replaced by their mean
            over other prompts (`llmgeom.model.no_context`); every claim about uncertainty or context needs it. Permuted
            weights (`llmgeom.model.controls.permute`) have the trained scale of each matrix, for numbers that depend on
            it, such as the entropy of attention.
        samples: names of further samples that it reads, where the command has them; or name -> a function of the
            subject and the main sample that makes one (e.g. of single tokens).
        control_prompts: for a probe that measures every prompt and compares with controls on some of them
            (`ProbeInput.null_subset`): how many prompts of a sample controls read, at most; of several probes the least
            counts. With 0 the probe gets only what controls read, at most MOST_PROMPTS.
        chosen_layers: whether each of its numbers concerns one layer, or the last, so that it can measure chosen layers
            (`--layers`, `ProbeInput.layers`); any other probe that reads layers is then left out.
        check: raises UserError if the probe cannot measure this batch in this model, before anything runs.
        collect: makes `ProbeInput.observations` from the captures by sample name ("" is the main one) and from the
            return value of `examine`; by default the latter.
        examine: the declared exception to "a probe calls no model": reads weights, edits activations or takes
            gradients, of the model and of every untrained control, whose facts have "untrained".
    """

    sites: frozenset[Site] = frozenset()
    optional: frozenset[Site] = frozenset()
    observers: tuple[Observer, ...] = ()
    controls: frozenset[str] = frozenset({UNTRAINED, SHUFFLED, NO_CONTEXT})
    samples: Collection[str] | Mapping[str, Callable[[Model, Batch], Batch | None]] = ()
    control_prompts: int = 0
    chosen_layers: bool = False
    check: Callable[[Model, Batch], None] | None = None
    collect: Callable[[Mapping[str, Capture], Any], Any] | None = None
    examine: Callable[[Model, Mapping[str, Capture]], Any] | None = None

    def __post_init__(self) -> None:
        """Sites and controls of any collection, as names too. Raises UserError for an unknown one."""
        for name in ("sites", "optional"):
            object.__setattr__(self, name, frozenset(map(Site, getattr(self, name))))
        object.__setattr__(self, "controls", frozenset(self.controls))
        for name in self.controls - {*CONTROLS}:
            raise unknown("control", name, CONTROLS)


def is_control(subject: Model) -> bool:
    """Whether a model that `Needs.examine` gets is an untrained control of the run."""
    return subject.facts.get("untrained") is not None and not subject.facts.get("initial")


def exact_answers(subject: Model, batch: Batch) -> None:
    """`Needs.check` of a probe that compares with exact answers. Raises Unavailable without any."""
    batch.exact  # noqa: B018 (it raises)


@dataclass(frozen=True)
class ProbeInput:
    """The input of `measure`: captures of the model and of its controls.

    Attributes:
        capture: the model on the main sample.
        entropy: [row] float64, bits: the trained model's next-token entropy at each queried position.
        untrained: each untrained control on the main sample.
        shuffled: the model on the prompts with all tokens but the final one in random order, one capture per draw.
        samples: further samples by name, those of NEEDS.samples that there are: each with its capture and entropy, in
            the model, the untrained controls and without context.
        observations: the result of NEEDS.collect for the model; control_observations: for each untrained control.
        seed: seed of every draw of the probe.
        subset: for a probe of every prompt (`Needs.control_prompts`): the input of those that controls read, if fewer.
        no_context: the trained model without context on the main sample; None without such a control.
        no_context_observations: the result of NEEDS.collect for it, for a probe that examines nothing.
        layers: the numbers of the captured layers; None for all layers.
        permuted: the model with its weights permuted within each matrix, one capture per draw; its sites alone.
    """

    capture: Capture
    entropy: np.ndarray
    untrained: tuple[Capture, ...] = ()
    shuffled: tuple[Capture, ...] = ()
    samples: Mapping[str, ProbeInput] = field(default_factory=dict)
    observations: Any = None
    control_observations: tuple[Any, ...] = ()
    seed: int = 0
    subset: ProbeInput | None = None
    no_context: Capture | None = None
    no_context_observations: Any = None
    layers: tuple[int, ...] | None = None
    permuted: tuple[Capture, ...] = ()

    @property
    def null_subset(self) -> ProbeInput:
        """The input restricted to the prompts that the controls read."""
        return self.subset or self

    @property
    def clusters(self) -> np.ndarray:
        """[row] str: the cluster (template, document, sequence) of each row."""
        return np.asarray(self.capture.batch.cluster)[self.capture.prompt.numpy()]


class Probe(Protocol):
    """A module of probes/, an object from `probe`, or a frozen dataclass whose fields are the probe's parameters."""

    @property
    def NEEDS(self) -> Needs: ...

    def measure(self, data: ProbeInput, /) -> Result: ...


@dataclass(frozen=True)
class FunctionProbe:
    """A probe from a function; see `probe`."""

    NEEDS: Needs
    function: Callable[[ProbeInput], Any]

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.function.__doc__

    def measure(self, data: ProbeInput) -> Result:
        """What the function returns; of a number, its interval over clusters, and the same number of every control."""
        answer = self.function(data)
        if isinstance(answer, Result):
            return answer
        number, figure = answer if isinstance(answer, tuple) else (answer, None)
        value = _number(self.function, number)

        def again(capture: Capture, entropy: np.ndarray = data.entropy) -> float:
            answer = self.function(replace(data, capture=capture, entropy=entropy))
            return _number(self.function, answer[0] if isinstance(answer, tuple) else answer)

        def without(prompts: np.ndarray) -> float:
            rows = np.flatnonzero(np.isin(data.capture.prompt.numpy(), prompts))
            return again(data.capture.take(torch.from_numpy(prompts)), data.entropy[rows])

        prompts, clusters = np.arange(len(data.capture.batch)), np.asarray(data.capture.batch.cluster)
        interval = jackknife(without, prompts, in_groups(clusters, data.seed))
        nulls = [
            Null.of(name, np.array([again(capture) for capture in captures]))
            for name, captures in ((UNTRAINED, data.untrained), (SHUFFLED, data.shuffled))
            if captures
        ]
        if data.no_context is not None:
            centre = again(data.no_context)
            nulls.append(Null(name=NO_CONTEXT, low=centre, high=centre, centre=centre))
        meaning = (self.function.__doc__ or self.function.__name__.replace("_", " ")).strip().splitlines()[0]
        found = Estimate(
            # A number and its controls: no claim.
            rule=Claim(name=meaning.rstrip("."), unit="", side="upper", effect=0.0),
            value=value,
            low=interval.low,
            high=interval.high,
            method=interval.method,
            n=len(prompts),
            clusters=len(set(clusters.tolist())),
            deletions=interval.deletions,
            controls=tuple(
                Control(null.name, null.draws, null.centre, null.low, null.high)
                for null in sorted(nulls, key=lambda null: -null.high)
            ),
        )
        drawn = {FIGURE: figure.to_json()} if figure is not None else {}
        return Result(self.function.__name__.replace("_", " "), (found,), facts=drawn)


def probe(needs: Needs | str | Site, *sites: str | Site) -> Callable[[Callable[[ProbeInput], Any]], FunctionProbe]:
    """Make a probe from a function, in a notebook or in a file for `--probes FILE`.

    Example:
        @probe("residual")
        def length(data):
            "Mean length of the residual stream after the last layer."
            return data.capture["residual", -1].norm(dim=-1).mean()

    The function returns a number, a number and a Plotly figure, or a `Result`. It is also called with each control's
    captures in the place of the model's, and without each cluster in turn: the number comes with its control and its
    95 % interval. The first line of its docstring says what it is.

    Args:
        needs: What it reads: `Needs`, or the name of a site, then of further ones.
    """
    every = needs if isinstance(needs, Needs) else Needs(frozenset({Site(needs), *map(Site, sites)}))
    return lambda function: FunctionProbe(every, function)


def _number(function: Callable, answer: Any) -> float:
    try:
        number = float(answer)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"probe {function.__name__!r} returned {brief(answer)}: expected a finite number, a number and a Plotly "
            "figure, or a Result"
        )
    return number
