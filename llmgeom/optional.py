"""Packages that one feature needs and the rest does without: what each is for, and the command that installs it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import Any

from llmgeom.errors import UserError


@dataclass(frozen=True)
class Extra:
    """A package, what cannot be done without it, and how it is installed."""

    package: str
    what: str
    remedy: str


EXTRAS = {
    extra.package: extra
    for extra in (
        Extra("accelerate", "--device-map, and several processes", "pip install accelerate"),
        Extra("transformer_lens", "--backend tl", "pip install transformer-lens"),
        Extra("pyarrow", "export RUN parquet", "pip install pyarrow"),
        Extra("gguf", "export RUN gguf", "pip install 'llmgeom[gguf]'"),
        Extra("kaleido", "export RUN png, svg or pdf", "pip install 'llmgeom[images]'"),
        Extra("peft", "loading what export RUN steered wrote", "pip install 'llmgeom[steered]'"),
        Extra(
            "bitsandbytes",
            "--quantize, and checkpoints that are stored in 8 or 4 bits",
            "pip install 'llmgeom[quantised]'",
        ),
    )
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
NO_BROWSER = (
    "no Chromium or Chrome was found; install one (Debian: apt-get install chromium), or set BROWSER_PATH to it"
)


def there(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def needed(package: str) -> Any:
    """The package, imported. Raises UserError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = EXTRAS[package]
        raise UserError(f"{extra.what} needs the package {package} ({error}); {extra.remedy}") from error


def browser() -> str | None:
    """Where a browser is that can draw figures: BROWSER_PATH, or what is on the PATH; None where there is none."""
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named if os.access(named, os.X_OK) else None
    return next(filter(None, map(shutil.which, BROWSERS)), None)
