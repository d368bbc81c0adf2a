"""Jacobian lenses: a linear network whose Jacobians are products of its matrices, plain autograd, and files."""

import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import llmgeom
from llmgeom.errors import UserError
from llmgeom.verbs.transport import Transport

WIDTH, DEPTH = 8, 3
IDS = [[1, 5, 7, 2, 9, 11, 3], [4, 4, 8, 6, 10, 2, 12], [9, 1, 3, 3, 7, 8, 5], [2, 6, 11, 12, 1, 10, 4]]


@pytest.fixture(scope="module")
def linear():
    """Attention that looks at all earlier tokens alike, W_O of their mean, and a linear MLP; no norms in between."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8)).eval()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()
        layer.mlp = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(layer.self_attn.q_proj.weight)
        for weight in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.weight):
            nn.init.normal_(weight, std=0.3)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        nn.init.normal_(weight)
    return llmgeom.load(model)


def jacobians(subject, length, skip):
    """layer -> J_l of the linear network, from its matrices alone: [d d]."""
    mean = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    one, kept = np.eye(length), range(skip, length - 1)
    whole, found = np.eye(length * WIDTH), {}
    for number in reversed(range(DEPTH)):
        if number < DEPTH - 1:
            blocks = whole.reshape(length, WIDTH, length, WIDTH)
            found[number] = np.mean([sum(blocks[later, :, t] for later in kept if later >= t) for t in kept], 0)
        layer = subject.model.model.layers[number]
        value, output = layer.self_attn.v_proj.weight.detach().numpy(), layer.self_attn.o_proj.weight.detach().numpy()
        attended = np.eye(length * WIDTH) + np.kron(mean, output @ value)
        whole = whole @ np.kron(one, np.eye(WIDTH) + layer.mlp.weight.detach().numpy()) @ attended
    return found


@pytest.mark.parametrize("skip", [0, 2])
def test_the_fit_of_a_linear_network_is_the_product_of_its_matrices(linear, skip):
    fitted = linear.fit_lens(IDS, skip=skip)
    exact = jacobians(linear, len(IDS[0]), skip)
    assert [*fitted.matrices] == sorted(exact) == [0, 1]
    for layer, matrix in exact.items():
        np.testing.assert_allclose(fitted.matrices[layer], matrix, atol=1e-5)
    assert max(fitted.attrs["error"]) < 1e-3, "it is the same for all prompts"
    few = linear.fit_lens(IDS, rows=4, skip=skip)  # half of the rows in each prompt
    np.testing.assert_allclose(few.matrices[1], exact[1], atol=1e-5)
    assert few.attrs["prompts a row"] == 2


def test_the_fit_of_a_transformer_is_the_mean_of_autograds_jacobians():
    subject = llmgeom.load("pocket:llama", device="cpu")
    texts = ["The dog saw a cat", "She went to the market", "Two and two make four"]
    fitted = subject.fit_lens(texts, skip=1)
    base, each = subject.model.model, []
    for text in texts:
        ids = torch.tensor([subject.tokenizer(text)["input_ids"]])
        streams = [*base(ids, output_hidden_states=True).hidden_states[:-1]]
        kept = range(1, ids.shape[1] - 1)

        def rest(x, ids=ids):  # the output of layer 1 -> that of the last
            place = torch.arange(ids.shape[1])[None]
            for layer in base.layers[2:]:
                out = layer(x, position_ids=place, position_embeddings=base.rotary_emb(x, place))
                x = out[0] if isinstance(out, tuple) else out
            return x

        whole = torch.autograd.functional.jacobian(rest, streams[2], vectorize=True)[0, :, :, 0]  # [t' d t d]
        each.append(torch.stack([whole[list(kept), :, t].sum(0) for t in kept]).mean(0))
    several = torch.stack(each)
    np.testing.assert_allclose(fitted.matrices[1], several.mean(0), atol=1e-4)
    error = (several.var(0).sum() / 3).sqrt() / several.mean(0).norm()
    assert fitted.attrs["error"][1] == pytest.approx(float(error), rel=1e-2)


@torch.no_grad()
def test_the_lens_reads_the_carried_stream_through_norm_and_head(linear):
    lens = linear.lens(IDS[0], transport=linear.fit_lens(IDS, skip=0))
    assert lens.coords["layer"] == (1, 2, 3)
    exact, model = jacobians(linear, len(IDS[0]), 0), linear.model
    streams = linear.capture([IDS[0]], "residual", positions="all").layers("residual")
    final = model(torch.tensor([IDS[0]])).logits[0].log_softmax(-1)
    for row, layer in enumerate((0, 1)):
        carried = streams[layer + 1] @ torch.tensor(exact[layer].T, dtype=torch.float32)
        here = model.lm_head(model.model.norm(carried)).log_softmax(-1)
        apart = (final.exp() * (final - here)).sum(-1) / np.log(2)
        np.testing.assert_allclose(lens["Jacobian KL"][row], apart, atol=1e-4)
        assert [*lens["Jacobian token"][row]] == [str(token) for token in here.argmax(-1).tolist()]
    assert np.abs(lens["Jacobian KL"][:2] - lens["KL"][:2]).max() > 0.01
    for way in ("KL", "Jacobian KL"):
        assert lens[way][-1].max() < 1e-4, "the last layer is the model"
    many = linear.lens(IDS, controls=2, transport=linear.fit_lens(IDS, skip=0))
    each = [linear.lens(ids, transport=linear.fit_lens(IDS, skip=0))["Jacobian KL"][:, -1] for ids in IDS]
    np.testing.assert_allclose(many["Jacobian KL"], np.mean(each, 0), atol=1e-5)
    band = [many[f"Jacobian KL, {end} of untrained copies"] for end in ("lowest", "highest")]
    assert (band[0][:2] > 0).all() and (band[0] <= band[1]).all()


def test_files_of_three_kinds_hold_the_same_lens(linear, tmp_path):
    fitted = linear.fit_lens(IDS, skip=0)
    matrices = {layer: matrix.half() for layer, matrix in fitted.matrices.items()}
    fitted.save(str(tmp_path / "a.safetensors"))
    np.savez(tmp_path / "b.npz", **{f"layer_{layer}": matrix.numpy() for layer, matrix in matrices.items()})
    torch.save({"J": matrices, "n_prompts": 4, "source_layers": [0, 1], "d_model": WIDTH}, tmp_path / "c.pt")
    torch.save(torch.stack([*matrices.values(), torch.eye(WIDTH).half()]), tmp_path / "d.pt")
    lenses = [linear.lens(IDS[0], transport=str(path)) for path in sorted(tmp_path.iterdir())]
    for lens in lenses:
        np.testing.assert_array_equal(lens["Jacobian KL"], lenses[0]["Jacobian KL"])


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_file_of_code_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in {"a.pt": Hostile(), "b.pt": {"J": {0: Hostile()}}}.items():
        torch.save(data, name)
    (tmp_path / "c.pt").write_bytes(pickle.dumps(Hostile()))
    np.savez("d.npz", J=np.array([Hostile()], dtype=object))
    for name in ("a.pt", "b.pt", "c.pt", "d.npz"):
        with pytest.raises(UserError, match="other objects than tensors"):
            Transport.load(name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"J.0": torch.eye(9)}, "reads 8 x 8"),
        ({"J.7": torch.eye(WIDTH)}, "layers 0 to 2"),
        ({"J.0": torch.full((WIDTH, WIDTH), torch.nan)}, "finite"),
        ({"J.2": 2 * torch.eye(WIDTH)}, "not the identity"),
        ({"bias": torch.eye(WIDTH)}, "holds bias: expected matrices"),
    ],
)
def test_a_lens_of_another_model_is_refused(linear, tmp_path, tensors, said):
    path = str(tmp_path / "lens.safetensors")
    save_file(tensors, path)
    with pytest.raises(UserError, match=said):
        linear.lens(IDS[0], transport=path)


@pytest.mark.parametrize("name, content", [("no.pt", None), ("cut.safetensors", b"\x08"), ("cut.npz", b"PK\x03")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        Transport.load(str(tmp_path / name))


@pytest.mark.parametrize("options, said", [({"rows": 2}, "8 prompts or more"), ({"skip": 6}, "leaves out the first 6"),
                                           ({"rows": 9}, "expected 1 to 8 rows")])  # fmt: skip
def test_what_cannot_be_fitted_is_refused(linear, options, said):
    with pytest.raises(UserError, match=said):
        linear.fit_lens(IDS, **options)
