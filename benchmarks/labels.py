"""What a label probe costs after capture: CPU and wall seconds, and peak memory, without and with draws of controls.

    python benchmarks/labels.py [--prompts 10000] [--layers 24] [--width 1024] [--draws 20]

Random activations of one site, made layer by layer when they are read, as those of a store are read from disk; a binary
label, one prompt a cluster, 199 orders of the label, and confounds of 21 columns. OMP_NUM_THREADS=2 for two threads.
"""

import argparse
import os
import resource
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy is imported before llmgeom, which sets it

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Tokens
from llmgeom.model.capture import Capture, Key, LazyTensors, Site
from llmgeom.plan import MOST
from llmgeom.probe import ProbeInput
from llmgeom.probes.labels.probe import LabelProbe

LENGTH, VOCABULARY, TOPICS = 12, 3000, 15
SPENT: list[float] = []  # CPU seconds in which activations are made


def made(prompts: int, layers: int, width: int, draws: int) -> ProbeInput:
    """The input of the probe: all prompts, and those that controls read with the controls."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, VOCABULARY, (prompts, LENGTH)))
    label = rng.integers(0, 2, prompts)
    batch = Batch(
        Tokens(ids, torch.full((prompts,), LENGTH)),
        tuple(map(str, range(prompts))),
        {"name": "random"},
        columns={
            "label": tuple("ab"[i] for i in label),
            "topic": tuple(f"topic {i}" for i in rng.integers(0, TOPICS, prompts)),
            "amount": tuple(rng.standard_normal(prompts).tolist()),
        },
    )

    def capture(seed: int, strength: float) -> Capture:
        def read(key: Key, rows: Tensor | None) -> Tensor:
            started, at = time.process_time(), np.arange(prompts) if rows is None else rows.numpy()
            x = np.random.default_rng([seed, key[1]]).standard_normal((len(at), width), dtype=np.float32)
            x[:, 0] += strength * label[at]
            SPENT.append(time.process_time() - started)
            return torch.from_numpy(x)

        ends = torch.full((prompts,), LENGTH - 1), torch.full((prompts,), LENGTH)
        tensors = LazyTensors(read, [(Site.RESIDUAL, layer) for layer in range(layers)])
        return Capture(batch, torch.arange(prompts), *ends, tensors)

    own = capture(0, 0.5)
    if prompts <= MOST:
        return part(own, torch.arange(prompts), capture, draws)
    subset = torch.from_numpy(np.sort(rng.permutation(prompts)[:MOST]))
    return ProbeInput(own, np.zeros(prompts), subset=part(own, subset, capture, draws))


def part(own: Capture, rows: Tensor, capture, draws: int) -> ProbeInput:
    """These prompts, with every control of them."""
    others = [capture(1 + i, 0.0).take(rows) for i in range(2 * draws + 1)]
    controls = {"untrained": tuple(others[:draws]), "shuffled": tuple(others[draws:-1]), "no_context": others[-1]}
    return ProbeInput(own.take(rows), np.zeros(len(rows)), **controls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 10_000), ("layers", 24), ("width", 1024), ("draws", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    probe = LabelProbe("label", given=("length", "topic", "amount"))
    for draws in dict.fromkeys((0, asked.draws)):
        data = made(asked.prompts, asked.layers, asked.width, draws)
        SPENT.clear()
        cpu, wall = time.process_time(), time.perf_counter()
        probe.measure(data)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{draws} untrained copies, {draws} shuffled orders: {cpu:.0f} CPU s, {sum(SPENT):.0f} of them to make "
            f"activations; {wall:.0f} s on {torch.get_num_threads()} threads; peak {peak:.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
