"""A model of any architecture in float64, its inputs, and its logits."""

import torch
from torch import Tensor

from llmgeom.wind_tunnels.models.architectures import build

V, T = 11, 13
SHAPE = {"vocabulary": V, "length": T, "width": 32}
EXACT = {"rtol": 0.0, "atol": 1e-12}


def made(arch: str, features: int = 0, **shape):
    """A model in float64 whose weights are large enough that every input leaves a trace."""
    model = build(arch, features=features, **{**SHAPE, **shape}).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.mul_(4)
    return model


def inputs(features: int, batch: int = 3, length: int = T, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if features:
        return torch.randn(batch, length, features, dtype=torch.float64, generator=generator)
    return torch.randint(V, (batch, length), generator=generator)
