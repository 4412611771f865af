"""Partial rollouts: pause a long generation, change the weights, and go on where it was."""

from typing import Any

import torch
from torch import Tensor

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup

TOKENS, END = 16, 0
Answers = list[dict[str, Any]]


class Rollout(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.zeros(TOKENS, TOKENS)  # of each token after each token
        self.scores[:, END] = -torch.inf  # this policy does not know how to end
        self.version, self.made, self.paused = 0, 0, False
        self.dice = torch.Generator().manual_seed(self.rank)

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, answers: Answers) -> Answers:
        """Go on with these answers until all have ended, or somebody pauses."""
        while not self.paused and (open_ := [a for a in answers if a["tokens"][-1] != END]):
            last = torch.tensor([answer["tokens"][-1] for answer in open_])
            chosen = torch.multinomial(self.scores[last].softmax(1), 1, generator=self.dice)
            for answer, token in zip(open_, chosen[:, 0].tolist(), strict=True):
                answer["tokens"].append(token)
                answer["versions"].append(self.version)
            self.made += len(open_)
        return answers

    @asyncwg.register()
    async def pause(self) -> None:  # async def: served while `generate` runs
        self.paused = True

    @asyncwg.register()
    async def resume(self) -> None:
        self.paused = False

    @asyncwg.register()
    async def count(self) -> int:
        return self.made

    @asyncwg.register()
    def load(self, scores: Tensor, version: int) -> None:  # def: after `generate` has returned
        self.scores, self.version = scores, version


async def main() -> None:
    answers: Answers = [{"tokens": [first], "versions": []} for first in range(1, 9)]
    async with WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Rollout)) as rollout:
        running = rollout.generate(answers)
        while min(await rollout.count()) < 100:
            pass  # in its place a trainer makes a step
        await rollout.pause()
        partial = await running  # all of it, as far as it has come
        await rollout.load(torch.zeros(TOKENS, TOKENS), version=1)  # this policy ends answers
        await rollout.resume()
        whole = await rollout.generate(partial)
        made = sum(await rollout.count())
    open_ = sum(answer["tokens"][-1] != END for answer in partial)
    pairs = zip(partial, whole, strict=True)
    resumed = sum(b["tokens"][: len(a["tokens"])] == a["tokens"] for a, b in pairs)
    both = sum(set(answer["versions"]) == {0, 1} for answer in whole)
    print(f"answers that had not ended at the pause: {open_}")
    print(f"answers that go on where they were: {resumed}")
    print(f"answers with tokens of both versions: {both}")
    print(f"tokens made and not in an answer: {made - sum(len(a['versions']) for a in whole)}")


asyncwg.run(main())
