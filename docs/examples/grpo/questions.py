"""Questions of reasoning-gym as tokens, and what answers to them are worth."""

from collections.abc import Iterator, Sequence
from typing import Any

import reasoning_gym

from .settings import Settings
from .text import Text

SIZE = 1_000_000  # questions are made when they are asked for; this many differ


class Questions:
    """An endless supply of questions, each known by its number, and some that are held out."""

    def __init__(self, settings: Settings, text: Text) -> None:
        self.text = text
        options = {"size": SIZE, **settings.options}
        # Numbers below SIZE are those of the first data set, the others are held out. reasoning-gym makes a
        # question from the sum of its number and the seed: seeds that are near each other share questions.
        first = 2 * SIZE * settings.seed
        self._training = reasoning_gym.create_dataset(settings.dataset, seed=first, **options)
        self._testing = reasoning_gym.create_dataset(settings.dataset, seed=first + SIZE, **options)
        self.held_out = range(SIZE, SIZE + settings.held_out)
        self._held_out_texts = {self.entry(number)["question"] for number in self.held_out}
        self._next = 0

    def entry(self, number: int) -> dict[str, Any]:
        chosen = self._training if number < SIZE else self._testing
        return chosen[number % SIZE]

    def prompt(self, number: int) -> list[int]:
        return self.text.prompt(self.entry(number)["question"])

    def reward(self, number: int, tokens: Sequence[int]) -> float:
        """Score an answer: 1 if reasoning-gym takes it for right, and less if not."""
        answer = self.text.answer(self.text.text(tokens))
        return float(self._training.score_answer(answer, self.entry(number)))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """Return the number of the next question that is not among those held out."""
        while True:
            number = self._next
            self._next += 1
            if self.entry(number)["question"] not in self._held_out_texts:
                return number

    def take(self, count: int) -> list[int]:
        return [next(self) for _ in range(count)]
