"""Are keys more orthogonal than in the same model before training?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.model.weights import key_weight, query_weight
from llmgeom.probe import (
    UNTRAINED,
    Batch,
    Capture,
    Model,
    Needs,
    Observer,
    ProbeInput,
    Rows,
    Site,
    Step,
    Tokens,
    Unavailable,
    UserError,
)
from llmgeom.probes.shared.nulls import compare, mean_of
from llmgeom.result import Estimate, Figure, Result, labelled, line
from llmgeom.stats.resampling import LEAST_CLUSTERS, Interval, jackknife
from llmgeom.stats.similarity import cosines, mean_abs_cosine, random_cosine, seen_through

MOST_TOKENS = 256
TOKENS = "single tokens"
GROUPS = 32
CLAIMS = declared("key_orthogonality")
COLUMNS, BY_HEAD, SEEN = "columns of W_K", "token keys, by head", "token keys as queries see them, centred"


@dataclass(frozen=True)
class Reading:
    """Key vectors of one model.

    Attributes:
        columns: [layer kv_head] mean |cos| of the columns of each head's W_K, in R^d_model.
        keys: [kv_head token head_dim] keys of single tokens at position 0 of layer 0.
        seen: these keys in the coordinates that the group's queries see (`stats.similarity.seen_through`).
        d_model: number of coordinates of a column.
        normed: whether queries and keys are normalised after their projection.
    """

    columns: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    d_model: int
    normed: bool


def weights(subject: Model, captures: Mapping[str, Capture]) -> dict[str, np.ndarray]:
    """Mean |cos| of the columns of W_K [layer head]; without a norm between W_Q and the scores, also sum_h W_Q W_Q' of
    each group in layer 0 [kv_head head_dim head_dim].

    Raises:
        UserError: fewer than 5 different tokens, or a matrix cannot be cut out of the weights.
    """
    if TOKENS not in captures:
        raise Unavailable("the model reads rows of real numbers: there are no tokens whose keys could be compared")
    if (tokens := len(captures[TOKENS].batch)) < LEAST_CLUSTERS:
        raise UserError(f"the prompts hold {tokens} different tokens; key orthogonality needs {LEAST_CLUSTERS}")
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    columns = []
    for layer in range(len(subject.blocks)):
        parts = [key_weight(subject, layer, head).T for head in range(kv_heads)]
        # On a CPU one head at a time, which fits its cache; elsewhere a layer at a time.
        sets = [torch.stack(parts)] if parts[0].device.type != "cpu" else [part[None] for part in parts]
        columns.append(torch.cat([mean_abs_cosine(x) for x in sets]).cpu().numpy())
    arrays = {"columns": np.stack(columns), "d_model": np.array(subject.facts["d_model"])}
    attention = subject.blocks[0].attention
    if attention is None or not any("norm" in name for name, _ in attention.named_children()):
        arrays["metric"] = _metric([as_array(query_weight(subject, 0, head)) for head in range(heads)], kv_heads)
    return arrays


def first_layer(step: Step) -> dict[str, torch.Tensor]:
    """Keys and queries of layer 0, [token head head_dim]."""
    return {"key": step.layers(Site.KEY)[0], "query": step.layers(Site.QUERY)[0]}


def collect(captures: Mapping[str, Capture], examined: Mapping[str, np.ndarray]) -> Reading:
    """The Reading of one model, from its weights and its keys of single tokens."""
    keys, queries = (as_array(captures[TOKENS].observed(f"single_tokens.{name}")) for name in ("key", "query"))
    # If a norm follows the projections, the queries of the same tokens replace W_Q.
    metric = examined.get("metric")
    if metric is None:
        metric = _metric([queries[:, head] for head in range(queries.shape[1])], keys.shape[1])
    keys = keys.transpose(1, 0, 2)
    seen = seen_through(keys, metric)
    return Reading(examined["columns"], keys, seen, int(examined["d_model"]), normed="metric" not in examined)


def _metric(queries: Sequence[np.ndarray], kv_heads: int) -> np.ndarray:
    """[kv_head head_dim head_dim] second moments of the queries that read each kv head, summed over its group."""
    second = np.stack([q.T @ q for q in queries])
    return second.reshape(kv_heads, len(queries) // kv_heads, *second.shape[1:]).sum(1)


def single_tokens(subject: Model, batch: Batch) -> Batch | None:
    """The tokens whose keys are compared, each as a separate prompt; None for a model that reads no tokens."""
    if isinstance(batch.inputs, Rows):
        return None
    ids = token_ids(subject, batch)
    tokens = Tokens(torch.tensor(ids)[:, None], torch.ones(len(ids), dtype=torch.int64))
    return Batch(tokens, tuple(map(str, ids)), {"kind": TOKENS})


def token_ids(subject: Model, batch: Batch) -> list[int]:
    """The tokens whose keys are compared: at most 256, the most frequent of the prompts, ties by lower id.

    Special tokens of the tokenizer are left out.
    """
    inputs = subject.tokens(batch)
    if isinstance(inputs, Rows):
        raise Unavailable("the model reads rows of real numbers: there are no tokens whose keys could be compared")
    real = torch.arange(inputs.ids.shape[1]) < inputs.lengths[:, None]
    special = set(subject.tokenizer.all_special_ids) if subject.tokenizer is not None else set()
    counts = Counter(token for token in inputs.ids[real].tolist() if token not in special)
    return sorted(counts, key=lambda token: (-counts[token], token))[:MOST_TOKENS]


def as_array(x: torch.Tensor) -> np.ndarray:
    """The tensor as a float64 array."""
    return x.detach().double().cpu().numpy()


NEEDS = Needs(
    controls=frozenset({UNTRAINED}),
    observers=(
        Observer(
            "single_tokens",
            first_layer,
            frozenset({Site.KEY, Site.QUERY}),
            samples=(TOKENS,),
            version="1",
            row_bytes=lambda facts: 4 * (facts["heads"] + facts["kv_heads"]) * facts["head_dim"],
        ),
    ),
    samples={TOKENS: single_tokens},
    examine=weights,
    collect=collect,
)


def measure(view: ProbeInput) -> Result:
    """Mean |cosine| over pairs of columns of W_K and of keys of single tokens, in every form, with its null.

    Raises UserError if no untrained copy was read.
    """
    model, untrained = view.observations, view.control_observations
    if not untrained:
        raise UserError("no untrained copy was read (a preview, or no controls), and it has no other control")
    estimates, warnings = [], []
    heads = model.columns.ravel()
    if len(heads) < LEAST_CLUSTERS:
        warnings.append(f"{COLUMNS}: {len(heads)} heads in all are too few for an interval; see the heat map")
    else:
        # Each head of each layer is a unit. Its position only distinguishes layers and heads.
        controls = {UNTRAINED: [control.columns.ravel() for control in untrained]}
        estimates.append(_over(compare(CLAIMS[COLUMNS], mean_of, heads, np.arange(len(heads)), controls), "heads"))
    for name, field, centre in ((BY_HEAD, "keys", False), (SEEN, "seen", True)):
        draws = [float(mean_abs_cosine(getattr(control, field), centre).mean()) for control in untrained]
        null = Null.of(UNTRAINED, np.array(draws), CLAIMS[name].side)
        value, interval = _tokens(getattr(model, field), centre)
        count = model.keys.shape[1]
        estimates.append(estimate(CLAIMS[name], value, interval, [null], n=count, clusters=count))
    if model.normed:
        warnings.append(
            "queries and keys are normalised after their projection: keys are compared as normalised, W_K's basis is "
            "free only as far as the norm allows, and queries are these tokens' own rather than W_Q"
        )
    above = [
        f"{h.name} ({h.value:.3g} against {h.null_low:.3g} to {h.null_high:.3g})"
        for h in estimates
        if h.low > h.null_high
    ]
    band = layer_band({UNTRAINED: np.array([control.columns.mean(1) for control in untrained])}, "lower")
    unit, mean, drawn = "|cos|", "columns of W_K, mean over heads", ("columns of W_K, untrained copies", band)
    of_keys = random_cosine(model.keys.shape[-1])
    return Result.of(
        "Key orthogonality",
        {
            "columns": labelled(
                model.columns, "layer kv_head", unit, "columns of W_K, mean over pairs", Figure("heatmap")
            ),
            **line("columns_mean", model.columns.mean(1), "layer", unit, mean, null=drawn),
            "columns_gaussian": labelled(
                random_cosine(model.d_model), "", unit, "isotropic Gaussian columns in d_model dimensions"
            ),
            "head_gaussian": labelled(of_keys, "", unit, "isotropic Gaussian keys as wide as one head"),
        },
        __name__,
        estimates=tuple(estimates),
        warnings=tuple(warnings),
        notes=(f"less orthogonal than chance, above the whole band of the null: {'; '.join(above)}",) if above else (),
    )


def _tokens(x: np.ndarray, centre: bool) -> tuple[float, Interval]:
    """Value and jackknife interval over tokens; each deletion subtracts the mean of the remaining tokens.

    So every deletion recomputes all cosines, and many tokens are deleted in groups: every 32nd one.
    """
    every = np.arange(x.shape[1])
    if centre:

        def value(rows: np.ndarray) -> float:
            return float(mean_abs_cosine(x[:, rows], True).mean())

        groups, what = (every % GROUPS, "groups of tokens") if len(every) > 2 * GROUPS else (every, "tokens")
        return value(every), _over(jackknife(value, every, groups), what)
    square = cosines(x).mean(0)
    np.fill_diagonal(square, 0)
    sums = square.sum(0)

    def pairs(rows: np.ndarray) -> float:
        # Sum over kept pairs = sum over all - 2 (row sums of the few left out) + sum among those left out.
        left_out = np.ones(len(every), dtype=bool)
        left_out[rows] = False
        out = np.flatnonzero(left_out)
        total = sums.sum() - 2 * sums[out].sum() + square[np.ix_(out, out)].sum()
        return float(total / (len(rows) * (len(rows) - 1)))

    return pairs(every), _over(jackknife(pairs, every, every), "tokens")


T = TypeVar("T", Interval, Estimate)


def _over(of: T, what: str) -> T:
    """The interval or estimate with the name of its units."""
    return replace(of, method=of.method.replace("clusters", what))
