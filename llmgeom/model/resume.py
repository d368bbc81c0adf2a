"""The clean pass of a batch, from which edited passes go on.

In a causal model an edit at layer l and at positions from t on changes nothing below l and nothing before t. The clean
pass keeps the input of every layer, and every key and value; an edited pass then skips the layers below l, and runs the
positions from t on alone, which attend to the clean keys and values before them (`edits.Resume`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.errors import UnsupportedModel
from llmgeom.model.attention import Recorder, active
from llmgeom.model.batching import BATCH_TOKENS, ropes
from llmgeom.model.capture import Site
from llmgeom.model.edits import NOTHING, Clean, Edit, Resume
from llmgeom.model.forward import Reader
from llmgeom.model.layers import Block, attending

FEW = 3  # inputs whose pass is compared with the full one
MOST = 2**31  # bytes of a clean pass; above, edited passes are full ones
# Of the last residual stream's rms: how far a pass that is resumed without an edit may lie from the full one. Rounding
# gives 1e-6 in float32 and up to .02 in bfloat16, another mask or position .3 (SmolLM2 and 12 tiny families).
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
NEAR = 5e-2

_lock = threading.Lock()
_skipping: dict[int, tuple[int, list[Any]]] = {}  # users, and what each layer's own `forward` was, if set on it


def clean_pass(
    reader: Reader, batch: Batch, batch_tokens: int = BATCH_TOKENS, further: frozenset[Site] = frozenset()
) -> Clean | None:
    """The clean pass of a batch; None where edited passes of it have to be full ones, which the log says.

    Whatever a family does that is not known here shows: a pass of three inputs that is resumed without an edit, in
    the middle of both depth and text, is compared with the full one. `further` sites are kept at every position.
    """
    try:
        if why := _unable(reader, batch):
            raise UnsupportedModel(why)
        clean = _read(reader, batch, batch_tokens, further)
        lengths = reader.tokens(batch).lengths
        _compare(reader, batch, Resume(clean, len(reader.blocks) // 2, lengths[:FEW] // 2))
    except Exception as error:  # a family's own forward may raise anything: the full pass is right, and slower
        logging.getLogger("llmgeom").info("%s: every edited pass is a full one (%s)", reader.name, error)
        return None
    return clean


def alone(reader: Reader, batch: Batch, edits: Sequence[Edit]) -> Resume | None:
    """Where passes begin whose edits replace all that attention writes: at the last position, as no other reaches it.

    None where a family mixes positions in another way, too, which a comparison of three inputs shows.
    """
    first = reader.tokens(batch).lengths - 1
    try:
        if why := _unable(reader, batch):
            raise UnsupportedModel(why)
        _compare(reader, batch, Resume(NOTHING, 0, first[:FEW]), edits)
    except Exception as error:
        logging.getLogger("llmgeom").info("%s: every pass without context is a full one (%s)", reader.name, error)
        return None
    return Resume(NOTHING, 0, first)


def _read(reader: Reader, batch: Batch, batch_tokens: int, further: frozenset[Site]) -> Clean:
    tokens, depth = reader.tokens(batch), len(reader.blocks)
    masks, returns = _seen(reader, tokens)
    facts = reader.facts
    size = tokens.data.numel() * depth * (facts["d_model"] + 2 * facts["kv_heads"] * facts["head_dim"])
    if size * next(reader.model.parameters()).itemsize > MOST:
        raise MemoryError(f"its clean pass takes more than {MOST / 2**30:.0f} GiB")
    sites = {Site.RESIDUAL, Site.KEY, Site.VALUE, *further}
    capture = reader.capture(batch, sites, positions="all", batch_tokens=batch_tokens)

    def padded(site: Any, layer: int) -> Tensor:
        rows = capture.tensors[site, layer]
        whole = rows.new_zeros(*tokens.data.shape[:2], *rows.shape[1:])
        whole[capture.prompt, capture.position] = rows
        return whole

    residual = tuple(padded(Site.RESIDUAL, layer) for layer in range(depth))
    key, value = (
        tuple(padded(site, layer).transpose(1, 2).contiguous() for layer in range(depth))
        for site in (Site.KEY, Site.VALUE)
    )
    return Clean(residual, key, value, masks, returns, {at: padded(*at) for at in capture.tensors if at[0] in further})


@torch.no_grad()
def _seen(reader: Reader, tokens: Tokens | Rows) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """The mask of each layer for the longest input, of which those of shorter ones are corners, and `Clean.returns`.

    Raises UnsupportedModel where inputs or heads have masks of their own, or layers return more than the stream.
    """
    longest, width = int(tokens.lengths.argmax()), int(tokens.lengths.max())
    end = (torch.tensor([0]), torch.tensor([width - 1]))
    where = (torch.tensor([longest]), torch.zeros(1, width, dtype=torch.bool))
    recorder, returns = Recorder(reader.blocks, end, frozenset(), (), where), [0] * len(reader.blocks)

    def watch(index: int, _module: Any, _args: Any, out: Any) -> None:
        if isinstance(out, tuple | list):
            if any(one is not None for one in out[1:]):
                raise UnsupportedModel("its layers return more than the residual stream")
            returns[index] = len(out)

    with ExitStack() as hooks, reader.forward.attached():
        for index, block in enumerate(reader.blocks):
            hooks.callback(block.layer.register_forward_hook(partial(watch, index)).remove)
        reader.forward.run(recorder, tokens.data[[longest], :width])
    masks: list[Tensor | None] = []
    for mask in map(recorder.masks.get, range(len(reader.blocks))):
        if mask is not None and mask.shape[0] * mask.shape[1] > 1 and not (mask == mask[:1, :1]).all():
            raise UnsupportedModel("its inputs or heads have masks of their own")
        masks.append(None if mask is None else mask[0, 0])
    return tuple(masks), tuple(returns)


def _compare(reader: Reader, batch: Batch, resume: Resume, edits: Sequence[Edit] = ()) -> None:
    few = batch.take(range(len(resume.first)))
    ours, full = (
        reader.capture(few, {Site.FINAL}, edits, positions=(-1,), **how).final.float()
        for how in ({"resume": resume}, {})
    )
    apart = float((ours - full).square().mean().sqrt() / full.square().mean().sqrt())
    if not apart <= CLOSE.get(next(reader.model.parameters()).dtype, NEAR):
        raise ArithmeticError(f"resumed without an edit it is {apart:.1e} of the rms away from the full pass")


def _unable(reader: Reader, batch: Batch) -> str:
    """Why edited passes of a model cannot be resumed; empty where they may be."""
    config = getattr(reader.model, "config", None)
    if not isinstance(reader.tokens(batch), Tokens):
        return "it reads numbers"
    if reader.edits:
        return "it has edits"
    if reader.forward.backend != "transformers" or not getattr(reader.forward, "takes_positions", False):
        return "it takes no positions"
    if len(attending(reader.blocks)) < len(reader.blocks):
        return "some layers mix positions in another way than attention"
    if getattr(reader.model, "hf_device_map", None):
        return "it is divided over several places"
    if any(rope["rope_type"] in ("dynamic", "longrope") for rope in ropes(config)):
        return "its rotary embedding follows the longest text of a batch"
    return ""


@contextmanager
def skipping(blocks: Sequence[Block], returns: Sequence[int]) -> Iterator[None]:
    """While this holds, the layers that a resumed pass leaves out return their input. Counted, as `attached`.

    returns: how many things each layer returns, 0 for a tensor alone (`Clean.returns`).
    """

    def skipper(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            recorder = active.get()
            if recorder is None or (ran := recorder.resumed) is None:
                return forward(*args, **kwargs)
            if index >= ran.start and (ran.end is None or index < ran.end):
                return forward(*args, **kwargs)
            x = args[0] if args else kwargs["hidden_states"]
            return (x, *[None] * (returns[index] - 1)) if returns[index] else x

        return run

    key = id(blocks[0].layer)
    with _lock:
        users, before = _skipping.get(key, (0, []))
        if not users:
            before = [vars(block.layer).get("forward") for block in blocks]  # accelerate sets it on a module
            for index, block in enumerate(blocks):
                block.layer.forward = skipper(index, block.layer.forward)
        _skipping[key] = users + 1, before
    try:
        yield
    finally:
        with _lock:
            users, before = _skipping.pop(key)
            if users > 1:
                _skipping[key] = users - 1, before
            else:
                for block, own in zip(blocks, before, strict=True):
                    del block.layer.forward
                    if own is not None:
                        block.layer.forward = own
