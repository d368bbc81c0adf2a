"""Libraries that keep still: no requests to the hub, no bars and reports of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from huggingface_hub import constants


def go_offline() -> None:
    """Stop all requests to the hub from this process, also of libraries that are already imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Stop requests to the hub inside this context; restore the settings afterwards.

    local_files_only alone still lets one request out, which a silent server answers after seconds.
    """
    variable, constant = os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE
    go_offline()
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
