"""Activation patching of the residual stream, layer by position: ours, hooks written by hand, TransformerLens.

    python benchmarks/interventions.py [--model smollm2] [--dtype bfloat16] [--reps 3] [--tl]

Two prompts of 30 tokens that part at position 10; the logit difference of two answers at the end. In one process and in
interleaved order: `model.patch`; by hand, a pre-hook on each layer and one whole pass of all positions as a batch; by
hand, one whole pass for each layer and position, as TransformerLens' `generic_activation_patch` runs it; and with
`--tl` that function itself, on its TransformerBridge around a copy of the model. All must give the same numbers.
"""

import argparse
import statistics
import time

import numpy as np
import torch

import llmgeom
from llmgeom.model.edits import original

TOKENS, PARTS = 30, 10


def prompts(vocabulary: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(1000, min(vocabulary, 40_000), (TOKENS,), generator=generator)
    corrupt = clean.clone()
    corrupt[PARTS] += 1
    return clean.tolist(), corrupt.tolist()


def by_hand(subject, clean, corrupt, answers, batched: bool) -> np.ndarray:
    """[layer position] the logit difference, by whole passes: of all positions of a layer, or of one at a time."""
    model, layers = original(subject.model), [block.layer for block in subject.blocks]
    donors: list[torch.Tensor] = []

    def keep(_module, args, kwargs):
        donors.append((args[0] if args else kwargs["hidden_states"]).clone())

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in layers]
    with torch.inference_mode():
        model(torch.tensor([clean]))
        for handle in handles:
            handle.remove()
        found = np.zeros((len(layers), len(corrupt)))
        for layer, module in enumerate(layers):
            for some in [range(len(corrupt))] if batched else [[at] for at in range(len(corrupt))]:
                rows, places = torch.arange(len(some)), torch.tensor(list(some))

                def put(_module, args, kwargs, layer=layer, rows=rows, places=places):
                    x = (args[0] if args else kwargs["hidden_states"]).clone()
                    x[rows, places] = donors[layer][0, places]
                    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

                handle = module.register_forward_pre_hook(put, with_kwargs=True)
                logits = model(torch.tensor([corrupt] * len(some)), logits_to_keep=1).logits[:, -1].double()
                handle.remove()
                found[layer, places.numpy()] = (logits[:, answers[0]] - logits[:, answers[1]]).numpy()
    return found


def by_transformer_lens(bridge, clean, corrupt, answers) -> np.ndarray:
    from transformer_lens import patching

    with torch.inference_mode():
        _, cache = bridge.run_with_cache(torch.tensor([clean]))
        metric = lambda logits: (logits[0, -1, answers[0]] - logits[0, -1, answers[1]]).double()  # noqa: E731
        return patching.get_act_patch_resid_pre(bridge, torch.tensor([corrupt]), cache, metric).double().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--tl", action="store_true")
    asked = parser.parse_args()
    subject = llmgeom.load(asked.model, dtype=asked.dtype)
    clean, corrupt = prompts(subject.facts["vocabulary"])
    answers = (clean[PARTS], corrupt[PARTS])
    arms = {
        "ours": lambda: subject.patch(clean, corrupt, answers)["logit difference"],
        "hooks, a pass a layer": lambda: by_hand(subject, clean, corrupt, answers, batched=True),
        "hooks, a pass a node": lambda: by_hand(subject, clean, corrupt, answers, batched=False),
    }
    if asked.tl:
        bridge = llmgeom.load(asked.model, dtype=asked.dtype, backend="tl").forward.bridge
        arms["TransformerLens"] = lambda: by_transformer_lens(bridge, clean, corrupt, answers)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    found = {}
    for _ in range(asked.reps):
        for name, arm in arms.items():
            start = time.perf_counter()
            found[name] = arm()
            seconds[name].append(time.perf_counter() - start)
    nodes = len(subject.blocks) * TOKENS
    ours = statistics.median(seconds["ours"])
    print(f"{subject.name}, {asked.dtype}, {nodes} nodes of {len(subject.blocks)} layers by {TOKENS} positions")
    print(f"logit differences of {found['ours'].min():.3f} to {found['ours'].max():.3f}")
    for name, times in seconds.items():
        middle, apart = statistics.median(times), np.abs(found[name] - found["ours"]).max()
        each = f"{1000 * middle / nodes:8.2f} ms a node{middle / ours:8.1f} x ours"
        print(f"{name:24}{middle:8.2f} s{each}   apart {apart:.1e}")


if __name__ == "__main__":
    main()
