"""The door: `llmgeom VERB`. Each command parses, calls one public function, saves, and says where."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llmgeom import __version__, interrupt
from llmgeom.errors import UserError, first_line, redact
from llmgeom.exports import FORMATS, export
from llmgeom.model import hub
from llmgeom.progress import bar


class Verb(click.Command):
    """A command; each has -v, since -vv shows the traceback of whatever ends it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if all(param.name != "verbose" for param in self.params):
            names, told = ["--verbose", "-v"], "Twice: where something goes wrong, the traceback too."
            self.params.append(click.Option(names, count=True, expose_value=False, help=told))


class Verbs(click.Group):
    """A command that has commands of its own."""

    command_class = Verb


class Door(Verbs):
    """A refusal becomes one sentence and exit code 1, an interruption 130 with the command that continues; so does
    what nobody foresaw, a traceback only where -vv asks for it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        run: Callable[[], Any] = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        given = list(sys.argv[1:] if args is None else args)
        if odd := [word for word in given if any("\ud800" <= c <= "\udfff" for c in word)]:
            # It could be opened, and then written into no record.
            _fail(f"{odd[0]!r} is not UTF-8: rename what it names", 1)
        loud = given.count("--verbose") + sum(word.count("v") for word in given if re.fullmatch("-[qv]+", word)) > 1
        # Of several processes none may wait for the end of a step that the others have left: there Ctrl-C is at once.
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        try:
            with interrupt.gently(_heard) if alone else nullcontext():
                code = run()
        except click.exceptions.Abort as abort:
            if not isinstance(abort.__cause__, KeyboardInterrupt):
                _fail(_unforeseen(abort.__cause__ or abort), 1, abort if loud else None)
            _fail(f"interrupted; nothing is half-written. Continue with: {shlex.join(['llmgeom', *given])}", 130)
        except click.ClickException as error:
            error.show(said := io.StringIO())
            click.echo(_short(redact(said.getvalue())), err=True, nl=False)
            sys.exit(error.exit_code)
        except UserError as refusal:
            _fail(str(refusal), 1, refusal if loud else None)
        except Exception as error:
            _fail(_unforeseen(error), 1, error if loud else None)
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx, args):
        import difflib

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            raise click.UsageError(error.message + (f" Did you mean {near[0]!r}?" if near else ""), ctx) from None


def _fail(sentence: str, code: int, error: BaseException | None = None) -> None:
    from llmgeom.reports.text import visible

    if error is not None:
        click.echo(redact("".join(traceback.format_exception(error))), err=True)
    click.echo(f"llmgeom: {visible(_short(redact(sentence)))}", err=True)
    sys.exit(code)


def _short(sentence: str, ends: int = 500) -> str:
    """A sentence that repeats a value of any length, without its middle."""
    return sentence if len(sentence) <= 2 * ends else f"{sentence[:ends]} … {sentence[-ends:]}"


def _unforeseen(error: BaseException) -> str:
    """The sentence for what no one refused: the machine's fault where it can be told, else ours."""
    said = first_line(error)
    if isinstance(error, OSError) and error.strerror:
        from llmgeom.files import REMEDY

        place = error.filename if isinstance(error.filename, str) else "a file"
        return f"{place}: {error.strerror}; {REMEDY}"
    if isinstance(error, MemoryError) or re.search("out of memory|allocate memory|enough memory", said):
        return f"not enough memory ({said}); ask for fewer sequences or prompts, a smaller model, or --batch-tokens"
    return f"this should not have happened ({type(error).__name__}: {said}); -vv shows where, please report it"


def _heard() -> None:
    # From within a signal handler: a print could meet the print that it interrupted.
    os.write(2, b"\nllmgeom: stopping after what is in hand; Ctrl-C again stops at once\n")


@click.group(
    cls=Door,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "LLMGEOM", "max_content_width": 110},
    epilog="Example:  llmgeom scan --model EleutherAI/pythia-410m --domain math",
)
@click.version_option(__version__, prog_name="llmgeom")
def main() -> None:
    """How does a language model hold its uncertainty? Every number with n, an interval and a null."""


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in the order of the help."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


_dtype = click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Weights' precision.")
_device = click.option("--device", help="cpu, cuda, cuda:1 ... [default: a GPU where there is one]")
_device_map = click.option("--device-map", help="accelerate's placement for models larger than a GPU, e.g. auto.")
_offline = click.option("--offline", is_flag=True, help="Never touch the network.")
_trust = click.option("--trust-remote-code", is_flag=True, help="Run the model repository's own code.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
_quiet = click.option("--quiet", "-q", is_flag=True, help="No progress.")

_model_options = _all(
    click.option("--model", default="pocket:pythia", show_default=True, help="pocket:NAME, a folder or a hub id."),
    click.option("--revision", help="Branch, tag or commit of a hub model, e.g. step1000."),
    _dtype,
    click.option(
        "--quantize",
        type=click.Choice(["8bit", "4bit"]),
        help="Through bitsandbytes; activations only, and a banner on every page.",
    ),
    _device,
    _device_map,
    click.option(
        "--backend",
        type=click.Choice(["transformers", "tl"]),
        default="transformers",
        show_default=True,
        help="tl reads through TransformerLens (GPT-J, GPT-Neo, BLOOM, Falcon; a second opinion).",
    ),
    _offline,
    _trust,
)


_protocol_option = click.option(
    "--protocol",
    type=click.Choice(["sound", "published"]),
    default="sound",
    show_default=True,
    help="published: by the papers' definitions, flaws included; `llmgeom audit` sets both side by side.",
)


_say_options = _all(
    click.option(
        "--fail-on",
        multiple=True,
        type=click.Choice(["FAIL", "INCONCLUSIVE", "not above null", "undecided", "unmeasured"]),
        help="Exit 3 where a verdict is this; repeat for several.",
    ),
    _json,
    _quiet,
    click.option(
        "--verbose",
        "-v",
        count=True,
        help="Say more: every reason and the parity check; twice: tracebacks too.",
    ),
)


class Listed(click.ParamType):
    """Values with commas between."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            return tuple(self.kind(one.strip()) for one in value.split(",") if one.strip())
        except ValueError:
            self.fail(f"{value!r}: expected {self.name} with commas between", param, ctx)


@main.command(epilog="Example:  llmgeom scan --model EleutherAI/pythia-410m --domain math --n 75 --out runs/410m-math")
@_model_options
@click.option("--domain", "domains", multiple=True, help="Prompt domain; repeat for several. [default: mixed and math]")
@click.option(
    "--task", "tasks", multiple=True, help="A tunnel's task, e.g. bijection:vocab=20; repeat. [default: its own]"
)
@click.option("--prompts", "prompts_file", help="Your own prompts: .jsonl, .txt or - for standard input.")
@click.option("--prompts-from", help="Reuse the prompts of an earlier run folder.")
@click.option("--n", type=int, help="Prompts a domain, spread evenly over entropy. [default: 75; fewer in small ones]")
@click.option("--limit", type=int, help="Use only the first LIMIT prompts of a file, or a pool of at most LIMIT.")
@click.option(
    "--probes",
    type=Listed(str, "names"),
    help="Comma-separated probe names, or all. [default: all; of prompts less what costs most]",
)
@_protocol_option
@click.option(
    "--nulls", default=20, show_default=True, help="Draws of each null: untrained controls, shuffled prompts."
)
@click.option("--batch-tokens", default=4096, show_default=True, help="Tokens that run together.")
@click.option("--shard", help="Of a job array: i/n makes every n-th shard of the captures and stops (docs/store.md).")
@click.option("--seed", default=0, show_default=True, help="Fixes prompts, nulls and permutations.")
@click.option("--out", type=click.Path(), help="Run folder. [default: runs/MODEL-DOMAINS-HASH]")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan: what each claim needs, tokens, bytes, memory, minutes; read no weights.",
)
@click.option(
    "--stability", is_flag=True, help="Scan again in another precision, in smaller batches and with BOS toggled."
)
@click.option("--fail-on-flip", is_flag=True, help="With --stability: exit 3 where a verdict flips.")
@_say_options
def scan(**options: Any) -> int:
    """Scan a model: how the geometry of its last tokens relates to its uncertainty, and a page to look at."""
    from llmgeom.commands.scan import Request, perform, prepare

    say = {name: options.pop(name) for name in ("fail_on", "fail_on_flip", "dry_run", "as_json", "quiet", "verbose")}
    if say["fail_on_flip"] and not options["stability"]:
        raise UserError("--fail-on-flip is about what --stability finds; give both")
    if options["probes"] == ():
        raise UserError("--probes names no probe; leave it out for all of them, or see `llmgeom list probes`")
    plan = prepare(Request(**options), write=not say["dry_run"])
    if say["dry_run"]:
        from llmgeom.commands.dry_run import estimate, lines

        cost = estimate(plan)
        click.echo(json.dumps(cost, sort_keys=True) if say["as_json"] else "\n".join(lines(cost)))
        return 0
    found = None
    with bar(say["quiet"] or say["as_json"]) as progress:
        if options["stability"]:
            from llmgeom.commands import stability

            records, found = stability.perform(plan, progress)
        else:
            records = [record for _, record in perform(plan, progress)]
    if not records:  # one of several processes: there is nothing to show yet
        click.echo(plan.shared, nl=False)
        return 0
    code = _show(plan.out, records, say, {"stability": found.to_dict()} if found else None)
    if found and not say["as_json"]:
        click.echo("\n".join(found.lines()))
    return 3 if found and found.flipped and say["fail_on_flip"] else code


@main.command(epilog="Example:  llmgeom sula --model EleutherAI/pythia-410m --prior beta:2,2 --k 0,2,4,8,16")
@_model_options
@click.option(
    "--prior", default="two-point", show_default=True, help="two-point, two-point:0.8, beta (uniform) or beta:2,1."
)
@click.option(
    "--template",
    type=click.Choice(["colon", "is", "plain", "instructed"]),
    help="colon `w: label`, is `w is label`, plain without a lead-in (as published), instructed: the prior is stated."
    " [default: colon; plain with --protocol published]",
)
@_protocol_option
@click.option(
    "--k", "ks", type=Listed(int, "whole numbers"), default="0,1,2,4,8", show_default=True, help="Labelled words shown."
)
@click.option("--labels", type=Listed(str, "words"), default="", help="Labels. [default: single-token syllables]")
@click.option("--n", default=50, show_default=True, help="Prompts for each number of labelled words.")
@click.option("--nulls", default=20, show_default=True, help="Untrained controls.")
@click.option("--seed", default=0, show_default=True, help="Fixes prompts and nulls.")
@click.option("--out", type=click.Path(), help="Run folder. [default: runs/MODEL-sula-PRIOR-TEMPLATE-HASH]")
@_say_options
def sula(**options: Any) -> int:
    """In-context evidence: are k labelled words weighed as Bayes' rule does? With controls and rival readers."""
    from llmgeom.commands import evidence as sula

    return _show_record(sula, options)


@main.command(
    epilog="Example:  llmgeom ablate --model EleutherAI/pythia-410m --layers 12 --positions all\n\n"
    "Example:  llmgeom ablate --model EleutherAI/pythia-70m --heads all --domain math\n\n"
    "Example:  llmgeom ablate --model runs/seed0 --also runs/seed1 --also runs/seed2 --heads all"
)
@_model_options
@click.option("--axis", type=click.Choice(["entropy"]), default="entropy", show_default=True, help="What is edited.")
@click.option("--heads", type=click.Choice(["all"]), help="Instead of an axis: each head replaced, one at a time.")
@click.option(
    "--blocks", type=click.Choice(["all"]), help="Instead of an axis: each attention, MLP and block replaced."
)
@click.option(
    "--direction",
    "directions",
    multiple=True,
    type=click.Choice(["pc1", "ridge"]),
    default=("pc1", "ridge"),
    show_default=True,
    help="First principal component (as published), or the weights that read entropy best; repeat for both.",
)
@click.option("--mode", type=click.Choice(["cut", "only", "shift"]), default="cut", show_default=True, help="The edit.")
@click.option("--layers", default="last", show_default=True, help="last, each (one at a time), or 3,7 (together).")
@click.option(
    "--positions",
    type=click.Choice(["query", "all"]),
    help="Edit the final token (of a task: every query), or all (of prompts with heads and blocks: but the first)."
    " [default: query; of a task all]",
)
@click.option("--domain", default="mixed", show_default=True, help="Prompt domain.")
@click.option("--sula", is_flag=True, help="Label sequences in the place of a domain; see `llmgeom sula`.")
@click.option("--prior", default="two-point", show_default=True, help="Of the label sequences.")
@click.option(
    "--k", "ks", type=Listed(int, "whole numbers"), default="1,2,4,8", show_default=True, help="Labels shown."
)
@click.option("--n", type=int, help="Prompts. [default: 75; 20 for each k with --sula; 200 sequences]")
@click.option("--limit", type=int, help="A pool of at most LIMIT prompts.")
@click.option("--task", help="Of heads and blocks: a task's sequences. [default: its own, of a tunnel's model]")
@click.option("--also", multiple=True, help="Of heads and blocks: another training of the same model; repeat.")
@click.option("--controls", default=199, show_default=True, help="Of an axis: draws of each control.")
@click.option("--nulls", default=20, show_default=True, help="Of heads and blocks: untrained controls.")
@click.option("--batch-tokens", default=4096, show_default=True, help="Tokens that run together.")
@click.option("--seed", default=0, show_default=True, help="Fixes prompts, halves and controls.")
@click.option("--out", type=click.Path(), help="Run folder. [default: runs/MODEL-ablate-DOMAIN-WHAT-HASH]")
@_say_options
def ablate(**options: Any) -> int:
    """Is the entropy axis used? Edit it, and hold what changes in the output against edits of the same size.

    With --heads all or --blocks all: which heads, or blocks, does the output need? Replace each, one at a time.
    """
    from llmgeom.commands import ablate as ablation

    return _show_record(ablation, options)


@main.command(epilog="Example:  llmgeom swap --model runs/bijection --layers 0,1")
@_model_options
@click.option("--task", help="NAME or NAME:field=value,... [default: what the model was trained on]")
@click.option("--n", default=200, show_default=True, help="Sequences; a frame is found on half of them.")
@click.option("--layers", default="all", show_default=True, help="all, or 0,1: whose input is swapped, one at a time.")
@click.option("--controls", default=39, show_default=True, help="Random subspaces.")
@click.option("--nulls", default=20, show_default=True, help="Untrained controls.")
@click.option("--batch-tokens", default=4096, show_default=True, help="Tokens that run together.")
@click.option("--seed", default=0, show_default=True, help="Fixes sequences, swaps, halves and controls.")
@click.option("--out", type=click.Path(), help="Run folder. [default: runs/MODEL-swap-TASK-HASH]")
@_say_options
def swap(**options: Any) -> int:
    """Where is evidence held? Exchange it inside the model, and hold the answer against the exact counterfactual."""
    from llmgeom.commands import patch as swap

    return _show_record(swap, options)


@main.command(
    epilog="Example:  llmgeom train bijection:vocab=8 --arch llama --steps 600 --lr 1e-2 --out runs/bijection\n\n"
    "Example:  llmgeom train coin --arch lstm --lr auto\n\n"
    "Example:  llmgeom train path/to/file.py:MyTask --steps 2000"
)
@click.argument("task")
@click.option("--arch", default="neox", show_default=True, help="See `llmgeom list architectures`.")
@click.option("--width", default=64, show_default=True, help="Of the residual stream.")
@click.option("--layers", default=2, show_default=True, help="Layers.")
@click.option("--heads", default=0, help="Attention heads, or of a mamba2 mixer. [default: 2; gqa: 4]")
@click.option("--match-params", "parameters", default=0, help="Choose the width for this many parameters, within 2 %.")
@click.option("--steps", default=1000, show_default=True, help="Optimiser steps.")
@click.option("--batch", default=128, show_default=True, help="Sequences a step, drawn afresh.")
@click.option("--lr", default="3e-3", show_default=True, help="Highest learning rate, or auto: successive halving.")
@click.option("--schedule", type=click.Choice(["cosine", "constant"]), default="cosine", show_default=True)
@click.option("--warmup", default=50, show_default=True, help="Steps of linear warm-up.")
@click.option("--weight-decay", default=0.01, show_default=True, help="Of AdamW, on matrices.")
@click.option("--clip", default=1.0, show_default=True, help="Largest norm of the gradient.")
@click.option(
    "--targets",
    type=click.Choice(["hard", "soft"]),
    default="hard",
    show_default=True,
    help="hard: the outcome drawn, so that Bayes' rule has to be found; soft: the exact answer itself.",
)
@click.option("--corrupt", default=0.0, show_default=True, help="Fraction of the hard targets drawn again, evenly.")
@click.option(
    "--evidence",
    type=click.Choice(["kept", "exchanged", "unbound", "sheet"]),
    default="kept",
    show_default=True,
    help="What is learnt instead: exchanged, nothing; unbound, what is shown without its keys; sheet, position.",
)
@click.option("--precision", type=click.Choice(["float32", "bf16"]), default="float32", show_default=True)
@click.option("--compile", is_flag=True, help="Through torch.compile; pays for itself in long runs.")
@click.option("--cuda-graph", "graph", is_flag=True, help="One CUDA graph a step.")
@click.option("--snapshots", default=12, show_default=True, help="Kept, step 0 and the last included.")
@click.option("--from", "start", help="Fine-tune this model: a folder, pocket:NAME or a hub id.")
@click.option("--seed", default=0, show_default=True, help="Fixes weights and data.")
@_device
@click.option("--out", type=click.Path(), help="Folder of the model. [default: runs/TASK-ARCH-HASH]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_quiet
def train(out: str | None, device: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Train a small model in a wind tunnel, where the exact posterior is known. Run again to go on after a stop.

    TASK: see `llmgeom list tasks`; its fields follow a colon, as in hmm:states=5,steps=20.
    """
    from llmgeom.wind_tunnels.training import Training, default_folder, train

    asked = Training(**options)
    with bar(quiet or as_json) as progress:
        done = train(asked, out or default_folder(asked), device, progress)
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
        return
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "out": str(done.out), **done.to_dict()}, sort_keys=True))
    else:
        click.echo("\n".join(done.lines()))


@main.command(epilog="Example:  llmgeom grade --model runs/tunnel --n 1000")
@_model_options
@click.option("--task", help="NAME or NAME:field=value,... [default: what the model was trained on]")
@click.option("--n", default=1000, show_default=True, help="Sequences: held-out, and as many seen.")
@click.option("--nulls", default=20, show_default=True, help="Untrained controls.")
@click.option("--seed", default=0, show_default=True, help="Fixes sequences and nulls.")
@click.option("--out", type=click.Path(), help="Run folder. [default: runs/MODEL-grade-TASK-HASH]")
@_say_options
def grade(**options: Any) -> int:
    """How near are a model's answers in a wind tunnel to the exact posterior? Beside predictors that do not infer."""
    from llmgeom.commands import grade as grading

    return _show_record(grading, options, grading.table)


@main.command(
    epilog="Example:  llmgeom dynamics runs/seed0 runs/seed1 runs/seed2 runs/seed3 runs/seed4\n\n"
    "Example:  llmgeom dynamics --task bijection --seeds 5\n\n"
    "Example:  llmgeom dynamics --model EleutherAI/pythia-70m --revisions step0,step512,step8000,step143000"
)
@click.argument("runs", nargs=-1, type=click.Path())
@click.option("--task", help="Train constant-rate runs of this task, and as many on random targets, and follow them.")
@click.option("--seeds", default=5, show_default=True, help="Of --task: runs of each kind.")
@click.option("--quick", is_flag=True, help="Of --task: a quarter of the steps.")
@click.option("--model", help="A hub id, instead of runs.")
@click.option("--revisions", type=Listed(str, "revisions"), default="", help="Of --model: stepN,stepM,... ascending.")
@click.option("--domain", default="mixed", show_default=True, help="Prompts that the revisions of --model read.")
@click.option(
    "--probes",
    type=Listed(str, "names"),
    help="Comma-separated probe names, or all; '' for none. [default: as `llmgeom scan`]",
)
@click.option("--n", type=int, help="Sequences, or prompts. [default: 200, or 75 prompts]")
@click.option("--nulls", default=20, show_default=True, help="Draws of each null of the probes.")
@click.option("--seed", default=0, show_default=True, help="Fixes sequences, prompts and nulls.")
@_dtype
@_device
@_offline
@click.option("--out", type=click.Path(), help="Run folder; a stopped run goes on. [default: runs/dynamics-WHAT-HASH]")
@_say_options
def dynamics(**options: Any) -> int:
    """What settles first in training: attention, values or the answers? And every probe from snapshot to snapshot.

    RUNS: folders of `llmgeom train --schedule constant`, one a training seed, and of `--corrupt 1` as their null.
    """
    from llmgeom.commands import dynamics

    return _show_record(dynamics, options, dynamics.table)


@main.command(epilog="Example:  llmgeom primitives --quick")
@click.option("--quick", is_flag=True, help="A fifth of the steps: about 10 minutes on two cores instead of 60.")
@click.option("--seeds", default=3, show_default=True, help="Trainings of each cell.")
@click.option("--dose-seeds", default=5, show_default=True, help="Trainings of each dose of corrupted labels.")
@click.option("--out", type=click.Path(), help="Run folder; a stopped run goes on. [default: runs/primitives-HASH]")
@_json
@_quiet
def primitives(**options: Any) -> None:
    """Which architectures accumulate, transport and bind? Trained at equal size and data, beside trivial predictors.

    And the dose curve: what a model says whose labels were partly drawn again.
    """
    from llmgeom.papers import primitives

    _show_rows(primitives, options)


@main.command(epilog="Example:  llmgeom calibrate --quick")
@click.option("--quick", is_flag=True, help="Four cells of eleven and few seeds: about 10 minutes on two cores.")
@click.option("--out", type=click.Path(), help="Run folder; a stopped run goes on. [default: runs/calibrate-HASH]")
@_json
@_quiet
def calibrate(**options: Any) -> None:
    """Which numbers tell models that infer from models trained as long that cannot? On a bench of known truth.

    Every probe reads small models trained to the posterior, untrained, trained where nothing can be inferred, right for
    the wrong reason, and stopped on the way; about two hours of CPU. The table that it makes ships with the code.
    """
    from llmgeom.commands import calibrate

    _show_rows(calibrate, options)


_trilogy_options = _all(
    click.option("--n", type=int, help="Prompts a domain. [default: 75]"),
    click.option("--limit", type=int, help="A pool of at most LIMIT prompts a domain."),
    click.option("--nulls", default=20, show_default=True, help="Draws of each null."),
    click.option("--controls", default=199, show_default=True, help="Draws of each control of the ablation."),
    click.option("--seed", default=0, show_default=True, help="Fixes prompts, nulls and controls."),
    _json,
    _quiet,
)


@main.command(epilog="Example:  llmgeom audit --model EleutherAI/pythia-410m")
@_model_options
@_trilogy_options
@click.option("--out", type=click.Path(), help="Run folder. [default: runs/MODEL-audit-HASH]")
def audit(**options: Any) -> None:
    """Paper III's tables by the published definitions and by sound ones, side by side, and why they differ."""
    from llmgeom.papers import audit

    _show_rows(audit, options)


_PAPERS = {"quick", "dry_run", "out", "as_json", "quiet"}
_MODELS = {"models", "dtype", "device", "device_map", "backend", "offline", "trust_remote_code"}
_MODELS |= {"n", "limit", "nulls", "controls", "seed"}
_TAKES = {
    "paper1": _PAPERS | {"scale", "device"},
    "paper2": _PAPERS,
    "paper3": _PAPERS | {"scale"} | _MODELS,
    "predictions": _MODELS | {"revision", "out", "as_json", "quiet"},
}


@main.command(
    epilog="Example:  llmgeom reproduce paper1 --quick\n\n"
    "Example:  llmgeom reproduce paper3 --model EleutherAI/pythia-410m --model microsoft/phi-2\n\n"
    "Example:  llmgeom reproduce predictions --model EleutherAI/pythia-410m"
)
@click.argument("what", type=click.Choice(list(_TAKES)))
@click.option("--scale", type=click.Choice(["small", "paper"]), help="paper: the published sizes, on one GPU. [small]")
@click.option("--quick", is_flag=True, help="Of the papers: a few minutes instead of up to an hour on two cores.")
@click.option("--dry-run", is_flag=True, help="Of the papers: say what would be run and what not; run nothing.")
@click.option(
    "--model", "models", multiple=True, help="pocket:NAME, a folder or a hub id; of paper3 repeat for several."
)
@click.option("--revision", help="Of predictions: branch, tag or commit of a hub model, e.g. step1000.")
@_dtype
@click.option("--device", help="cpu, cuda, cuda:1 ... [default: a GPU where there is one; small tunnels: cpu]")
@_device_map
@click.option("--backend", type=click.Choice(["transformers", "tl"]), help="tl reads through TransformerLens.")
@_offline
@_trust
@_trilogy_options
@click.option("--out", type=click.Path(), help="Run folder; a stopped run goes on. [default: runs/WHAT-HASH]")
@click.pass_context
def reproduce(ctx: click.Context, what: str, **options: Any) -> None:
    """Every published number of a paper beside ours, with PASS, FAIL, INCONCLUSIVE or NOT TESTED, and why; or the
    trilogy's testable predictions, put to one model."""
    from llmgeom.commands import reproduce
    from llmgeom.papers import predictions

    source = {name: ctx.get_parameter_source(name) for name in options}
    typed = [name for name, origin in source.items() if origin is ParameterSource.COMMANDLINE]
    if unused := [name for name in typed if name not in _TAKES[what]]:
        flag = {"models": "model"}.get(unused[0], unused[0]).replace("_", "-")
        raise UserError(f"reproduce {what} has no --{flag}; leave it out")
    given = {n: v for n, v in options.items() if n in _TAKES[what] and source[n] is not ParameterSource.DEFAULT}
    say = {"as_json": given.pop("as_json", False), "quiet": given.pop("quiet", False)}
    if what == "predictions":
        models = given.pop("models", ("pocket:pythia",))
        if len(models) > 1:
            raise UserError(f"reproduce predictions --model {models[1]}: it takes one model; paper3 takes several")
        return _show_rows(predictions, {**say, **given, "model": models[0]})
    dry = given.pop("dry_run", False)
    asked: dict[str, Any] = {
        name: given.pop(name) for name in ("scale", "quick", "models", "device", "out") if name in given
    }
    asked |= {"paper": what, "options": given}
    if dry:
        click.echo("\n".join(reproduce.planned(reproduce.Request(**asked))))
    else:
        _show_rows(reproduce, asked | say)


def _show_rows(experiment: Any, options: dict[str, Any]) -> None:
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    with bar(quiet or as_json) as progress:
        out, found = experiment.perform(experiment.Request(**options), progress)
    if as_json:
        body = {"schema_version": 1, "run_dir": str(out), "report": str(out / "report.html"), **found.to_dict()}
        click.echo(json.dumps(body, sort_keys=True, ensure_ascii=False))
    else:
        click.echo("\n".join([*found.lines(), f"page: {out / 'report.html'}"]))


@main.command(name="list", epilog="Example:  llmgeom list probes")
@click.argument("what", type=click.Choice(["models", "domains", "tasks", "architectures", "probes", "claims"]))
def list_(what: str) -> None:
    """What there is: pocket models, prompt domains, tasks and architectures of tunnels, probes, and the claims that a
    scan can pass or fail."""
    if what == "probes":
        from llmgeom.probes import ON_REQUEST, PROTOCOLS, known, names

        for protocol in PROTOCOLS:
            for name, module in known(names(protocol)).items():
                asked = " (of prompts: --probes)" if name in ON_REQUEST else ""
                click.echo(f"{name:18} {(module.__doc__ or '').strip().partition(chr(10))[0]}{asked}")
    elif what == "claims":
        from llmgeom.claims import entries

        for entry in entries():
            if entry.claim:
                click.echo("\n".join(entry.lines()) + "\n")
    elif what == "tasks":
        from llmgeom import wind_tunnels

        for name in wind_tunnels.names():
            click.echo("\n".join(wind_tunnels.described(name)))
        click.echo("or one of your own: path/to/file.py:CLASS (docs/tunnels.md)")
    elif what == "architectures":
        from llmgeom.wind_tunnels.models import ARCHITECTURES

        for name, text in ARCHITECTURES.items():
            click.echo(f"{name:10} {text}")
    elif what == "domains":
        from llmgeom.prompts import domains

        for name in domains.known():
            click.echo(f"{name:12} {domains.Domain(name).size()} prompts")
    else:
        for name in hub.pockets():
            click.echo(f"pocket:{name}  (untrained: pocket:{name}@step0)")
        click.echo("or a folder written by save_pretrained, or any hub id, e.g. EleutherAI/pythia-410m")


@main.command(epilog="Example:  llmgeom report runs/410m-math runs/1b-math --out both.html")
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=click.Path(), help="The page. [default: report.html in the first run folder]")
def report(runs: tuple[str, ...], out: str | None) -> None:
    """Draw the page of one run, or of several side by side; no model is loaded."""
    from llmgeom.files import write_whole
    from llmgeom.record import Record
    from llmgeom.reports import page

    path = Path(out) if out else Path(runs[0]) / "report.html"
    write_whole(path, page([Record.load(run) for run in runs]).encode())
    click.echo(path)


@main.command(epilog="Example:  llmgeom compare runs/410m-math runs/1b-math --out both.html")
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--out", type=click.Path(), help="Draw the page of these runs side by side, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def compare(runs: tuple[str, ...], out: str | None, as_json: bool) -> None:
    """Compare runs on the same prompts (scan the others with --prompts-from RUN); no model is loaded."""
    from llmgeom.commands.comparison import compare
    from llmgeom.files import write_whole
    from llmgeom.record import Record

    records = [Record.load(run) for run in runs]
    found = compare(records)
    if out:
        from llmgeom.reports import page

        write_whole(Path(out), page(records, found.to_dict()).encode())
    click.echo(json.dumps(found.to_dict(), sort_keys=True, ensure_ascii=False) if as_json else "\n".join(found.lines()))


@main.command(
    name="export",
    epilog="Example:  llmgeom export runs/410m-math latex --out paper/verdicts.tex\n\n"
    "Example:  llmgeom export runs/shift gguf --direction ridge --dose 2",
)
@click.argument("run", type=click.Path())
@click.argument("form", metavar="FORMAT", type=click.Choice(list(FORMATS)))
@click.option("--out", type=click.Path(), help="File or folder. [default: inside the run folder]")
@click.option("--direction", type=click.Choice(["pc1", "ridge"]), help="Of gguf and steered: which of the run's axes.")
@click.option("--dose", type=float, help="Of gguf and steered: how far, in spreads of the axis. [default: 1]")
@click.option("--approximate", is_flag=True, default=None, help="Of gguf: also where it is not the same as the shift.")
def export_(run: str, form: str, out: str | None, **options: Any) -> None:
    """Write a run for elsewhere: tables, a model card, arrays, images, or an axis's shift for llama.cpp and PEFT.

    FORMAT: parquet, latex, safetensors, card, live (the page with a wind tunnel's model in it, to play with), png, svg,
    pdf, gguf (a control vector), steered (an adapter).
    """
    click.echo("\n".join(export(run, form, out, **options)))


@main.command(epilog="Example:  llmgeom completion bash >> ~/.bashrc")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands, flags and their values; put it where the shell reads its settings."""
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # the three above come with click
    click.echo(made(main, {}, "llmgeom", "_LLMGEOM_COMPLETE").source())


@main.group(cls=Verbs, epilog="Example:  llmgeom cache ls")
def cache() -> None:
    """What is kept of activations under LLMGEOM_CACHE: list it, check it, remove it, bring it together."""


_runs_argument = click.argument("runs", nargs=-1)


@cache.command(name="ls", epilog="Example:  llmgeom cache ls")
@_runs_argument
def cache_ls(runs: tuple[str, ...]) -> None:
    """The runs that are kept (key, size, age, model); of RUNS, given by their keys, every capture."""
    from llmgeom.cache import manage as cache

    click.echo("\n".join(cache.table(cache.chosen(runs) if runs else cache.runs(), captures=bool(runs))))


@cache.command(name="verify", epilog="Example:  llmgeom cache verify")
@_runs_argument
def cache_verify(runs: tuple[str, ...]) -> int:
    """Read every shard, of all runs or of RUNS, and hold it against its hash; exit 1 where one is damaged."""
    from llmgeom.cache import manage as cache

    found = list(cache.verify(cache.chosen(runs) if runs else cache.runs()))
    bad = [f"{path}: {why}" for path, why in found if why]
    said = f"{len(bad)} of {len(found)} shards are damaged: a run that needs them makes them again"
    click.echo("\n".join([*bad, said if bad else f"{len(found)} shards, all whole"]))
    return int(bool(bad))


@cache.command(name="rm", epilog="Example:  llmgeom cache rm 3fa90c12")
@_runs_argument
@click.option("--all", "every", is_flag=True, help="All runs.")
def cache_rm(runs: tuple[str, ...], every: bool) -> None:
    """Delete RUNS, given by the beginnings of their keys, and say what that freed."""
    from llmgeom.cache import manage as cache
    from llmgeom.cache.shards import said

    if bool(runs) == every:
        raise UserError("say which: the keys of runs (`llmgeom cache ls` shows them), or --all")
    which = cache.runs() if every else cache.chosen(runs)
    freed = cache.remove(which)
    click.echo(f"removed {len(which)} run{'s' * (len(which) != 1)}: {said(freed)} freed")


@cache.command(name="merge", epilog="Example:  llmgeom cache merge node0/cache node1/cache")
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
def cache_merge(folders: tuple[str, ...]) -> None:
    """Copy what is kept in other cache FOLDERS into this one, each shard checked, e.g. after a job array."""
    from llmgeom.cache import manage as cache
    from llmgeom.cache.shards import said

    done = cache.merge(folders)
    there = f"; {done.there} were there" if done.there else ""
    click.echo("\n".join([*done.left, f"{done.copied} shards copied, {said(done.size)}{there}"]))


@main.command(epilog="Example:  llmgeom doctor")
def doctor() -> int:
    """Is this machine ready? Versions, devices, cache, hub, pocket models, and what each feature lacks."""
    from llmgeom.commands.doctor import findings

    worst = 0
    for mark, sentence in findings():
        click.echo(f"{mark:4} {sentence}")
        worst = max(worst, mark == "BAD")
    return int(worst)


def _show_record(experiment: Any, options: dict[str, Any], table: Callable[[Any], Iterable[str]] | None = None) -> int:
    """Perform an experiment that makes one record, and show it, below a table of its own where it has one."""
    say = {name: options.pop(name) for name in ("fail_on", "as_json", "quiet", "verbose")}
    with bar(say["quiet"] or say["as_json"]) as progress:
        out, record = experiment.perform(experiment.Request(**options), progress)
    if table and not say["as_json"]:
        click.echo("\n".join([*table(record), ""]))
    return _show(out, [record], say)


def _show(out: Path, records: list, say: dict[str, Any], more: dict[str, Any] | None = None) -> int:
    """The verdicts to standard output; 3 where one of them is named by --fail-on."""
    from llmgeom.reports import table

    words = {h.verdict for record in records for m in record.results.values() for h in m.estimates}
    words |= {"unmeasured"} if any(record.unmeasured for record in records) else set()
    failed = sorted(words & set(say["fail_on"]))
    if say["as_json"]:
        body = {
            "schema_version": 1,
            "status": "failed" if failed else "ok",
            "run_dir": str(out),
            "report": str(out / "report.html"),
            "verdicts": table(records),
            "warnings": [warning for record in records for warning in record.warnings],
            **(more or {}),
        }
        click.echo(json.dumps(body, sort_keys=True, ensure_ascii=False))
    else:
        _show_table(records, say["verbose"])
        click.echo(f"page: {out / 'report.html'}")
    if failed:
        click.echo(f"llmgeom: --fail-on: there are verdicts {', '.join(failed)}", err=True)
    return 3 if failed else 0


COLUMNS = {
    "name": "metric",
    "value": "value",
    "interval": "95 % interval",
    "null": "95 % band of the null",
    "p": "p",
    "n": "n",
    "verdict": "verdict",
}


def _show_table(records: list, verbose: bool) -> None:
    """A table a record; on a narrow terminal cells wrap, into a file they do not."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from llmgeom.reports import table

    console = Console(width=None if sys.stdout.isatty() else 150)
    for record in records:
        grid = Table(
            box=None, header_style="bold", padding=(0, 2, 0, 0), title_justify="left", title=Text(record.title)
        )
        for title in COLUMNS.values():
            grid.add_column(title, overflow="fold")
        rows, group = table([record]), None
        for row in rows:
            if row["verdict"] == "not measured":
                continue
            if group != (group := "claims of the papers" if row.get("claim") else row["probe"]):
                grid.add_row(Text(group, style="bold"))
            grid.add_row(*(Text(row[key]) for key in COLUMNS))
        console.print(grid)
        for row in rows:
            if verbose or row["verdict"] in ("undecided", "INCONCLUSIVE", "not measured"):
                console.print(Text(f"{row['name']}: {row['verdict']}, {row['why']}"))
        for warning in record.warnings:
            console.print(Text(f"warning: {warning}"))
        console.print()
    if verbose:
        console.print(Text(f"parity: {records[0].subject.get('parity')}"))
