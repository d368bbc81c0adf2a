"""Captures as matrices of one layer, and what each row is: its entropy, token and position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from llmgeom.batch import Text
from llmgeom.probe import Capture, Site


def as_matrix(x: Tensor) -> np.ndarray:
    """[row coordinate] float64, heads concatenated if the site has heads."""
    return x.flatten(1).double().numpy()


def layer_matrices(capture: Capture, site: Site) -> Iterator[np.ndarray]:
    """`as_matrix`, one layer at a time."""
    return map(as_matrix, capture.layers(site))


def last_layer(capture: Capture, site: Site) -> np.ndarray:
    """`as_matrix` of the last layer."""
    return as_matrix(capture.layers(site)[-1])


def captured(capture: Capture, site: Site) -> bool:
    """Whether a site is in the capture; some models lack optional sites."""
    return any(key == site for key, _ in capture.tensors)


def varies(x: np.ndarray) -> bool:
    """Whether any coordinate differs between two rows."""
    return bool((x.max(0) != x.min(0)).any())


def input_at_rows(capture: Capture) -> Tensor:
    """[row] the token id at each row's position; for real-valued inputs [row feature]."""
    inputs = capture.batch.inputs
    assert not isinstance(inputs, Text), "a scan tokenizes its batches before it captures them"
    return inputs.data[capture.prompt, capture.position]


def final_tokens(capture: Capture) -> np.ndarray:
    """[row] the token id at each row's position; equal real-valued inputs have the same number."""
    inputs = input_at_rows(capture).numpy()
    return inputs if inputs.ndim == 1 else np.unique(inputs, axis=0, return_inverse=True)[1].reshape(-1)
