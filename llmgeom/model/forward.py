"""How a model is run: one forward pass, seen by a recorder; and its own way from a residual to logits, for a lens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.errors import Unavailable
from llmgeom.model.attention import Recorder, attached, implementation, interface_kind, recording
from llmgeom.model.batching import ropes
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Edit
from llmgeom.model.layers import Block, attending, blocks, without_attention

Backend = Literal["transformers", "tl"]


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 in float32, whatever the caller chose for its own work: a cache key does not hold that choice.

    By default torch lets cuDNN's recurrences and convolutions round to TF32. Measured on an H200: the logits of an LSTM
    were then .002 of their rms from those of the CPU. Products are float32 by default; `set_float32_matmul_precision`
    and `autocast` change that.
    """
    backends: Any = torch.backends
    cudnn = backends.cudnn
    kinds = (cudnn.rnn, cudnn.conv, backends.cuda.matmul, backends.mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    # The old names, which set several at once: torch refuses to read them where they and the new ones differ.
    old = "highest" if before[2] != "tf32" else "medium" if before[3] == "bf16" else "high"
    cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        cudnn.allow_tf32 = "tf32" in before[:2]
        torch.set_float32_matmul_precision(old)
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


@dataclass(frozen=True, eq=False)
class Forward:
    """How a transformers model is run; `transformer_lens.BridgeForward` runs one through TransformerLens.

    Attention that runs through transformers' attention interface is read, where there is such.

    Attributes:
        backend: The name of this way, as `--backend` takes it.
    """

    model: Any
    name: str
    blocks: Sequence[Block]
    backend: ClassVar[Backend] = "transformers"

    @property
    def attention(self) -> str:
        """How attention is computed and read now, in words: `set_attn_implementation` changes it."""
        if why := without_attention(self.model, self.blocks):
            return f"none: {why}"
        return f"{implementation(self.model)} through {interface_kind(self.model, self.name)}"

    @property
    def concurrent(self) -> bool:
        """Whether several passes may run at the same time: on a CPU, unless a pass writes to the model, through hooks
        of the user's, to weights that are packed in their first pass, or to a RoPE whose frequencies follow the longest
        prompt of the batch."""
        config = getattr(self.model, "config", None)
        following = any(rope["rope_type"] in ("dynamic", "longrope") for rope in ropes(config))
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules())
        elsewhere = any(weight.device.type != "cpu" for weight in self.model.parameters())
        return not (elsewhere or following or hooked or getattr(config, "quantization_config", None))

    @contextmanager
    def attached(self, attention: bool = True) -> Iterator[None]:
        """Holds while passes run; `attention` says whether they read or edit it. A pass that does not is the plain
        model's: some families have attention that cannot be read."""
        read = attention and self.backend == "transformers" and any(block.attention for block in self.blocks)
        with full_float32(), attached(self.model, self.name) if read else nullcontext():
            yield

    def run(self, recorder: Recorder, inputs: Tensor) -> Tensor:
        """One pass that `recorder` sees; the logits of its rows, [row vocabulary]."""
        with recording(recorder, self.blocks, self.model.get_output_embeddings()):
            resumed = recorder.resumed
            at = None if resumed is None else resumed.position.clamp(max=resumed.width - 1)
            return self.logits(inputs, at)

    def logits(self, inputs: Tensor, position: Tensor | None = None, **options: Any) -> Tensor:
        """Logits [row vocabulary] of inputs [input seq ...], at the rows that a hook on the output embedding keeps.

        No mask is given: right pads come after every real token, and a causal model does not look ahead.
        position: [input seq] the number of each position; None where they count from 0.
        """
        weight = self.model.get_input_embeddings().weight
        device = torch.device("cpu") if weight.is_meta else weight.device  # on disk: accelerate takes inputs along
        inputs = inputs.to(device)
        read = {"rows": inputs.to(weight.dtype)} if inputs.is_floating_point() else {"input_ids": inputs}
        if self.takes_positions:
            count = torch.arange(inputs.shape[1], device=device).expand(inputs.shape[:2])
            read["position_ids"] = count if position is None else position.to(device)
        return self.model(**read, use_cache=False, **options).logits[:, 0]

    @cached_property
    def takes_positions(self) -> bool:
        """Whether the model knows positions by number: BLOOM, RWKV and Mamba do not."""
        return "position_ids" in inspect.signature(type(self.model).forward).parameters


def through_transformers(model: Any, name: str) -> tuple[Forward, tuple[Block, ...], dict[str, Any]]:
    """How to run a model, its layers, and how its attention is read, as a fact.

    Raises UnsupportedModel where its attention cannot be read.
    """
    layers = blocks(model, name)
    read = attending(layers)
    if read:
        interface_kind(model, name)
    forward = Forward(model, name, layers)
    facts: dict[str, Any] = {"attention": forward.attention, "layers": len(layers)}
    if 0 < len(read) < len(layers):
        facts["attention_layers"] = list(read)
    return forward, layers, facts


@dataclass(frozen=True, eq=False)
class Reader:
    """A `Model`, as the modules that it imports see it."""

    model: Any
    tokenizer: Any
    name: str
    facts: Mapping[str, Any]
    blocks: tuple[Block, ...]
    forward: Forward
    edits: tuple[Edit, ...] = ()

    if TYPE_CHECKING:

        @property
        def weight_hash(self) -> str: ...
        @property
        def unembed(self) -> Callable[[Tensor], Tensor]: ...
        def tokens(self, batch: Batch) -> Tokens | Rows: ...
        def unavailable(self, sites: Iterable[Site], layers: Iterable[int] | None = None) -> str: ...
        def partial(self, sites: Iterable[Site]) -> str: ...
        def capture(self, batch: Batch, sites: Iterable[Site], *args: Any, **options: Any) -> Capture: ...


def probe_batch(facts: Mapping[str, Any]) -> Batch:
    """Two random input sequences for a model with these facts, long enough for a small sliding window to act."""
    generator = torch.Generator().manual_seed(0)
    length = min(24, facts["positions"] or 24)
    if facts["window"] and facts["window"] < 64:
        length = min(2 * facts["window"], facts["positions"] or 128)
    lengths = torch.tensor([length, length - 3 if length > 4 else length])
    inputs: Rows | Tokens
    if facts["features"]:
        inputs = Rows(torch.randn(2, length, facts["features"], generator=generator), lengths)
    else:
        inputs = Tokens(torch.randint(facts["vocabulary"], (2, length), generator=generator), lengths)
    return Batch(inputs, ("a", "b"), {"kind": "self_check"})


# ---- from the last residual to the logits ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Unembedding:
    """Final norm (or the identity), and the model's own code from there to its logits: its output embedding and what
    stands before and after it (a soft-cap, a scale, a dense layer, or nothing).

    Attributes:
        norm: The module between the last layer and the output embedding.
        head: The output embedding.
        logits: Normalised states [row 1 d_model] -> logits [row 1 vocabulary].
        dtype: Of the residual stream, which Mamba keeps in float32.
    """

    norm: nn.Module
    head: nn.Module
    logits: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    @torch.no_grad()
    def __call__(self, residual: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocabulary"]:
        """Log-probabilities in nats, float32, where the residual is."""
        hidden = self.norm(residual.to(next(self.head.parameters()).device, self.dtype)[:, None])
        return self.logits(hidden)[:, 0].log_softmax(-1, dtype=torch.float32).to(residual.device)


class _Given(nn.Module):
    """Stands in the place of a model's decoder: it returns the states that it is given."""

    def __init__(self, decoder: nn.Module, state: Tensor) -> None:
        super().__init__()
        self.of = [decoder]  # not a child: it answers for what a head reads of it (Falcon-H1's lm_head_multiplier)
        self.state = state

    def __getattr__(self, name: str) -> Any:
        return vars(self)[name] if name in vars(self) else getattr(vars(self)["of"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.state)


class _Output(SimpleNamespace):
    """What a decoder returns: fields that are not there are None, as transformers has it; also a tuple."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]


@torch.no_grad()
def unembedding_of(reader: Reader) -> Unembedding:
    """Found by trial on two random sequences: the norm is the module next to the layers from which the model's own
    head, or its output embedding alone, gives the model's own log-probabilities.

    Raises Unavailable: none does, or the output embedding is not in memory.
    """
    model = reader.model  # a lens that held its reader would keep both in memory until the next collection
    prefix = getattr(model, "base_model_prefix", "")
    plain = replace(reader, edits=())  # an edit at a token or a place may not meet it here
    seen = plain.capture(probe_batch(reader.facts), {Site.RESIDUAL, Site.LOG_PROBS})
    last = seen.layers(Site.RESIDUAL)[-1]
    head = model.get_output_embeddings()
    if head is None or next(head.parameters()).is_meta:
        raise Unavailable(f"{reader.name} has no output embedding in memory; a logit lens reads through it")
    # The same code on the same numbers: what differs is the shape of a batch, which rounds otherwise.
    near = 1e-4 if reader.facts["dtype"] == "float32" else 3e-2
    spread = float(seen.log_probs.std(-1).mean())

    def own_head(states: Tensor) -> Tensor:
        """The model's forward with states in the place of its decoder's, with whatever its family does there."""
        shallow = copy.copy(model)
        shallow._modules = {**model._modules, prefix: _Given(model._modules[prefix], states)}
        tokens = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        # Of the class: accelerate puts a forward on the object, which would move to another device.
        return type(model).forward(shallow, input_ids=tokens, use_cache=False).logits

    ways = [own_head] if model._modules.get(prefix) is not None else []
    # Modules next to a list of layers; the norm is mostly one. Two in their order, too: OPT-350m projects after it.
    beside: list[nn.Module] = []
    for owner in model.modules():
        if any(isinstance(child, nn.ModuleList) for child in owner.children()):
            beside += [child for child in owner.children() if not isinstance(child, nn.ModuleList | nn.Embedding)]
    for norm in (*beside, nn.Identity()):
        for logits in (*ways, head):
            found = Unembedding(norm, head, logits, last.dtype)
            try:
                ours = found(last)
            except (TypeError, RuntimeError, ValueError, AttributeError):  # not a module of one tensor: no norm
                continue
            if ours.shape == seen.log_probs.shape and (ours - seen.log_probs).abs().max() <= near * spread:
                return found
    raise Unavailable(
        f"{reader.name}: how model type {reader.facts['model_type']!r} goes from its last layer to its logits is not "
        "known; a logit lens would not be its own"
    )
