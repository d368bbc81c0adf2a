"""Scores of every attention head on repeated random tokens, and what in-context copying loses without some heads."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Site
from llmgeom.model.edits import Clean, Resume
from llmgeom.model.passes import Observer, Step
from llmgeom.model.resume import clean_pass
from llmgeom.model.tokenizing import special_tokens
from llmgeom.model.weights import output_weight, value_weight
from llmgeom.progress import tell
from llmgeom.verbs.lens import interval
from llmgeom.verbs.reading import Reading, called

MOST = 2**25  # log-probabilities in memory at once
_log = logging.getLogger(__name__)
KINDS = ("induction", "previous token", "duplicate token", "first token")
INPUT_NORMS = ("input_layernorm", "ln_1", "norm1", "self_attn_layer_norm", "pre_attention_layernorm")


def heads(subject: Any, length: int, sequences: int, controls: int, seed: int) -> Reading:
    """See `Verbs.heads`."""
    _check(length, sequences)
    ids, before = repeated(subject, length, sequences, seed)
    by_sequence, even = _scores(subject, ids, before, length)
    mean = by_sequence.mean(0)
    error = by_sequence.std(0, ddof=1) / sequences**0.5 if sequences > 1 else np.zeros_like(mean)
    values = {kind: mean[..., k] for k, kind in enumerate(KINDS)}
    values |= {f"error of {kind}": error[..., k] for k, kind in enumerate(KINDS)}
    try:
        values["copying"] = copying_scores(subject)
    except Unavailable as lacking:  # a family whose weights are laid out otherwise
        _log.info("no copying scores: %s", lacking)
    attrs: dict[str, Any] = {"even attention": even, "sequences": sequences, "length": length}
    if controls:
        drawn: dict[str, list[np.ndarray]] = {kind: [] for kind in (*KINDS, *{"copying"} & values.keys())}
        with subject.controls() as control:
            for i in range(controls):
                tell("heads of untrained copies", i, controls)
                copy = control(seed + i)
                each = _scores(copy, ids, before, length)[0].mean(0)
                for k, kind in enumerate(KINDS):
                    drawn[kind].append(each[..., k])
                if "copying" in drawn:
                    drawn["copying"].append(copying_scores(copy))
            control(None)
        attrs["untrained copies"] = {
            kind: (float(np.nanmin(each)), float(np.nanmax(each))) for kind, each in drawn.items()
        }
        attrs["draws"] = controls
    return Reading(
        f"{called(subject)}, attention heads on {sequences} x 2 x {length} repeated random tokens",
        {"layer": tuple(range(mean.shape[0])), "head": tuple(range(mean.shape[1]))},
        values,
        attrs=attrs,
    )


def _check(length: int, sequences: int) -> None:
    if length < 2 or sequences < 1:
        raise UserError(
            f"heads(length={length}, sequences={sequences}): expected 2 tokens or more, in 1 sequence or more"
        )


def _batch(ids: torch.Tensor, query: torch.Tensor) -> Batch:
    names = tuple(map(str, range(len(ids))))
    source = {"kind": "tokens", "name": "repeated random tokens"}
    return Batch(Tokens(ids, torch.full((len(ids),), ids.shape[1])), names, source, query.expand(ids.shape))


def _scores(subject: Any, ids: torch.Tensor, before: int, length: int) -> tuple[np.ndarray, float]:
    """[sequence layer head kind]: the weight on each kind's key, mean over the queries of the second half; and the
    weight that spread evenly each key would get."""

    def scores(step: Step) -> dict[str, torch.Tensor]:
        t = step.position
        keys = torch.stack([t - length + 1, t - 1, t - length, torch.zeros_like(t)], 1)
        every = [rows.gather(2, keys.to(rows.device)[:, None].expand(-1, rows.shape[1], -1))
                 for rows in step.layers(Site.ATTENTION)]  # fmt: skip
        return {"scores": torch.stack(every, 1)}

    batch = _batch(ids, torch.arange(ids.shape[1]) >= before + length)
    observer = Observer("heads", scores, frozenset({Site.ATTENTION}))
    seen = subject.capture(batch, Site.FINAL, observers=[observer])
    by_row = seen.observed("heads.scores").double().numpy()
    by_sequence = np.stack([by_row[seen.prompt.numpy() == i].mean(0) for i in range(len(ids))])
    return by_sequence, float((1.0 / (seen.position.double() + 1)).mean())


@torch.no_grad()
def copying_scores(subject: Any) -> np.ndarray:
    """[layer head]: sum of the eigenvalues of a head's OV circuit over the sum of their absolute values, -1 to 1.

    The circuit goes from a token's embedding through W_V and W_O to the logits, W_E W_V W_O W_U, with the weights of
    both norms (Elhage et al. 2021, "Copying heads"): 1 where writing a token raises its own logit in every direction.
    Its eigenvalues other than 0 are those of W_V W_U W_E W_O taken around, [head_dim head_dim].

    Raises:
        Unavailable: how the family lays out its weights, or its way to the logits, is not known.
    """
    unembed, embedding = subject.unembed, subject.model.get_input_embeddings().weight
    if unembed.head.weight.shape != embedding.shape:
        raise Unavailable(f"{subject.name}: its embeddings have another width than its output embedding")
    after, centred_after = _scale(unembed.norm, embedding)
    around = (unembed.head.weight.float() * after).T @ embedding.float()  # [d_model d_model]
    found = np.full((len(subject.blocks), subject.facts["heads"]), np.nan)
    shared = subject.facts["heads"] // subject.facts["kv_heads"]
    for layer, block in enumerate(subject.blocks):
        if block.attention is None:
            continue
        norm = next((child for name, child in block.layer.named_children() if name in INPUT_NORMS), None)
        scale, centred = (torch.ones(embedding.shape[1]).to(embedding.device), False) if norm is None else _scale(
            norm, embedding)  # fmt: skip
        values = torch.stack([value_weight(subject, layer, head).float() for head in range(subject.facts["kv_heads"])])
        values = values * scale[:, None]
        values = values - values.mean(1, keepdim=True) if centred else values
        outputs = torch.stack([output_weight(subject, layer, head).float() for head in range(found.shape[1])])
        outputs = outputs - outputs.mean(2, keepdim=True) if centred_after else outputs
        roots = torch.linalg.eigvals(outputs @ (around @ values).repeat_interleave(shared, 0))
        found[layer] = (roots.real.sum(-1) / roots.abs().sum(-1)).cpu().numpy()
    return found


def _scale(norm: Any, like: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """[d_model] what a norm multiplies each dimension by, and whether it takes the mean away first; by trial, since
    some families store the weight less 1."""
    signs = torch.ones(1, 1, like.shape[1], dtype=like.dtype, device=like.device)
    signs[..., 1::2] = -1
    zero, ones = norm(0 * signs), norm(signs.abs())
    return ((norm(signs) - zero) * signs)[0, 0].float(), bool((ones - zero).abs().max() < 0.01 * signs.abs().max())


def copying(subject: Any, chosen: Sequence[tuple[int, int]], length: int, sequences: int, draws: int, seed: int):
    """See `Verbs.copying`."""
    _check(length, sequences)
    layers, count = len(subject.blocks), subject.facts["heads"]
    chosen = [(int(layer), int(head)) for layer, head in chosen]
    if not chosen or any(not (0 <= layer < layers and 0 <= head < count) for layer, head in chosen):
        raise UserError(f"copying({chosen}): expected pairs (layer, head), of layers 0 to {layers - 1} and heads 0 to "
                        f"{count - 1}")  # fmt: skip
    if len(chosen) > len({*chosen}):
        raise UserError(f"copying({chosen}): a head stands there twice")
    lowest = min(layer for layer, _ in chosen)
    of_layer: Counter[int | None] = Counter(layer for layer, _ in chosen)
    if any(2 * number > count for number in of_layer.values()):  # fewer others than chosen: from anywhere
        lowest, of_layer = 0, Counter({None: len(chosen)})
    rng, edits = np.random.default_rng(seed), {"no head": [], "these heads": chosen}
    has_heads = [layer for layer, block in enumerate(subject.blocks) if block.attention is not None]
    for i in range(draws):
        edits[f"random heads {i + 1}"] = drawn = []
        for layer, number in of_layer.items():
            others = [(at, head) for at in (has_heads if layer is None else [layer]) for head in range(count)
                      if (at, head) not in chosen]  # fmt: skip
            if len(others) < number:
                raise UserError(f"copying of {number} heads: only {len(others)} others are left to compare with")
            drawn += [others[k] for k in rng.choice(len(others), number, replace=False)]
    ids, before = repeated(subject, length, sequences, seed)
    place = torch.arange(ids.shape[1])
    asked = (place >= before + length) & (place < len(place) - 1)
    parts: list[tuple[Batch, torch.Tensor, Clean | None]] = []
    sums: dict[int, Any] = defaultdict(float)
    for some in ids.split(max(1, MOST // (length * subject.facts["vocabulary"]))):
        batch = _batch(some, asked)
        parts.append((batch, some, clean_pass(subject, batch)))
        resume = _from(parts[-1][2], lowest, batch)
        written = subject.capture(_batch(some, place >= before), Site.Z, resume=resume)
        for layer in range(lowest, layers):
            if (Site.Z, layer) in written.tensors:
                sums[layer] += written[Site.Z, layer].float().sum(0) / (len(ids) * int((place >= before).sum()))
    rows: list[list[float]] = []
    for i, heads_ in enumerate(edits.values()):
        tell("ablating heads", i, len(edits))
        model = subject
        for layer in sorted({layer for layer, _ in heads_}):
            model = model.edit("z", sums[layer], layers=layer, heads=[h for at, h in heads_ if at == layer])
        start = min((layer for layer, _ in heads_), default=layers - 1)
        rows.append([])
        for batch, some, clean in parts:
            log_probs = model.capture(batch, Site.LOG_PROBS, resume=_from(clean, start, batch)).log_probs
            right = some[:, before + length + 1 :].reshape(-1, 1).to(log_probs.device)
            rows[-1] += log_probs.gather(1, right).double().view(len(some), -1).mean(1).tolist()
    by_sequence = np.array(rows)  # [edit sequence]
    lost = by_sequence[0] - by_sequence
    low, high = interval(lost) if sequences > 1 else (lost.mean(1),) * 2
    return Reading(
        f"{called(subject)}, in-context copying without {', '.join(f'L{a}H{b}' for a, b in chosen)}",
        {"edit": tuple(range(len(edits)))},
        {"lost": lost.mean(1), "lost, low": low, "lost, high": high, "log-probability": by_sequence.mean(1)},
        units={"lost": "nats a token", "log-probability": "nats a token"},
        ticks={"edit": tuple(edits)},
        bands={"95 % interval over sequences": ("{}, low", "{}, high")},
        attrs={"sequences": sequences, "heads": [str(heads_) for heads_ in edits.values()]},
    )


def _from(clean: Clean | None, layer: int, batch: Batch) -> Resume | None:
    """Passes that begin at a layer, at every position."""
    return None if clean is None else Resume(clean, layer, torch.zeros(len(batch), dtype=torch.int64))


def repeated(subject: Any, length: int, sequences: int, seed: int) -> tuple[torch.Tensor, int]:
    """[sequence token] ids: what the tokenizer puts before a text, then `length` random tokens twice; and how many
    stand before. No token is drawn twice in a sequence, so that only one earlier place holds the same one."""
    known = subject.facts["vocabulary"]
    special: set[int] = set()
    prefix: list[int] = []
    if subject.tokenizer is not None:
        known = min(known, len(subject.tokenizer))
        special = set(getattr(subject.tokenizer, "all_special_ids", ()))
        prefix = list(subject.tokenizer("a")["input_ids"][: special_tokens(subject.tokenizer)[0]])
    usable = np.array([token for token in range(known) if token not in special])
    if length > len(usable):
        raise UserError(f"heads(length={length}): {subject.name} has {len(usable)} tokens to draw from")
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(usable, length, replace=False) for _ in range(sequences)])
    ids = np.concatenate([np.tile(prefix, (sequences, 1)), drawn, drawn], 1).astype(np.int64)
    return torch.from_numpy(ids), len(prefix)
