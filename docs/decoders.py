"""What each causal language model of transformers gives, as docs/decoders.md: `python -m docs.decoders`.

A tiny model of random weights is made of every model type that a small common config fits, loaded with its self-check
against transformers, and read. About two minutes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import llmgeom
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from tests.test_decoders import DECODERS, EXPERTS, LATENT, USUAL

OUT = Path(__file__).parent / "decoders.md"
MOST = 30_000_000  # parameters; a config that ignores the small sizes makes more
# The same sizes under the names of older families.
OLDER = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "d_model": 64, "n_heads": 4, "num_layers": 4,
         "num_heads": 4, "ffn_dim": 96, "attention_heads": 4, "head_dim": 16, "hidden_dim": 96}  # fmt: skip
COLUMNS = "residual stream, entropy | logit lens | attention layers | writes of attention and MLP"


def tiny(name: str) -> Any:
    """A model of a type, in the first of some small configs with which it runs, or None."""
    settings = DECODERS[name][0] if name in DECODERS else {}
    for more in (settings, settings | OLDER, settings | EXPERTS | OLDER, settings | LATENT | EXPERTS):
        try:
            config = transformers.AutoConfig.for_model(name, **{**USUAL, **more})
            with torch.device("meta"):
                made = transformers.AutoModelForCausalLM.from_config(config)
            if sum(p.numel() for p in made.parameters()) > MOST:
                continue
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                if not model(torch.tensor([[3, 4, 5]]), use_cache=False).logits.isfinite().all():
                    continue
            return model
        except Exception:  # a config that does not fit raises anything
            continue
    return None


def row(name: str) -> str | None:
    """The cells of a model type; None where no small config fits it."""
    model = tiny(name)
    if model is None:
        return None
    try:
        subject = llmgeom.load(model)
    except UserError as refusal:
        said = str(refusal)
        kinds = ("fails the self-check", "not one residual stream", "stacks of layers")
        why = next((kind for kind in kinds if kind in said), said.split(";")[0][:90])
        return f"refused: {why} | | |"
    try:
        lens = "yes" if subject.unembed else ""
    except UserError:
        lens = "no"
    depth = len(subject.blocks)
    attending = [i for i, block in enumerate(subject.blocks) if block.attention is not None]
    some = "all" if len(attending) == depth else f"{len(attending)} of {depth}" if attending else "none"
    writes = "no" if subject.unavailable({Site.MLP_OUT}, range(depth)) else "yes"
    return f"yes | {lens} | {some} | {writes}"


def main() -> None:
    """Write the page, sorted by what is read."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found[name] = row(name)
        print(name, found[name] or "no small config fits", file=sys.stderr, flush=True)
    cells: dict[str, list[str]] = {}
    for name, cell in found.items():
        if cell:
            cells.setdefault(cell, []).append(f"`{name}`")
    order = sorted(cells.items(), key=lambda item: (item[0].startswith("refused"), -len(item[1])))
    unread = [f"`{name}`" for name, cell in found.items() if cell is None]
    read = sum(len(names) for cell, names in cells.items() if not cell.startswith("refused"))
    lines = [
        "# Which decoders are read",
        "",
        "    python -m docs.decoders      # writes this page",
        "",
        f"transformers {transformers.__version__} has {len(found)} types of causal language models. Of {read} a tiny "
        "model of random weights passes the check that every load makes against transformers' own pass.",
        "",
        f"| types | {COLUMNS} |",
        "|---|---|---|---|---|",
        *(f"| {', '.join(names)} | {cell} |" for cell, names in order),
        "",
        f"Not tried, since no small config was found that they run with: {', '.join(unread)}.",
        "",
    ]
    OUT.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
