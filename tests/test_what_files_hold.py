"""What files hold reaches the reader: GGUF, LoRA, tensors without a place, tokenizers that add or warn."""

import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

import llmgeom
from llmgeom.errors import UserError
from llmgeom.model import gguf, hub, tokenizing
from tests.refusals import refused
from tests.smollm2 import smollm2

POCKET = Path(llmgeom.__file__).parent / "pocket" / "pythia"
PROMPTS = ["The capital of France is", "2 + 3 ="]
BITS = np.log(2)
DEFAULT = hub.default  # as it is: tests that name no model read a pocket model


def saved(folder: Path, model=None, **config) -> Path:
    """A tiny llama with the tokenizer of a pocket model, in a folder; `config` changes its config.json."""
    (model or llama()).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / name, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(3) if weight.dim() > 1 else weight.normal_() if name.endswith("bias") else None
        model.lm_head.weight.mul_(6)
    return model


def by_hand(model, ids) -> float:
    """Next-token entropy in bits after some tokens, of transformers alone."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    return float(-(log_p.exp() * log_p).sum() / BITS)


def special(folder: Path, **template) -> Path:
    """The tokenizer in a folder puts special tokens about a text."""
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = "<|endoftext|>"
    made.post_processor = processors.TemplateProcessing(
        single=template["single"].replace("END", end), special_tokens=[(end, made.token_to_id(end))]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


# ---- tensors without a place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "count", "first"),
    [
        ({"attention_bias": False}, 12, "model.layers.0.self_attn.k_proj.bias"),
        ({"num_hidden_layers": 2}, 13, "model.layers.2.input_layernorm.weight"),
    ],
)
def test_tensors_that_a_config_has_no_place_for_are_told_by_number_and_name(tmp_path, caplog, change, count, first):
    whole = llmgeom.load(str(saved(tmp_path / "whole", llama(attention_bias=True))), offline=True)
    assert whole.facts["note"] is None
    with caplog.at_level(logging.WARNING, "llmgeom"):
        less = llmgeom.load(str(saved(tmp_path / "less", llama(attention_bias=True), **change)), offline=True)
    assert f"{count} tensors" in less.facts["note"] and first in less.facts["note"] and first in caplog.text
    assert np.abs(whole.entropy(PROMPTS) - less.entropy(PROMPTS)).max() > 0.1  # another model than was saved


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_read_at_the_last_token_of_its_text_where_the_tokenizer_appends_eos(tmp_path):
    plain = llmgeom.load(str(saved(tmp_path / "plain")), offline=True)
    end = llmgeom.load(str(special(saved(tmp_path / "end"), single="$A END")), offline=True)
    ids = [plain.tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    assert [row[:n] for row, n in zip(end.tokens(PROMPTS).ids.tolist(), map(len, ids), strict=True)] == ids
    assert end.entropy(PROMPTS) == pytest.approx([by_hand(end.model, row) for row in ids], abs=1e-4)
    assert "<|endoftext|>" in end.facts["note"]


def test_a_special_token_that_the_text_brings_is_read_once(tmp_path):
    subject = llmgeom.load(str(special(saved(tmp_path / "begin"), single="END $A")), offline=True)
    texts = [f"<|endoftext|>{PROMPTS[0]}", PROMPTS[0], PROMPTS[1]]
    ids = subject.tokens(texts).ids.tolist()
    assert ids[0] == ids[1] and ids[0].count(ids[0][0]) == 1
    both = subject.tokenizer("<|endoftext|>a", add_special_tokens=True)["input_ids"]
    assert both[0] == both[1]  # the tokenizer alone reads it twice
    said = [*tokenizing.caveats(subject.tokenizer, texts)]
    assert len(said) == 1 and said[0].startswith("1 of 3 prompts begin with <|endoftext|>")
    assert not [*tokenizing.caveats(subject.tokenizer, texts[1:])]


def test_a_text_in_the_chat_template_is_not_put_into_it_again():
    tokenizer = transformers.AutoTokenizer.from_pretrained(POCKET)
    tokenizer.add_tokens(["<|start|>"], special_tokens=True)
    tokenizer.chat_template = "{% for one in messages %}<|start|>{{ one['content'] }}\n{% endfor %}<|start|>answer"
    chat, once = tokenizing.Chat(tokenizer, "pocket"), "<|start|>Hi\n<|start|>answer"
    assert chat(["Hi"])["input_ids"] == chat([once])["input_ids"]
    assert chat(["Hi"])["input_ids"][0].count(tokenizer.convert_tokens_to_ids("<|start|>")) == 2
    assert [*tokenizing.caveats(chat, ["Hi", once])] == [
        "1 of 2 prompts are written in the chat template already, and are read as they are"
    ]


def test_what_transformers_warns_of_a_tokenizer_reaches_the_user_and_can_be_mended(tmp_path):
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocabulary) < 100_300:  # the check reads vocabularies above 100,000
        vocabulary[f"x{len(vocabulary)}"] = len(vocabulary)
    merges = [("e", "B"), ("a", "y"), ("eB", "ay")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocabulary, merges))
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    config = transformers.MistralConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_version": "4.50.0"}))
    subject = llmgeom.load(str(tmp_path), offline=True)
    assert "fix_mistral_regex" in subject.facts["note"]
    mended = llmgeom.load(str(tmp_path), offline=True, tokenizer_options={"fix_mistral_regex": True})
    right = transformers.AutoTokenizer.from_pretrained(tmp_path, fix_mistral_regex=True)("eBay")["input_ids"]
    assert mended.tokens(["eBay"]).ids[0].tolist() == right != subject.tokens(["eBay"]).ids[0].tolist()


# ---- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol():
    return llmgeom.load("smollm2", offline=True, dtype="bfloat16")


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads_from_the_same_file(smol):
    model, tokenizer = smollm2()
    ids = tokenizer(PROMPTS[0])["input_ids"]
    assert smol.tokens(PROMPTS[:1]).ids[0].tolist() == ids
    assert smol.tokenizer.chat_template == tokenizer.chat_template
    with torch.no_grad():
        own = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    assert (smol.capture(PROMPTS[:1], "log_probs").tensors["log_probs", -1][0] - own).abs().max() < 0.02
    assert "Q4_1" in smol.facts["note"]


@pytest.mark.slow
def test_a_conversion_is_made_once_and_whole(smol, tmp_path, monkeypatch):
    folder = Path(hub.locate("smollm2").path)
    assert folder.parent == Path(os.environ["LLMGEOM_CACHE"]) / "gguf"
    assert not [*folder.parent.glob("*.part")]
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted again"))
    assert hub.locate(str(gguf.packaged())).path == hub.locate(str(gguf.packaged().parent)).path == str(folder)


def test_files_that_hold_no_model_are_refused_in_a_sentence(tmp_path):
    text, cut = tmp_path / "text.gguf", tmp_path / "cut.gguf"
    text.write_text("not a model")
    cut.write_bytes(gguf.packaged().read_bytes()[:200_000])
    with refused(UserError, "no GGUF file, though its name says so"):
        hub.locate(str(text))
    with refused(UserError, "holds 2 GGUF files (cut.gguf, text.gguf)"):
        hub.locate(str(tmp_path))
    with refused(UserError, "cut.gguf cannot be read as a causal language model"):
        hub.locate(str(cut))
    with refused(UserError, "is a GGUF file and has no revisions"):
        hub.locate(str(cut), "main")
    assert not [*(Path(os.environ["LLMGEOM_CACHE"]) / "gguf").glob("*.part")]


def test_without_the_package_a_pocket_model_is_read_and_it_is_said_how_to_get_the_real_one(monkeypatch):
    monkeypatch.setattr(gguf, "packaged", lambda: None)
    name, how = DEFAULT()
    assert name == "pocket:pythia" and gguf.INSTALL in how
    with refused(UserError, gguf.INSTALL):
        hub.locate("smollm2")


def written(path: Path, *surplus: str, pre: str = "smollm") -> Path:
    """A GGUF file of a llama with two layers and random weights, with surplus tensors."""
    import gguf as format

    rng, file = np.random.default_rng(0), format.GGUFWriter(str(path), "llama")
    for set_it, value in (
        (file.add_block_count, 2), (file.add_context_length, 64), (file.add_embedding_length, 32),
        (file.add_feed_forward_length, 48), (file.add_head_count, 4), (file.add_head_count_kv, 2),
        (file.add_layer_norm_rms_eps, 1e-5), (file.add_rope_dimension_count, 8), (file.add_rope_freq_base, 1e4),
    ):  # fmt: skip
        set_it(value)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "ĠĠ", "<e>"]
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_list(tokens)
    file.add_token_types([1] * (len(tokens) - 1) + [3])
    file.add_token_merges(["Ġ Ġ"])
    file.add_eos_token_id(len(tokens) - 1)
    file.add_bos_token_id(len(tokens) - 1)
    shapes = {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    wide = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    wide |= {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48), "attn_norm": (32,), "ffn_norm": (32,)}
    shapes |= {f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in wide.items()}
    shapes |= {name: (4,) if name.startswith("rope") else (32,) for name in surplus}
    for name, shape in shapes.items():
        file.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def test_tensors_of_a_gguf_file_without_a_place_are_told(tmp_path):
    surplus = [f"blk.{layer}.attn_q.bias" for layer in range(2)]
    assert "place" not in llmgeom.load(str(written(tmp_path / "whole.gguf")), offline=True).facts["note"]
    note = llmgeom.load(str(written(tmp_path / "more.gguf", *surplus)), offline=True).facts["note"]
    assert "2 tensors of the file have no place in the model, first blk.0.attn_q.bias" in note


def test_a_scaled_rotary_embedding_that_is_not_read_is_refused(tmp_path):
    with refused(UserError, "rope_freqs.weight", "the folder or the hub id"):
        llmgeom.load(str(written(tmp_path / "scaled.gguf", "rope_freqs.weight")), offline=True)


def test_a_tokenizer_splits_text_as_its_file_says(tmp_path):
    """Two spaces before a digit: split as GPT-2 does they are two tokens, since the second goes with the digit."""
    subject = llmgeom.load(str(written(tmp_path / "digits.gguf")), offline=True)
    right = Tokenizer.from_str(subject.tokenizer.backend_tokenizer.to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    right.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    ids = subject.tokens(["a  7"]).ids[0].tolist()
    assert [right.id_to_token(one) for one in ids] == ["a", "ĠĠ", "7"] and ids == right.encode("a  7").ids
    other = llmgeom.load(str(written(tmp_path / "other.gguf", pre="nobodys")), offline=True)
    assert "'nobodys'" in other.facts["note"] and "nobodys" not in subject.facts["note"]


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def adapter(folder: Path, base: Path, rank: int = 2):
    """A LoRA adapter with random weights; returns the adapted model."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=rank, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads names that transformers has replaced
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.save_pretrained(folder)
    return model.eval()


def test_a_lora_folder_is_its_base_model_with_the_adapter_merged(tmp_path):
    base = saved(tmp_path / "base")
    adapted = adapter(tmp_path / "lora", base)
    subject = llmgeom.load(str(tmp_path / "lora"), offline=True)
    ids = subject.tokens(PROMPTS[:1]).ids[0].tolist()
    assert subject.entropy(PROMPTS[:1])[0] == pytest.approx(by_hand(adapted, ids), abs=1e-4)
    plain = llmgeom.load(str(base), offline=True)
    assert abs(plain.entropy(PROMPTS[:1])[0] - by_hand(adapted, ids)) > 0.01
    assert "LoRA of rank 2 merged into" in subject.facts["note"] and subject.facts["files"] != plain.facts["files"]


def test_adapters_that_cannot_be_merged_are_refused_in_a_sentence(tmp_path):
    base, lora = saved(tmp_path / "base"), tmp_path / "lora"
    adapter(lora, base)
    path = lora / "adapter_config.json"
    said = json.loads(path.read_text())
    other = saved(tmp_path / "other", transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=1024, n_embd=32, n_layer=2, n_head=2, n_positions=64)))  # fmt: skip
    for change, sentence in (
        ({"peft_type": "IA3"}, "an adapter of type 'IA3'"),
        ({"base_model_name_or_path": ""}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": str(tmp_path / "gone")}, "is a LoRA adapter of"),
        ({"base_model_name_or_path": str(other)}, "does not fit its base model"),
        ({"base_model_name_or_path": str(saved(tmp_path / "less", num_hidden_layers=2))}, "has no place in it"),
    ):
        path.write_text(json.dumps(said | change))
        with refused(UserError, sentence):
            llmgeom.load(str(lora), offline=True)
    path.write_text(json.dumps(said))
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with refused(UserError, "expected adapter_model.safetensors"):
        llmgeom.load(str(lora), offline=True)
