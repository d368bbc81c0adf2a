"""Several symbols with unknown shares, a point of a simplex that the counts narrow down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llmgeom.answers import dirichlet_multinomial
from llmgeom.sampling import Generator, dirichlet
from llmgeom.wind_tunnels.exchangeable import Exchangeable


@dataclass(frozen=True)
class Dirichlet(Exchangeable):
    """Symbols with shares from Dirichlet(a, ..., a).

    The hidden cause is a point of the simplex, not a finite state: its posterior mean is the predictive,
    (a + n_j) / (a K + n).

    Attributes:
        symbols: K.
        a: 1 is uniform on the simplex.
    """

    symbols: int = 3
    a: float = 1.0

    def __post_init__(self) -> None:
        self.require(self.symbols >= 2 and self.steps >= 1, "2 or more symbols and 1 or more steps")
        # Below 0.01 all Gamma variables of a draw may round to 0.
        self.require(self.a >= 0.01, f"a of 0.01 or more, since a Dirichlet({self.a:g}, ...) prior has no mass to draw")

    @property
    def outcomes(self) -> int:
        return self.symbols

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """The shares, [n symbol]."""
        return dirichlet((n, self.symbols), generator, self.a)

    def after(self, inputs: Tensor, seen: Tensor) -> Tensor:
        return dirichlet_multinomial(seen, self.a)
