"""Loaded dice: which of six faces is loaded?"""

from dataclasses import dataclass

import torch

from llmgeom.task import Categorical, Sequences, Task


@dataclass(frozen=True)
class Dice(Task):
    """A die with one loaded face, thrown again and again; the next throw is asked."""

    throws: int = 12
    load: float = 0.5  # probability of the loaded face; the others share the rest

    memorisable = "there are six hypotheses"
    vocabulary, answers = 7, Categorical(tuple(range(6)))  # token 6 stands before the first throw

    @property
    def length(self):
        return self.throws

    @property
    def query(self):
        return tuple(range(self.throws))

    def hypothesis(self, n, generator):
        return torch.randint(6, (n, 1), generator=generator, device=generator.device)

    def draw(self, hypothesis, generator, training=False):
        each = self.faces(generator.device)[hypothesis[:, 0]]
        faces = torch.multinomial(each, self.throws, replacement=True, generator=generator)
        start = torch.full_like(faces[:, :1], 6)
        return Sequences(torch.cat([start, faces[:, :-1]], 1), faces)

    def log_predictive(self, inputs):
        seen = torch.nn.functional.one_hot(inputs, 7)[..., :6].cumsum(1).double()
        faces = self.faces(inputs.device).double()
        belief = (seen @ faces.log().T).log_softmax(-1)  # [sequence query hypothesis]
        return (belief.exp() @ faces).log()

    def faces(self, device):
        """P(face | which is loaded), [hypothesis face]."""
        even = (1 - self.load) / 5
        return even + torch.eye(6, device=device) * (self.load - even)
