"""What the everyday verbs cost beside hooks written by hand and TransformerLens, in CPU seconds of one process.

    OMP_NUM_THREADS=1 python benchmarks/verbs.py [--model smollm2] [--dtype bfloat16] [--reps 3] [--tl]

In interleaved order, all with equal numbers: the logit lens of 30 tokens (entropy at each layer and position);
attention of every head on 8 x 100 repeated random tokens (induction score); activation patching of the residual stream,
layer by position, of two prompts of 30 tokens that part at position 10; attribution patching of the same places. By
hand, patching takes a whole pass for each layer (all positions as a batch), or for each node, as TransformerLens'
`generic_activation_patch` does. `--tl` adds TransformerLens' own ways, on its TransformerBridge around a copy of the
model.
"""

import argparse
import statistics
import time

import numpy as np
import torch

import llmgeom
from llmgeom.model.edits import original
from llmgeom.verbs.heads import repeated

TOKENS, PARTS, LENGTH = 30, 10, 50


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


@torch.no_grad()
def lens_by_hand(model, ids) -> np.ndarray:
    norm, head = model.base_model.norm, model.get_output_embeddings()
    seen = model(torch.tensor([ids]), output_hidden_states=True)
    logits = [head(norm(stream))[0] for stream in seen.hidden_states[:-1]] + [seen.logits[0]]
    return np.array([torch.special.entr(x.float().softmax(-1)).sum(-1).numpy() for x in logits]) / np.log(2)


@torch.no_grad()
def lens_by_transformer_lens(bridge, ids) -> np.ndarray:
    logits, cache = bridge.run_with_cache(torch.tensor([ids]))
    streams = [cache[f"blocks.{layer}.hook_in"] for layer in range(bridge.cfg.n_layers)]
    every = [bridge.unembed(bridge.ln_final(stream))[0] for stream in streams] + [logits[0]]
    return np.array([torch.special.entr(x.float().softmax(-1)).sum(-1).numpy() for x in every]) / np.log(2)


def induction(patterns, before: int) -> np.ndarray:
    """[layer head] mean weight on the token after the earlier copy; patterns: [sequence head query key] by layer."""
    t = torch.arange(before + LENGTH, before + 2 * LENGTH)
    return np.array([rows[:, :, t, t - LENGTH + 1].float().mean((0, 2)).numpy() for rows in patterns])


@torch.no_grad()
def heads_by_hand(model, ids, before) -> np.ndarray:
    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return induction(model(ids, output_attentions=True).attentions, before)
    finally:
        model.set_attn_implementation(chosen)


@torch.no_grad()
def heads_by_transformer_lens(bridge, ids, before) -> np.ndarray:
    _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    return induction([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(bridge.cfg.n_layers)], before)


def attribution_by_hand(model, clean, corrupt, answers) -> np.ndarray:
    with torch.no_grad():
        donors = model(torch.tensor([clean]), output_hidden_states=True).hidden_states
    seen = model(torch.tensor([corrupt]), output_hidden_states=True)
    streams, last = seen.hidden_states[:-1], seen.logits[0, -1].float()
    difference = last[answers[0]] - last[answers[1]]
    slopes = torch.autograd.grad(difference, streams)
    each = [((a - b) * g)[0].double().sum(-1) for a, b, g in zip(donors, streams, slopes, strict=False)]
    return float(difference.detach()) + torch.stack(each).detach().numpy()


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
    model = original(subject.model)
    clean, corrupt = prompts(subject.facts["vocabulary"])
    answers = (clean[PARTS], corrupt[PARTS])
    ids, before = repeated(subject, LENGTH, 8, 0)
    patch = {"hooks, a pass a layer": True, "hooks, a pass a node": False}
    arms = {
        "lens": {"ours": lambda: subject.lens(clean)["entropy"], "by hand": lambda: lens_by_hand(model, clean)},
        "heads": {
            "ours": lambda: subject.heads(LENGTH, 8)["induction"],
            "by hand": lambda: heads_by_hand(model, ids, before),
        },
        "patching": {
            "ours": lambda: subject.patch(clean, corrupt, answers)["logit difference"],
            **{name: lambda batched=batched: by_hand(subject, clean, corrupt, answers, batched)
               for name, batched in patch.items()},
        },
        "attribution": {
            "ours": lambda: subject.patch(clean, corrupt, answers, attribution=True)["logit difference"],
            "by hand": lambda: attribution_by_hand(model, clean, corrupt, answers),
        },
    }  # fmt: skip
    if asked.tl:
        bridge = llmgeom.load(asked.model, dtype=asked.dtype, backend="tl").forward.bridge
        arms["lens"]["TransformerLens"] = lambda: lens_by_transformer_lens(bridge, clean)
        arms["heads"]["TransformerLens"] = lambda: heads_by_transformer_lens(bridge, ids, before)
        arms["patching"]["TransformerLens"] = lambda: by_transformer_lens(bridge, clean, corrupt, answers)
    seconds: dict[tuple[str, str], list[float]] = {}
    found = {}
    for _ in range(asked.reps):
        for task, ways in arms.items():
            for way, run in ways.items():
                start = time.process_time()
                found[task, way] = run()
                seconds.setdefault((task, way), []).append(time.process_time() - start)
    print(f"{subject.name}, {asked.dtype}, {len(subject.blocks)} layers, CPU seconds, medians of {asked.reps}")
    for (task, way), times in seconds.items():
        middle, ours = statistics.median(times), statistics.median(seconds[task, "ours"])
        apart = np.abs(found[task, way] - found[task, "ours"]).max()
        print(f"{task:12}{way:24}{middle:8.2f} s{middle / ours:8.2f} x ours   apart {apart:.1e}")


if __name__ == "__main__":
    main()
