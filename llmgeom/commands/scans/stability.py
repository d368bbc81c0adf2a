"""Do verdicts stand when the model is read in another precision, in other batches, or with its BOS token toggled?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmgeom.cache.distributed import Share
from llmgeom.commands.scans.perform import perform as scan, scanned
from llmgeom.commands.scans.plan import Plan
from llmgeom.commands.scans.request import RunConfig
from llmgeom.commands.scans.samples import Drawn, sampled
from llmgeom.errors import UserError
from llmgeom.model.batching import BatchRules, plan_batches
from llmgeom.model.hub import Located
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import special_prefix
from llmgeom.progress import renamed
from llmgeom.record import Record
from llmgeom.reports.text import grid, number_of
from llmgeom.result import Estimate

FOLDER = "stability"
MISSING = "not measured"


@dataclass(frozen=True)
class Toggled:
    """A tokenizer with its BOS token before a text where it would put none, or without what it would put there.

    Attributes:
        prefix: ids put first.
        drop: how many of the tokenizer's own first ids are left out.
    """

    tokenizer: Any
    prefix: tuple[int, ...] = ()
    drop: int = 0

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any) -> dict[str, list]:
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, **options)["input_ids"]
        if not add_special_tokens:
            return {"input_ids": ids}
        rows = [[*self.prefix, *row[self.drop :]] for row in ([ids] if isinstance(text, str) else ids)]
        return {"input_ids": rows[0] if isinstance(text, str) else rows}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@dataclass(frozen=True)
class Condition:
    """The change of one repetition; prompts, seeds and nulls stay the same.

    Attributes:
        name: in words, and its folder's name.
        subject: makes the subject that is read.
        why: why it cannot be run, known beforehand; empty where it can.
    """

    name: str
    subject: Callable[[], Subject]
    quarter: bool = False
    why: str = ""


def conditions(
    settings: RunConfig, subject: Subject, located: Located | None = None
) -> tuple[Condition, Condition, Condition]:
    """Another precision, a quarter of the batch, and BOS, each with the reason where a model does not allow it."""
    other: Literal["bfloat16", "float32"] = "bfloat16" if subject.facts["dtype"] == "float32" else "float32"
    special = special_prefix(subject.tokenizer)
    bos, why, toggled = "without BOS" if special else "with BOS", "", None
    if subject.tokenizer is None:
        why = "a task's sequences have no BOS token: the model has no tokenizer"
    elif special:
        toggled = Toggled(subject.tokenizer, drop=special)
    elif subject.tokenizer.bos_token_id is None:
        why = "the tokenizer has no BOS token"
    else:
        toggled = Toggled(subject.tokenizer, prefix=(subject.tokenizer.bos_token_id,))
    return (
        Condition(other, lambda: replace(settings, dtype=other).load(located)),
        Condition("quarter batches", lambda: subject, quarter=True),
        Condition(bos, lambda: replace(subject, tokenizer=toggled), why=why),
    )


@dataclass(frozen=True)
class Row:
    """One metric of one record under every condition that was run.

    Attributes:
        verdict: of the main run.
        others: by condition.
        changes: by condition |change of the value| over half the width of the main run's interval; empty where that has
            no width, or the metric was not measured there.
    """

    record: str
    probe: str
    metric: str
    claim: bool
    verdict: str
    others: Mapping[str, str]
    changes: Mapping[str, float]

    @property
    def flips(self) -> tuple[str, ...]:
        """Conditions under which the verdict is another."""
        return tuple(name for name, verdict in self.others.items() if verdict != self.verdict)

    def cell(self, name: str) -> str:
        """The columns of one condition in the table."""
        if name not in self.others:
            return "not run"
        verdict = self.others[name] if name in self.flips else "same"
        return f"{verdict} ({self.changes[name]:.2g})" if name in self.changes else verdict


@dataclass(frozen=True)
class Stability:
    """All metrics of all records; not_run: conditions that could not be run, and why."""

    rows: tuple[Row, ...]
    not_run: Mapping[str, str]

    @property
    def flipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.flips)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(row) | {"flips": row.flips} for row in self.rows]
        return {"flips": len(self.flipped), "rows": rows, "not_run": dict(self.not_run)}

    def warnings(self, record: str) -> tuple[str, ...]:
        """A sentence a verdict that flips, for the page of that record; claims first."""
        return tuple(
            f"unstable: {row.metric} {_said(row.verdict)} here, but "
            + " and ".join(f"{_said(row.others[name])} {_spelt(name)}" for name in row.flips)
            for row in sorted(self.flipped, key=lambda row: not row.claim)
            if row.record == record
        )

    def facts(self, record: str) -> dict[str, Any]:
        """What the main record says of it."""
        rows = [row for row in self.rows if row.record == record]
        ran = dict.fromkeys(name for row in rows for name in row.others)
        counts = {name: _counted(rows, [row for row in rows if name in row.flips]) for name in ran}
        return {"stability": counts | {name: f"not run: {why}" for name, why in self.not_run.items()}}

    def lines(self) -> Iterator[str]:
        """For a terminal: each metric, what its verdict becomes, and by how much its value changes."""
        ran = tuple(dict.fromkeys(name for row in self.rows for name in row.others))
        for record in dict.fromkeys(row.record for row in self.rows):
            rows = [
                (
                    row.metric,
                    row.verdict,
                    *(row.cell(name) for name in ran),
                    f"{max(row.changes.values()):.2g}" if row.changes else "-",
                )
                for row in self.rows
                if row.record == record
            ]
            yield from grid(f"stability of {record}", ("verdict", *ran, "largest change"), rows)
        yield ""
        yield from (f"not run: {name}: {why}" for name, why in self.not_run.items())
        yield _counted(self.rows, self.flipped)
        yield "(change of the value, over half the width of the main run's interval)"


def _counted(rows: Sequence[Row], flipped: Sequence[Row]) -> str:
    """How many verdicts flip, which only claims have, and how many other numbers are missing in a record."""
    flips, verdicts = sum(row.claim for row in flipped), sum(row.claim for row in rows)
    missing = len(flipped) - flips
    others = "other number is" if missing == 1 else "other numbers are"
    of_others = f"; {missing} {others} not measured everywhere" if missing else ""
    return f"{flips} of {number_of(verdicts, 'verdicts')} flip{'s' * (flips == 1)}{of_others}"


def _said(verdict: str) -> str:
    return {"holds": "holds", "opposite": "is the opposite", "": "is measured"}.get(verdict, f"is {verdict}")


def _spelt(name: str) -> str:
    return name if name.startswith("with") else f"in {name}"


def compared(name: str, main: Record, again: Mapping[str, Record]) -> Iterator[Row]:
    """A row for every metric that the main record or a repetition has."""

    def estimates(record: Record) -> dict[tuple[str, str], Estimate]:
        return {(probe, h.name): h for probe, m in record.results.items() for h in m.estimates}

    first, others = estimates(main), {condition: estimates(record) for condition, record in again.items()}
    for probe, estimate in dict.fromkeys(key for table in (first, *others.values()) for key in table):
        key, here = (probe, estimate), first.get((probe, estimate))
        verdicts = {name: table[key].verdict if key in table else MISSING for name, table in others.items()}
        changes = {}
        if here is not None and (half := (here.high - here.low) / 2) > 0:
            changes = {
                name: abs(table[key].value - here.value) / half for name, table in others.items() if key in table
            }
        claim = any(bool(table[key].claim) for table in (first, *others.values()) if key in table)
        yield Row(name, probe, estimate, claim, MISSING if here is None else here.verdict, verdicts, changes)


def one_process(settings: RunConfig) -> Share | None:
    """This process's share of the captures, None if it makes all. Raises UserError for a share with --stability."""
    share = Share.given(settings.shard)
    if share is not None and settings.stability:
        raise UserError("--stability scans in one process: leave --shard, or the launcher, out")
    return share


def perform(plan: Plan) -> tuple[list[Record], Stability]:
    """Scan, scan again under every condition on the same prompts, and warn of what flips on the main run's page.

    A repetition is a run folder of its own: stability/CONDITION in the main one.
    """
    one_process(plan.request)
    subject = plan.request.load(plan.located)
    main = dict(zip(plan.pools, (record for _, record in scan(plan, subject)), strict=True))
    drawn = {name: sampled(plan, subject, name) for name in plan.pools}
    again: dict[str, dict[str, Record]] = {name: {} for name in plan.pools}
    not_run = {}
    for condition in conditions(plan.request, subject, plan.located):
        try:
            with renamed(lambda stage, *rest, by=condition.name: (f"{by}, {stage}", *rest)):
                made = dict(_repeated(plan, condition, drawn))
        except UserError as refusal:
            not_run[condition.name] = str(refusal)
            continue
        for name, record in made.items():
            record.save(folder(plan, name, condition))
            again[name][condition.name] = record
    outcome = Stability(tuple(row for name in plan.pools for row in compared(name, main[name], again[name])), not_run)
    warned = [
        replace(
            record, warnings=(*outcome.warnings(name), *record.warnings), facts={**record.facts, **outcome.facts(name)}
        )
        for name, record in main.items()
    ]
    for name, record in zip(plan.pools, warned, strict=True):
        record.save(plan.folder(name))
    from llmgeom.reports.preview import write_page

    write_page(plan.out / "report.html", warned)
    return warned, outcome


def _repeated(plan: Plan, condition: Condition, drawn: Mapping[str, Drawn]) -> Iterator[tuple[str, Record]]:
    if condition.why:
        raise UserError(condition.why)
    subject = condition.subject()
    for name, prompts in drawn.items():
        tokens = _quarter(plan, subject, prompts) if condition.quarter else None
        yield name, scanned(plan, subject, name, prompts, tokens, condition=condition.name)


def _quarter(plan: Plan, subject: Subject, prompts: Drawn) -> int:
    """A quarter of the tokens that ran together: of the budget where that was filled."""
    lengths = subject.tokens(prompts[0]).lengths.tolist()
    rules = BatchRules.of(subject.facts, subject.model.config)
    batches = plan_batches(lengths, plan.request.batch_tokens, rules)
    together = max(len(members) * lengths[members[0]] for members in batches)
    return max(1, min(together, plan.request.batch_tokens) // 4)


def folder(plan: Plan, name: str, condition: Condition) -> Path:
    """Where one repetition goes."""
    return plan.out / FOLDER / condition.name.replace(" ", "-") / plan.folder(name).relative_to(plan.out)
