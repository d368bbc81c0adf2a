"""The config of a wind tunnel's own architectures."""

from __future__ import annotations

from transformers import PreTrainedConfig


class TunnelConfig(PreTrainedConfig):
    """The shape of a TunnelForCausalLM.

    Attributes:
        mixer: One of MIXERS.
        inner_size: States of a channel's memory (mamba2, mamba), width of the LSTM's state, or of the MLP (mlp,
            meanpool, flat).
        num_heads: Decays of a layer (mamba2).
    """

    model_type = "llmgeom_tunnel"

    mixer: str = "mamba2"
    vocab_size: int = 16
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_heads: int = 4
    inner_size: int = 16
    max_position_embeddings: int = 64
    initializer_range: float = 0.02
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
