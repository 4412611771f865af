"""One run: the two groups, and what every mode does with them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import asyncwg
from asyncwg import ClassWithInitArgs, DataProto, ResourcePool, RowsStatistics, WorkerGroup

from .policy import padded, text_of
from .questions import Questions
from .record import Record, mean
from .sampler import Answer, Group
from .settings import Settings
from .workers import Rollout, Trainer

State = dict[str, Tensor]
JUDGED = 2  # answers to each held-out question


@dataclass(frozen=True)
class Cores:
    """Which cores each group computes on; None for all of them."""

    trainer: Sequence[int] | None = None
    rollout: Sequence[int] | None = None


@dataclass
class Run:
    """Both groups with the same weights, and a record of what they do."""

    settings: Settings
    questions: Questions
    trainer: WorkerGroup
    rollout: WorkerGroup
    link: Any
    record: Record
    kept: list[tuple[int, float, State]] = field(default_factory=list)
    """Steps, seconds, and the weights at that time."""

    @property
    def in_flight(self) -> int:
        """How many questions keep the places of the rollout group filled.

        More than there are places for: of a question under way, some answers are finished.
        """
        places = self.settings.slots * self.rollout.world_size
        return 3 * places // (2 * self.settings.samples)

    async def steps(self) -> AsyncIterator[int]:
        """Count the steps, beginning the clock with the first, and keep the weights now and then."""
        every = self.settings.judge_every
        self.record.begin()
        for step in range(self.settings.steps + 1):
            if every and step % every == 0:
                self.kept.append((step, self.record.now, await self.trainer.weights()))
            if step < self.settings.steps:
                yield step

    def question(self) -> Group:
        """Return the next question, with no token of any answer to it."""
        number = next(self.questions)
        answers = [Answer() for _ in range(self.settings.samples)]
        return Group(number, self.questions.prompt(number), answers)

    async def sample(self) -> list[Group]:
        """Have the next step's questions answered, whichever rank is free."""
        groups = [self.question() for _ in range(self.settings.questions)]
        answered = self.rollout.map("generate", groups, ordered=True, max_inflight=len(groups))
        return [group async for group in answered]

    async def learn(self, groups: Sequence[Group]) -> None:
        """Take a step on these groups, and write down what it was like."""
        start = time.monotonic()
        rewards = [
            [self.questions.reward(group.number, answer.tokens) for answer in group.answers]
            for group in groups
        ]
        batch, tokens = batch_of(groups, rewards, self.questions.text.padding)
        # Shards by index: the ranks' rows are as many, give or take one.
        parts = await self.trainer.learn(batch, tokens=tokens)
        taught = sum(part["tokens"] for part in parts)
        version = len(self.record.lines)  # before this step
        stale = [version - group.version for group in groups]
        lengths = [len(answer.tokens) for group in groups for answer in group.answers]
        self.record.step(
            reward=mean(reward for each in rewards for reward in each),
            staleness=mean(stale),
            most_stale=max(stale),
            answer_tokens=mean(lengths),
            longest_answer=max(lengths),
            learn_seconds=time.monotonic() - start,
            clipped=sum(part["clipped"] for part in parts) / taught,
            divergence=sum(part["divergence"] for part in parts) / taught,
        )

    async def publish(self) -> None:
        """Give the rollout group the trainer's weights."""
        await self.link.broadcast_state("weights", "load")

    async def held_out(self, samples: int = 0) -> float:
        """Return the mean reward on the held-out questions; ``samples`` as for `evaluate`."""
        return mean(
            self.questions.reward(group.number, answer.tokens)
            for group in await self.evaluate(samples)
            for answer in group.answers
        )

    def right(self, group: Group) -> bool:
        """Return whether its first answer is right."""
        return self.questions.reward(group.number, group.answers[0].tokens) == 1

    async def evaluate(self, samples: int = 0) -> list[Group]:
        """Answer the held-out questions.

        Args:
            samples: answers to each of them; 0 for the most probable one.
        """
        groups = [
            Group(
                number,
                self.questions.prompt(number),
                [Answer() for _ in range(max(samples, 1))],
                greedy=not samples,
            )
            for number in self.questions.held_out
        ]
        answered = self.rollout.map("generate", groups, ordered=True, max_inflight=len(groups))
        return [group async for group in answered]

    async def judge(self) -> None:
        """Write down what the weights that were kept are worth: the same questions for all, and no clock."""
        for step, seconds, state in self.kept:
            await self.rollout.load(state)
            self.record.judged(step, seconds, await self.held_out(samples=JUDGED))
        self.kept.clear()

    def note(self, rows: RowsStatistics) -> None:
        self.record.rows = rows


def batch_of(
    groups: Sequence[Group], rewards: Sequence[Sequence[float]], padding: int
) -> tuple[DataProto, int]:
    """Return a row for each answer, and how many tokens the answers have.

    An answer's advantage is by how many standard deviations its reward is above the mean of its group.
    """
    rows, advantages = [], []
    for group, each in zip(groups, rewards, strict=True):
        reward = torch.tensor(each)
        advantages.append((reward - reward.mean()) / (reward.std() + 1e-4))
        rows += [(group.prompt, answer) for answer in group.answers]
    data = padded([(prompt, answer.tokens) for prompt, answer in rows], padding)
    log_probabilities = torch.zeros_like(data["answer"])
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer.tokens)
        log_probabilities[i, len(prompt) : end] = torch.tensor(answer.log_probabilities)
    more = {"log_probabilities": log_probabilities, "advantage": torch.cat(advantages)}
    return DataProto.from_dict(data | more), int(data["answer"].sum())


@asynccontextmanager
async def start(
    settings: Settings, record: Record, state: State | None, cores: Cores
) -> AsyncIterator[Run]:
    """Start both groups with the weights ``state``, and stop them in the end."""
    questions = Questions(settings, text_of(settings))
    gpus = torch.cuda.device_count()
    use_gpu = gpus >= settings.trainers + settings.rollouts
    trainer = WorkerGroup(
        ResourcePool([settings.trainers], use_gpu=use_gpu),
        ClassWithInitArgs(Trainer, settings, cores.trainer),
        name="trainer",
    )
    rollout = WorkerGroup(
        ResourcePool([settings.rollouts], use_gpu=use_gpu),
        ClassWithInitArgs(Rollout, settings, cores.rollout),
        name="rollout",
    )
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as tasks:  # both start at the same time
            for group in (trainer, rollout):
                tasks.create_task(stack.enter_async_context(group))
        link = await stack.enter_async_context(asyncwg.link(trainer, rollout))
        if state is not None:
            await trainer.load(state)
        run = Run(settings, questions, trainer, rollout, link, record)
        await run.publish()
        yield run
        record.spans["trainer"], record.spans["rollout"] = await asyncio.gather(
            trainer.spans(), rollout.spans()
        )
