"""A page with a wind tunnel's transformer inside: choose tokens and compare its answer with the exact one.

The forward pass of `reports/live.js` is in double precision on the same weights; the page compares it with what PyTorch
gave here on one sequence, and says how far apart they are.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llmgeom.errors import UserError
from llmgeom.exports.activations import measured
from llmgeom.files import write_whole
from llmgeom.model import weights
from llmgeom.model.model import Model
from llmgeom.record import Record
from llmgeom.reports import page
from llmgeom.reports.figures import LINE, NULL, Drawn
from llmgeom.reports.text import compact
from llmgeom.stats.information import bits
from llmgeom.wind_tunnels import load_world

LARGEST = 200_000  # parameters: a megabyte of page
TASKS = frozenset({"bijection", "coin", "markov"})  # whose exact answer live.js has
CAPTION = (
    "At each query of the sequence: the entropy of the exact answer, of the model's, and how far the model's answer is "
    "from the exact one (KL divergence)."
)
COLUMNS = ("query", "exact entropy [bits]", "the model's entropy [bits]", "KL [bits]")
# Architectures that live.js can run: two norms a layer, and an MLP of two maps, or of three with a gate.
FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral")


def write(record: Record, form: str, out: Path) -> list[str]:
    """The record's page with its model in it. UserError for a model that was trained in no wind tunnel, is not the
    one that was measured, is too large or no transformer, and for a task whose exact answer the page cannot say."""
    spelt = record.subject.get("trained_on")
    if not isinstance(spelt, str):
        raise UserError(
            f"export live: {record.subject['name']} was not trained in a wind tunnel, so that the page has no "
            "exact answers; first `llmgeom train TASK --out MODEL`, then `llmgeom grade --model MODEL --out RUN`, then "
            "`llmgeom export RUN live`"
        )
    if (name := spelt.partition(":")[0]) not in TASKS:
        raise UserError(f"export live: the page knows the exact answer of {', '.join(sorted(TASKS))}, not of {name}")
    subject = measured(record)
    model = contents(subject)
    task = load_world(spelt)
    batch, answers = task.sample(1, seed=0), task.answers
    with torch.inference_mode():
        logits = subject.model(input_ids=batch.tokens.data.to(subject.model.device)).logits[0].cpu()
    exact, answer = answers.exact(batch.exact.predictive[0]), answers.read(logits[list(task.query)])
    fields: dict[str, Any] = {
        "task": {
            "name": name,
            "title": task.title,
            "length": task.length,
            "outcomes": list(batch.exact.outcomes),
            "query": list(task.query),
            **asdict(task),
        },
        "example": {
            "ids": batch.tokens.data[0].tolist(),
            "logits": _array(logits),
            "exact": _array(batch.exact.predictive[0].exp()),
            "bits": _array(
                bits(torch.stack([answers.entropy(exact), answers.entropy(answer), answers.kl(exact, answer)], 1))
            ),
        },
    }
    shown: dict[str, Any] = {"parameters": f"{model['parameters']:,}", "task": task.title}
    shown["drawn"] = uncertainty(fields["example"]["bits"], len(task.query))
    html = page([record], live=shown | {"data": {"name": subject.name, **fields, **model}})
    write_whole(out, html.encode())
    return [f"{model['parameters']:,} parameters, {len(html.encode()) / 1e6:.1f} MB"]


def uncertainty(rows: np.ndarray, queries: int) -> Drawn:
    """The figure of one sequence, from [query 3] in bits: the entropy of the exact answer, of the model's, and KL."""
    x, (entropy, predicted, kl) = list(range(1, len(rows) + 1)), map(compact, rows.T)
    line = {"mode": "lines+markers", "x": x, "hoverinfo": "x+y"}
    return Drawn(
        id="live-figure",
        caption=CAPTION,
        label=f"Three curves over {len(rows)} queries",
        spec={
            "name": "the live sequence",
            "data": [
                line | {"y": entropy, "name": "exact entropy", "line": {"color": NULL, "width": 5}},
                line
                | {"y": predicted, "name": "the model's entropy", "line": {"color": LINE, "width": 2, "dash": "dash"}},
                line | {"y": kl, "name": "KL", "line": {"color": "#D55E00", "width": 2}, "marker": {"symbol": "x"}},
            ],
            "layout": {
                "xaxis": {"title": {"text": "query"}, "range": [0.5, queries + 0.5]},
                "yaxis": {"title": {"text": "bits"}, "rangemode": "tozero"},
                "margin": {"t": 48},
                "height": 320,
            },
        },
        columns=COLUMNS,
        rows=tuple((str(i), *(f"{v:.4g}" for v in values)) for i, values in enumerate(rows, 1)),
    )


def contents(subject: Model) -> dict[str, Any]:
    """Shape and weights of a transformer, every matrix as [out in] float32.

    Raises UserError: an architecture outside FAMILIES, or more than LARGEST parameters.
    """
    model, config = subject.model, subject.model.config
    if config.model_type not in FAMILIES:
        raise UserError(
            f"export live: {subject.name} is a {config.model_type} model; the page can run {', '.join(FAMILIES)}"
        )
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > LARGEST:
        raise UserError(
            f"export live: {subject.name} has {parameters:,} parameters; a page holds up to {LARGEST:,}: train a "
            f"smaller one (--match-params {LARGEST // 2})"
        )
    rotary = getattr(config, "rope_parameters", None)
    final: Any = subject.unembed.norm
    shape = {
        "heads": subject.facts["heads"],
        "kv": subject.facts["kv_heads"],
        "act": getattr(config, "hidden_act", None) or config.activation_function,
        "eps": final.eps if isinstance(final, nn.LayerNorm) else final.variance_epsilon,
        "centred": isinstance(final, nn.LayerNorm),
        "parallel": bool(getattr(config, "use_parallel_residual", False)),
        "theta": rotary["rope_theta"] if rotary else None,
        "window": getattr(config, "sliding_window", None),
    }
    place = getattr(getattr(model, "transformer", None), "wpe", None)
    layers = []
    for i, block in enumerate(subject.blocks):
        assert block.mlp_writer is not None  # as in every family of these
        maps = [module for module in block.mlp_writer.modules() if isinstance(module, nn.Linear | Conv1D)]
        norms = [module for module in block.layer.children() if "norm" in type(module).__name__.lower()]
        roles = ("first", "second", *("gate", "up", "down")[-len(maps) :])
        layer = {role: _affine(module) for role, module in zip(roles, (*norms, *maps), strict=True)}
        for role in weights.ROLES:
            each = range(subject.facts["heads" if role == "query" else "kv_heads"])
            w, b = zip(*(weights.input_weights(subject, i, role, head) for head in each), strict=True)
            layer[role] = {"w": _array(torch.cat(w, 1).T), "b": _array(torch.cat(b))}
        layers.append(layer | {"output": _affine(weights.output_projection(subject, i))})
    return {
        "parameters": parameters,
        "shape": shape,
        "embed": _array(model.get_input_embeddings().weight),
        "place": None if place is None else _array(place.weight),
        "layers": layers,
        "final": _affine(final),
        "head": _affine(model.get_output_embeddings()),
    }


def _affine(module: nn.Module) -> dict[str, Any]:
    """Weight [out in] and bias of a linear map; of a norm, weight [width]. `b` is None where there is none."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    return {
        "w": _array(weight.T if isinstance(module, Conv1D) else weight),
        "b": _array(bias) if isinstance(bias, Tensor) else None,
    }


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()
