"""Loaded dice: which of six faces is loaded?"""

from dataclasses import dataclass, replace

import torch

from llmgeom.sampling import integers, uniforms
from llmgeom.world import Categorical, Sequences, World


@dataclass(frozen=True)
class Dice(World):
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

    def showing(self, k):
        return replace(self, throws=k + 1)

    def hypothesis(self, n, generator):
        return integers(6, generator, n, 1)

    def draw(self, hypothesis, generator, training=False):
        bounds = self.faces(generator.device)[hypothesis[:, 0]].cumsum(1)[:, None, :-1]
        faces = (uniforms(generator, len(hypothesis), self.throws)[..., None] >= bounds).sum(-1)
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
