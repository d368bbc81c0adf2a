"""`--chat` where prompts are lists: the list is the message, and its last item begins the answer."""

from __future__ import annotations

from dataclasses import dataclass

from llmgeom.commands.config import AnySubject, ModelConfig
from llmgeom.flags import flag


@dataclass(frozen=True)
class ChatListConfig(ModelConfig):
    """What a command that can give lists as messages is asked for."""

    chat: bool = flag(
        False,
        "Give each list as a user's message, in the tokenizer's template; its last item begins the answer.",
        group="Prompts",
    )

    def reading(self, subject: AnySubject) -> AnySubject:
        """The model as it reads prompts: with --chat a list is a message, and its last item the answer's beginning."""
        from llmgeom.prompts.surfaces import QUESTION

        return subject.chat(QUESTION) if self.chat else subject
