"""An edit: a change made to the activations during a pass, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from llmgeom.errors import UserError

Point = Literal["residual", "value", "z", "attention_write", "mlp_write"]
POINTS: tuple[Point, ...] = ("residual", "value", "z", "attention_write", "mlp_write")


@dataclass(frozen=True)
class Where:
    """What an edit may need to know of the rows it is given: `prompt` [batch] int64, the index of each row in the
    whole Batch; `query` [batch position] bool, the positions under examination; `layer`."""

    prompt: Tensor
    query: Tensor
    layer: int


@dataclass(frozen=True)
class Edit:
    """Replace an activation by `function(x, where)` at one point of some layers.

    point      residual         x is [batch position d_model]: the input of a layer, whatever it then reads it with.
               value            x is [batch position kv_head head_dim]: what attention mixes, true kv heads.
               z                x is [batch position head head_dim]: each query head's output before W_O.
               attention_write, mlp_write
                                x is [batch position d_model]: what the block adds to the residual stream.
    layers     which layers, 0 .. L-1, or None for all.
    positions  "all", or "query": the edit is kept only at the positions under examination.
    spec       plain data that says what the function does; a Record stores it in the function's place.

    `Edit("z", lambda x, where: 0 * x, layers=(3,), spec={"do": "zero"})` silences the attention of layer 3.
    """

    point: Point
    function: Callable[[Tensor, Where], Tensor]
    layers: tuple[int, ...] | None = None
    positions: Literal["all", "query"] = "all"
    spec: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise UserError(f"edit point {self.point!r} is unknown; an edit acts on one of {', '.join(POINTS)}")
        if self.positions not in ("all", "query"):
            raise UserError(f"edit positions {self.positions!r}: expected 'all' or 'query'")
        if self.layers is not None and not self.layers:
            raise UserError("an edit of no layers would change nothing; name layers, or None for all")

    def on(self, layers: int) -> tuple[int, ...]:
        """The layers it touches in a model of `layers` layers. Raises UserError where one does not exist."""
        if self.layers is None:
            return tuple(range(layers))
        wrong = [layer for layer in self.layers if not 0 <= layer < layers]
        if wrong:
            raise UserError(f"edit of layer {wrong[0]}: this model has layers 0 to {layers - 1}; nothing was edited")
        return self.layers

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """The edited activation. Raises UserError where the function changes the shape."""
        edited = self.function(x, where)
        if edited.shape != x.shape:
            raise UserError(
                f"the edit at {self.point} returned shape {tuple(edited.shape)} for {tuple(x.shape)}: "
                "an edit keeps the shape"
            )
        edited = edited.to(x.dtype)
        if self.positions == "query":
            mask = where.query.reshape(*where.query.shape, *([1] * (x.dim() - 2)))
            return edited.where(mask, x)
        return edited
