"""Text as tokens."""

from collections.abc import Sequence
from typing import Protocol

PREAMBLE = "State the final answer to the following arithmetic problem: "


class Text(Protocol):
    """What turns text into tokens and back."""

    end: int
    padding: int

    def prompt(self, question: str) -> list[int]: ...

    def text(self, tokens: Sequence[int]) -> str: ...

    def answer(self, text: str) -> str:
        """Find the final answer in what a policy wrote."""
        ...


class Digits:
    """One token for each character of an arithmetic problem, and none for the words around it."""

    CHARACTERS = "0123456789+-=;"
    padding, start, end, ask = range(4)
    size = 4 + len(CHARACTERS)

    def prompt(self, question: str) -> list[int]:
        problem = question.removeprefix(PREAMBLE).removesuffix("=").replace(" ", "")
        return [self.start, *self.tokens(problem), self.ask]

    def tokens(self, text: str) -> list[int]:
        return [4 + self.CHARACTERS.index(each) for each in text]

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.CHARACTERS[each - 4] for each in tokens if each >= 4)

    def answer(self, text: str) -> str:
        return text.rpartition("=")[2]
