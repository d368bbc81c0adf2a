"""How a model is run: one forward pass, seen by a recorder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.model.attention import Recorder, attached, implementation, interface_kind, recording
from llmgeom.model.batching import ropes
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Edit
from llmgeom.model.layers import Block, attending, blocks, without_attention

Backend = Literal["transformers", "tl"]


class Forward(Protocol):
    """How a model is run. There are two: through transformers (here) and through TransformerLens.

    Attributes:
        backend: the name of this way, as `--backend` takes it.
        remedy: what to try where the self-check fails.
    """

    backend: ClassVar[Backend]
    remedy: ClassVar[str]

    @property
    def attention(self) -> str:
        """How attention is computed and read now, in words: `set_attn_implementation` changes it."""

    @property
    def concurrent(self) -> bool:
        """Whether several passes may run at the same time."""

    def attached(self, attention: bool = True) -> AbstractContextManager[None]:
        """Holds while passes run; `attention` says whether they read or edit it."""

    def logits(self, inputs: Tensor, **options: Any) -> Tensor:
        """Logits [row vocabulary] of inputs [input seq ...], at the rows that a hook on the output embedding keeps."""

    def run(self, recorder: Recorder, inputs: Tensor) -> Tensor:
        """One pass that `recorder` sees; the logits of its rows, [row vocabulary]."""


class Reader(Protocol):
    """A `Subject`, as the modules that it imports see it: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    @property
    def blocks(self) -> tuple[Block, ...]: ...
    @property
    def forward(self) -> Forward: ...
    @property
    def edits(self) -> tuple[Edit, ...]: ...
    @property
    def weight_hash(self) -> str: ...
    @property
    def unembed(self) -> Callable[[Tensor], Tensor]: ...
    def tokens(self, batch: Batch) -> Tokens | Rows: ...
    def unavailable(self, sites: Iterable[Site], layers: Iterable[int] | None = None) -> str: ...
    def partial(self, sites: Iterable[Site]) -> str: ...
    def capture(self, batch: Batch, sites: Iterable[Site], *args: Any, **options: Any) -> Capture: ...


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
class TransformersForward:
    """A transformers model. Attention that runs through the attention interface is read, where there is such."""

    model: Any
    name: str
    blocks: Sequence[Block]
    backend: ClassVar[Backend] = "transformers"
    remedy: ClassVar[str] = "try --backend tl"

    @property
    def attention(self) -> str:
        if why := without_attention(self.model, self.blocks):
            return f"none: {why}"
        return f"{implementation(self.model)} through {interface_kind(self.model, self.name)}"

    @property
    def concurrent(self) -> bool:
        """On a CPU, unless a pass writes to the model: through hooks of the user's; to weights that are packed in their
        first pass; to a RoPE whose frequencies follow the longest prompt of the batch."""
        config = getattr(self.model, "config", None)
        following = any(rope["rope_type"] in ("dynamic", "longrope") for rope in ropes(config))
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules())
        elsewhere = any(weight.device.type != "cpu" for weight in self.model.parameters())
        return not (elsewhere or following or hooked or getattr(config, "quantization_config", None))

    @contextmanager
    def attached(self, attention: bool = True) -> Iterator[None]:
        """A pass that reads no attention is the plain model's: some families have attention that cannot be read."""
        read = attention and any(block.attention is not None for block in self.blocks)
        with full_float32(), attached(self.model, self.name) if read else nullcontext():
            yield

    def run(self, recorder: Recorder, inputs: Tensor) -> Tensor:
        with recording(recorder, self.blocks, self.model.get_output_embeddings()):
            resumed = recorder.resumed
            at = None if resumed is None else resumed.position.clamp(max=resumed.width - 1)
            return self.logits(inputs, at)

    def logits(self, inputs: Tensor, position: Tensor | None = None, **options: Any) -> Tensor:
        """No mask is given: right pads come after every real token, and a causal model does not look ahead.

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


def through_transformers(model: Any, name: str) -> tuple[TransformersForward, tuple[Block, ...], dict[str, Any]]:
    """How to run a model, its layers, and how its attention is read, as a fact.

    Raises UnsupportedModel where its attention cannot be read.
    """
    layers = blocks(model, name)
    read = attending(layers)
    if read:
        interface_kind(model, name)
    forward = TransformersForward(model, name, layers)
    facts: dict[str, Any] = {"attention": forward.attention, "layers": len(layers)}
    if 0 < len(read) < len(layers):
        facts["attention_layers"] = list(read)
    return forward, layers, facts
