"""What a question can find: for each claim the clusters that it needs, and the smallest effect that it would find."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmgeom.claims import Claim
from llmgeom.commands.dry_run.stages import Source
from llmgeom.probe import LEAST_SEQUENCES, WHOLE, Needs
from llmgeom.stats import power
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.tests import needed_n_correlation, needed_n_mean
from llmgeom.stats.verdict import no_n, too_few

KV_HEADS = "kv heads"  # the one thing counted that prompts do not add to


@cache
def assumptions() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """[probe][metric] of llmgeom/planning.toml: measured spreads, which a plan assumes and no verdict reads."""
    return tomllib.loads((Path(__file__).parents[2] / "planning.toml").read_text(encoding="utf-8"))


def findable(source: Source) -> Iterator[dict[str, Any]]:
    """A row for each claim that the record would judge, all of them in Holm's correction (llmgeom/stats/power.py)."""
    claims = [
        (probe.NEEDS, claim)
        for probe in source.modules.values()
        for claim in getattr(probe, "CLAIMS", {}).values()
        if claim.claim and _judged(source, probe.NEEDS, claim)
    ]
    prompts_per_cluster = len(source.batch) / len(set(source.batch.cluster))
    for needs, claim in claims:
        rank = claim.needed == "correlation"
        have, most = _clusters_of(source, needs, claim)
        row = {"probe": claim.probe, "name": claim.name, "unit": claim.unit, "effect": claim.smallest}
        row |= {"counts": claim.counts, "clusters": have, "most_clusters": most}
        assumed = assumptions().get(claim.probe, {}).get(claim.name, {})
        kind = "" if source.batch.posterior is None else "task_"
        spread, null_spread = (assumed.get(f"{kind}{key}", 0.0) for key in ("spread", "null_spread"))
        row |= {"spread": None if rank else spread, "null_spread": null_spread, "why": ""}
        unplanned = "" if rank or spread else "not planned: how much clusters differ was never measured"
        if unplanned := needs.unplanned.get(claim.name, unplanned):
            yield row | {"spread": None, "null_spread": None, "why": unplanned}
            continue
        control = assumed.get("control", "draws")
        design = power.Design(claim, spread, null_spread, source.draws, len(claims), control)
        row["interval_clusters"] = _interval(design)
        row["needed_clusters"] = needed = power.needed(design)
        row["needed_prompts"] = math.ceil(needed * prompts_per_cluster) if needed and claim.counts != KV_HEADS else None
        row["any_layer_clusters"] = None
        if rank:
            row["any_layer_clusters"] = power.needed_in_any_layer(claim.effect, source.subject.facts["layers"])
        smallest = power.detectable(design, have)
        row["detectable"] = smallest if smallest is not None and smallest <= claim.most else None
        if needed is None:
            row["why"] = _never(design, claim.unit)
        elif most is not None and needed > most:
            row["why"] = f"needs {needed} clusters, and there are {most}"
        yield row


def _interval(design: power.Design) -> int:
    """Units at which the interval alone decides, as a verdict says it: without Holm, and without the draws' spread."""
    claim = design.claim
    if claim.needed == "correlation":
        return needed_n_correlation(claim.smallest)
    return needed_n_mean(claim.smallest, design.spread, 0.95 if claim.equivalence else power.POWER)


def _never(design: power.Design, unit: str) -> str:
    if few := too_few(design.draws):
        return f"{few}: raise --nulls"
    return no_n(design.null_spread, unit if design.claim.needed == "mean" else "on Fisher's scale")


def _judged(source: Source, needs: Needs, claim: Claim) -> bool:
    """Whether the scan will come to a verdict, as far as that is known without weights."""
    if claim.counts == KV_HEADS:
        return _clusters_of(source, needs, claim)[0] >= LEAST_CLUSTERS
    return needs.judged is None or needs.judged(claim.name, source.subject, source.batch, source.samples)


def _clusters_of(source: Source, needs: Needs, claim: Claim) -> tuple[int, int | None]:
    """How many clusters the claim is judged on, and the most there can be; None where that is for the asking."""
    batch, facts = source.batch, source.subject.facts
    if claim.counts == KV_HEADS:
        return (heads := facts["layers"] * (facts["kv_heads"] or 0)), heads
    have, most = len(set(batch.cluster)), len(set(source.pool.cluster)) if batch.posterior is None else None
    if needs.most_rows:
        queries = source.samples.get(WHOLE, source.batch).exact.predictive.shape[1]  # of each sequence
        most = max(needs.most_rows // queries, LEAST_SEQUENCES)
    return have if most is None else min(have, most), most
