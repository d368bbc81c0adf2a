"""Key orthogonality by each definition in the papers and their code, with the baselines that they quote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmgeom.claims import declared
from llmgeom.model.weights import key_weight
from llmgeom.probe import UNTRAINED, Batch, Capture, Model, Needs, ProbeInput, Site, UserError
from llmgeom.probes.key_orthogonality import as_array, token_ids
from llmgeom.probes.shared.nulls import compare, mean_of
from llmgeom.result import Result, line
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.similarity import cosines, mean_abs_cosine, pair_mean, random_cosine
from studies.published import CLAIMS_FOLDER

CLAIMS = declared("published_keys", CLAIMS_FOLDER)
COLUMNS, SIGNED = "columns of W_K, early layers", "signed, raw embeddings by head"
HEADS, EMBEDDINGS = "final token's keys, between heads", "token embeddings, no layer"
QUOTED = (  # printed for a random W_K of any model: Paper III, sections 2 and 4.4; 4.2; 4.5 and Table 2
    ("quoted, Gaussian W_K", 0.40, 0.45),
    ("quoted, model width", 0.02, 0.04),
    ("quoted, head width 64", 0.11, 0.11),
)


@dataclass(frozen=True)
class Reading:
    """Vectors of one model: mean |cos| of W_K's columns [layer kv_head], the embeddings of tokens [token d_model], and
    their keys in the first layer by W_K alone [kv_head token head_dim]; and its number of heads."""

    columns: np.ndarray
    embeddings: np.ndarray
    keys: np.ndarray
    heads: int


def read(subject: Model, batch: Batch) -> Reading:
    """A Reading of one model. Raises UserError for few tokens, or if a matrix cannot be cut out of the weights."""
    layers, kv_heads = range(len(subject.blocks)), subject.facts["kv_heads"]
    ids = token_ids(subject, batch)
    if len(ids) < LEAST_CLUSTERS:
        raise UserError(f"the prompts hold {len(ids)} different tokens; key orthogonality needs {LEAST_CLUSTERS}")
    weights = [[as_array(key_weight(subject, layer, head)) for head in range(kv_heads)] for layer in layers]
    embeddings = as_array(subject.model.get_input_embeddings().weight[torch.tensor(ids)])
    return Reading(
        columns=np.array([[float(mean_abs_cosine(w.T)) for w in layer] for layer in weights]),
        embeddings=embeddings,
        keys=np.stack([embeddings @ w for w in weights[0]]),
        heads=subject.facts["heads"],
    )


NEEDS = Needs(
    frozenset({Site.KEY}),
    controls=frozenset({UNTRAINED}),
    examine=lambda subject, captures: read(subject, captures[""].batch),
)


def measure(view: ProbeInput) -> Result:
    """Each definition with its null. Raises Unavailable if the weights cannot be read."""
    model = view.observations
    untrained = view.control_observations
    if not untrained:
        raise UserError("no untrained copy was read (a preview, or no controls), and it has no other control")
    (layers, kv_heads), d_model = model.columns.shape, model.embeddings.shape[1]
    early = layers - max(1, round(layers / 6))  # the last sixth is late: "the last 3-4" of 24 (Paper III)
    estimates, warnings = [], []
    heads = model.columns[:early].ravel()
    if len(heads) >= LEAST_CLUSTERS:
        columns = {UNTRAINED: [control.columns[:early].ravel() for control in untrained]}
        estimates.append(compare(CLAIMS[COLUMNS], mean_of, heads, np.arange(len(heads)), columns))
    else:
        warnings.append(f"{COLUMNS}: {len(heads)} heads are too few for an interval")
    tokens = np.arange(len(model.embeddings))
    for name, square in ((SIGNED, _signed), (EMBEDDINGS, lambda reading: cosines(reading.embeddings))):
        estimates.append(compare(CLAIMS[name], _pairs, square(model), tokens, {UNTRAINED: map(square, untrained)}))
    if model.heads > 1:  # one head has no other
        between, *others = (_between(capture, model.heads) for capture in (view.capture, *view.untrained))
        estimates.append(compare(CLAIMS[HEADS], mean_of, between, view.clusters, {UNTRAINED: others}))
    head_dim = model.keys.shape[-1]
    exact = (("Gaussian, model width", random_cosine(d_model)), ("Gaussian, head width", random_cosine(head_dim)))
    ranges = [*QUOTED, *((name, value, value) for name, value in exact)]
    cut = f"{kv_heads} key heads are cut into {model.heads} pieces of {head_dim * kv_heads // model.heads}"
    middles, ends = [(low + high) / 2 for _, low, high in ranges], [(low, high) for _, low, high in ranges]
    quoted, said = ("what is quoted", ends), "what a random W_K gives, as quoted and exactly"
    return Result.of(
        "Key orthogonality, as published",
        {
            **line("columns", model.columns.mean(1), "layer", "|cos|", "columns of W_K, mean over heads"),
            **line("baseline", middles, "baseline", "|cos|", said, interval=quoted),
        },
        __name__,
        estimates=tuple(estimates),
        ticks={"baseline": tuple(name for name, _, _ in ranges)},
        warnings=tuple(warnings),
        notes=(cut,) if model.heads != kv_heads else (),
    )


def _signed(reading: Reading) -> np.ndarray:
    """[token token] cosines with their signs, mean over heads."""
    unit = reading.keys / np.linalg.norm(reading.keys, axis=-1, keepdims=True)
    return (unit @ unit.swapaxes(-1, -2)).mean(0)


def _pairs(square: np.ndarray, rows: np.ndarray) -> float:
    return float(pair_mean(square[rows][:, rows]))


def _between(capture: Capture, heads: int) -> np.ndarray:
    """[row] mean |cos| between the code's "heads": the last layer's keys cut into `heads` equal pieces."""
    keys = capture.layers(Site.KEY)[-1].flatten(1).double().numpy()
    return mean_abs_cosine(keys.reshape(len(keys), heads, -1))
