"""From prompts to what a model reads: token ids or rows of numbers, right-padded; and their shuffles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.model.forward import Reader

Tokenizer = Callable[..., Mapping[str, Any]]
SURROGATE = re.compile("[\ud800-\udfff]")


def encode(batch: Batch, tokenizer: Tokenizer | None, facts: Mapping[str, Any], name: str) -> Tokens | Rows:
    """The inputs of a batch as a model reads them, right-padded; a prompt of any length, an empty one too.

    Args:
        batch: Prompts, tokens or rows.
        tokenizer: Of the model; None for a model that reads token ids or rows only.
        facts: Of the model: `features` (width of the rows that it reads, else None) and `vocabulary`.
        name: Of the model, for errors.

    Returns:
        Token ids as of `token_ids`, or rows of real numbers.

    Raises:
        UserError: The model does not read this kind of input, or has no such token.
    """
    features = facts["features"]
    if isinstance(batch.inputs, Rows):
        width = batch.inputs.values.shape[-1]
        if width != features:
            reads = f"rows of {features} numbers" if features else "tokens"
            raise UserError(f"{name} reads {reads}; this batch holds rows of {width} real numbers")
        return batch.inputs
    if features:
        raise UserError(f"{name} reads rows of {features} real numbers; this batch holds text or tokens")
    if isinstance(batch.inputs, Tokens):
        largest = int(batch.inputs.ids.max()) if batch.inputs.ids.numel() else 0
        if largest >= facts["vocabulary"]:
            raise UserError(f"{name} knows tokens below {facts['vocabulary']}; this batch holds {largest}")
        return batch.inputs
    if tokenizer is None:
        raise UserError(f"{name} {NO_TOKENIZER}")
    for i, text in enumerate(batch.text):
        if SURROGATE.search(text):
            raise UserError(f"prompt {i + 1}, {text!r}, holds half of a surrogate pair: expected text that is UTF-8")
    tokens = Tokens.of(token_ids(tokenizer, batch.text))
    if len(foreign := (tokens.ids >= facts["vocabulary"]).nonzero()):
        prompt, place = foreign[0].tolist()
        raise UserError(
            f"prompt {prompt + 1} holds token {int(tokens.ids[prompt, place])} and {name} knows tokens below "
            f"{facts['vocabulary']}: the tokenizer belongs to another model"
        )
    return tokens


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """[text][position] the tokens of texts as a model reads them.

    Special tokens that the tokenizer puts before a text are read, once: a text that brings them gets no second ones.
    Those that it would put after a text (EOS) are not: a prompt goes on where its text ends. `caveats` and `appended`
    say so.
    """
    if isinstance(tokenizer, Chat):
        return tokenizer(list(texts), verbose=False)["input_ids"]
    before, _ = _frame(tokenizer)
    plain = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [list(row) if row[: len(before)] == before else [*before, *row] for row in plain]


def caveats(tokenizer: Tokenizer | None, texts: Sequence[str]) -> Iterator[str]:
    """Prompts that bring special tokens, or are chats already."""
    if tokenizer is None:
        return
    if isinstance(tokenizer, Chat):
        if ready := sum(map(tokenizer.written, texts)):
            yield f"{ready} of {len(texts)} prompts are written in the chat template already, and are read as they are"
        return
    if before := _frame(tokenizer)[0]:
        plain = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        if twice := sum(row[: len(before)] == before for row in plain):
            name = "".join(map(str, tokenizer.convert_ids_to_tokens(before)))  # type: ignore[attr-defined]
            yield f"{twice} of {len(texts)} prompts begin with {name}, which the tokenizer adds: it is read once"


def appended(tokenizer: Tokenizer) -> str:
    """The sentence about special tokens that a tokenizer puts after a text; empty where it puts none."""
    if not (after := _frame(tokenizer)[1]):
        return ""
    name = "".join(map(str, tokenizer.convert_ids_to_tokens(after)))  # type: ignore[attr-defined]
    return f"the tokenizer appends {name}, which is left out: prompts are read at the last token of their text"


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before a text and after it."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole, other = (tokenizer(text, add_special_tokens=True)["input_ids"] for text in "ab")
    if whole != other:  # it knows the texts
        for before in range(len(whole) - len(plain) + 1):
            if whole[before : before + len(plain)] == plain:
                return whole[:before], whole[before + len(plain) :]
    before = _shared(whole, other)
    return whole[:before], []


def fitting(reader: Reader, batch: Batch) -> Batch:
    """The prompts of a batch that are no longer than the model's positions."""
    limit = reader.facts["positions"]
    lengths = encode(batch, reader.tokenizer, reader.facts, reader.name).lengths.tolist()
    return batch.take([i for i, length in enumerate(lengths) if limit is None or length <= limit])


def ids_of(token: str, tokenizer: Tokenizer | None, name: str) -> list[int]:
    """The ids of a token by its text, with a space before it and without.

    Raises UserError: the text is several tokens, or the model has no tokenizer.
    """
    if tokenizer is None:
        raise UserError(f"{name} {NO_TOKENIZER}")
    ways = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in dict.fromkeys((token, f" {token}"))]
    if found := [ids[0] for ids in ways if len(ids) == 1]:
        return found
    raise UserError(f"{token!r} is {len(ways[0])} tokens of {name}, not one: give positions by number")


def after_space(word: str, tokenizer: Any) -> list[int]:
    """The tokens of a word after a text and a space. Mistral's tokenizer puts a second space before " word" alone."""
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (":", f": {word}"))
    return whole[len(before) :]


class Chat:
    """A tokenizer that reads a text as the message of a user: the chat template stands where special tokens do.

    Attributes:
        tokenizer: With a chat template.
        question: What a text ends in that the assistant begins its answer with; None where the whole text is the
            user's.

    Raises:
        UserError: The tokenizer has no template, or one that refuses a user's message alone, leaves it out, or has no
            place for an answer that is begun.
    """

    def __init__(self, tokenizer: Any, name: str, question: re.Pattern[str] | None = None) -> None:
        if not has_template(tokenizer):
            raise UserError(f"{name} has no chat template in its tokenizer; leave out --chat")
        self.tokenizer, self.name, self.question = tokenizer, name, question

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, **options: Any) -> Mapping[str, Any]:
        if add_special_tokens:
            text = self._read(text) if isinstance(text, str) else [self._read(one) for one in text]
        return self.tokenizer(text, add_special_tokens=False, **options)

    def _read(self, text: str) -> str:
        return text if self.written(text) else self._message(text)

    def written(self, text: str) -> bool:
        """Whether a text is written in the template already: it begins with the special token that the template begins
        with, or with that after a BOS."""
        if not hasattr(self, "_begins"):
            opening = self.tokenizer(self._message("a"), add_special_tokens=False)["input_ids"]
            special = {*getattr(self.tokenizer, "all_special_ids", ())}
            special |= {*(getattr(self.tokenizer, "added_tokens_decoder", None) or {})}
            self._begins = [*dict.fromkeys(token for token in opening[:2] if token in special)]
        if not self._begins:
            return False
        first = self.tokenizer(text, add_special_tokens=False)["input_ids"][:2]
        return bool(first) and first[0] in self._begins

    def _message(self, text: str) -> str:
        answer = self.question.search(text) if self.question else None
        start = answer.start() if answer else len(text)
        messages = [{"role": "user", "content": text[:start].rstrip()}]
        if answer:
            messages.append({"role": "assistant", "content": text[start:]})
        try:
            written = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not answer, continue_final_message=bool(answer)
            )
        except (ValueError, TemplateError) as error:  # the template refuses a role, or its output has another text
            place = f"an answer that begins with {text[start:]!r}" if answer else f"a user's message alone ({error})"
            raise UserError(f"the chat template of {self.name} has no place for {place}; leave out --chat") from None
        if messages[0]["content"].strip() not in written:
            raise UserError(
                f"{messages[0]['content']!r} is not in what the chat template of {self.name} writes; leave out --chat"
            )
        return written

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template, as those of instruct models have."""
    return bool(getattr(tokenizer, "chat_template", None))


def special_tokens(tokenizer: Tokenizer | None) -> tuple[int, int]:
    """How many tokens are read before a text and after it: 1 and 0 with a BOS; of a chat those of its template."""
    if tokenizer is None:
        return 0, 0
    if not isinstance(tokenizer, Chat):
        return len(_frame(tokenizer)[0]), 0
    # A template may hold the text's own tokens, and the text others within it: what does not change with it is the
    # template.
    whole, other = (tokenizer(text, add_special_tokens=True)["input_ids"] for text in "ab")
    return _shared(whole, other), _shared(whole[::-1], other[::-1])


def _shared(first: list[int], second: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (one, two) in enumerate(zip(first, second, strict=False)) if one != two), 0)


def shuffle(tokens: Tokens | Rows, before: int, seed: int, after: int = 0) -> Tokens | Rows:
    """Every sequence with its tokens in random order; special ones `before` and `after` it stay, and the final one."""
    generator = np.random.default_rng(seed)
    data = tokens.data.clone()
    for row, length in zip(data, tokens.lengths.tolist(), strict=True):
        end = length - max(after, 1)
        if end > before:
            order = before + generator.permutation(end - before)
            row[before:end] = row[torch.from_numpy(order)]
    return type(tokens)(data, tokens.lengths)
