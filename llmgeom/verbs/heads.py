"""Scores of every attention head on repeated random tokens, and what in-context copying loses without some heads."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Site
from llmgeom.model.intervention import Intervention, Runner
from llmgeom.model.passes import Observer, Step
from llmgeom.model.resume import clean_pass
from llmgeom.model.tokenizing import special_tokens
from llmgeom.model.weights import norm_gain, output_weight, value_weight
from llmgeom.progress import tell, watched
from llmgeom.stats.resampling import mean_intervals
from llmgeom.verbs.lens import asking
from llmgeom.verbs.reading import Reading, called

MOST = 2**25  # log-probabilities in memory at once
_log = logging.getLogger(__name__)
KINDS = ("induction", "previous token", "duplicate token", "first token")
INPUT_NORMS = ("input_layernorm", "ln_1", "norm1", "self_attn_layer_norm", "pre_attention_layernorm")


@watched()
def heads(subject: Any, length: int = 50, sequences: int = 8, controls: int = 0, seed: int = 0) -> Reading:
    """Scores of every query head on random tokens that are repeated once (Olsson et al. 2022).

    A score is the mean attention weight over the queries of the second half, at place t, with period `length`:
    on t - length + 1, the token after the earlier copy ("induction"); on t - 1 ("previous token"); on t - length,
    the earlier copy ("duplicate token"); on place 0 ("first token"). "error of ..." is the standard error over
    sequences. Attention that is spread evenly scores `attrs["even attention"]`. "copying" is of the weights alone:
    the sum of the eigenvalues of the head's OV circuit over that of their sizes, -1 to 1 (Elhage et al. 2021).

    Args:
        length: Tokens before they repeat. They all differ.
        sequences: How many.
        controls: Untrained copies: `attrs["untrained copies"]` has the least and the largest score of all their
            heads.
        seed: Of the random tokens, and of the copies.

    Returns:
        Over layer and head.
    """
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


def _scores(subject: Any, ids: torch.Tensor, before: int, length: int) -> tuple[np.ndarray, float]:
    """[sequence layer head kind]: the weight on each kind's key, mean over the queries of the second half; and the
    weight that spread evenly each key would get."""

    def scores(step: Step) -> dict[str, torch.Tensor]:
        t = step.position
        keys = torch.stack([t - length + 1, t - 1, t - length, torch.zeros_like(t)], 1)
        every = [
            rows.gather(2, keys.to(rows.device)[:, None].expand(-1, rows.shape[1], -1))
            for rows in step.layers(Site.ATTENTION)
        ]
        return {"scores": torch.stack(every, 1)}

    batch = asking(ids, range(before + length, ids.shape[1]))
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
    width, device = embedding.shape[1], embedding.device
    after, centred_after = norm_gain(unembed.norm, width).float().to(device), _centres(unembed.norm, embedding)
    around = (unembed.head.weight.float() * after).T @ embedding.float()  # [d_model d_model]
    found = np.full((len(subject.blocks), subject.facts["heads"]), np.nan)
    shared = subject.facts["heads"] // subject.facts["kv_heads"]
    for layer, block in enumerate(subject.blocks):
        if block.attention is None:
            continue
        norm = next((child for name, child in block.layer.named_children() if name in INPUT_NORMS), None)
        values = torch.stack([value_weight(subject, layer, head).float() for head in range(subject.facts["kv_heads"])])
        if norm is not None:
            values = values * norm_gain(norm, width).float().to(device)[:, None]
            values = values - values.mean(1, keepdim=True) if _centres(norm, embedding) else values
        outputs = torch.stack([output_weight(subject, layer, head).float() for head in range(found.shape[1])])
        outputs = outputs - outputs.mean(2, keepdim=True) if centred_after else outputs
        roots = torch.linalg.eigvals(outputs @ (around @ values).repeat_interleave(shared, 0))
        found[layer] = (roots.real.sum(-1) / roots.abs().sum(-1)).cpu().numpy()
    return found


def _centres(norm: Any, like: torch.Tensor) -> bool:
    """Whether a norm takes the mean away first: it gives a constant as it gives 0."""
    ones = torch.ones(1, 1, like.shape[1], dtype=like.dtype, device=like.device)
    return bool((norm(ones) - norm(0 * ones)).abs().max() < 0.01)


@watched()
def copying(
    subject: Any, heads: Sequence[tuple[int, int]], length: int = 50, sequences: int = 8, draws: int = 8, seed: int = 0
) -> Reading:
    """What in-context copying loses without some heads: random tokens, repeated once (Olsson et al. 2022).

    The heads' outputs z become their means over all positions (mean ablation), at every position.

    Args:
        heads: Pairs (layer, head).
        length, sequences: As in `heads`.
        draws: Random sets of as many other heads of the same layers, as a control; of any layer where a layer
            has too few.
        seed: Of tokens and random heads.

    Returns:
        Over edits (none, these heads, each random set): `lost`, the mean log-probability of a repeated token
        without the edit less with it, in nats, with its 95 % interval over sequences. In `attrs` what the tokens
        had the first time, without the edit: heads that do all of the copying bring a token back to it.
    """
    layers, count = len(subject.blocks), subject.facts["heads"]
    chosen = [(int(layer), int(head)) for layer, head in heads]
    if not chosen or any(not (0 <= layer < layers and 0 <= head < count) for layer, head in chosen):
        raise UserError(
            f"copying({chosen}): expected pairs (layer, head), of layers 0 to {layers - 1} and heads 0 to {count - 1}"
        )
    if len(chosen) > len({*chosen}):
        raise UserError(f"copying({chosen}): a head stands there twice")
    of_layer: Counter[int | None] = Counter(layer for layer, _ in chosen)
    if any(2 * number > count for number in of_layer.values()):  # fewer others than chosen: from anywhere
        of_layer = Counter({None: len(chosen)})
    rng, edits = np.random.default_rng(seed), {"no head": [], "these heads": chosen}
    has_heads = [layer for layer, block in enumerate(subject.blocks) if block.attention is not None]
    for i in range(draws):
        edits[f"random heads {i + 1}"] = drawn = []
        for layer, number in of_layer.items():
            others = [
                (at, head)
                for at in (has_heads if layer is None else [layer])
                for head in range(count)
                if (at, head) not in chosen
            ]
            if len(others) < number:
                raise UserError(f"copying of {number} heads: only {len(others)} others are left to compare with")
            drawn += [others[k] for k in rng.choice(len(others), number, replace=False)]
    ids, before = repeated(subject, length, sequences, seed)
    width, means = ids.shape[1], defaultdict[int, Any](float)
    parts = ids.split(max(1, MOST // (length * subject.facts["vocabulary"])))
    for some in parts:
        written = subject.capture(asking(some, range(before, width)), Site.Z)
        for (_, layer), z in written.tensors.items():
            means[layer] += z.double().flatten(1).sum(0).cpu() / (len(ids) * (width - before))

    def to_mean(layer: int, mine: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (means[layer] - x) * mine

    def ablated(name: str, heads_: Sequence[tuple[int, int]]) -> Intervention:
        mine = torch.zeros(layers, count, subject.facts["head_dim"], dtype=torch.float64)
        for layer, head in heads_:
            mine[layer, head] = 1
        return Intervention(name, {("z", at): partial(to_mean, at, mine[at].flatten()) for at, _ in heads_})

    every, rows, first = [ablated(name, heads_) for name, heads_ in edits.items()], [], []
    for some in parts:
        seen = subject.capture(asking(some, range(before, before + length - 1)), Site.LOG_PROBS).log_probs.cpu()
        first += seen.gather(1, some[:, before + 1 : before + length].reshape(-1, 1)).flatten().tolist()
        batch, right = asking(some, range(before + length, width - 1)), some[:, before + length + 1 :].reshape(-1, 1)

        def said(_: Sequence[torch.Tensor], x: Sequence[torch.Tensor], right: torch.Tensor = right) -> dict[str, Any]:
            """[sequence] mean log-probability of the repeated tokens."""
            return {"said": x[0].cpu().gather(1, right).double().view(-1, length - 1).mean(1).numpy()}

        everywhere, clean = torch.ones_like(some, dtype=torch.bool), clean_pass(subject, batch)
        runner = Runner(subject, batch, everywhere, said, compared=False, clean=clean)
        rows.append(runner.measure(every, "ablating heads")["said"])
    by_sequence = np.concatenate(rows, 1)  # [edit sequence]
    lost = by_sequence[0] - by_sequence
    low, high = mean_intervals(lost).T if sequences > 1 else (lost.mean(1),) * 2
    return Reading(
        f"{called(subject)}, in-context copying without {', '.join(f'L{a}H{b}' for a, b in chosen)}",
        {"edit": tuple(range(len(edits)))},
        {"lost": lost.mean(1), "lost, low": low, "lost, high": high, "log-probability": by_sequence.mean(1)},
        units={"lost": "nats a token", "log-probability": "nats a token"},
        ticks={"edit": tuple(edits)},
        bands={"95 % interval over sequences": ("{}, low", "{}, high")},
        attrs={
            "sequences": sequences,
            "heads": [str(heads_) for heads_ in edits.values()],
            "log-probability, first time": float(np.mean(first)),
        },
    )


def repeated(subject: Any, length: int, sequences: int, seed: int) -> tuple[torch.Tensor, int]:
    """[sequence token] ids: what the tokenizer puts before a text, then `length` random tokens twice; and how many
    stand before. No token is drawn twice in a sequence, so that only one earlier place holds the same one."""
    if length < 2 or sequences < 1:
        raise UserError(
            f"heads(length={length}, sequences={sequences}): expected 2 tokens or more, in 1 sequence or more"
        )
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
