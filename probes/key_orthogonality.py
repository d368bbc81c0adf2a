"""Are keys more orthogonal than chance, by each definition that the papers use?"""

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
    Batch,
    Capture,
    Needs,
    Observer,
    ProbeInput,
    Rows,
    Site,
    Step,
    Subject,
    Tokens,
    Unavailable,
    UserError,
)
from llmgeom.probes.shared.nulls import UNTRAINED, compare, mean_of, permutation_null
from llmgeom.result import Curve, Estimate, Figure, Result as Base, curve, quantity
from llmgeom.stats.cosines import (
    class_cosine,
    cosines,
    gaussian_like,
    late,
    mean_abs_cosine,
    permuted_class_cosine,
    random_cosine,
    seen_through,
    simplex_cosine,
)
from llmgeom.stats.resampling import LEAST_CLUSTERS, Interval, band, jackknife

MOST_TOKENS = 256
TOKENS = "single tokens"
LEAST_CLASSES = 3
PERMUTATIONS = 10_000
WORK = 10**9  # budget of multiplications for all permutations together: about a second
SPECTRUM_DRAWS = 8
GROUPS = 32
CLAIMS = declared("key_orthogonality")
COLUMNS, DEPTH = "columns of W_K", "columns of W_K, last layers less others"
WHOLE, BY_HEAD = "token keys, all heads together", "token keys, by head"
SEEN, CLASSES = "token keys as queries see them", "class-mean keys"
SEEN_CENTRED = f"{SEEN}, centred"
RAW, CENTRED = 0, 1


@dataclass(frozen=True)
class Reading:
    """Key and query vectors of one model.

    Attributes:
        columns, query_columns: mean |cos| of the columns of each head's W_K and W_Q, raw and centred, in R^d_model:
            [layer kv_head 2] and [layer head 2].
        keys: [kv_head token head_dim] keys of single tokens at position 0 of layer 0.
        seen: these keys in the coordinates that the group's queries see (`stats.cosines.seen_through`).
        d_model: number of coordinates of a column.
        normed: whether queries and keys are normalised after their projection.
    """

    columns: np.ndarray
    query_columns: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    d_model: int
    normed: bool

    def sets(self) -> dict[str, tuple[np.ndarray, bool]]:
        """Name of a measure of tokens -> its vectors [set token coordinate], and whether they are centred."""
        kv_heads, tokens, dim = self.keys.shape
        whole = self.keys.transpose(1, 0, 2).reshape(1, tokens, kv_heads * dim)
        return {
            WHOLE: (whole, False),
            f"{WHOLE}, centred": (whole, True),
            BY_HEAD: (self.keys, False),
            f"{BY_HEAD}, centred": (self.keys, True),
            SEEN: (self.seen, False),
            SEEN_CENTRED: (self.seen, True),
        }


def weights(subject: Subject, captures: Mapping[str, Capture]) -> dict[str, np.ndarray]:
    """Mean |cos| of the columns of W_K and W_Q [layer head 2]; without a norm between W_Q and the scores, also
    sum_h W_Q W_Q' of each group in layer 0 [kv_head head_dim head_dim].

    Raises:
        UserError: fewer than 5 different tokens, or a matrix cannot be cut out of the weights.
    """
    if TOKENS not in captures:
        raise Unavailable("the model reads rows of real numbers: there are no tokens whose keys could be compared")
    if (tokens := len(captures[TOKENS].batch)) < LEAST_CLUSTERS:
        raise UserError(f"the prompts hold {tokens} different tokens; key orthogonality needs {LEAST_CLUSTERS}")
    layers, heads, kv_heads = range(len(subject.blocks)), subject.facts["heads"], subject.facts["kv_heads"]

    def of_columns(weight, count: int) -> np.ndarray:
        """[layer head 2]. On a CPU one head at a time, which fits its cache; elsewhere a layer at a time."""
        cosines = []
        for layer in layers:
            heads = [weight(subject, layer, head).T for head in range(count)]
            sets = [torch.stack(heads)] if heads[0].device.type != "cpu" else [head[None] for head in heads]
            cosines += [torch.stack([mean_abs_cosine(x), mean_abs_cosine(x, centre=True)], -1) for x in sets]
        return torch.cat([x.cpu() for x in cosines]).numpy().reshape(len(layers), count, 2)

    arrays = {"columns": of_columns(key_weight, kv_heads), "query_columns": of_columns(query_weight, heads)}
    if not _normed(subject):
        arrays["metric"] = _metric([as_array(query_weight(subject, 0, head)) for head in range(heads)], kv_heads)
    return arrays | {"d_model": np.array(subject.facts["d_model"])}


def _normed(subject: Subject) -> bool:
    """Whether queries and keys are normalised after their projection."""
    attention = subject.blocks[0].attention
    return attention is not None and any("norm" in name for name, _ in attention.named_children())


def _metric(queries: Sequence[np.ndarray], kv_heads: int) -> np.ndarray:
    """[kv_head head_dim head_dim] second moments of the queries that read each kv head, summed over its group."""
    second = np.stack([q.T @ q for q in queries])
    return second.reshape(kv_heads, len(queries) // kv_heads, *second.shape[1:]).sum(1)


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
    return Reading(
        columns=examined["columns"],
        query_columns=examined["query_columns"],
        keys=keys,
        seen=seen_through(keys, metric),
        d_model=int(examined["d_model"]),
        normed="metric" not in examined,
    )


def single_tokens(subject: Subject, batch: Batch) -> Batch | None:
    """The tokens whose keys are compared, each as a separate prompt; None for a model that reads no tokens."""
    if isinstance(batch.inputs, Rows):
        return None
    ids = token_ids(subject, batch)
    tokens = Tokens(torch.tensor(ids)[:, None], torch.ones(len(ids), dtype=torch.int64))
    return Batch(tokens, tuple(map(str, ids)), {"kind": TOKENS})


def token_ids(subject: Subject, batch: Batch) -> list[int]:
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
    frozenset({Site.KEY}),
    shuffled=False,
    no_context=False,
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
    inputs={TOKENS: single_tokens},
    examine=weights,
    collect=collect,
)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """Mean |cosine| over distinct pairs: of columns of W_K and W_Q by head, and of the keys of single tokens."""

    TITLE = "Key orthogonality"

    columns: np.ndarray = quantity("layer kv_head", "|cos|", "columns of W_K, mean over pairs", Figure("heatmap"))
    columns_mean: Curve = curve(
        "layer", "|cos|", "columns of W_K, mean over heads", null="columns of W_K, untrained copies"
    )
    columns_centred: Curve = curve(
        "layer", "|cos|", "columns of W_K minus their mean", null="the same, untrained copies"
    )
    query_columns: Curve = curve(
        "layer", "|cos|", "columns of W_Q, mean over heads", null="columns of W_Q, untrained copies"
    )
    query_columns_centred: np.ndarray = quantity("layer", "|cos|", "columns of W_Q minus their mean, mean over heads")
    columns_gaussian: float = quantity("", "|cos|", "isotropic Gaussian columns in d_model dimensions")

    tokens: int = quantity("", "tokens", "tokens whose keys are compared")
    tokens_simplex: float = quantity("", "|cos|", "a regular simplex with a corner for each of these tokens")
    whole_gaussian: float = quantity("", "|cos|", "isotropic Gaussian keys as wide as all heads together")
    head_gaussian: float = quantity("", "|cos|", "isotropic Gaussian keys as wide as one head")
    whole_spectrum: float = quantity("", "|cos|", "Gaussian keys with these keys' covariance, all heads together")
    whole_centred: float = quantity("", "|cos|", "token keys minus their mean, all heads together")
    whole_centred_null: np.ndarray = quantity("bound", "|cos|", "the same, untrained copies")
    whole_centred_spectrum: float = quantity("", "|cos|", "Gaussian keys with their covariance, minus their mean")
    by_head: np.ndarray = quantity("kv_head", "|cos|", "token keys of each head")
    by_head_spectrum: float = quantity("", "|cos|", "Gaussian keys with these keys' covariance, by head")
    by_head_centred: float = quantity("", "|cos|", "token keys minus their mean, by head")
    by_head_centred_null: np.ndarray = quantity("bound", "|cos|", "the same, untrained copies")
    by_head_centred_spectrum: float = quantity(
        "", "|cos|", "Gaussian keys with their covariance, minus their mean, by head"
    )
    seen_spectrum: float = quantity("", "|cos|", "Gaussian keys with their covariance, as queries see them")
    seen_centred_spectrum: float = quantity(
        "", "|cos|", "Gaussian keys with their covariance, minus their mean, as queries see them"
    )


@dataclass(frozen=True, kw_only=True)
class WithClasses(Result):
    """The result for prompts that fall into classes."""

    class_means: Curve = curve(
        "layer",
        "|cos|",
        "centred class means of the final token's keys",
        null="the same, classes permuted over templates",
    )
    class_simplex: float = quantity("", "|cos|", "a regular simplex with a corner for each class")


def measure(view: ProbeInput) -> Result:
    """Every form of key orthogonality with its null. Raises Unavailable if weights or keys cannot be read."""
    model, untrained = view.observations, view.control_observations
    if not untrained:
        raise UserError("no untrained copy was read (a preview, or no controls), and it has no other control")
    estimates, warnings = _of_heads(model, untrained)
    estimates += _depth(model, untrained)
    sets, count = model.sets(), model.keys.shape[1]
    theirs = {name: np.array([_value(*control.sets()[name]) for control in untrained]) for name in sets}
    for name in (WHOLE, BY_HEAD, SEEN, SEEN_CENTRED):
        value, interval = _tokens(*sets[name])
        null = Null.of(UNTRAINED, theirs[name], CLAIMS[name].side)
        estimates.append(estimate(CLAIMS[name], value, interval, [null], n=count, clusters=count))
    if model.normed:
        warnings.append(
            "queries and keys are normalised after their projection: keys are compared as normalised, W_K's basis is "
            "free only as far as the norm allows, and queries are these tokens' own rather than W_Q"
        )
    gaussian = {name: gaussian_like(x, SPECTRUM_DRAWS, view.seed, centre) for name, (x, centre) in sets.items()}
    fields = dict(
        columns=model.columns[..., RAW],
        columns_mean=_over_heads("columns", RAW, model, untrained),
        columns_centred=_over_heads("columns", CENTRED, model, untrained),
        query_columns=_over_heads("query_columns", RAW, model, untrained),
        query_columns_centred=model.query_columns[..., CENTRED].mean(1),
        columns_gaussian=random_cosine(model.d_model),
        tokens=count,
        tokens_simplex=simplex_cosine(count),
        whole_gaussian=random_cosine(sets[WHOLE][0].shape[-1]),
        head_gaussian=random_cosine(model.keys.shape[-1]),
        whole_spectrum=gaussian[WHOLE],
        whole_centred=_value(*sets[f"{WHOLE}, centred"]),
        whole_centred_null=np.array(band(theirs[f"{WHOLE}, centred"])),
        whole_centred_spectrum=gaussian[f"{WHOLE}, centred"],
        by_head=mean_abs_cosine(model.keys),
        by_head_spectrum=gaussian[BY_HEAD],
        by_head_centred=_value(*sets[f"{BY_HEAD}, centred"]),
        by_head_centred_null=np.array(band(theirs[f"{BY_HEAD}, centred"])),
        by_head_centred_spectrum=gaussian[f"{BY_HEAD}, centred"],
        seen_spectrum=gaussian[SEEN],
        seen_centred_spectrum=gaussian[SEEN_CENTRED],
    )
    classes, note = _classes(view.capture, view.clusters)
    fields |= {"warnings": tuple(warnings), "notes": (*_other_side(estimates), note)}
    if not classes:
        return Result(**fields, estimates=tuple(estimates))
    row, more = _class_means(view, classes)
    return WithClasses(**fields, **more, estimates=(*estimates, row))


def _of_heads(model: Reading, untrained: Sequence[Reading]) -> tuple[list[Estimate], list[str]]:
    """|cos| of the columns of W_K over heads; or a warning that they are too few."""
    heads = model.columns[..., RAW].ravel()
    if len(heads) < LEAST_CLUSTERS:
        return [], [f"columns of W_K: {len(heads)} heads in all are too few for an interval; see the heat map"]
    # Each head of each layer is a unit. Its position only distinguishes layers and heads.
    controls = {UNTRAINED: [control.columns[..., RAW].ravel() for control in untrained]}
    return [_over(compare(CLAIMS[COLUMNS], mean_of, heads, np.arange(len(heads)), controls), "heads")], []


def _depth(model: Reading, untrained: Sequence[Reading]) -> list[Estimate]:
    """Excess of |cos| of columns in the last layers; empty if these, or the other layers, have a single head."""
    layers, heads = model.columns.shape[:2]
    last = np.repeat(np.arange(layers) >= layers - late(layers), heads)
    if min(last.sum(), (~last).sum()) < 2 or len(last) < LEAST_CLUSTERS:
        return []

    def gain(x: np.ndarray, rows: np.ndarray | slice) -> float:
        x, late_rows = x[rows], last[rows]
        return float(x[late_rows].mean() - x[~late_rows].mean())

    columns, *others = (reading.columns[..., RAW].ravel() for reading in (model, *untrained))
    return [_over(compare(CLAIMS[DEPTH], gain, columns, np.arange(len(last)), {UNTRAINED: others}), "heads")]


def _over_heads(name: str, form: int, model: Reading, untrained: Sequence[Reading]) -> Curve:
    """Mean over heads at every layer, with the untrained controls' band; the form is RAW or CENTRED."""
    mean, *controls = (getattr(reading, name)[..., form].mean(1) for reading in (model, *untrained))
    return Curve(mean, null=layer_band({UNTRAINED: np.array(controls)}, "lower"))


def _value(x: np.ndarray, centre: bool) -> float:
    return float(mean_abs_cosine(x, centre).mean())


def _tokens(x: np.ndarray, centre: bool) -> tuple[float, Interval]:
    """Value and jackknife interval over tokens; each deletion subtracts the mean of the remaining tokens.

    So every deletion recomputes all cosines, and many tokens are deleted in groups: every 32nd one.
    """
    every = np.arange(x.shape[1])
    if centre:
        groups, what = (every % GROUPS, "groups of tokens") if len(every) > 2 * GROUPS else (every, "tokens")
        return _value(x, True), _over(jackknife(lambda rows: _value(x[:, rows], True), every, groups), what)
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


def _other_side(estimates: list[Estimate]) -> tuple[str, ...]:
    """One sentence on metrics above the band of their null: the claims ask only whether keys are below."""
    above = [
        f"{h.name} ({h.value:.3g} against {h.null_low:.3g} to {h.null_high:.3g})"
        for h in estimates
        if h.low > h.null_high
    ]
    return (f"less orthogonal than chance, above the whole band of the null: {'; '.join(above)}",) if above else ()


def _classes(capture: Capture, clusters: np.ndarray) -> tuple[dict[str, str], str]:
    """Template -> class, for classes of at least 5 templates, and a note on them; empty without 3 such classes.

    Classes are the prompts' domains, or else the first words of their tags.
    """
    prompt, columns = capture.prompt.numpy(), capture.batch.columns
    for column in ("domain", "tags"):
        labels = [(str(label).split() or [""])[0] for label in columns.get(column, ())]
        by_template: dict[str, set[str]] = {}
        for row, cluster in enumerate(clusters if labels else ()):
            by_template.setdefault(str(cluster), set()).add(labels[prompt[row]])
        single = {name: min(found) for name, found in by_template.items() if len(found) == 1 and found != {""}}
        sizes = Counter(single.values())
        classes = sorted(label for label, size in sizes.items() if size >= LEAST_CLUSTERS)
        if len(classes) >= LEAST_CLASSES:
            listed = ", ".join(f"{label} ({sizes[label]})" for label in classes)
            rest = len(by_template) - sum(sizes[label] for label in classes)
            left = f"; {rest} other templates are left out" if rest else ""
            by = "domains" if column == "domain" else "first tags"
            chosen = {cluster: label for cluster, label in single.items() if label in classes}
            return chosen, f"classes of class-mean keys are the templates' {by}: {listed}{left}"
    return {}, (
        f"class-mean keys are not measured: they need {LEAST_CLASSES} classes (domains, or first tags) of "
        f"{LEAST_CLUSTERS} templates each, since two class means are always opposite about their common mean"
    )


def _class_means(view: ProbeInput, classes: Mapping[str, str]) -> tuple[Estimate, dict]:
    clusters = view.clusters
    names = np.array(sorted(classes))
    labels = np.array([classes[cluster] for cluster in names])

    def templates(capture: Capture) -> list[np.ndarray]:
        """[template kv_head head_dim] for each layer."""
        rows = [np.flatnonzero(clusters == name) for name in names]
        keys = (as_array(layer) for layer in capture.layers(Site.KEY))
        return [np.stack([layer[of_template].mean(0) for of_template in rows]) for layer in keys]

    layers = templates(view.capture)
    count = len(set(labels))
    cost = sum(count * layer.size for layer in layers)
    permutations = int(np.clip(WORK // cost, 999, PERMUTATIONS))
    nulls = [permuted_class_cosine(layer, labels, permutations, view.seed) for layer in layers]
    values = [class_cosine(layer, labels) for layer in layers]
    claim, value, last = CLAIMS[CLASSES], values[-1], layers[-1]
    # A permutation's p contains the sampling noise, so the interval need only exclude the centre of the null.
    permuted = permutation_null("permuted templates", value, nulls[-1], "lower")
    untrained = np.array([class_cosine(templates(control)[-1], labels) for control in view.untrained])
    # The untrained controls' class means contain the noise of the same prompts, so p compares with all of them.
    control = Null.of(UNTRAINED, untrained, claim.side, noisy=True)
    interval = jackknife(lambda rows: class_cosine(last[rows], labels[rows]), np.arange(len(names)), names)
    interval = _over(interval, "templates")
    row = estimate(
        claim, value, interval, [permuted, control], n=int(np.isin(clusters, names).sum()), clusters=len(names)
    )
    return row, {
        "class_means": Curve(np.array(values), null=np.array([band(null) for null in nulls])),
        "class_simplex": simplex_cosine(count),
    }
