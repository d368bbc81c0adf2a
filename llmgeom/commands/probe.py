"""The whole of `llmgeom probe`: is a label of the user's own linearly readable, beyond controls and confounds?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag

if TYPE_CHECKING:
    from llmgeom.batch import Batch
    from llmgeom.model.subject import Subject
    from llmgeom.probes.labels.probe import LabelProbe
    from llmgeom.progress import Progress
    from llmgeom.record import Record

SITES = ("residual", "value", "key", "query", "z", "attention_write", "mlp_write")
LABEL = "label"  # the probe's name in a record
AUTOMATIC = ("length", "final_token")
MOST_DOCUMENTS = 1000  # of a data set: as many as the controls read


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom probe` is asked for."""

    VERB: ClassVar[str] = "probe"

    prompts: str | None = flag(None, "Prompts with labels: .jsonl, .csv, .parquet or hf:DATASET.", group="Prompts")
    target: str | None = flag(None, "The column to read.", group="Prompts")
    answers: str | None = flag(
        None, "Instead of --target: the column of right answers, scored by log-probability.", group="Prompts"
    )
    log: str | None = flag(
        None, "Instead of a model: answers that lm-eval (--log_samples) or inspect_ai (JSON) logged.", group="Prompts"
    )
    cluster: str | None = flag(
        None, "Column whose equal values stay on one side of every split. [default: template, or each row]",
        group="Prompts",
    )  # fmt: skip
    kind: Literal["auto", "binary", "classes", "number"] = flag("auto", "What the label is.", group="Measure")
    estimator: Literal["ridge", "logistic", "means"] = flag(
        "ridge", "means: along the difference of class means.", group="Measure"
    )
    given: tuple[str, ...] = flag(
        AUTOMATIC, "Confounds to remove: columns, length, final_token; or none.", listed=True, group="Measure"
    )
    transfer: str | None = flag(None, "Column each of whose values is also predicted from the others.", group="Measure")
    sites: tuple[str, ...] = flag(("residual",), f"Where it is read: {', '.join(SITES)}.", listed=True, group="Measure")
    layers: str = flag("all", "all, or numbers with commas between.", group="Measure")
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED, group="Measure")
    nulls: int = flag(20, "Untrained copies, and orders of shuffled prompts.", least=1, group="Controls")
    seed: int = flag(0, "Fixes folds and nulls.", least=0, most=LARGEST_SEED, group="Controls")
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-probe-TARGET-HASH]", group="Output")

    def probe(self) -> LabelProbe:
        """The probe that is asked for. Raises UserError for layers that are no numbers."""
        from llmgeom.model.capture import Site
        from llmgeom.probes.labels.probe import LabelProbe

        if unknown := [site for site in self.sites if site not in SITES]:
            raise UserError(f"--sites {unknown[0]}: expected some of {', '.join(SITES)}, with commas between")
        if not self.target:
            raise UserError("--target is missing: give the column to read")
        layers = None if self.layers == "all" else config.numbers("--layers", self.layers, "all", "2,4")
        given = () if self.given == ("none",) else tuple(dict.fromkeys(self.given))
        sites = tuple(dict.fromkeys(Site(site) for site in self.sites))
        return LabelProbe(
            self.target, self.kind, sites, layers and tuple(sorted(set(layers))), given, self.estimator, self.transfer
        )


@config.command(
    RunConfig,
    VerdictOutput,
    examples=[
        "llmgeom probe --model EleutherAI/pythia-410m --prompts mine.jsonl --target correct --given length,source",
        "llmgeom probe --log samples_arc_easy_2026-01-31.jsonl",
    ],
)
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Test whether a label of your own is linearly readable from activations, beyond controls and confounds."""
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom probe`: check, load, measure, save the record and its page; (folder, record)."""
    from llmgeom.files import digest
    from llmgeom.prompts import documents, files

    if asked.log:
        return _logged(asked)
    if not asked.prompts:
        raise UserError("--prompts is missing: give a .jsonl, .csv or .parquet file with a column of labels")
    if asked.answers and asked.target:
        raise UserError("--answers and --target are two different measurements: run them one after the other")
    if asked.prompts.startswith(documents.PREFIX):
        if asked.cluster:
            raise UserError(f"--cluster {asked.cluster}: in a data set each document is its own cluster; leave it out")
        batch = documents.read(asked.prompts, MOST_DOCUMENTS, asked.seed, offline=asked.offline)
    else:
        batch = files.read(asked.prompts, asked.cluster)
    measure = _answers(asked, batch) if asked.answers else _label(asked, batch)
    located = asked.locate()
    content = digest({"text": batch.text, "cluster": batch.cluster, "columns": dict(batch.columns)})
    spec = asked.spec(located, content=content)
    what = f"answers-{asked.answers}" if asked.answers else f"probe-{asked.target}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, config.safe(what), spec)
    config.check_folder(out, spec)
    record = measure(subject or asked.load(located), spec, progress)
    if asked.target:
        from llmgeom.probes.labels.directions import SavedDirection

        if direction := SavedDirection.of(record, LABEL):
            direction.save(out / "direction.safetensors")
    config.keep(record, out)
    return out, record


Measure = Callable[["Subject", str, "Progress | None"], "Record"]  # of a model, the hash of the run, and progress


def _label(asked: RunConfig, batch: Batch) -> Measure:
    """The probe of a label, checked against the columns."""
    from llmgeom.probes.labels.target import read_target

    probe = asked.probe()
    read_target(batch, probe.target, probe.kind)
    for name in probe.given:
        if name == probe.target:
            raise UserError(f"--given {name}: the label cannot be removed from itself; leave it out")
        if name not in AUTOMATIC:
            batch.column(name)
    if probe.transfer is not None:
        batch.column(probe.transfer)

    def measure(subject: Subject, spec: str, progress: Progress | None) -> Record:
        facts = {"spec": spec, "command": asked.command(), "target": asked.target}
        facts |= {"given": ",".join(probe.given) or "none", "estimator": probe.estimator}
        record = _run(asked, subject, batch, LABEL, probe, facts, progress)
        return replace(record, prompts=_predicted(record))

    return measure


def _answers(asked: RunConfig, batch: Batch) -> Measure:
    """The probe of given answers, checked against the column."""
    from llmgeom.probes.labels.answers import PROBE, AnswersProbe, expanded, prompt_columns, read_answers

    column = str(asked.answers)
    answers = read_answers(batch, column)

    def measure(subject: Subject, spec: str, progress: Progress | None) -> Record:
        facts = {"spec": spec, "command": asked.command(), "answers": column}
        many = expanded(subject, batch, answers, column)
        record = _run(asked, subject, many, PROBE, AnswersProbe(answers, column), facts, progress)
        prompts = prompt_columns(batch, record, answers, column)
        # Each prompt was read once for every answer: what the runner says of its inputs is not true of the prompts.
        of_inputs = ("controls read", "share one template")
        warnings = [one for one in record.warnings if not any(words in one for words in of_inputs)]
        most = max(batch.cluster.count(name) for name in set(batch.cluster))
        warnings += [f"up to {most} prompts share one cluster; intervals count clusters"] * (most > 2)
        return replace(record, prompts=prompts, facts={**record.facts, "prompts": len(batch)}, warnings=tuple(warnings))

    return measure


def _logged(asked: RunConfig) -> tuple[Path, Record]:
    """Score the answers of a log: no model is loaded. (folder, record)."""
    import numpy as np

    from llmgeom import __version__, claims
    from llmgeom.files import digest
    from llmgeom.probes.labels.answer_scores import PROBE, probabilities, scored
    from llmgeom.prompts import logs
    from llmgeom.record import Record

    for name in ("prompts", "target", "answers"):
        if getattr(asked, name):
            raise UserError(f"--{name} {getattr(asked, name)} with --log {asked.log}: a log holds prompts and answers")
    log = logs.read(str(asked.log), asked.cluster)
    content = {"text": log.text, "log_prob": log.log_prob, "right": log.right, "cluster": log.cluster}
    spec = digest(content | {"seed": asked.seed})
    out = Path(asked.out or f"runs/{config.safe(log.model or 'log')}-answers-{config.safe(log.name)}-{spec[:8]}")
    result = scored(log.log_prob, np.array(log.right), np.array(log.cluster), asked.seed, log.notes).lowered()
    config.check_folder(out, spec)
    probability, n = probabilities(log.log_prob), len(log.text)
    columns = {
        "likeliest answer": tuple(
            answers[i] for answers, i in zip(log.answers, probability.argmax(1).tolist(), strict=True)
        ),
        "right answer": tuple(answers[i] for answers, i in zip(log.answers, log.right, strict=True)),
        "p of the right answer": tuple(probability[np.arange(n), list(log.right)].round(6).tolist()),
        "correct": tuple((probability.argmax(1) == np.array(log.right)).astype(int).tolist()),
    }
    known = {"tags": ("",) * n, "domain": (log.name,) * n, "template": log.cluster, "text": log.text}
    record = Record(
        results=claims.judge({PROBE: result}),
        unmeasured={},
        prompts={**known, **columns, "entropy": tuple(result.arrays["entropy"].round(6).tolist()), "tokens": (0,) * n},
        subject={"name": log.model or "the logged model"},
        source={"kind": "log", "name": log.name, "n": n},
        facts={
            "llmgeom": __version__,
            "claims_hash": claims.digest(),
            "seed": asked.seed,
            "spec": spec,
            "answers": "the log",
            "command": f"llmgeom probe --log {asked.log}" + f" --cluster {asked.cluster}" * bool(asked.cluster),
        },
    )
    config.keep(record, out)
    return out, record


def _run(
    asked: RunConfig, subject: Subject, batch: Batch, name: str, probe: Any, facts: dict, progress: Progress | None
) -> Record:
    from llmgeom.cache.shards import captures_folder
    from llmgeom.run import run_probes

    return run_probes(
        subject,
        batch,
        {name: probe},
        controls=asked.nulls,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens,
        store=str(captures_folder()),
        progress=progress,
        facts=facts,
    )


def _predicted(record: Record) -> dict[str, tuple]:
    """The prompt table with the held-out prediction of each prompt."""
    if LABEL not in record.results:
        return dict(record.prompts)
    values = record.results[LABEL].arrays["probe_prediction"]
    return {**record.prompts, "held-out prediction": tuple(round(float(v), 6) for v in values)}
