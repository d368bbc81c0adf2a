"""The whole of `llmgeom probe`: is a label of the user's own linearly readable, beyond controls and confounds?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmgeom.commands import config
from llmgeom.commands.job import Ask, Job, JobOutput
from llmgeom.commands.output import show_record
from llmgeom.errors import UserError, unknown
from llmgeom.files import digest
from llmgeom.flags import LARGEST_SEED, flag

if TYPE_CHECKING:
    from llmgeom.batch import Batch
    from llmgeom.model.subject import Subject
    from llmgeom.probes.labels.probe import LabelProbe
    from llmgeom.progress import Progress
    from llmgeom.record import Record
    from llmgeom.run import Question

SITES = ("residual", "value", "key", "query", "z", "attention_write", "mlp_write")
LABEL = "label"  # the probe's name in a record
AUTOMATIC = ("length", "final_token")
# Flags that answers do not read, and all that a log does.
OF_LABELS = ("kind", "weight", "estimator", "given", "transfer", "sites", "layers", "positions", "nulls")
OF_LOGS = ("log", "cluster", "seed", "offline", "out")
MOST_DOCUMENTS = 1000  # of a data set: as many as the controls read


@dataclass(frozen=True)
class RunConfig(config.ChatConfig):
    """What `llmgeom probe` is asked for."""

    VERB: ClassVar[str] = "probe"

    prompts: str | None = flag(None, "Prompts with labels: .jsonl, .csv, .parquet or hf:DATASET.", group="Prompts")
    target: str | None = flag(None, "The column of labels to predict.", group="Prompts")
    answers: str | None = flag(
        None, "Instead of --target: the column of right answers, scored by log-probability.", group="Prompts"
    )
    log: str | None = flag(
        None, "Instead of a model: answers that lm-eval (--log_samples) or inspect_ai logged.", group="Prompts"
    )
    cluster: str | None = flag(
        None,
        "Column whose equal values stay in one fold. [default: template, or each row]",
        group="Prompts",
    )
    kind: Literal["auto", "binary", "classes", "number"] = flag("auto", "Type of the label.", group="Measure")
    weight: str | None = flag(
        None, "Column of numbers above 0: a prompt of weight 3 counts as three prompts.", group="Prompts"
    )
    estimator: Literal["ridge", "logistic", "means", "pls"] = flag(
        "ridge", "means: along the difference of class means. pls: partial least squares.", group="Measure"
    )
    given: tuple[str, ...] = flag(
        AUTOMATIC, "Confounds to remove: columns, length, final_token; or none.", listed=True, group="Measure"
    )
    transfer: str | None = flag(
        None, "Also test transfer: predict the prompts of each value of this column from the others.", group="Measure"
    )
    sites: tuple[str, ...] = flag(("residual",), f"Sites to read: {', '.join(SITES)}.", listed=True, group="Measure")
    layers: str = flag("all", "all, or numbers with commas between.", group="Measure")
    positions: tuple[str, ...] = flag(
        ("last",), "last, mean (over all tokens), or places from the end, e.g. -2.", listed=True, group="Measure"
    )
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED, group="Measure")
    nulls: int = flag(
        20, "Untrained copies, and shuffles of the prompts where used, as controls.", least=1, group="Controls"
    )
    seed: int = flag(0, "Fixes folds and controls.", least=0, most=LARGEST_SEED, group="Controls")
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-probe-TARGET-HASH]", group="Output")

    def probe(self) -> LabelProbe:
        """The probe that is asked for. Raises UserError for layers that are no numbers."""
        from llmgeom.model.capture import Site
        from llmgeom.probes.labels.positions import read_positions
        from llmgeom.probes.labels.probe import LabelProbe

        if unknown := [site for site in self.sites if site not in SITES]:
            raise UserError(f"--sites {unknown[0]}: expected some of {', '.join(SITES)}, with commas between")
        if not self.target:
            raise UserError("--target is missing: give the column to read")
        layers = None if self.layers == "all" else config.numbers("--layers", self.layers, "all", "2,4")
        given = () if self.given == ("none",) else tuple(dict.fromkeys(self.given))
        sites = tuple(dict.fromkeys(Site(site) for site in self.sites))
        return LabelProbe(
            self.target, self.kind, sites, layers and tuple(sorted(set(layers))), given, self.estimator, self.transfer,
            read_positions(self.positions), self.weight,
        )  # fmt: skip


@config.command(
    RunConfig,
    JobOutput,
    examples=[
        "llmgeom probe --model EleutherAI/pythia-410m --prompts mine.jsonl --target correct --given length,source",
        "llmgeom probe --log samples_arc_easy_2026-01-31.jsonl",
    ],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Test whether a label of your own is linearly readable from activations, beyond controls and confounds."""
    if settings.log:
        if output.dry_run:
            raise UserError(f"--dry-run with --log {settings.log}: a log is scored without a model; leave one out")
        return show_record(perform, settings, output)
    return prepare(settings).show(output)


def perform(
    settings: RunConfig, progress: Progress | None = None, subject: Subject | None = None
) -> tuple[Path, Record]:
    """Check, load, measure, save the record and its page; (folder, record)."""
    if settings.log:
        return _logged(settings)
    return prepare(settings).perform(progress, subject)


def prepare(settings: RunConfig) -> Job:
    """Check what can be checked before weights load. Raises UserError."""
    from llmgeom.prompts import documents, files

    if not settings.prompts:
        raise UserError("--prompts is missing: give a .jsonl, .csv or .parquet file with a column of labels")
    if settings.answers and settings.target:
        raise UserError("--answers and --target are two different measurements: run them one after the other")
    if settings.answers:
        settings.refuse_unread(OF_LABELS, f"--answers {settings.answers}")
    if settings.prompts.startswith(documents.PREFIX):
        if settings.cluster:
            raise UserError(
                f"--cluster {settings.cluster}: in a data set each document is its own cluster; leave it out"
            )
        batch = documents.read(settings.prompts, MOST_DOCUMENTS, settings.seed, offline=settings.offline)
    else:
        batch = files.read(settings.prompts, settings.cluster)
        if (column := settings.target or settings.answers) and not files.tabular(settings.prompts):
            raise UserError(
                f"--prompts {settings.prompts} with column {column!r}: a file of plain text has a prompt a line and no "
                f"columns; give a .csv or .jsonl file with `text` and `{column}`"
            )
    ask = _answers(settings, batch) if settings.answers else _label(settings, batch)
    located = settings.locate()
    content = {"content": digest({"text": batch.text, "cluster": batch.cluster, "columns": dict(batch.columns)})}
    what = f"answers-{settings.answers}" if settings.answers else f"probe-{settings.target}"
    return Job(settings, located, config.safe(what), ask, content, _save_direction if settings.target else None)


def _save_direction(record: Record, out: Path) -> None:
    """The label's direction, where there is one, as a file of its own."""
    from llmgeom.probes.labels.directions import SavedDirection

    if direction := SavedDirection.of(record, LABEL):
        direction.save(out / "direction.safetensors")


def _label(settings: RunConfig, batch: Batch) -> Ask:
    """The probe of a label, checked against the columns."""
    from llmgeom.probes.labels.positions import queried

    probe = settings.probe()
    probe.check(batch, settings.seed)
    for name in probe.given:
        if name == probe.target:
            raise UserError(f"--given {name}: the label cannot be removed from itself; leave it out")
        if name not in (*AUTOMATIC, *batch.columns):
            raise unknown("confound of --given", name, (*AUTOMATIC, *batch.columns), "; or none")
        if name in batch.columns:
            batch.column(name)

    facts = {"target": settings.target, "given": ",".join(probe.given) or "none", "estimator": probe.estimator}
    facts |= {"positions": ",".join(map(str, probe.positions)), "weight": probe.weight or "none"}

    def ask(subject: Subject, _: Progress | None = None) -> Question:
        probe.check_layers(subject.facts["layers"])
        return _question(
            settings, queried(batch, subject.tokens(batch), probe.positions), {LABEL: probe}, facts, _predicted
        )

    return ask


def _answers(settings: RunConfig, batch: Batch) -> Ask:
    """The probe of given answers, checked against the column."""
    from llmgeom.probes.labels.answers import PROBE, AnswersProbe, expanded, prompt_columns, read_answers

    column = str(settings.answers)
    answers = read_answers(batch, column)

    def finish(record: Record) -> Record:
        prompts = prompt_columns(batch, record, answers, column)
        # Each prompt was read once for every answer: what the runner says of its inputs is not true of the prompts.
        warnings = tuple(one for one in record.warnings if "controls read" not in one)
        return replace(record, prompts=prompts, facts={**record.facts, "prompts": len(batch)}, warnings=warnings)

    def ask(subject: Subject, _: Progress | None = None) -> Question:
        many = expanded(subject, batch, answers, column)
        return _question(settings, many, {PROBE: AnswersProbe(answers, column)}, {"answers": column}, finish)

    return ask


def _logged(settings: RunConfig) -> tuple[Path, Record]:
    """Score the answers of a log: no model is loaded. (folder, record)."""
    import numpy as np

    from llmgeom import __version__, claims
    from llmgeom.probes.labels.answer_scores import PROBE, probabilities, scored
    from llmgeom.prompts import logs
    from llmgeom.record import Record

    unread = [field for field in settings.changed if field not in OF_LOGS]
    settings.refuse_unread(unread, f"--log {settings.log}", ": a log holds prompts and answers")
    log = logs.read(str(settings.log), settings.cluster)
    content = {"text": log.text, "log_prob": log.log_prob, "right": log.right, "cluster": log.cluster}
    spec = digest(content | {"seed": settings.seed})
    out = Path(settings.out or f"runs/{config.safe(log.model or 'log')}-answers-{config.safe(log.name)}-{spec[:8]}")
    right, n = np.array(log.right), len(log.text)
    result = scored(log.log_prob, right, np.array(log.cluster), settings.seed, log.notes).lowered()
    config.check_folder(out, spec)
    probability = probabilities(log.log_prob)
    likeliest = probability.argmax(1)
    prompts = {
        "tags": ("",) * n,
        "domain": (log.name,) * n,
        "template": log.cluster,
        "text": log.text,
        "likeliest answer": tuple(answers[i] for answers, i in zip(log.answers, likeliest, strict=True)),
        "right answer": tuple(answers[i] for answers, i in zip(log.answers, right, strict=True)),
        "p of the right answer": tuple(probability[np.arange(n), right].round(6).tolist()),
        "correct": tuple((likeliest == right).astype(int).tolist()),
        "entropy": tuple(result.arrays["entropy"].round(6).tolist()),
        "tokens": (0,) * n,
    }
    record = Record(
        results=claims.judge({PROBE: result}),
        unmeasured={},
        prompts=prompts,
        subject={"name": log.model or "the logged model"},
        source={"kind": "log", "name": log.name, "n": n},
        facts={
            "llmgeom": __version__,
            "claims_hash": claims.digest(),
            "seed": settings.seed,
            "spec": spec,
            "answers": "the log",
            "command": settings.command(),
        },
    )
    config.keep(record, out)
    return out, record


def _question(
    settings: RunConfig, batch: Batch, probes: dict[str, Any], facts: dict, finish: Callable[[Record], Record]
) -> Question:
    from llmgeom.run import Question

    draws = (settings.nulls, settings.seed, settings.batch_tokens)
    return Question(batch, probes, *draws, facts=facts, whole=False, finish=finish)


def _predicted(record: Record) -> Record:
    """The record with the held-out prediction of each prompt in its table."""
    if LABEL not in record.results:
        return record
    values = record.results[LABEL].arrays["probe_prediction"]
    predicted = tuple(round(float(v), 6) for v in values)
    return replace(record, prompts={**record.prompts, "held-out prediction": predicted})
