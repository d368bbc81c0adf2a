"""Configurations of commands: from frozen dataclasses to click options, the saved spec and the repeating command."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import click
from click.core import ParameterSource

from llmgeom.errors import UserError, redact
from llmgeom.files import digest
from llmgeom.flags import Flag, check, flag, flags, model_flag, plain, prompt_flag
from llmgeom.model import hub

if TYPE_CHECKING:
    from llmgeom.model.model import Model

AnyModel = TypeVar("AnyModel", bound="Model")


@dataclass(frozen=True)
class Config:
    """The options of a command; its fields are the command's flags (see `llmgeom.flags`).

    VERB is the command's name, one word or two.
    """

    VERB: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for option in flags(type(self)):
            object.__setattr__(self, option.field, plain(getattr(self, option.field)))
        check(self)

    @property
    def changed(self) -> dict[str, Flag]:
        """The flags whose values are not their defaults, by field."""
        return {option.field: option for option in flags(type(self)) if getattr(self, option.field) != option.default}

    def values(self, *names: str) -> dict[str, Any]:
        """These fields, as keyword arguments of a function that calls them the same."""
        return {name: getattr(self, name) for name in names}

    def refuse_unread(self, names: Sequence[str], where: str, remedy: str = "") -> None:
        """Raises UserError for the first of these fields that is not its default, though nothing reads it there."""
        changed = self.changed
        if unread := next((name for name in names if name in changed), None):
            value, option = getattr(self, unread), changed[unread]
            said = option.name if value is True else f"{option.name} {shown(value)}"
            raise UserError(f"{said} with {where}: it is not read there; leave it out{remedy}")

    def command(self) -> str:
        """The command that repeats this run: every value that is not its default, except --out."""
        arguments: list[str] = []
        words: list[str] = []
        for field, option in self.changed.items():
            value = getattr(self, field)
            if field == "out":
                continue
            values = value if option.several else (value,)
            if option.argument:
                arguments += map(str, values)
            elif option.listed:
                words += [option.name, shown(value)]
            elif value is True:
                words.append(option.name)
            else:
                for item in values:
                    words += [option.name, str(item)]
        return redact(shlex.join(["llmgeom", *self.VERB.split(), *arguments, *words]))


DRAWS = 8  # of each control: `provenance.CONTROLS`, which imports numpy


def draws_flag(what: str, group: str = "") -> Any:
    """The flag --control-models of a command that judges claims."""
    return flag(DRAWS, f"{what}, as controls.", least=1, group=group, name="--control-models")


@dataclass(frozen=True)
class ModelConfig(Config):
    """The options of a command that reads one model: which, and how it is loaded."""

    model: str = model_flag(
        "", "smollm2, pocket:NAME, a folder, a GGUF file or a hub id. [default: smollm2, where it is installed]"
    )
    revision: str | None = model_flag(None, "Branch, tag or commit of a hub model, e.g. step1000.")
    quantize: Literal["8bit", "4bit"] | None = model_flag(
        None, "Quantise with bitsandbytes: activations only, and every page says so."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = model_flag(None, "Precision of the weights.")
    device: str | None = model_flag(None, "cpu, cuda, cuda:1, mps ... [default: a GPU if there is one]")
    device_map: str | None = model_flag(None, "Spread the model over several devices with accelerate, e.g. auto.")
    backend: Literal["transformers", "tl"] = model_flag(
        "transformers", "tl: run the model in TransformerLens (GPT-J, GPT-Neo, BLOOM)."
    )
    offline: bool = model_flag(False, "Never use the network.")
    trust_remote_code: bool = model_flag(False, "Run code from the model's repository.")
    tokenizer_option: tuple[str, ...] = model_flag(
        (), "NAME=VALUE: an option of the tokenizer's loading, e.g. fix_mistral_regex=true."
    )

    def __post_init__(self) -> None:
        if not self.model:
            name, lacking = hub.default()
            object.__setattr__(self, "model", name)
            if lacking:
                print(f"llmgeom: {lacking}", file=sys.stderr)
        super().__post_init__()

    @property
    def tokenizer_options(self) -> dict[str, Any]:
        """The options of the tokenizer's loading by name. Raises UserError for one without =."""
        found = {}
        for one in self.tokenizer_option:
            name, equals, value = one.partition("=")
            if not (name and equals):
                raise UserError(f"--tokenizer-option {one}: expected NAME=VALUE, e.g. fix_mistral_regex=true")
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
        return found

    def spec(self, located: hub.Located, **more: Any) -> str:
        """Hash of everything that determines the bytes of a run.

        It covers every flag but --out, --offline and --device; the commit of the model; and `more`.
        """
        left_out = {"out", "offline", "device"}
        decisive = (option.field for option in flags(type(self)) if option.field not in left_out)
        return digest(self.values(*decisive) | {"revision": located.revision} | more)

    def subject(self, located: hub.Located, given: Model | None = None) -> Model:
        """The model, unless it is given, as it reads prompts."""
        return self.reading(given or self.load(located))

    def reading(self, subject: AnyModel) -> AnyModel:
        """The model as it reads prompts: as plain text."""
        return subject

    def locate(self) -> hub.Located:
        """Where the model is. Raises UserError if it is not there."""
        return hub.locate(self.model, self.revision, offline=self.offline, trust_remote_code=self.trust_remote_code)

    def described(self, located: hub.Located) -> tuple[Any, Any]:
        """The tokenizer of the model, None in a wind tunnel, and its config; reads no weights. Raises UserError."""
        import transformers

        from llmgeom.model.loading import tokenizer_of
        from llmgeom.optional import undisturbed

        shared: dict[str, Any] = {"revision": located.revision, "local_files_only": located.local_only}
        shared["trust_remote_code"] = self.trust_remote_code
        own = hub.tunnel(located.path)
        if own:
            importlib.import_module("llmgeom.wind_tunnels.models.architectures")
        try:
            with undisturbed(located.local_only):
                tokenizer = None if own else tokenizer_of(located, shared | self.tokenizer_options)[0]
                return tokenizer, transformers.AutoConfig.from_pretrained(located.path, **shared)
        except Exception as error:
            raise hub.explain(error, located) from error

    def load(self, located: hub.Located | None = None) -> Model:
        """The model, checked. Pass what `locate` returned: the run's hash and the weights are then of one commit."""
        from llmgeom.model.model import Model

        return Model.load(
            located or self.locate(),
            **self.values("dtype", "quantize", "device", "device_map", "backend", "offline", "trust_remote_code"),
            tokenizer_options=self.tokenizer_options,
        )


@dataclass(frozen=True)
class ChatConfig(ModelConfig):
    """The options of a command that can read prompts as messages. With LISTS a prompt's last item begins the answer."""

    LISTS: ClassVar[bool] = False

    chat: bool = prompt_flag(False, "Give each prompt, or list, as a user's message, in the tokenizer's template.")

    def reading(self, subject: AnyModel) -> AnyModel:
        """The model as it reads prompts: with --chat each as a message."""
        from llmgeom.prompts.surfaces import QUESTION

        return subject.chat(QUESTION if self.LISTS else None) if self.chat else subject


def shown(value: Any) -> str:
    """A value as it is written after its flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- click ----------------------------------------------------------------------------------------------------------


GROUPS = ("", "Model", "Prompts", "Process", "Axis", "Heads and blocks", "Measure", "Controls", "Output")  # in the help


class Verb(click.Command):
    """A command whose help stands under the headings of its flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags.

        Raises click.UsageError for an environment variable that begins with the prefix of this command and sets none of
        its flags: it would be ignored.
        """
        prefix = f"{ctx.auto_envvar_prefix}_"
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param else None
            if name and ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT:
                text = f"{error.message} It is from {prefix}{name.upper()} in the environment."
                raise click.BadParameter(text, error.ctx, error.param, error.param_hint) from error
            raise
        known = {f"{prefix}{param.name}".upper() for param in self.params if isinstance(param, click.Option)}
        for name in sorted(set(os.environ) - known):
            if name.startswith(prefix):
                remedy = "".join(f" Did you mean {near}?" for near in get_close_matches(name, known, 1))
                raise click.UsageError(f"The environment sets {name}, which is no flag of {self.name}.{remedy}", ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each group; options without one come first."""
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row and not isinstance(param, click.Argument):  # the usage line and the help's first lines say these
                sections.setdefault(getattr(param, "group", "Output"), []).append(row)
        for group, rows in sections.items():
            if rows:
                with formatter.section(group or "Options"):
                    formatter.write_dl(rows)


def _listed(kind: type) -> Callable[[Any], Any]:
    """What reads values with commas between."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(kind(item.strip()) for item in value.split(",") if item.strip())
        except ValueError:
            raise click.BadParameter(f"{value!r}: expected whole numbers with commas between") from None

    read.__name__ = "list"
    return read


def parameter(entry: Flag) -> click.Parameter:
    """The click option or argument of a flag. Its click name is the flag's, so that LLMGEOM_COMMAND_FLAG sets it."""
    kind = click.Choice(entry.choices) if entry.choices else _listed(entry.kind) if entry.listed else entry.kind
    required = entry.default is MISSING
    default = (
        None if required else ",".join(map(str, entry.default)) if entry.listed and entry.default else entry.default
    )
    if entry.argument:
        many = -1 if entry.several else 1
        return click.Argument([entry.name], type=kind, nargs=many, required=required, metavar=entry.metavar)
    names = [entry.name, *filter(None, [entry.short])]
    shown = "[default" not in entry.help and default not in (None, (), False, 0)
    given: dict[str, Any] = {"type": kind, "multiple": entry.several and not entry.listed}
    if entry.kind is bool:
        given = {"is_flag": True}
    elif entry.kind is int and entry.short:
        given = {"count": True}
    option = click.Option(names, default=default, help=entry.help, show_default=shown, **given)
    vars(option)["group"] = entry.group
    return option


def command(*configs: type, examples: Sequence[str]) -> Callable[[Callable[..., int | None]], Verb]:
    """A click command from configurations: `main(config, ...)` gets one of each; its docstring is the help."""

    def decorate(main: Callable[..., int | None]) -> Verb:
        def callback(**values: Any) -> int | None:
            given = (
                {one.field: values[one.name.removeprefix("--").replace("-", "_")] for one in flags(config)}
                for config in configs
            )
            return main(*(config(**fields) for config, fields in zip(configs, given, strict=True)))

        words = examples[0].split()
        name = main.__name__ if main.__name__ in words else words[1]
        params = [parameter(one) for config in configs for one in flags(config)]
        if all(param.name != "verbose" for param in params):  # of every command -vv shows tracebacks
            text = "Twice: show the traceback of an error."
            params.append(click.Option(["--verbose", "-v"], count=True, expose_value=False, help=text))
        epilog = "\n\n".join(f"Example:  {example}" for example in examples)
        return Verb(name, callback=callback, params=params, help=main.__doc__, epilog=epilog)

    return decorate
