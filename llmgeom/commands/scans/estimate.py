"""The price of a scan: its prompts are drawn with random entropies, and each set is priced as a question."""

from __future__ import annotations

from typing import Any

from llmgeom.commands.dry_run.cost import costs
from llmgeom.commands.dry_run.stages import Source, Weightless
from llmgeom.commands.scans.perform import question
from llmgeom.commands.scans.plan import Plan
from llmgeom.commands.scans.samples import sampled
from llmgeom.commands.scans.stability import conditions
from llmgeom.reports.first_look import PATIENCE


def estimate(plan: Plan, only_look: bool = False) -> dict[str, Any]:
    """The `costs` of a scan; with `only_look` always with the minutes before its first page, where the run ends.

    Raises:
        UserError: As the scan would.
    """
    who, asked = Weightless.found(plan.request, plan.located), plan.request
    scans = 1 + sum(not one.why for one in conditions(asked, who)) * asked.stability
    sources = ((name, _source(plan, who, name)) for name in plan.pools)
    patience = 0.0 if only_look else PATIENCE
    return costs(who, sources, asked.device, asked.batch_tokens, plan.out, scans, patience)


def _source(plan: Plan, who: Weightless, name: str) -> Source:
    """One pool of a scan."""
    who.pools.clear()
    return Source.of(who, question(plan, sampled(plan, who, name)), plan.pools[name], early=plan.stratify)
