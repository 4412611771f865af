"""Sampling with a cache of keys and values: answers come and go, one token for each at a time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass
class Answer:
    """An answer as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    """Of each token, by the weights that chose it."""
    versions: list[int] = field(default_factory=list)
    """Of those weights."""
    finished: bool = False


@dataclass
class Group:
    """A question and the answers to it, which GRPO compares with each other."""

    number: int
    prompt: list[int]
    answers: list[Answer]
    greedy: bool = False
    """Whether the most probable token is taken instead of a sample."""

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    @property
    def version(self) -> int:
        """Of the oldest weights that had a part in it; it has at least one token."""
        return min(answer.versions[0] for answer in self.answers)


@dataclass
class _Row:
    """An answer that has a place in the batch."""

    group: Group
    answer: Answer
    luck: list[float]
    """A number from 0 to 1 for each token: what is sampled depends on it and the weights alone."""

    @property
    def last(self) -> int:
        return (self.answer.tokens or self.group.prompt)[-1]

    @property
    def tokens(self) -> list[int]:
        return [*self.group.prompt, *self.answer.tokens]


class Sampler:
    """A batch in which each row is an answer of its own length.

    All rows end at the same column of the cache; where a row is shorter, its first columns are masked. A row
    that is finished leaves at once, and the next one that waits takes its place.

    Args:
        model: any causal language model of `transformers` whose layers attend to everything.
        end: the token that ends an answer.
        padding: any token.
        longest: tokens of an answer at most.
        slots: rows at most.
        seed: two samplers with one seed sample the same answer to the same question.
    """

    def __init__(
        self, model: nn.Module, *, end: int, padding: int, longest: int, slots: int, seed: int
    ) -> None:
        self.model = model
        self.version = 0
        self._device = next(model.parameters()).device
        self._end, self._padding, self._longest, self._slots = end, padding, longest, slots
        self._seed = seed
        self._waiting: list[_Row] = []
        self._rows: list[_Row] = []
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)

    def __len__(self) -> int:
        """Return the number of answers that are not finished."""
        return len(self._rows) + len(self._waiting)

    def add(self, group: Group) -> None:
        """Begin, or go on, with a group's answers."""
        for number, answer in enumerate(group.answers):
            if not answer.finished:
                dice = np.random.default_rng([self._seed, group.number, number])
                luck = dice.random(self._longest, np.float32).tolist()
                self._waiting.append(_Row(group, answer, luck))

    def remove(self, groups: Iterable[Group]) -> None:
        """Let go of these groups' answers, as far as they have come."""
        gone = {id(group) for group in groups}
        self._waiting = [row for row in self._waiting if id(row.group) not in gone]
        self._keep([i for i, row in enumerate(self._rows) if id(row.group) not in gone])

    @torch.inference_mode()
    def step(self) -> None:
        """Give each row its next token."""
        self._admit()
        if not self._rows:
            return
        last = torch.tensor([[row.last] for row in self._rows], device=self._device)
        lengths = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(last)], 1)
        logits = self._forward(last, self._mask, lengths, self._cache).float()
        log_probabilities = logits.log_softmax(-1)
        luck = [row.luck[len(row.answer.tokens)] for row in self._rows]
        # The token in whose share of the probability the number falls; the sum may be a little below 1.
        total = log_probabilities.exp().cumsum(-1)
        reached = torch.tensor(luck, device=self._device)[:, None] * total[:, -1:]
        sampled = (total < reached).sum(-1)
        greedy = torch.tensor([row.group.greedy for row in self._rows], device=self._device)
        chosen = torch.where(greedy, logits.argmax(-1), sampled)
        own = log_probabilities.gather(1, chosen[:, None])[:, 0]
        for row, token, value in zip(self._rows, chosen.tolist(), own.tolist(), strict=True):
            answer = row.answer
            answer.tokens.append(token)
            answer.log_probabilities.append(value)
            answer.versions.append(self.version)
            answer.finished = token == self._end or len(answer.tokens) == self._longest
        self._keep([i for i, row in enumerate(self._rows) if not row.answer.finished])

    def _forward(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Return the logits after the last token of each row; the cache takes the tokens in."""
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            cache=cache,
        )
        return out.logits[:, -1]

    def _admit(self) -> None:
        """Give rows that wait a place, once there are enough places for them to be worth a pass."""
        free = self._slots - len(self._rows)
        count = min(free, len(self._waiting))
        if count < min(math.ceil(self._slots / 8), len(self._waiting)) or not count:
            return
        rows, self._waiting = self._waiting[:count], self._waiting[count:]
        # Answers that begin have their prompt in common, and it is read once.
        texts = [row.tokens[:-1] for row in rows]
        unique = list(dict.fromkeys(map(tuple, texts)))
        longest = max(map(len, unique))
        tokens = torch.tensor(
            [[self._padding] * (longest - len(text)) + list(text) for text in unique],
            device=self._device,
        )
        lengths = torch.tensor([len(text) for text in unique], device=self._device)
        mask = (torch.arange(longest, device=self._device) >= longest - lengths[:, None]).long()
        cache = DynamicCache()
        self._forward(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        index = torch.tensor([unique.index(tuple(text)) for text in texts], device=self._device)
        cache.batch_select_indices(index)
        self._join(cache, mask[index])
        self._rows += rows

    def _join(self, cache: DynamicCache, mask: Tensor) -> None:
        """Put rows below those that are there, so that all end at the same column."""
        if not self._rows:
            self._cache, self._mask = cache, mask
            return
        columns = max(mask.shape[1], self._mask.shape[1])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_widened(old.keys, columns), _widened(new.keys, columns)])
            old.values = torch.cat([_widened(old.values, columns), _widened(new.values, columns)])
        self._mask = torch.cat([_widened(each[..., None], columns) for each in (self._mask, mask)])
        self._mask = self._mask[..., 0]

    def _keep(self, kept: list[int]) -> None:
        """Keep these rows, and no column that is masked in all of them."""
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in kept]
        index = torch.tensor(kept, dtype=torch.long, device=self._device)
        self._mask = self._mask[index]
        if not kept:
            self._cache = DynamicCache()
            return
        first = int(self._mask.any(0).long().argmax())
        self._mask = self._mask[:, first:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[index, :, first:]
            layer.values = layer.values[index, :, first:]


def _widened(values: Tensor, columns: int) -> Tensor:
    """Put zeros before the columns, which are the last dimension but one."""
    return nn.functional.pad(values, (0, 0, columns - values.shape[-2], 0))
