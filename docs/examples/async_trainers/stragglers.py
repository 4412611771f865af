"""Slow rollouts: take what is there, set a deadline, or take the first n; the rest is stopped."""

import torch

import asyncwg
from asyncwg import ClassWithInitArgs, PerRank, ResourcePool, Worker, WorkerGroup

ENDLESS = -1  # a prompt whose answer would never end
MARGIN = 3.0  # seconds before its deadline at which a method returns what it has


class Rollout(Worker):
    @asyncwg.register()
    def generate(self, prompt: int) -> list[int]:
        """Make tokens until the answer ends, nobody wants it any more, or time is short."""
        call, dice = asyncwg.current_call(), torch.Generator().manual_seed(abs(prompt))
        answer = [prompt]
        while answer[-1] != 0:
            if call.cancelled or (call.remaining is not None and call.remaining < MARGIN):
                break
            answer.append(torch.randint(int(prompt == ENDLESS), 8, (1,), generator=dice).item())
        return answer


async def main() -> None:
    pool = ResourcePool([3], use_gpu=False)
    async with WorkerGroup(pool, ClassWithInitArgs(Rollout)) as rollout:
        # Two of three ranks are enough: those that answer first.
        answers = {}
        call = rollout.generate(PerRank([1, ENDLESS, 2]))
        async for rank, answer in call.as_completed():
            answers[rank] = answer
            if len(answers) == 2:
                break
        call.cancel()  # the method of rank 1 sees it and returns; the call fails for nobody
        print(f"two of three: ranks {sorted(answers)}")

        # A deadline that the method knows of: what there is, instead of nothing.
        answer = await rollout[1].generate.options(timeout=MARGIN + 0.2)(ENDLESS)
        print(f"at the deadline: an answer that has not ended: {answer[-1] != 0}")

        # The first ten answers to twelve prompts, whoever makes them.
        prompts, first = [3, ENDLESS, *range(4, 13), ENDLESS], []
        one_each = rollout.world_size  # so that nothing waits behind a slow one
        pairs = rollout.map("generate", prompts, max_inflight=one_each, with_items=True)
        async for prompt, _answer in pairs:
            first.append(prompt)
            if len(first) == 10:
                break  # stops the two that are still being made
        print(f"the first ten: {sorted(first)}")
        print(f"and all ranks are free: {[answer[-1] for answer in await rollout.generate(2)]}")


asyncwg.run(main())
