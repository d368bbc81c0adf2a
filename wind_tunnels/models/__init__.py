"""Architectures for tunnels: configs of transformers, and our short models, which are PreTrainedModels too.

This module is light. models.architectures registers our classes with transformers, so that AutoModelForCausalLM loads
saved models.
"""

ARCHITECTURES = {
    "neox": "transformer, GPT-NeoX: rotary positions, attention and MLP side by side",
    "llama": "transformer, Llama: rotary positions, RMS norm, gated MLP",
    "gqa": "llama whose query heads share keys and values in fours",
    "window": "transformer, Mistral: a position sees itself and what is less than a third of the length back",
    "gpt2": "transformer, GPT-2: learned positions",
    "mamba2": "state space, one decay a head (Mamba-2), in its quadratic form",
    "mamba": "state space, one decay a channel and state (Mamba-1), a loop over positions",
    "lstm": "LSTM layers, pre-norm and residual (the papers' stack is plain)",
    "mlp": "MLP on each position alone: it sees no context, a null",
    "meanpool": "MLP and the mean of all positions so far: a bag of tokens",
    "flat": "MLP on the flattened prefix: a linear map of its own for each position, summed",
}
