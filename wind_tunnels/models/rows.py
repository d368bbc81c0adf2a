"""Any causal LM on rows of real numbers: a linear map replaces its embedding."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


class RowsConfig(PreTrainedConfig):
    """The config of a RowsForCausalLM.

    Attributes:
        features: real numbers in a row.
        text_config: config of the inner model; its vocabulary is the number of outputs of the head.
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
    """A causal LM on rows: inner(inputs_embeds=read(rows)). The inner model keeps its unused embedding, so that it can
    be saved and loaded as its own class."""

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
        """Why the inner model has no attention; empty if it has."""
        return getattr(self.inner, "without_attention", "")

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of an inner model without attention; other models' layers are found by their attention."""
        return self.inner.layers

    def _can_set_attn_implementation(self) -> bool:  # type: ignore[override]  # theirs is of the class
        """transformers calls this on the class; here the result depends on the inner model."""
        return self.inner._can_set_attn_implementation()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, rows: Float[Tensor, "batch seq feature"], **kwargs: Any) -> Any:
        """The forward of the inner model, with its arguments: logits_to_keep, position_ids, use_cache ..."""
        return self.inner(inputs_embeds=self.read(rows.to(self.read.weight.dtype)), **kwargs)


AutoConfig.register(RowsConfig.model_type, RowsConfig, exist_ok=True)
AutoModelForCausalLM.register(RowsConfig, RowsForCausalLM, exist_ok=True)
