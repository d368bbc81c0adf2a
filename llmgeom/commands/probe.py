"""The whole of `llmgeom probe`: is a label of the user's own linearly readable, beyond controls and confounds?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject
    from llmgeom.probes.labels.probe import LabelProbe
    from llmgeom.progress import Progress
    from llmgeom.record import Record

SITES = ("residual", "value", "key", "query", "z", "attention_write", "mlp_write")
LABEL = "label"  # the probe's name in a record
AUTOMATIC = ("length", "final_token")


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom probe` is asked for."""

    VERB: ClassVar[str] = "probe"

    prompts: str | None = flag(None, "Prompts with their labels: .jsonl, .csv or .parquet.", group="Prompts")
    target: str | None = flag(None, "The column to read.", group="Prompts")
    cluster: str | None = flag(
        None, "Column whose equal values stay on one side of every split. [default: template, or each row]",
        group="Prompts",
    )  # fmt: skip
    kind: Literal["auto", "binary", "classes", "number"] = flag("auto", "What the label is.", group="Measure")
    given: tuple[str, ...] = flag(
        AUTOMATIC, "Confounds to remove: columns, length, final_token; or none.", listed=True, group="Measure"
    )
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
        return LabelProbe(self.target, self.kind, sites, layers and tuple(sorted(set(layers))), given)


@config.command(
    RunConfig,
    VerdictOutput,
    examples=[
        "llmgeom probe --model EleutherAI/pythia-410m --prompts mine.jsonl --target correct --given length,source"
    ],
)
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Test whether a label of your own is linearly readable from activations, beyond controls and confounds."""
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom probe`: check, load, measure, save the record and its page; (folder, record)."""
    from llmgeom.cache.shards import captures_folder
    from llmgeom.files import digest
    from llmgeom.probes.labels.directions import SavedDirection
    from llmgeom.probes.labels.target import read_target
    from llmgeom.prompts import files
    from llmgeom.run import run_probes

    if not asked.prompts:
        raise UserError("--prompts is missing: give a .jsonl, .csv or .parquet file with a column of labels")
    probe = asked.probe()
    batch = files.read(asked.prompts, asked.cluster)
    read_target(batch, probe.target, probe.kind)
    for name in probe.given:
        if name not in AUTOMATIC:
            batch.column(name)
        if name == asked.target:
            raise UserError(f"--given {name}: the label cannot be removed from itself; leave it out")
    located = asked.locate()
    content = digest({"text": batch.text, "cluster": batch.cluster, "columns": dict(batch.columns)})
    spec = asked.spec(located, content=content)
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, f"probe-{asked.target}", spec)
    config.check_folder(out, spec)
    subject = subject or asked.load(located)
    record = run_probes(
        subject,
        batch,
        {LABEL: probe},
        controls=asked.nulls,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens,
        store=str(captures_folder()),
        progress=progress,
        facts={"spec": spec, "command": asked.command(), "target": asked.target},
    )
    record = replace(record, prompts=_predicted(record))
    if direction := SavedDirection.of(record, LABEL):
        direction.save(out / "direction.safetensors")
    config.keep(record, out)
    return out, record


def _predicted(record: Record) -> dict[str, tuple]:
    """The prompt table with the held-out prediction of each prompt."""
    if LABEL not in record.results:
        return dict(record.prompts)
    values = record.results[LABEL].arrays["probe_prediction"]
    return {**record.prompts, "held-out prediction": tuple(round(float(v), 6) for v in values)}
