"""The whole of `llmgeom probe`: is a label of the user's own linearly readable, beyond controls and confounds?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llmgeom.batch import recorded
from llmgeom.commands import config, folders
from llmgeom.commands.job import Ask, Job, JobOutput
from llmgeom.commands.output import show_record
from llmgeom.errors import UserError, unknown
from llmgeom.files import digest, sha256
from llmgeom.flags import LARGEST_SEED, control_flag, measure_flag, output_flag, places, prompt_flag

if TYPE_CHECKING:
    from llmgeom.batch import Batch
    from llmgeom.model.model import Model
    from llmgeom.plan import Plan
    from llmgeom.probes.labels.probe import LabelProbe
    from llmgeom.record import Record

SITES = ("residual", "value", "key", "query", "z", "attn_out", "mlp_out")
LABEL = "label"  # the probe's name in a record
AUTOMATIC = ("length", "final_token")
# Flags that answers do not read.
OF_LABELS = ("kind", "given", "transfer", "sites", "layers", "positions", "nulls")
# All flags that stored activations read.
OF_ACTIVATIONS = ("activations", "prompts", "target", "cluster", "kind", "given", "transfer", "layers", "seed", "out")
MOST_DOCUMENTS = 1000  # of a data set: as many as the controls read


@dataclass(frozen=True)
class RunConfig(config.ChatConfig):
    """The options of `llmgeom probe`."""

    VERB: ClassVar[str] = "probe"

    prompts: str | None = prompt_flag(None, "Prompts with labels: .jsonl, .csv, .parquet or hf:DATASET.")
    target: str | None = prompt_flag(None, "The column of labels to predict.")
    answers: str | None = prompt_flag(
        None, "Instead of --target: the column of right answers, scored among all, or among the row's `choices`."
    )
    activations: str | None = prompt_flag(
        None, "Instead of a model: stored activations with labels (.safetensors, .npz, .parquet)."
    )
    cluster: str | None = prompt_flag(
        None, "Column whose equal values stay in one fold. [default: template, or each row]"
    )
    kind: Literal["auto", "binary", "classes", "number"] = measure_flag("auto", "Type of the label.")
    given: tuple[str, ...] = measure_flag(
        AUTOMATIC, "Confounds to remove: columns, length, final_token; or none.", listed=True
    )
    transfer: str | None = measure_flag(
        None, "Also test transfer: predict the prompts of each value of this column from the others."
    )
    sites: tuple[str, ...] = measure_flag(("residual",), f"Sites to read: {', '.join(SITES)}.", listed=True)
    layers: str = measure_flag(
        "all", "Layers to read: numbers and slices, e.g. 0:12:2,-1; of the residual stream one more, after the last."
    )
    positions: tuple[str, ...] = measure_flag(
        ("last",),
        "last, mean, places from the end (-2), or in a chat: user-last, assistant-mean ...; span-mean.",
        listed=True,
    )
    batch_tokens: int = measure_flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    nulls: int = config.draws_flag("Untrained copies, and shuffles of the prompts where used", group="Controls")
    seed: int = control_flag(0, "Fixes folds and controls.", least=0, most=LARGEST_SEED)
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-probe-TARGET-HASH]")

    def probe(self) -> LabelProbe:
        """The probe with these options, of all layers. Raises UserError for layers that are not numbers."""
        from llmgeom.model.capture import Site
        from llmgeom.probes.labels.inputs import read_positions
        from llmgeom.probes.labels.probe import LabelProbe

        if unknown := [site for site in self.sites if site not in SITES]:
            raise UserError(f"--sites {unknown[0]}: expected some of {', '.join(SITES)}, with commas between")
        if not self.target:
            raise UserError("--target is missing: give the column to read")
        places("--layers", self.layers, 1, strict=False)
        given = () if self.given == ("none",) else tuple(dict.fromkeys(self.given))
        sites = tuple(dict.fromkeys(Site(site) for site in self.sites))
        return LabelProbe(self.target, self.kind, sites, None, given, self.transfer, read_positions(self.positions))


@config.command(
    RunConfig,
    JobOutput,
    examples=[
        "llmgeom probe --model EleutherAI/pythia-410m --prompts mine.jsonl --target correct --given length,source",
        "llmgeom probe --activations stored.safetensors --target label --cluster document",
    ],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Test whether a label of your own is linearly readable from activations, beyond controls and confounds."""
    if settings.activations:
        if output.dry_run:
            raise UserError(f"--dry-run with --activations {settings.activations}: no model is read; leave one out")
        return show_record(perform, settings, output)
    return prepare(settings).show(output)


def perform(settings: RunConfig, subject: Model | None = None) -> tuple[Path, Record]:
    """Check, load, measure, save the record and its page; (folder, record). Stored activations need no model."""
    if not settings.activations:
        return prepare(settings).perform(subject)
    from llmgeom.model import hub
    from llmgeom.probes.labels import activations
    from llmgeom.prompts import files

    path = settings.activations
    of_default = {"model"} if settings.model == hub.default()[0] else set()
    unread = [name for name in settings.changed if name not in {*OF_ACTIVATIONS, *of_default}]
    settings.refuse_unread(unread, f"--activations {path}", ": no model is read")
    x, untrained, batch = activations.read(
        path, settings.cluster, files.read(settings.prompts) if settings.prompts else None
    )
    probe = settings.probe()
    if settings.layers != "all":
        probe = replace(probe, layers=places("--layers", settings.layers, x.shape[1]))
    columns = {name: recorded(column) for name, column in batch.columns.items()}
    spec = digest({"bytes": sha256(x.tobytes()), "columns": columns, "flags": settings.command()})
    stem = folders.safe(Path(path).stem)
    out = Path(settings.out or f"runs/{stem}-probe-{folders.safe(probe.target)}-{spec[:8]}")
    folders.check_folder(out, spec)
    facts = {"spec": spec, "command": settings.command()}
    record = activations.measure(x, untrained, batch, probe, settings.seed, **facts)
    folders.save(record, out)
    folders.write_page(out, [record])
    return out, record


def prepare(settings: RunConfig) -> Job:
    """Check what can be checked before weights load. Raises UserError."""
    if not settings.prompts:
        raise UserError(
            "--prompts or --activations is missing: give a .jsonl, .csv or .parquet file with a column of labels"
        )
    if settings.answers and settings.target:
        raise UserError("--answers and --target are two different measurements: run them one after the other")
    if settings.answers:
        settings.refuse_unread(OF_LABELS, f"--answers {settings.answers}")
    from llmgeom.prompts import files

    if settings.prompts.startswith(files.PREFIX):
        if settings.cluster:
            raise UserError(
                f"--cluster {settings.cluster}: in a data set each document is its own cluster; leave it out"
            )
        batch = files.read_documents(settings.prompts, MOST_DOCUMENTS, settings.seed, offline=settings.offline)
    else:
        batch = files.read(settings.prompts, settings.cluster)
        if (column := settings.target or settings.answers) and not files.tabular(settings.prompts):
            raise UserError(
                f"--prompts {settings.prompts} with column {column!r}: a file of plain text has a prompt a line and no "
                f"columns; give a .csv or .jsonl file with `text` and `{column}`"
            )
    columns = {name: recorded(column) for name, column in batch.columns.items()}
    ask = _asked_answers(settings, batch, settings.answers) if settings.answers else _asked_label(settings, batch)
    located = settings.locate()
    content = {"content": digest({"text": batch.text, "cluster": batch.cluster, "columns": columns})}
    what = f"answers-{settings.answers}" if settings.answers else f"probe-{settings.target}"

    def save_direction(record: Record, out: Path) -> None:
        """The label's direction, where there is one, as a file of its own."""
        from llmgeom.probes.labels.directions import SavedDirection

        if direction := SavedDirection.of(record, LABEL):
            direction.save(out / "direction.safetensors")

    return Job(settings, located, folders.safe(what), ask, content, save_direction if settings.target else None)


def _asked_label(settings: RunConfig, batch: Batch) -> Ask:
    """Whether the label of --target can be read from activations.

    Raises UserError for a label or a confound that the prompts do not have.
    """
    probe = settings.probe()
    probe.check(batch, settings.seed)
    for name in probe.given:
        if name == probe.target:
            raise UserError(f"--given {name}: the label cannot be removed from itself; leave it out")
        if name == "none":
            raise UserError(f"--given {','.join(settings.given)}: none stands alone; leave it or the others out")
        if name not in (*AUTOMATIC, *batch.columns):
            raise unknown("confound of --given", name, (*AUTOMATIC, *batch.columns), "; or none")
        if name in batch.columns:
            batch.column(name)

    def with_predictions(record: Record, _: object) -> Record:
        """The record with the held-out prediction of each prompt in its table."""
        if LABEL not in record.results:
            return record
        values = record.results[LABEL].arrays["probe_prediction"]
        predicted = tuple(round(float(v), 6) for v in values)
        return replace(record, prompts={**record.prompts, "held-out prediction": predicted})

    def ask(subject: Model) -> Plan:
        from llmgeom.plan import Plan
        from llmgeom.probes.labels.inputs import queried

        after = probe.sites == ("residual",)  # of the stream alone there is one more, after the last layer
        depth = subject.facts["layers"]
        chosen = None if settings.layers == "all" else places("--layers", settings.layers, depth, after=after)
        asked = replace(probe, layers=chosen)
        facts = {"target": probe.target, "given": ",".join(probe.given) or "none"}
        facts |= {"positions": ",".join(map(str, probe.positions))}
        inputs = queried(subject, batch, probe.positions)
        draws = (settings.nulls, settings.seed, settings.batch_tokens)
        return Plan.of(subject, inputs, {LABEL: asked}, *draws, facts=facts, whole=False, finish=with_predictions)

    return ask


def _asked_answers(settings: RunConfig, batch: Batch, column: str) -> Ask:
    """Which answers of a column the model prefers after each prompt. Raises UserError for one that holds no answers."""
    from llmgeom.probes.labels.answers import PROBE, AnswersProbe, expanded, prompt_columns, read_answers

    answers, right = read_answers(batch, column)

    def by_prompt(record: Record, _: object) -> Record:
        """The record with a row for each prompt instead of each input."""
        prompts = prompt_columns(batch, record, answers, right)
        return replace(record, prompts=prompts, facts={**record.facts, "prompts": len(batch)})

    def ask(subject: Model) -> Plan:
        """Each prompt is read once for each of its answers."""
        from llmgeom.plan import Plan

        inputs, probe = expanded(subject, batch, answers, right, column), AnswersProbe(answers, column)
        draws = (settings.nulls, settings.seed, settings.batch_tokens)
        facts = {"answers": column}
        return Plan.of(subject, inputs, {PROBE: probe}, *draws, facts=facts, whole=False, finish=by_prompt)

    return ask
