"""The price of a scan: its prompts are drawn with random entropies, and each set is priced as a question."""

from __future__ import annotations

from typing import Any

from llmgeom.cache.distributed import Share
from llmgeom.commands.dry_run.cost import costs
from llmgeom.commands.dry_run.stages import Source, Weightless
from llmgeom.commands.scans.perform import question
from llmgeom.commands.scans.plan import Plan
from llmgeom.commands.scans.samples import sampled


def estimate(plan: Plan, only_look: bool = False) -> dict[str, Any]:
    """The `costs` of a scan, of its first page alone with `only_look`, or of one job's share.

    Raises UserError as the scan would.
    """
    who, request = Weightless.found(plan.request, plan.located), plan.request
    sources = ((name, _source(plan, who, name)) for name in plan.pools)
    share, end = Share.given(request.shard), ""
    patience: float | None = 0.0
    if only_look:
        sources, patience = ((name, source.preview()) for name, source in sources), None
        end = "No controls: --preview ends with the first page, which judges no claim."
    elif share is not None and not share.launched:
        sources, patience = ((name, source.shared(share.count)) for name, source in sources), None
        end = f"1 of {share.count} shares of all captures, those of every control included. Nothing is measured yet."
    return costs(who, sources, request.device, request.batch_tokens, plan.out, patience, end)


def _source(plan: Plan, who: Weightless, name: str) -> Source:
    """One pool of a scan."""
    who.pools.clear()
    return Source.of(who, question(plan, sampled(plan, who, name)), plan.pools[name], early=plan.stratify)
