"""What a probe observes of a model on a batch, without the runner and its controls."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmgeom.plan import MAIN
from llmgeom.probe import Batch, Model, Needs, Site


def observe(subject: Model, batch: Batch, needs: Needs) -> Any:
    """The observations of one probe on one batch, without controls, as in `ProbeInput.observations`."""
    inputs = {MAIN: replace(batch, inputs=subject.tokens(batch))}
    makers = needs.samples if isinstance(needs.samples, Mapping) else {}
    inputs |= {name: made for name, make in makers.items() if (made := make(subject, inputs[MAIN])) is not None}
    captures = {
        name: subject.capture(
            one,
            needs.sites | {Site.ENTROPY, Site.LIKELY},
            observers=[observer for observer in needs.observers if name in observer.samples],
        )
        for name, one in inputs.items()
    }
    examined = None if needs.examine is None else needs.examine(subject, captures)
    return examined if needs.collect is None else needs.collect(captures, examined)
