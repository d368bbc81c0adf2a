"""Any causal LM on rows of real numbers: a linear map takes the place of its embedding."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


class RowsConfig(PreTrainedConfig):
    """Of a RowsForCausalLM.

    Attributes:
        features: real numbers in a row.
        text_config: of the model inside; its vocabulary is the outputs of the head.
    """

    model_type = "llmgeom_rows"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 (transformers' own way to say so)

    features: int = 1
    text_config: dict | PreTrainedConfig | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = CONFIG_MAPPING[self.text_config["model_type"]](**self.text_config)
        super().__post_init__(**kwargs)


class RowsForCausalLM(PreTrainedModel):
    """inner(inputs_embeds=read(rows)). The model inside keeps an embedding that nothing reads, so that it can be saved
    and loaded as what it is."""

    config_class = RowsConfig
    main_input_name = "rows"
    _input_embed_layer = "read"
    _supports_sdpa = True

    def __init__(self, config: RowsConfig) -> None:
        super().__init__(config)
        inner = config.get_text_config()
        self.read = nn.Linear(config.features, inner.hidden_size)
        self.inner = AutoModelForCausalLM.from_config(inner)
        self.post_init()

    @property
    def without_attention(self) -> str:
        """Of the model inside; empty where it has attention."""
        return getattr(self.inner, "without_attention", "")

    @property
    def layers(self) -> nn.ModuleList:
        """Of a model inside without attention; in others they are found by their attention."""
        return self.inner.layers

    def _can_set_attn_implementation(self) -> bool:  # type: ignore[override]  # theirs is of the class
        """transformers asks the class; here it depends on the model inside."""
        return self.inner._can_set_attn_implementation()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, rows: Float[Tensor, "batch seq feature"], **kwargs: Any) -> Any:
        """As the model inside: logits_to_keep, position_ids, use_cache ..."""
        return self.inner(inputs_embeds=self.read(rows.to(self.read.weight.dtype)), **kwargs)


AutoConfig.register(RowsConfig.model_type, RowsConfig, exist_ok=True)
AutoModelForCausalLM.register(RowsConfig, RowsForCausalLM, exist_ok=True)
