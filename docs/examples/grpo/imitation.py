"""Imitation: a fresh policy learns the format from a sloppy teacher before it is reinforced."""

import random
import re
from collections.abc import Callable, Iterable

from torch import Tensor

from asyncwg import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup

from .policy import padded
from .questions import Questions
from .settings import Settings
from .text import Digits
from .workers import Trainer

WARM, COOL = 20, 100  # steps over which the learning rate rises, and falls


class Teacher:
    """Works a sum out term by term, ``3+4=7;7-9=-2``, and gets many a step wrong.

    Whoever imitates it learns the format, and is right as seldom as the teacher.
    """

    def __init__(self, questions: Questions, text: Digits, slips: float, seed: int) -> None:
        self._questions, self._text, self._slips = questions, text, slips
        self._dice = random.Random(seed)

    def demonstrate(self, number: int) -> tuple[list[int], list[int]]:
        """Return a question's tokens and those of an answer."""
        problem = self._questions.entry(number)["metadata"]["expression"].replace(" ", "")
        first, *rest = re.findall(r"[+-]?\d+", problem)
        total, steps = int(first), []
        for term in rest:
            result = total + int(term)
            if self._dice.random() < self._slips:
                result += self._dice.choice((-2, -1, 1, 2))
            steps.append(f"{total}{term}={result}")
            total = result
        answer = self._text.tokens(";".join(steps))
        return self._questions.prompt(number), [*answer, self._text.end]


async def imitate(
    settings: Settings, ranks: int, track: Callable[[Iterable[int]], Iterable[int]]
) -> dict[str, Tensor]:
    """Teach a fresh policy, data-parallel on ``ranks`` ranks, and return its weights."""
    text = Digits()
    questions = Questions(settings, text)
    teacher = Teacher(questions, text, settings.slips, settings.seed)
    async with WorkerGroup(
        ResourcePool([ranks]), ClassWithInitArgs(Trainer, settings), name="imitation"
    ) as trainer:
        for step in track(range(settings.lessons)):
            pairs = [teacher.demonstrate(next(questions)) for _ in range(settings.lesson_size)]
            data = padded(pairs, text.padding)
            batch, tokens = DataProto.from_dict(data), int(data["answer"].sum())
            share = min(1, (step + 1) / WARM, (settings.lessons - step) / COOL)
            await trainer.imitate(batch, tokens=tokens, lr=settings.lesson_lr * share)
        return await trainer.weights()
