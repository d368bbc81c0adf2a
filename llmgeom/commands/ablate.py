"""The whole of `llmgeom ablate`: edits of the entropy axis, or ablation of each head or block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llmgeom.commands import config, folders
from llmgeom.commands.job import Job, JobOutput
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.files import sha256
from llmgeom.flags import LARGEST_SEED, axis_flag, component_flag, flag, output_flag, places, prompt_flag
from llmgeom.model import hub

if TYPE_CHECKING:
    from llmgeom.batch import Batch
    from llmgeom.model.model import Model
    from llmgeom.plan import Plan
    from llmgeom.world import World

# Flags that only one kind of ablation reads.
OF_AXIS, OF_COMPONENTS = ("axis", "pair", "directions", "mode", "layers", "controls"), ("task", "exact", "nulls")
OF_ENTROPY = ("directions", "layers")  # a saved direction has its own
SEQUENCES, PROCESS_PROMPTS = 200, 20  # drawn unless --n is given


@dataclass(frozen=True)
class RunConfig(config.ChatConfig):
    """The options of `llmgeom ablate`."""

    VERB: ClassVar[str] = "ablate"

    what: Literal["axis", "heads", "blocks"] = flag(
        "axis", "Edit the entropy axis, or replace each head or each attention, MLP and block, one at a time."
    )
    positions: Literal["query", "all"] | None = flag(
        None,
        "all: every position; with heads or blocks on prompts all but the first. query: the final token, or every "
        "query of a task: the direct effect there. [default: all; for an axis query]",
    )
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes prompts, halves and controls.", least=0, most=LARGEST_SEED)
    axis: str = axis_flag("entropy", "entropy, or the direction.safetensors of an `llmgeom probe` run.")
    pair: tuple[str, ...] = axis_flag(
        (), "With --axis FILE: the label's two answers, whose log-odds are measured.", listed=True
    )
    directions: tuple[Literal["pc1", "ridge"], ...] = axis_flag(
        ("pc1", "ridge"),
        "pc1: first principal component, as published. ridge: the weights that predict entropy. Repeat for both.",
        name="--direction",
    )
    mode: Literal["project-out", "keep-only", "steer"] = axis_flag("project-out", "How the axis is edited.")
    layers: str = axis_flag("last", "last, each (one at a time), or numbers and slices (together), e.g. 3,-1.")
    controls: int = axis_flag(39, "Draws of each control edit.", least=1, name="--random-edits")
    task: str | None = component_flag(None, "Use sequences of this task. [default: the model's own, if any]")
    exact: bool = component_flag(
        False, "Edit every head or block. By default, of more than 60, the largest by gradients, and others at random."
    )
    nulls: int | None = component_flag(
        None,
        "Untrained copies, as controls. [default: 8 where a claim names them, else 4]",
        least=1,
        name="--control-models",
    )
    domain: str | None = prompt_flag(None, "Prompt domain. [default: mixed]")
    prompts: str | None = prompt_flag(None, "Your own prompts: a file as for `llmgeom probe`.")
    process: str | None = prompt_flag(
        None, "Use evidence of this world, e.g. two-point, instead of a domain (`llmgeom list worlds`)."
    )
    ks: tuple[int, ...] = prompt_flag((1, 2, 4, 8), "With --process: numbers of observations.", name="--k", listed=True)
    n: int | None = prompt_flag(
        None, "Prompts or sequences. [default: 75; with --process 20 for each k; in a task 200]", least=1
    )
    limit: int | None = prompt_flag(None, "Choose from LIMIT candidates. [default: 4 N, 300 to 1000]", least=20)
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-ablate-DOMAIN-WHAT-HASH]")

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = self.changed
        axis, saved = self.what == "axis", self.axis != "entropy"
        instead = ", or give --what heads or --what blocks" * axis
        self.refuse_unread(OF_COMPONENTS if axis else OF_AXIS, f"--what {self.what}", instead)
        if saved:
            self.refuse_unread(OF_ENTROPY, f"--axis {self.axis}", ": the file has its own place")
        else:
            self.refuse_unread(("pair",), "--axis entropy", ", or give --axis FILE")
        if not self.process:
            self.refuse_unread(("ks",), "no --process", ", or add --process")
        if self.prompts:
            self.refuse_unread(("n",), f"--prompts {self.prompts}", ": every prompt of the file is read")
        if len(self.pair) not in (0, 2):
            raise UserError(f"--pair {config.shown(self.pair)}: expected two answers with a comma between, e.g. yes,no")
        sources: list[str] = [name for name in ("domain", "prompts", "process", "task") if name in changed]
        if self.limit and sources and sources[0] != "domain":
            sources.append("limit")
        if len(sources) > 1:
            first, second = (f"--{name} {getattr(self, name)}" for name in sources[:2])
            raise UserError(f"{first} with {second}: prompts come from one source; leave one out")
        if self.chat and (self.process or self.task):
            raise UserError("--chat reads prompts as messages: leave out --process and --task")
        if self.process and min(self.ks) < 1:
            raise UserError(f"--k {config.shown(self.ks)}: expected at least 1: 0 observations are no evidence")
        if self.n is not None and self.n < (least := 5 if self.process else 20):
            raise UserError(f"--n {self.n}: expected at least {least}")


@config.command(
    RunConfig,
    JobOutput,
    examples=[
        "llmgeom ablate --model EleutherAI/pythia-410m --layers 12 --positions all",
        "llmgeom ablate --model EleutherAI/pythia-70m --what heads --domain math",
        "llmgeom ablate --axis runs/mine/direction.safetensors --prompts mine.jsonl --pair yes,no --mode steer",
    ],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Edit the entropy axis, and compare the change of the output with that of equally large random edits.

    With --axis FILE: edit the direction of a label.
    With --what heads or --what blocks: replace each head or block, one at a time, and rank them by the change.
    """
    return prepare(settings).show(output)


def prepare(settings: RunConfig) -> Job:
    """Check what can be checked before weights load. Raises UserError."""
    located = settings.locate()
    task = _task(settings, located)
    draw, drawn = _inputs(settings, task)
    saved, files = None, {}
    if settings.axis != "entropy":
        from llmgeom.probes.labels.directions import SavedDirection

        saved = SavedDirection.load(settings.axis)
        files["direction"] = sha256(Path(settings.axis).read_bytes())
    if settings.prompts:
        from llmgeom.prompts.files import whole_bytes

        files["prompts"] = sha256(whole_bytes(settings.prompts, f"--prompts {settings.prompts}"))
    if settings.layers not in ("last", "each"):
        places("--layers", settings.layers, 1, strict=False, also="last, each")

    def ask(subject: Model) -> Plan:
        from llmgeom.probes.interventions import axis_ablation, component_ablation, label_axis

        batch, options = draw(subject), settings.values("seed", "batch_tokens")
        if settings.what != "axis":
            # A head works where it writes, and that may be long before the answer: L16H0 of SmolLM2 moves .03 bits at
            # the final token of repeated random tokens, and 2.6 at all positions but the first.
            options |= {"positions": settings.positions or "all", **settings.values("nulls", "exact")}
            return component_ablation.question(subject, batch, settings.what, task=task, **options)
        options |= {"positions": settings.positions or "query", **settings.values("mode", "controls")}
        if saved:
            return label_axis.question(subject, batch, saved, settings.pair, **options)
        return axis_ablation.question(subject, batch, directions=settings.directions, layers=settings.layers, **options)

    what = settings.mode if settings.what == "axis" else settings.what
    return Job(settings, located, f"ablate-{drawn}-{what}", ask, files)


def _task(settings: RunConfig, located: hub.Located) -> World | None:
    """The task of --task, or else the model's own where no prompts are asked for. UserError if it breaks its laws."""
    own = hub.tunnel_task(located.path) if hub.tunnel(located.path) else None
    spec = settings.task or (None if settings.domain or settings.prompts or settings.process or settings.limit else own)
    if spec is None:
        return None
    from llmgeom import wind_tunnels
    from llmgeom.wind_tunnels.exactness import require_exact

    task = wind_tunnels.load_world(spec)
    require_exact(task)
    if settings.what == "axis":
        raise UserError(
            f"{task.title}: an axis can only be edited on prompts; with a task use --what heads or --what blocks"
        )
    return task


def _inputs(settings: RunConfig, task: World | None) -> tuple[Callable[[Model], Batch], str]:
    """How inputs are drawn for a model, and their name. Raises UserError for an unknown domain, prior or file."""
    if task:
        n, name = settings.n or SEQUENCES, type(task).__name__.lower()
        return lambda _: task.sample(n, settings.seed, task.test_split), name
    if settings.prompts:
        from llmgeom.prompts import files

        batch = files.read(settings.prompts)
        return lambda _: batch, folders.safe(Path(settings.prompts).stem)
    if settings.process:
        from llmgeom.wind_tunnels import load_world

        world = load_world(settings.process, text=True)

        def evidence(subject: Model) -> Batch:
            """Prompts of a world, in marks that the tokenizer has as one token."""
            from llmgeom.prompts import text

            if subject.tokenizer is None:
                raise UserError(f"{subject.name} {NO_TOKENIZER}")
            options = {"ks": settings.ks, "surfaces": ("list",), "positions": subject.facts["positions"]}
            return text.sample(world, settings.n or PROCESS_PROMPTS, settings.seed, subject.tokenizer, **options)

        return evidence, folders.safe(settings.process)
    from llmgeom.prompts.domains import Domain

    domain = Domain(settings.domain or "mixed")

    def stratified(subject: Model) -> Batch:
        """Prompts of a domain, spread over entropy."""
        from llmgeom.cache.shards import captures_folder
        from llmgeom.model.tokenizing import fitting
        from llmgeom.prompts.pool import USUAL, candidates, stratify

        size = min(candidates(settings.n, settings.limit), domain.size())
        pool = fitting(subject, domain.sample(size, settings.seed))
        entropy = subject.entropy(pool, batch_tokens=settings.batch_tokens, store=str(captures_folder()))
        return stratify(pool, entropy, settings.n or USUAL, seed=settings.seed)

    return stratified, domain.name
