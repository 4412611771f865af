"""The two groups: ranks that sample answers, and ranks that learn from them."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import asyncwg
from asyncwg import DataProto, Dispatch, Execute, Worker

from . import policy
from .sampler import Group, Sampler
from .settings import Settings

GAP = 0.002  # seconds: a worker that rests for less counts as busy

Span = tuple[float, float]
"""Begin and end, in seconds of the clock that all processes of a machine share."""


class Busy(Worker):
    """A worker that keeps to its cores, and notes when it was busy."""

    def __init__(self, cores: Sequence[int] | None) -> None:
        super().__init__()
        if cores is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(max(len(cores) // self.world_size, 1))
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            if self._spans and start - self._spans[-1][1] < GAP:
                start = self._spans.pop()[0]
            self._spans.append((start, time.monotonic()))

    @asyncwg.register()
    async def spans(self) -> list[Span]:
        """Return when it was busy since the last call."""
        spans, self._spans = self._spans, []
        return spans


class Rollout(Busy):
    """Samples answers to many questions at a time, each call one question."""

    def __init__(self, settings: Settings, cores: Sequence[int] | None = None) -> None:
        super().__init__(cores)
        text = policy.text_of(settings)
        dtype = policy.precision(settings, self.device)
        self.model = policy.build(settings, self.device, dtype).eval()
        self.parameters = policy.trained(self.model, settings.trained_layers)
        self.sampler = Sampler(
            self.model,
            end=text.end,
            padding=text.padding,
            longest=settings.longest,
            slots=settings.slots,
            seed=settings.seed,
        )
        self.lock = threading.Lock()  # held by a step and by a change of the weights
        # Each call's group until it is answered, and what the sampler has not been told yet: calls come
        # and go at any time, also while a step is under way in a thread.
        self.calls: list[tuple[Group, asyncio.Future[Group]]] = []
        self.arrived: list[Group] = []
        self.unwanted: list[Group] = []
        self.decoding: asyncio.Task[None] | None = None
        self.running = asyncio.Event()
        self.running.set()

    @asyncwg.register(execute_mode=Execute.ANY)
    async def generate(self, group: Group) -> Group:
        """Sample until the group is finished; paused, return it as far as it has come."""
        await self.running.wait()
        done: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self.calls.append((group, done))
        self.arrived.append(group)
        if self.decoding is None or self.decoding.done():
            self.decoding = asyncio.create_task(self._decode())
        try:
            return await done
        except asyncio.CancelledError:
            self.calls = [call for call in self.calls if call[1] is not done]
            self.unwanted.append(group)
            raise

    @asyncwg.register()
    async def pause(self) -> None:
        """Have all calls return what they have; later ones wait for `resume`."""
        self.running.clear()
        if self.decoding is not None:
            await asyncio.wait([self.decoding])

    @asyncwg.register()
    async def resume(self) -> None:
        self.running.set()

    @asyncwg.register()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take new weights; what is sampled from now on has their version."""
        with self.lock, torch.no_grad():
            for name, value in state.items():
                if name == "version":
                    self.sampler.version = int(value)
                else:
                    self.parameters[name].copy_(value)

    async def _decode(self) -> None:
        """Sample for all calls together, until there is none or it is paused."""
        try:
            while self.running.is_set() and self.calls:
                self._tell_sampler()
                await asyncio.to_thread(self._step)  # the event loop takes calls meanwhile
                self._answer([group for group, _ in self.calls if group.finished])
        except Exception as failure:  # noqa: BLE001  # whoever waits for an answer hears of it
            for _, done in self.calls:
                if not done.done():
                    done.set_exception(failure)
            self.calls = []
        finally:
            self._tell_sampler()
            groups = [group for group, _ in self.calls]
            self.sampler.remove(groups)
            self._answer(groups)

    def _tell_sampler(self) -> None:
        for group in self.arrived:
            self.sampler.add(group)
        self.sampler.remove(self.unwanted)
        self.arrived, self.unwanted = [], []

    def _step(self) -> None:
        with self.lock, self.busy():
            self.sampler.step()

    def _answer(self, groups: Sequence[Group]) -> None:
        answered = {id(group) for group in groups}
        for group, done in self.calls:
            if id(group) in answered and not done.done():
                done.set_result(group)
        self.calls = [(group, done) for group, done in self.calls if not done.done()]


class Trainer(Busy):
    """Learns from its rows of each batch; the gradients are added up over the ranks."""

    def __init__(self, settings: Settings, cores: Sequence[int] | None = None) -> None:
        super().__init__(cores)
        self.init_process_group()  # NCCL on GPUs, gloo on CPUs
        self.settings = settings
        self.model = policy.build(settings, self.device)
        self.parameters = policy.trained(self.model, settings.trained_layers)
        self.dtype = policy.precision(settings, self.device)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self.dtype)  # as the other group has them
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.version = 0

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, uneven="allow")
    def imitate(self, batch: DataProto, tokens: int, lr: float) -> float:
        """Make demonstrations, which have ``tokens`` tokens on all ranks, more probable."""
        with self.busy():
            data = batch.to(self.device).batch
            chosen = self._log_probabilities(data["tokens"], data["mask"])
            loss = -(chosen * data["answer"][:, 1:]).sum() / tokens
            self.optimizer.zero_grad()
            loss.backward()
            self._descend(lr)
            return loss.item()

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, uneven="allow")
    def learn(self, batch: DataProto, tokens: int) -> dict[str, float]:
        """Take one GRPO step on answers that have ``tokens`` tokens on all ranks.

        What was sampled by older weights counts by the ratio of its probabilities now and then, clipped.
        Return sums over the tokens of those answers that are better or worse than others of their group.
        """
        with self.busy():
            data = batch.to(self.device).batch
            teaches = data["advantage"] != 0
            teaches[0] = True  # a rank that has nothing to learn takes part in the sum all the same
            data = data[teaches]
            first = int(data["answer"].any(0).long().argmax())
            below, above = self.settings.clip
            counted, clipped, divergence = torch.zeros(3, device=self.device)
            self.optimizer.zero_grad()
            for part in data.split(self.settings.rows_at_once):
                answer = part["answer"][:, first:]
                now = self._log_probabilities(part["tokens"], part["mask"], first)
                change = (now - part["log_probabilities"][:, first:]) * answer
                ratio = change.exp()
                advantage = part["advantage"][:, None]
                gain = torch.minimum(
                    ratio * advantage, ratio.clamp(1 - below, 1 + above) * advantage
                )
                (-(gain * answer).sum() / tokens).backward()
                outside = ((ratio < 1 - below) | (ratio > 1 + above)) & (answer > 0)
                counted += answer.sum()
                clipped += outside.sum()
                divergence += ((ratio - 1 - change) * answer).sum().detach()
            self._descend(self.settings.lr)
            self.version += 1
            return {
                "tokens": counted.item(),
                "clipped": clipped.item(),
                "divergence": divergence.item(),
            }

    @asyncwg.register()
    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state[name])

    @asyncwg.register(execute_mode=Execute.RANK_ZERO)
    def weights(self) -> dict[str, Tensor]:
        """Return what the other group needs to sample with."""
        version = torch.tensor(self.version)
        return {"version": version, **{n: p.detach() for n, p in self.parameters.items()}}

    def _log_probabilities(self, tokens: Tensor, mask: Tensor, first: int = 1) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32):
            return policy.log_probabilities(self.model, tokens, mask, first)

    def _descend(self, lr: float) -> None:
        """Take a step down the sum of all ranks' gradients."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.world_size > 1:
            flat = nn.utils.parameters_to_vector(gradients)  # one message for all of them
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat, gradients)
        nn.utils.clip_grad_norm_(list(self.parameters.values()), self.settings.most_gradient)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
