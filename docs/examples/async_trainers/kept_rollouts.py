"""Kept rollouts: a call is cancelled, and the worker keeps what it had made for the next one."""

import torch

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

TOKENS, END = 16, 0
Answers = dict[int, list[int]]


class Rollout(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Answers = {}
        self.made, self.can_end = 0, False
        self.dice = torch.Generator().manual_seed(self.rank)

    @asyncwg.register()
    def generate(self, answers: Answers) -> Answers:
        """Go on until all have ended; once nobody waits for them any more, keep them here."""
        while open_ := [answer for answer in answers.values() if answer[-1] != END]:
            if asyncwg.current_call().cancelled:
                self.kept = answers  # the result of a cancelled call is thrown away
                break
            least = END if self.can_end else END + 1
            tokens = torch.randint(least, TOKENS, (len(open_),), generator=self.dice)
            for answer, token in zip(open_, tokens.tolist(), strict=True):
                answer.append(token)
            self.made += len(open_)
        return answers

    @asyncwg.register()
    def take_kept(self) -> Answers:  # def: after `generate` has returned
        kept, self.kept = self.kept, {}
        return kept

    @asyncwg.register()
    def learn_to_end(self) -> None:
        self.can_end = True

    @asyncwg.register()
    async def count(self) -> int:
        return self.made


async def main() -> None:
    answers: Answers = {number: [number] for number in range(1, 9)}
    async with WorkerGroup(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Rollout)) as group:
        rollout = group[0]
        generating = rollout.generate(answers)
        while await rollout.count() < 100:
            pass  # in its place a trainer makes a step
        generating.cancel()  # so do asyncio.timeout, and a TaskGroup in which something fails
        kept = await rollout.take_kept()
        answers.update(kept)  # what no rank had begun is here as it was
        await rollout.learn_to_end()
        whole = await rollout.generate(answers)
        made = await rollout.count()
    print(f"answers kept: {len(kept)}, none had ended: {all(a[-1] != END for a in kept.values())}")
    resumed = sum(whole[number][: len(answer)] == answer for number, answer in kept.items())
    print(f"answers that go on where they were: {resumed}")
    print(f"tokens made and not in an answer: {made - sum(len(a) - 1 for a in whole.values())}")


asyncwg.run(main())
