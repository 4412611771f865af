"""Routing: each request goes to the rank with the least to do, and a conversation to where its cache is."""

import asyncio

import torch
from torch import Tensor, nn

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

TOKENS, WIDTH, TURNS, TALKS = 32, 24, 4, 6


class Model(Worker):
    """A recurrent net: its state after some tokens is what a KV cache is to a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell = nn.Embedding(TOKENS, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.cache: dict[int, tuple[int, Tensor]] = {}  # of a conversation: tokens read, and state
        self.read = 0

    @asyncwg.register()
    @torch.no_grad()
    def reply(self, talk: int | None, tokens: list[int]) -> int:
        start, state = self.cache.get(talk, (0, torch.zeros(WIDTH)))
        for token in tokens[start:]:
            state = self.cell(self.embed.weight[token], state)
            self.read += 1
        if talk is not None:
            self.cache[talk] = (len(tokens), state)
        return self.head(state).argmax().item()

    @asyncwg.register()
    def counts(self) -> tuple[int, int]:
        return len(self.cache), self.read


async def converse(model: WorkerGroup, talk: int, *, cached: bool) -> list[int]:
    tokens = [talk]
    for turn in range(TURNS):
        tokens += [(talk + turn + n) % TOKENS for n in range(5)]  # the user
        if cached:
            reply = model.any.reply.options(sticky=talk)
            tokens.append(await reply(talk, tokens))
        else:
            tokens.append(await model.any.reply(None, tokens))
    return tokens


async def main() -> None:
    async with WorkerGroup(ResourcePool([3], use_gpu=False), ClassWithInitArgs(Model)) as model:
        texts = []
        for cached in (False, True):
            before = sum(read for _, read in await model.counts())
            talks = [converse(model, talk, cached=cached) for talk in range(TALKS)]
            texts.append(await asyncio.gather(*talks))
            counts = await model.counts()
            read = sum(read for _, read in counts) - before
            print(f"{'with' if cached else 'without'} caches: {read} tokens read")
    print(f"conversations by rank: {[talks for talks, _ in counts]}")
    print(f"the same replies: {texts[0] == texts[1]}")


asyncwg.run(main())
