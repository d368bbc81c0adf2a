"""The result of one pass: tensors by site, at the requested positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmgeom.batch import Batch, Posterior
from llmgeom.errors import Unavailable, unknown
from llmgeom.stats.information import bits


class Site(StrEnum):
    """A place in the forward pass. One row is one (prompt, position) pair; every layer is kept unless said.

    Attributes:
        VALUE, KEY, QUERY: [row kv_head head_dim], [row kv_head head_dim], [row head head_dim]: as attention consumed
            them, after rotary embedding, query/key norms and edits. Grouped heads are not repeated.
        ATTENTION: [row head key_position] float32: softmax weights of the row's query; 0 beyond the row's own position.
            Rows of models with attention sinks sum to less than 1 (the rest is the sink).
        ATTENTION_ENTROPY: [row head] float32, nats: -sum_j a_j log a_j of that row.
        ATTENTION_FIRST: [row head] float32: the weight on position 0 (the usual sink).
        ATTENTION_REST: [row head] float32, nats: entropy of the row without position 0, renormalised (0 at position 0).
        Z: [row head head_dim]: each head's output before W_O, after edits.
        ATTN_OUT: [row d_model]: what attention adds to the residual stream (after any post-norm).
        MLP_OUT: [row d_model]: what the MLP adds.
        RESIDUAL: [row d_model], layers + 1 of them: the input of each layer, then the output of the last.
        FINAL: [row d_model], no layer: what the output embedding reads, after the final norm.
        LOG_PROBS: [row vocabulary] float32, nats, no layer: next-token log-probabilities from upcast logits.
        ENTROPY: [row] float32, nats, no layer: entropy of the next-token distribution over the full vocabulary.
        LIKELY: [row 2 rank] float32, no layer: the 5 likeliest next tokens (fewer in a smaller vocabulary): their ids,
            which are exact below 2^24, and their log-probabilities in nats.
    """

    VALUE = "value"
    KEY = "key"
    QUERY = "query"
    ATTENTION = "attention"
    ATTENTION_ENTROPY = "attention_entropy"
    ATTENTION_FIRST = "attention_first"
    ATTENTION_REST = "attention_rest"
    Z = "z"
    ATTN_OUT = "attn_out"
    MLP_OUT = "mlp_out"
    RESIDUAL = "residual"
    FINAL = "final"
    LOG_PROBS = "log_probs"
    ENTROPY = "entropy"
    LIKELY = "likely"

    @classmethod
    def _missing_(cls, value: object) -> Site:
        raise unknown("site", value, map(str, cls))


ROWS = frozenset({Site.ATTENTION, Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST, Site.ATTENTION_REST})
ENTROPIES = frozenset({Site.ENTROPY, Site.ATTENTION_ENTROPY, Site.ATTENTION_REST})
RANKS = 5  # likeliest next tokens that are kept
OUTPUTS = frozenset({Site.LOG_PROBS, Site.ENTROPY, Site.LIKELY})
# What only layers with attention have, and what of it is inside the attention function.
ATTENDING = frozenset(Site) - OUTPUTS - {Site.RESIDUAL, Site.MLP_OUT, Site.FINAL}
INSIDE = ATTENDING - {Site.ATTN_OUT}

Key = tuple[Site | str, int]  # layer -1 for sites that have no layer; "OBSERVER.ARRAY" for what an observer returned


def nbytes(facts: Mapping[str, Any], sites: frozenset[Site], rows: int, width: int) -> int:
    """Bytes that `rows` rows of these sites take, at most `width` positions long, by the facts of a subject: exact
    where all layers have the same heads, else at most."""
    item = getattr(torch, facts["dtype"]).itemsize
    layers, heads, kv, dim = (facts[name] or 0 for name in ("layers", "heads", "kv_heads", "head_dim"))
    attended = len(facts["attention_layers"]) if facts.get("attention_layers") else layers
    d, value = facts["d_model"], facts.get("value_dim") or dim
    row_bytes = {
        Site.VALUE: attended * kv * value * item,
        Site.KEY: attended * kv * dim * item,
        Site.QUERY: attended * heads * dim * item,
        Site.ATTENTION: attended * heads * width * 4,
        Site.ATTENTION_ENTROPY: attended * heads * 4,
        Site.ATTENTION_FIRST: attended * heads * 4,
        Site.ATTENTION_REST: attended * heads * 4,
        Site.Z: attended * heads * value * item,
        Site.ATTN_OUT: attended * d * item,
        Site.MLP_OUT: layers * d * item,
        Site.RESIDUAL: (layers + 1) * d * item,
        Site.FINAL: d * item,
        Site.LOG_PROBS: facts["vocabulary"] * 4,
        Site.ENTROPY: 4,
        Site.LIKELY: 2 * min(RANKS, facts["vocabulary"]) * 4,
    }
    return rows * sum(row_bytes[site] for site in sites)


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors joined along rows; narrower attention rows are padded with zeros, the weight on absent positions."""
    width = max(tensor.shape[-1] for tensor in tensors) if tensors[0].dim() > 1 else 0
    if width:
        tensors = [torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors]
    return torch.cat(list(tensors))


class LazyTensors(Mapping[Key, Tensor]):
    """Tensors by key, each read on access: no more than one need be in memory.

    Args:
        read: (key, rows) -> tensor.
        keys: What can be read.
        rows: The indices of the rows that are read, in this order.
    """

    def __init__(self, read: Callable[[Key, Tensor], Tensor], keys: Iterable[Key], rows: Tensor) -> None:
        self.read, self._keys, self.rows = read, dict.fromkeys(keys), rows

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self.read(key, self.rows)

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # a Mapping would read the tensor to know

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True)
class Layers(Sequence[Any]):
    """The tensors of one site, layer by layer, each read on access."""

    read: Callable[[Key], Tensor]
    keys: tuple[Key, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<Layers of {', '.join(sorted({str(key[0]) for key in self.keys}))}: {len(self.keys)}>"

    def __getitem__(self, layer: Any) -> Any:  # a tensor, or Layers for a slice
        key = self.keys[layer]
        return Layers(self.read, key) if isinstance(layer, slice) else self.read(key)


@dataclass(frozen=True)
class Capture:
    """The tensors of one batch. Read them through the properties, which raise with the remedy.

    Attributes:
        prompt, position: [row] int64: which input, and which position of it, each row is.
        lengths: [batch] int64: real tokens of each input.
        tensors: (site, layer) -> tensor, on the CPU, in the model's dtype (float32 where Site says so). Of a large
            capture in a store they are read from there, one at a time.
        events: what happened on the way that a reader should know (a batch halved after out-of-memory).
    """

    batch: Batch
    prompt: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    lengths: Int[Tensor, " batch"]
    tensors: Mapping[Key, Tensor]
    events: tuple[str, ...] = ()

    def take(self, prompts: Int[Tensor, " kept"], batch: Batch | None = None) -> Capture:
        """The rows of some prompts, in the order given; tensors that are on disk stay there.

        Args:
            prompts: indices of the prompts; one that is named twice is there twice.
            batch: the same prompts with their own clusters, columns and posterior; by default those of this capture.
        """
        by_prompt, counts = torch.argsort(self.prompt, stable=True), torch.bincount(self.prompt)
        ends, each = counts.cumsum(0)[prompts], counts[prompts]
        place = torch.arange(len(prompts)).repeat_interleave(each)
        rows = by_prompt[torch.arange(len(place)) + (ends - each.cumsum(0))[place]]
        batch = self.batch.take(prompts.tolist()) if batch is None else batch
        tensors: Mapping[Key, Tensor] = self.tensors
        if isinstance(tensors, LazyTensors):
            tensors = LazyTensors(tensors.read, tensors, tensors.rows[rows])
        else:
            tensors = {key: tensors[key][rows] for key in tensors}
        return Capture(batch, place, self.position[rows], self.lengths[prompts], tensors, self.events)

    def observed(self, name: str) -> Tensor:
        """An array of an observer, [row ...]; `name` is OBSERVER.ARRAY. Raises LookupError if it was not taken."""
        if (name, -1) not in self.tensors:
            raise LookupError(f"{name!r} was not observed; add the observer to the probe's NEEDS")
        return self.tensors[name, -1]

    @property
    def exact(self) -> Posterior:
        """The exact answers row by row: predictive [row outcome], belief [row state], bearing [row seq].

        Raises:
            Unavailable: where the batch has none.
        """
        return self.batch.exact.flat

    def __getitem__(self, place: str | tuple[Any, ...]) -> Any:
        """`capture["value", -1]`: a site at a layer (a number, negative from the end, or a slice).

        `capture["value"]` is the site at all layers, and what has no layer. bfloat16 comes as float32, which NumPy has;
        entropies come in bits, in float64. `layers(site)` has both as they are stored, entropies in nats. Raises
        LookupError for a site or a layer that was not captured, Unavailable where layers differ in shape.
        """
        if isinstance(place, tuple) and len(place) != 2:
            raise LookupError(f"capture[{place!r}]: expected a site, or a site and a layer")
        site, layer = place if isinstance(place, tuple) else (place, None)
        known = [*self]
        if site not in known:
            raise LookupError(f"{site!r} was not captured; this capture has {', '.join(known)}")

        def read(key: Key) -> Tensor:
            tensor = self.tensors[key]
            if site in ENTROPIES:
                return bits(tensor.double())
            return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

        layers = Layers(read, self.layers(Site(site)).keys)
        if layer is None and layers.keys[0][1] == -1:
            return layers[0]
        if layer is None:
            tensors = [*layers]
            shapes = {tuple(tensor.shape) for tensor in tensors}
            if len(shapes) > 1:
                raise Unavailable(f"{site} has different shapes in different layers {sorted(shapes)}; use layers()")
            return torch.stack(tensors)
        if isinstance(layer, int):
            numbers = [number for _, number in layers.keys]
            if layer not in numbers and not -len(numbers) <= layer < 0:
                whole = numbers == list(range(len(numbers)))
                have = f"0 to {len(numbers) - 1}" if whole else ", ".join(map(str, numbers))
                raise LookupError(f"{site!r} has layers {have}, not {layer}")
            layer = layer if layer < 0 else numbers.index(layer)
        return layers[layer]

    def __iter__(self) -> Iterator[str]:
        """The sites that were captured."""
        return iter(sorted({str(getattr(key[0], "value", key[0])) for key in self.tensors}))

    def __contains__(self, site: object) -> bool:
        """Whether a site was captured."""
        return site in [*self]

    def __repr__(self) -> str:
        sites = ", ".join(self)
        return f"<Capture of {len(self.lengths)} inputs, {len(self.prompt)} rows: {sites}>"

    def layers(self, site: Site | str) -> Layers:
        """The tensors of a site, layer by layer (widths may differ between layers). Raises LookupError."""
        keys = sorted((key for key in self.tensors if key[0] == site), key=lambda key: key[1])
        if not keys:
            raise LookupError(f"{site} was not captured; add Site.{Site(site).name} to the sites")
        return Layers(self.tensors.__getitem__, tuple(keys))

    @property
    def value(self) -> Float[Tensor, "layer row kv_head head_dim"]:
        return self["value"]

    @property
    def key(self) -> Float[Tensor, "layer row kv_head head_dim"]:
        return self["key"]

    @property
    def query(self) -> Float[Tensor, "layer row head head_dim"]:
        return self["query"]

    @property
    def attention(self) -> Float[Tensor, "layer row head key"]:
        return self["attention"]

    @property
    def z(self) -> Float[Tensor, "layer row head head_dim"]:
        return self["z"]

    @property
    def attn_out(self) -> Float[Tensor, "layer row d_model"]:
        return self["attn_out"]

    @property
    def mlp_out(self) -> Float[Tensor, "layer row d_model"]:
        return self["mlp_out"]

    @property
    def residual(self) -> Float[Tensor, "depth row d_model"]:
        return self["residual"]

    @property
    def final(self) -> Float[Tensor, "row d_model"]:
        return self["final"]

    @property
    def log_probs(self) -> Float[Tensor, "row vocabulary"]:
        return self.layers(Site.LOG_PROBS)[0]

    @property
    def entropy(self) -> Float[Tensor, " row"]:
        """Next-token entropy, bits."""
        return self["entropy"]

    @property
    def likely(self) -> Float[Tensor, "row 2 rank"]:
        """Ids and log-probabilities (nats) of the likeliest next tokens."""
        return self.layers(Site.LIKELY)[0]
