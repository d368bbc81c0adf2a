"""Does what attention adds to the residual stream hold entropy as the values do, whatever basis the heads work in?"""

from __future__ import annotations

from dataclasses import dataclass

from llmgeom.claims import declared
from llmgeom.model.capture import Site
from llmgeom.probe import Needs, ProbeInput
from llmgeom.probes.shared.representation_geometry import CloudResult, describe

NEEDS = Needs(frozenset({Site.ATTENTION_WRITE}))
CLAIMS = declared("attention_write")


@dataclass(frozen=True, kw_only=True)
class Result(CloudResult):
    """The measures of the value manifold on what attention writes, which no change of basis inside a head can alter."""

    TITLE = "Attention write"
    MEANING = (
        "What attention adds to the residual stream at the last token, after W_O: the gauge-free control of the value "
        "manifold. The basis of a head's values is free (W_V R with R^-1 W_O is the same model), the write is not; "
        "what holds for the values and not for the write may be a matter of that basis."
    )
    COMPUTED = (
        "As for the value manifold: each coordinate of the write standardised over prompts, PCA, shares of the "
        "variance, participation ratio, |Spearman| of PC1 with next-token entropy in bits, and held-out R2 of a ridge "
        "regression of entropy on the write (5 folds of whole templates). The write is taken after any norm that "
        "follows attention and before it is added. Verdicts are about the last layer, fixed beforehand. Intervals are "
        "jackknifed over templates."
    )
    NULL = (
        "Shares: the same model re-initialised, and the same prompts with all tokens but the last shuffled; both must "
        "be beaten. Correlation and decodability: the re-initialised models' writes against the trained model's "
        "entropy and against their own, and permutations of whole templates; all must be beaten."
    )
    FAILURE_MODES = (
        "Standardising coordinates depends on the basis of the residual stream: the gain of the next norm singles out "
        "its axes, but nothing else does, and another orthonormal basis would give other shares. A write mixes all the "
        "values that attention looked at, so it can follow entropy where the last token's own values do not. Length "
        "and the final token can carry the correlation: see the partial row. PC1 misses curved or oblique manifolds; "
        "decodability does not miss oblique ones."
    )


def measure(view: ProbeInput) -> Result:
    """Shares, |rho| and held-out R2 at every layer, with nulls; metrics at the last. Raises UserError."""
    found = describe(view, Site.ATTENTION_WRITE, CLAIMS, "attention write: ")
    return Result(**found.fields, estimates=found.estimates, warnings=found.warnings)
