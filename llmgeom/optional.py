"""Packages of others: the command that installs those of a single feature, and how all of them keep still."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

from llmgeom.errors import UserError

OPTIONAL = {  # package -> the feature that needs it, and the command that installs it
    "accelerate": ("--device-map, and several processes", "pip install accelerate"),
    "transformer_lens": ("--backend tl", "pip install 'llmgeom[tl]'"),
    "pyarrow": ("export RUN parquet", "pip install pyarrow"),
    "gguf": ("models in a GGUF file", "pip install 'llmgeom[gguf]'"),
    "kaleido": ("export RUN png, svg or pdf", "pip install 'llmgeom[images]'"),
    "peft": ("models with a LoRA adapter", "pip install 'llmgeom[lora]'"),
    "bitsandbytes": ("--quantize, and checkpoints that are stored in 8 or 4 bits", "pip install 'llmgeom[quantised]'"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
NO_BROWSER = (
    "no Chromium or Chrome was found; install one (Debian: apt-get install chromium), or set BROWSER_PATH to it"
)


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def imported(package: str) -> Any:
    """The package, imported.

    Raises UserError: the package is not installed; the sentence ends with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        feature, install = OPTIONAL[package]
        raise UserError(f"{feature} needs the package {package} ({error}); {install}") from error


def browser() -> str | None:
    """The path of a browser that can draw figures: BROWSER_PATH, or one on the PATH; None without one."""
    configured = os.environ.get("BROWSER_PATH")
    if configured:
        return configured if os.access(configured, os.X_OK) else None
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Stop requests to the hub inside this context, also of libraries that are already imported.

    local_files_only alone still lets one request out, which a silent server answers after seconds.
    """
    from huggingface_hub import constants

    variable, constant = os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE
    os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = constant
        del os.environ["HF_HUB_OFFLINE"]
        if variable is not None:
            os.environ["HF_HUB_OFFLINE"] = variable


@contextlib.contextmanager
def undisturbed(silent: bool = False) -> Iterator[None]:
    """Turn transformers' progress bars and reports off, and with `silent` requests to the hub; restore them afterwards.

    Errors that matter are reported in our own words.
    """
    import transformers

    theirs = transformers.utils.logging
    bars, verbosity = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    try:
        with silence() if silent else contextlib.nullcontext():
            yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()
