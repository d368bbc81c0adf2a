"""What makes a page one file: its templates, JSON that cannot leave its element, scripts packed with their hashes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from llmgeom.reports.text import visible


def json_text(data: Any) -> str:
    """JSON that cannot end the element it stands in; everything outside ASCII is escaped too.

    An array is its shape and the base64 of little-endian float32.
    """

    def packed(array: np.ndarray) -> dict[str, Any]:
        return {"size": list(array.shape), "f32": base64.b64encode(array.astype("<f4").tobytes()).decode()}

    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, default=packed)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed_json(data: Any) -> str:
    """`json_text`, compressed, as base64."""
    return _packed(json_text(data))


@cache
def plotly_script() -> tuple[str, str]:
    """plotly.js as the installed plotly package carries it: compressed for the page, and the hash that lets it run."""
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs()
    return _packed(source), script_hash(source)


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def script_hash(script: str) -> str:
    """The hash by which a content security policy lets a script run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def file_text(name: str) -> str:
    """A template, style or script of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(file_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Whatever the template writes has its invisible characters spelt out, then is escaped.
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
    )
