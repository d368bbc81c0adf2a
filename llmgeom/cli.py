"""The entry point `llmgeom COMMAND`: imports the command's module and turns errors into a sentence and exit code."""

from __future__ import annotations

import difflib
import faulthandler
import gc
import importlib
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

import click

from llmgeom import __version__
from llmgeom.cache import interrupt
from llmgeom.errors import UserError, first_line, redact

STOPPING = b"\nllmgeom: stopping after the current step; a second Ctrl-C or SIGTERM stops at once\n"
# Heading -> command -> short help. Each command is the `main` of llmgeom/commands/NAME.py, imported at its first use.
COMMANDS = {
    "Look": {"lens": "See what each layer predicts", "heads": "Find induction and other heads"},
    "Measure": {
        "scan": "Measure a model's geometry of uncertainty",
        "probe": "Test if a label of yours can be read",
        "evidence": "Test if labels are weighed by Bayes' rule",
    },
    "Intervene": {
        "ablate": "Edit an axis, heads or blocks; rank effects",
        "patch": "Patch evidence; compare with exact answers",
    },
    "Known truth": {
        "train": "Train a small model in a wind tunnel",
        "grade": "Compare answers with the exact posterior",
        "dynamics": "Follow what training settles first",
    },
    "Runs": {
        "report": "Print and draw a run, or compare runs",
        "export": "Write a run as tables, arrays or images",
        "cache": "Manage the activation cache",
    },
    "Machine": {"list": "List models, tasks, probes and claims", "doctor": "Check this machine and its packages"},
}


class Door(click.Group):
    """The group of all commands.

    Exit codes: 0 success, 1 a refusal or an error in one sentence, 2 usage, 3 a verdict named by --fail-on, 130
    Ctrl-C, 143 SIGTERM. -vv adds the traceback. With --json standard output also has the sentence, as an object.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands in the order of the help."""
        return [name for group in COMMANDS.values() for name in group]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, from its module; no other module of a command is imported."""
        known = cmd_name in self.list_commands(ctx)
        return importlib.import_module(f"llmgeom.commands.{cmd_name}").main if known else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command by its name; the error for an unknown name suggests the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            raise click.UsageError(error.message + (f" Did you mean {near[0]!r}?" if near else ""), ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, without importing any."""
        for heading, group in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:9}", text) for name, text in group.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; in standalone mode every error ends in a sentence and an exit code."""
        run: Callable[[], Any] = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            faulthandler.enable(sys.__stderr__)  # where a library crashes, the process says in which line
        # Importing torch and transformers creates a million permanent objects. Searching them for garbage takes 1.2 s
        # of a default scan with Python's defaults, and .4 s with these settings. Peak memory is the same.
        gc.set_threshold(10_000, 20, 50)
        words = list(sys.argv[1:] if args is None else args)
        # A flag may be set by its environment variable, as click reads it.
        set_by = os.environ.get(f"LLMGEOM_{words[0].upper()}_JSON", "") if words else ""
        as_json = "--json" in words or set_by.strip().lower() in ("1", "true", "t", "yes", "y", "on")
        if odd := [word for word in words if any("\ud800" <= c <= "\udfff" for c in word)]:
            # Such a file could be opened, but no record could contain its name.
            _fail(f"{odd[0]!r} is not UTF-8: rename the file or folder", 1, as_json=as_json)
        loud = words.count("--verbose") + sum(word.count("v") for word in words if re.fullmatch("-[qv]+", word)) > 1
        fail = partial(_fail, as_json=as_json)
        # With several processes, none may wait for the end of a step that the others have left: Ctrl-C acts at once.
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        try:
            # Inside a signal handler a print could collide with the print that it interrupted.
            with interrupt.handled(partial(os.write, 2, STOPPING)) if alone else nullcontext():
                code = run()
        except click.exceptions.Abort as abort:
            if not isinstance(abort.__cause__, KeyboardInterrupt):
                fail(_unforeseen(abort.__cause__ or abort), 1, abort if loud else None)
            again = shlex.join(["llmgeom", *words])
            fail(f"interrupted; no file is half-written. Continue with: {again}", interrupt.code())
        except click.ClickException as error:
            error.show(text := io.StringIO())
            whole = isinstance(error, click.exceptions.NoArgsIsHelpError)  # a help text, which is ours
            shown = text.getvalue() if whole else _short(redact(text.getvalue()))
            click.echo(shown, err=True, nl=False)
            if as_json:
                _refuse(shown.strip(), "refused")
            sys.exit(error.exit_code)
        except UserError as refusal:
            fail(str(refusal), 1, refusal if loud else None)
        except Exception as error:
            fail(_unforeseen(error), 1, error if loud else None)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str, code: int, error: BaseException | None = None, as_json: bool = False) -> NoReturn:
    from llmgeom.reports.text import visible

    if error is not None:
        click.echo(redact("".join(traceback.format_exception(error))), err=True)
    shown = visible(_short(redact(sentence)))
    click.echo(f"llmgeom: {shown}", err=True)
    if as_json:
        _refuse(shown, "interrupted" if code > 128 else "refused")
    sys.exit(code)


def _refuse(sentence: str, status: str) -> None:
    """Print the object of a command with --json that has no result."""
    click.echo(json.dumps({"schema_version": 1, "status": status, "error": sentence}, ensure_ascii=False))


def _short(sentence: str, ends: int = 500) -> str:
    """A sentence, without its middle if it is long: it may repeat a value of any length."""
    return sentence if len(sentence) <= 2 * ends else f"{sentence[:ends]} … {sentence[-ends:]}"


def _unforeseen(error: BaseException) -> str:
    """The sentence for an error that no check caught: the machine's fault if that is known, else ours."""
    text = first_line(error)
    if isinstance(error, OSError) and error.strerror:
        from llmgeom.files import REMEDY

        place = error.filename if isinstance(error.filename, str) else "a file"
        return f"{place}: {error.strerror}; {REMEDY}"
    if isinstance(error, MemoryError) or re.search("out of memory|allocate memory|enough memory", text):
        return f"not enough memory ({text}); use fewer sequences or prompts, a smaller model, or --batch-tokens"
    return f"this should not have happened ({type(error).__name__}: {text}); -vv shows where, please report it"


@click.group(
    cls=Door,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "LLMGEOM", "max_content_width": 110},
    epilog="Example:  llmgeom scan --model EleutherAI/pythia-410m --domain math",
)
@click.version_option(__version__, prog_name="llmgeom")
def main() -> None:
    """Measure how a language model holds its uncertainty: every number with n, an interval and a control."""
