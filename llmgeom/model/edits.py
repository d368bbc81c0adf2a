"""An edit: a change made to the activations during a pass, as a value; and where edited passes begin."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from operator import index
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from llmgeom.errors import UserError, brief
from llmgeom.flags import places

Point = Literal["residual", "query", "key", "value", "scores", "attention", "z", "attn_out", "mlp_out"]
POINTS: tuple[Point, ...] = get_args(Point)
BY_HEAD = POINTS[1:7]
BY_KEY: tuple[Point, ...] = ("scores", "attention")


class TokenIds(tuple[int, ...]):
    """The positions that hold one of these tokens."""


Positions = Literal["all", "query"] | tuple[int, ...]


@dataclass(frozen=True)
class Where:
    """The context of an edit: which rows it receives.

    Attributes:
        prompt: [batch] int64, the index of each row in the whole Batch.
        query: [batch position] bool, the positions under examination.
        layer: Of the activation.
        tokens: [batch position] int64, padded; None where the inputs are rows of numbers.
        resumed: [batch position] int64, which position of its text each position of the activation is, in a pass that
            begins at the first one that is edited (`model.resume`); None where they are the same.
    """

    prompt: Tensor
    query: Tensor
    layer: int
    tokens: Tensor | None = None
    resumed: Tensor | None = None

    @property
    def position(self) -> Tensor:
        """[batch position] int64, which position of its text each position of the activation is."""
        places = torch.arange(self.query.shape[1], device=self.query.device).expand_as(self.query)
        return places if self.resumed is None else self.resumed

    def at(self, positions: Positions) -> Tensor:
        """[batch position] bool: which positions are chosen; one that a prompt does not have is left out."""
        places = self.position
        if positions == "all":
            return torch.ones_like(self.query)
        if positions == "query":
            return self.query
        if isinstance(positions, TokenIds):
            if self.tokens is None:
                raise UserError("an edit at a token: these inputs hold no tokens; give positions by number")
            return torch.isin(self.tokens, torch.tensor(positions, device=self.tokens.device))
        last = torch.where(self.query, places, -1).amax(1, keepdim=True)
        wanted = [place if place >= 0 else last + 1 + place for place in positions]
        return torch.stack([places == place for place in wanted]).any(0)


@dataclass(frozen=True)
class Edit:
    """Replace an activation by `function(x, where)` at one point of some layers.

    `Edit("z", lambda x, where: 0 * x, layers=(3,), spec={"do": "zero"})` silences the attention of layer 3;
    `Model.edit` says the same in fewer words.

    Attributes:
        point: What x is.
            residual: [batch position d_model], the input of a layer, whatever it then reads it with.
            query, key, value: [batch position head head_dim] as attention consumes them, after rotary embedding and
                norms; keys and values have true kv heads.
            scores: [batch position head key], q . k before the softmax: scaled, capped and -inf where a query may not
                look. -inf at an edge cuts it, and the softmax shares its weight among the others.
            attention: [batch position head key], the weights that mix the values; nothing is normalised after the edit.
                Neither opens an edge to where a query may not look: what is set there is -inf, or weight 0, again.
            z: [batch position head head_dim], each query head's output before W_O.
            attn_out, mlp_out: [batch position d_model], what the block adds to the residual stream.
        function: (x, where) -> x, of the same shape.
        layers: Which layers, 0 .. L-1, negative from the end; None for all.
        positions: The edit is kept at "all" positions, at the "query" positions (under examination), at places by
            number (negative: back from the last queried one), or at tokens.
        heads: The edit is kept at these heads (of keys and values: kv heads); None for all.
        keys: Of scores and attention, which keys' positions; as `positions`.
        spec: Plain data that says what the function does; a Record stores it in the function's place.

    Raises:
        UserError: A point, positions or an axis that does not exist; a function of another type.
    """

    point: Point
    function: Callable[[Tensor, Where], Tensor]
    layers: tuple[int, ...] | None = None
    positions: Positions = "all"
    spec: Mapping[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None
    keys: Positions = "all"

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise UserError(f"edit point {self.point!r} is unknown; an edit acts on one of {', '.join(POINTS)}")
        if not callable(self.function):
            raise UserError(
                f"edit function {brief(self.function)}: expected a function of (x, where); subject.edit takes a "
                "number, too"
            )
        for name in ("layers", "heads"):
            if (axis := getattr(self, name)) is not None:
                whole = integers(axis, f"edit {name}", "a number or several")
                object.__setattr__(self, name, whole)
        for chosen in (self.positions, self.keys):
            if isinstance(chosen, tuple) and not isinstance(chosen, TokenIds):
                integers(chosen, "edit positions", "'all', 'query' or a tuple of places")
            if not (chosen in ("all", "query") or (isinstance(chosen, tuple) and chosen)):
                raise UserError(f"edit positions {chosen!r}: expected 'all', 'query' or a tuple of places")
        if self.layers is not None and not self.layers:
            raise UserError("an edit of no layers would change nothing; name layers, or None for all")
        if self.heads is not None and (self.point not in BY_HEAD or not self.heads):
            raise UserError(f"edit of heads {self.heads} at {self.point}: name heads of one of {', '.join(BY_HEAD)}")
        if self.keys != "all" and self.point not in BY_KEY:
            raise UserError(f"edit of keys {self.keys} at {self.point}: only {' and '.join(BY_KEY)} have keys")

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of this edit in cache keys."""
        plain = {
            name: {"tokens": list(value)} if isinstance(value, TokenIds) else value
            for name, value in (("at", self.positions), ("keys", self.keys), ("heads", self.heads))
        }
        return {"point": self.point, "layers": self.layers, "spec": dict(self.spec), **plain}

    def on(self, layers: int) -> tuple[int, ...]:
        """The layers it touches in a model of `layers` layers. Raises UserError where one does not exist."""
        if self.layers is None:
            return tuple(range(layers))
        wrong = [layer for layer in self.layers if not -layers <= layer < layers]
        if wrong:
            raise UserError(f"edit of layer {wrong[0]}: this model has layers 0 to {layers - 1}; nothing was edited")
        return tuple(dict.fromkeys(layer % layers for layer in self.layers))  # 0 and -4 may be one layer

    def check_reach(self, where: Where, real: Tensor) -> None:
        """Raises UserError where the edit would change nothing: no prompt has such a position, or such a key.

        Args:
            where: Of all prompts.
            real: [prompt position] bool, without pads.
        """
        places_of: dict[str, Positions] = {"positions": self.positions, "keys": self.keys}
        for what, chosen in places_of.items():
            if not (where.at(chosen) & real).any():
                places = f"tokens {[*chosen]}" if isinstance(chosen, TokenIds) else f"{what} {chosen!r}"
                raise UserError(
                    f"edit of {self.point} at {places}: no prompt has such a position, and nothing would be edited; "
                    f"the longest has {int(real.sum(1).max())} tokens"
                )

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """The edited activation. Raises UserError where the function changes the shape, or a head does not exist."""
        edited = self.function(x.clone(), where)  # a function that writes in place must not reach what stays
        if not isinstance(edited, Tensor):
            raise UserError(
                f"the edit at {self.point} returned a {type(edited).__name__}: an edit returns a tensor of the shape "
                f"that it is given, {tuple(x.shape)}"
            )
        if edited.shape != x.shape:
            raise UserError(
                f"the edit at {self.point} returned shape {tuple(edited.shape)} for {tuple(x.shape)}: "
                "an edit keeps the shape"
            )
        edited = edited.to(x.dtype)
        if self.positions != "all":
            edited = edited.where(where.at(self.positions).view(*x.shape[:2], *[1] * (x.dim() - 2)), x)
        if self.heads is not None:
            if wrong := [head for head in self.heads if not 0 <= head < x.shape[2]]:
                raise UserError(f"edit of head {wrong[0]} at {self.point}: there are heads 0 to {x.shape[2] - 1}")
            chosen = torch.zeros(x.shape[2], dtype=torch.bool, device=x.device)
            chosen[list(self.heads)] = True
            edited = edited.where(chosen[:, None], x)
        return edited if self.keys == "all" else edited.where(where.at(self.keys)[:, None, None], x)


# ---- where edited passes begin ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Clean:
    """What the clean pass of a batch leaves to edited ones.

    Attributes:
        residual: [layer] of [input position d_model], the input of each layer.
        key, value: [layer] of [input kv_head position dim], as attention consumes them.
        masks: [layer] [position position] bool, True where a query (row) may look; None where it sees all before it.
        returns: How many things each layer returns: 0 for a tensor alone, n for a tuple with the stream first.
        further: (site, layer) -> [input position ...], where observers read every position.
    """

    residual: tuple[Tensor, ...]
    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    masks: tuple[Tensor | None, ...]
    returns: tuple[int, ...]
    further: Mapping[tuple[Any, int], Tensor] = field(default_factory=dict)


NOTHING = Clean((), (), (), (), ())  # for passes in which no position reads another


@dataclass(frozen=True, eq=False)
class Resume:
    """Where the edited passes of a batch begin.

    Attributes:
        start: The first layer that runs.
        first: [input] the first position that runs: no edit and no row that is read lies before it. Inputs beyond the
            batch's own are further copies of it, one after another; of the batch alone it holds for every copy.
        end: The first layer that no longer runs, as nothing above is read; None for all.
    """

    clean: Clean
    start: int
    first: Tensor
    end: int | None = None

    def left(self, lengths: Tensor) -> Tensor:
        """[input] how many positions of inputs of these lengths run."""
        return lengths - self.first.repeat(len(lengths) // len(self.first))

    def of(self, members: Sequence[int], lengths: Tensor) -> Resumed:
        """The part of some inputs of these lengths that runs."""
        lines = torch.tensor(members)
        first = self.first[lines % len(self.first)]
        position = first[:, None] + torch.arange(int((lengths - first).max()))
        own = lines % len(self.clean.residual[0] if self.clean.residual else self.first)
        return Resumed(self.clean, self.start, own, position, int(lengths.max()), self.end)


@dataclass(frozen=True, eq=False)
class Resumed:
    """One pass that is resumed.

    Attributes:
        start: The first layer that runs.
        own: [input] its number in the clean batch.
        position: [input place] the position of each place that runs; from `width` on there is none.
        width: The length of the longest input.
        end: The first layer that no longer runs; None for all.
    """

    clean: Clean
    start: int
    own: Tensor
    position: Tensor
    width: int
    end: int | None = None

    def cut(self, x: Tensor) -> Tensor:
        """[input place ...] of x [input position]; beyond the end what is at the end, which nothing reads."""
        return x.gather(1, self.position.clamp(max=x.shape[1] - 1))

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """(input, place) of every position that is there."""
        line, place = (self.position < self.width).nonzero(as_tuple=True)
        return line, place

    def stream(self, device: torch.device) -> Tensor:
        """[input place d_model] the input of the first layer that runs."""
        at = self.position.clamp(max=self.width - 1)
        return self.clean.residual[self.start][self.own[:, None], at].to(device)

    def joined(self, layer: int, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Any, Any, Any]:
        """Keys and values [input kv_head position dim] of this pass among the clean ones, and the mask
        [input 1 place position] of its queries; all as they are where nothing was clean."""
        if self.clean is NOTHING:
            return key, value, mask
        line, place = self.real
        at = self.position[line, place]
        states = []
        for clean, ours in ((self.clean.key[layer], key), (self.clean.value[layer], value)):
            whole = clean[self.own, :, : self.width].to(ours.device)
            whole[line, :, at] = ours.transpose(1, 2)[line, place]
            states.append(whole)
        mask, position = self.clean.masks[layer], self.position.clamp(max=self.width - 1)
        if mask is None:
            looks = torch.arange(self.width) <= position[..., None]
        else:
            looks = mask.to(position.device)[position, : self.width]
        return states[0], states[1], looks[:, None].to(key.device)


# ---- edits in few words ----------------------------------------------------------------------------------------------


def made(
    point: str,
    fn: Callable[..., Tensor] | float | Tensor,
    layers: int | slice | range | list[int] | tuple[int, ...] | None,
    depth: int,
    spec: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Edit:
    """The edit that `Model.edit` describes, in a model of `depth` layers. Raises UserError as Edit does."""
    if isinstance(layers, str):
        layers = None if layers == "all" else places("layers", layers, depth)
    if isinstance(layers, slice):
        layers = range(depth)[layers]
    if layers is not None:
        layers = integers(layers, "edit layers", "a number, a slice, or a list of numbers")
    if callable(fn):
        function = fn if _reads_where(fn) else lambda x, where: fn(x)
    elif isinstance(fn, Tensor | np.ndarray):
        value = torch.as_tensor(fn)

        def function(x: Tensor, where: Where) -> Tensor:
            """The tensor in the place of x, repeated along the axes that it does not have."""
            try:
                return value.to(x).expand_as(x)
            except RuntimeError:
                shapes = f"{tuple(value.shape)}: x has shape {tuple(x.shape)}"
                raise UserError(f"an edit to a tensor of shape {shapes}") from None

    elif isinstance(fn, Real):
        function, spec = (lambda x, where: torch.full_like(x, fn)), spec or {"set to": str(fn)}
    else:
        raise UserError(f"edit fn={brief(fn)}: expected a function, a number or a tensor")
    named: Any = point.replace(" ", "_") if isinstance(point, str) else point
    return Edit(named, function, layers, spec=spec or {}, **rest)


def integers(chosen: Any, what: str, expected: str) -> tuple[int, ...]:
    """One whole number or several, of Python, NumPy or torch, as a tuple.

    Raises:
        UserError: Something else, True and False among it: a mask would be read as the numbers 1 and 0.
    """
    try:
        several: list[Any] = [*chosen] if isinstance(chosen, Iterable) and getattr(chosen, "ndim", True) else [chosen]
        if not any(isinstance(number, bool) for number in several):
            return tuple(index(number) for number in several)
    except TypeError:
        pass
    raise UserError(f"{what}={brief(chosen)}: expected {expected}")


def refusing(model: Any) -> Any:
    """A model with the same modules that refuses to run or to be saved: either would leave the edits out in silence.

    It is what `.model` of an edited subject is; `original` gives the model that runs.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError(
            "this model has edits, which its own forward, generate and save_pretrained would leave out: call capture "
            "or generate of the edited model itself, edited.generate(...), not edited.model.generate(...)"
        )

    view = copy.copy(original(model))
    vars(view).update(forward=refuse, generate=refuse, save_pretrained=refuse, _orig_mod=original(model))
    return view


def original(model: Any) -> Any:
    """The model that runs, of one that torch.compile wrapped or that refuses to."""
    return getattr(model, "_orig_mod", model)


def _reads_where(fn: Callable[..., Tensor]) -> bool:
    """Whether a function takes (x, where), not x alone."""
    try:
        parameters = inspect.signature(getattr(fn, "forward", fn)).parameters  # a module's own call takes anything
    except (ValueError, TypeError):  # torch's built-in functions have no signature
        return False
    places = [one for one in parameters.values() if one.kind <= one.POSITIONAL_OR_KEYWORD]
    return sum(one.default is one.empty for one in places) > 1 or any(one.name == "where" for one in places)
