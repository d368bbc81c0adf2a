"""The everyday verbs of a model: one method a task, each of which returns numbers with their picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from llmgeom.progress import watched
from llmgeom.verbs import beliefs as of_beliefs, heads as of_heads, lens as of_lens, patching, steering, transport

if TYPE_CHECKING:
    from llmgeom.probes.labels.fitted import Probe


class Verbs:
    """What `llmgeom.load` returns has these methods. Edits of the model (`edit`, `steer`) are made in all of them."""

    edit: Callable[..., Self]

    # Each is documented where it is written.
    lens, attention, fit_lens = of_lens.lens, of_lens.attention, transport.fit_lens
    heads, copying = of_heads.heads, of_heads.copying
    patch = patching.patch
    beliefs = of_beliefs.beliefs
    dose_curve, generate = steering.dose_curve, steering.generate

    def probe(
        self, texts: Sequence[Any], labels: Sequence[Any], clusters: Sequence[Any] | None = None, **options: Any
    ) -> Probe:
        """Where a label of yours is linearly readable, and its direction: `llmgeom probe` as an object.

        Ridge regression at the last token of each text, scored on held-out clusters, beside untrained copies, shuffled
        words, no context, a bag of tokens and permuted labels.

        Args:
            texts: At least 5 of each class; or chats, lists of messages with `role` and `content`.
            labels: Two or more classes, or numbers.
            clusters: Texts of one cluster (template, document, author) stay in one fold; by default each is its own.
            options: Of `Probe`: site, layers, position, confounds, controls, seed.

        Returns:
            The score over layers, with intervals and the band of all controls; `layer`, `direction`, `intercept`,
            `predict`, `predict_proba`, `score`, `save`.

        Raises:
            UserError: Too few texts of a class; numbers of texts and labels that differ.
        """
        from llmgeom.probes.labels.fitted import Probe

        subject: Any = self
        with watched():
            return Probe(subject, **options).fit(texts, labels, clusters)

    def steer(self, direction: Any, dose: float, layer: int | None = None, positions: Any = "all") -> Self:
        """The model with `dose` times a direction added to the input of one layer, in every pass: `generate` too.

        Args:
            direction: A label probe, whose direction has length 1 and a layer of its own; or [d_model] numbers.
            dose: How many times the direction; `4 * probe.spread` is four standard deviations of its activations.
            layer: Whose input, 0 to the last; negative from the end.
            positions: Where, as in `edit`.

        Raises:
            UserError: The direction has another width, no layer is given, or it does not exist.
        """
        vector, layer, site = steering.place(direction, layer)
        function, spec = steering.added(self, vector, dose)
        return self.edit(site, function, layers=layer, positions=positions, spec=spec)
