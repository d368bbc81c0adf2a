"""What the page shows of a prompt is in the record: token pieces, the model's likeliest next tokens, and its place at
every layer. Judged by the model run by hand and by a tokenizer written here."""

import base64
import copy
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from llmgeom.batch import Batch, Text, Tokens
from llmgeom.model.capture import RANKS, Site, nbytes
from llmgeom.model.hub import pockets
from llmgeom.model.model import Model
from llmgeom.model.tokenizing import special_tokens
from llmgeom.probes import known
from llmgeom.prompts.domains import Domain
from llmgeom.provenance import SHOWN_WEIGHTS, _attention, _likely, _piece, prompt_table
from llmgeom.run import run_probes
from tests.families import FAMILIES


@pytest.fixture(scope="module")
def subject():
    return Model.load(f"pocket:{sorted(pockets())[0]}")


@pytest.fixture(scope="module")
def record(subject):
    batch = Domain("math").sample(20, 0)
    return batch, run_probes(subject, batch, known(("value_manifold",)), controls=1)


def test_the_likeliest_next_tokens_are_those_of_the_model_run_by_hand(subject, record):
    batch, made = record
    for text, told in list(zip(batch.text, made.prompts["next tokens"], strict=True))[:6]:
        ids = subject.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            p = subject.model(ids).logits[0, -1].double().softmax(-1)
        most = p.topk(RANKS)
        assert [q for _, q in told] == pytest.approx(most.values.tolist(), abs=2e-6)
        last = ids[0, -1:].tolist()
        for (piece, _), token in zip(told, most.indices.tolist(), strict=True):
            assert subject.tokenizer.decode([*last, token]) == subject.tokenizer.decode(last) + piece


def test_pieces_join_to_the_text_with_what_the_tokenizer_adds(subject, record):
    batch, made = record
    for text, pieces, count in zip(batch.text, made.prompts["pieces"], made.prompts["tokens"], strict=True):
        assert len(pieces) == count and "".join(pieces[special_tokens(subject.tokenizer)[0] :]).strip() == text


class Words:
    """A tokenizer that, like SentencePiece, writes no space before a text's first word, and splits characters."""

    NAMES = ("<s>", "▁the", "▁cat", "s", "<0xC3>", "<0xA9>")

    def decode(self, ids, clean_up_tokenization_spaces=True):
        assert not clean_up_tokenization_spaces
        said = b"".join(
            {4: b"\xc3", 5: b"\xa9"}.get(i, self.NAMES[min(i, 5)].replace("▁", " ").encode()) for i in ids if i < 6
        )
        return said.decode(errors="replace").lstrip(" ")

    def convert_ids_to_tokens(self, token):
        return self.NAMES[token] if token < 6 else None


def test_a_piece_keeps_its_space_and_part_of_a_character_has_a_name():
    class Who:
        tokenizer = Words()

    told = [_piece(Who, *pair) for pair in ((0,), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (3, 7))]
    assert told == ["<s>", " the", " cat", "s", "<0xC3>", "é", "token 7"]
    # So does each after the token before it, also the likeliest of those that come next.
    tokens = Tokens(torch.tensor([[0, 1, 2, 3], [1, 2, 0, 0]]), torch.tensor([4, 2]))
    table = prompt_table(Who, Batch(Text(("a", "b")), ("a", "b"), {}), tokens, np.zeros(2))
    assert table["pieces"] == (("<s>", " the", " cat", "s"), ("the", " cat"))
    likely = torch.tensor([[[2.0, 3.0], [-1.0, -2.0]], [[5.0, 1.0], [-0.5, -3.0]]])
    seen = SimpleNamespace(prompt=torch.tensor([0, 1]), position=torch.tensor([1, 1]), likely=likely)
    broken = Tokens(torch.tensor([[1, 2], [1, 4]]), torch.tensor([2, 2]))
    p = [round(math.exp(-x), 6) for x in (1, 2, 0.5, 3)]
    assert _likely(Who, broken, seen) == (((" cat", p[0]), ("s", p[1])), (("é", p[2]), ("▁the", p[3])))
    Who.tokenizer = None
    assert _piece(Who, 3, 17) == "17"


def test_the_last_queried_position_of_a_prompt_is_the_one_that_is_told():
    subject = Model.of(FAMILIES["llama"].model())
    ids = torch.tensor([[5, 3, 9, 4], [7, 8, 2, 0]])
    query = torch.tensor([[False, True, True, False], [True, False, True, False]])
    batch = Batch(Tokens(ids, torch.tensor([4, 3])), ("a", "b"), {"name": "x"}, query=query)
    seen = subject.capture(batch, {Site.LIKELY, Site.LOG_PROBS})
    table = prompt_table(subject, batch, batch.inputs, np.zeros(2), seen)
    assert table["pieces"] == (("5", "3", "9", "4"), ("7", "8", "2"))
    with torch.no_grad():
        for row, told in enumerate(table["next tokens"]):
            log_p = subject.model(ids[row : row + 1, :3]).logits[0, -1].double().log_softmax(-1)
            most = log_p.topk(RANKS)
            assert [int(piece) for piece, _ in told] == most.indices.tolist()
            assert [p for _, p in told] == pytest.approx(most.values.exp().tolist(), abs=2e-6)


def test_a_small_vocabulary_has_fewer_ranks():
    sizes = {"vocab_size": 3, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    subject = Model.of(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval())
    batch = Batch(Tokens(torch.tensor([[1, 2]]), torch.tensor([2])), ("a",), {"name": "x"})
    likely = subject.capture(batch, {Site.LIKELY}).likely
    assert likely.shape == (1, 2, 3) and likely[0, 1].exp().sum().item() == pytest.approx(1)
    assert nbytes(subject.facts, frozenset({Site.LIKELY}), 1, 2) == likely.nbytes


def test_every_layer_s_places_are_those_of_its_own_components_and_turn_no_sign(subject, record):
    batch, made = record
    values = subject.capture(batch, {Site.VALUE}).layers(Site.VALUE)
    arrays = made.results["value_manifold"].arrays
    layers = arrays["layer_scores"]
    assert layers.shape[:2] == (len(values), len(batch)) and np.array_equal(layers[-1], arrays["scores"])
    for place, x in zip(layers, values, strict=True):
        z = x.flatten(1).double().numpy()
        z = z[:, z.std(0) > 0]
        z = (z - z.mean(0)) / z.std(0)
        left, _, _ = np.linalg.svd(z, full_matrices=False)
        for i in (0, 1):  # singular vectors have no sign of their own
            assert abs(np.corrcoef(place[:, i], left[:, i])[0, 1]) == pytest.approx(1, abs=1e-6)
    for one, after in pairwise(layers):
        assert ((one * after).sum(0) >= 0).all()


def test_attention_of_the_final_query_is_that_of_the_model_run_by_hand(subject, record):
    batch, made = record
    eager = copy.deepcopy(subject.model)
    eager.set_attn_implementation("eager")
    every = zip(batch.text, made.prompts["attention"], made.prompts["pieces"], strict=True)
    for text, layers, pieces in list(every)[:6]:
        with torch.no_grad():
            theirs = eager(subject.tokenizer(text, return_tensors="pt")["input_ids"], output_attentions=True).attentions
        assert len(layers) == len(theirs)
        for ours, weights in zip(layers, theirs, strict=True):
            rows = np.frombuffer(base64.b64decode(ours), np.uint8).reshape(-1, len(pieces)) / 255
            assert np.abs(rows - weights[0, :, -1].numpy()).max() < 0.5 / 255 + 1e-5


def test_where_a_record_has_no_room_for_all_attention_prompts_of_every_entropy_keep_theirs():
    n, layers, heads, tokens = 50, 12, 12, 100
    entropy = np.random.default_rng(0).permutation(n).astype(float)
    weights = np.full((n, layers, heads, tokens), 7, np.uint8)
    kept = _attention(weights, np.full(n, tokens), entropy)
    whose = [i for i, rows in enumerate(kept) if rows]
    assert SHOWN_WEIGHTS * 0.9 < len(whose) * layers * heads * tokens <= SHOWN_WEIGHTS
    assert sorted(entropy[whose])[:: len(whose) - 1] == [0, n - 1]
    assert np.diff(sorted(entropy[whose])).max() <= np.ceil(n / (len(whose) - 1))
