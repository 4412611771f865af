"""Train CartPole with PPO: actor, critic and reference are three roles in the same processes.

The controller at the end reads like the algorithm. Each worker plays in environments of its own,
and gradients are added up over the workers, so the nets are the same everywhere.
"""

import argparse
import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.vector import AutoresetMode, VectorEnv
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

import asyncwg
from asyncwg import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
)

ENVS, STEPS = 8, 128  # in each worker; steps of each environment between two updates
EPOCHS, PARTS = 6, 4  # passes over a rollout, and the number of mini-batches in each
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
LR, CRITIC_LR, MOST_GRADIENT = 1e-3, 2e-3, 0.5
EPISODES = 50  # that each worker plays for the evaluation
LONGEST = 500  # steps; CartPole-v1 ends an episode then


def environments(count: int) -> VectorEnv:
    # SAME_STEP: when an episode ends, the step that ended it has the first observation of the next.
    # What the old episode ended with is in info["final_obs"].
    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gymnasium.make_vec(
        "CartPole-v1", count, vectorization_mode="sync", vector_kwargs=options
    )


def average(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


class Role(Worker):
    """A small net, and how to train it together with the other ranks."""

    def __init__(self, outputs: int, lr: float, seed: int) -> None:
        super().__init__()
        self.init_process_group()  # once for all roles of a process: they are one rank
        torch.manual_seed(seed)  # the same weights on every rank, without a broadcast
        self.net = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )
        with torch.no_grad():
            self.net[-1].weight *= 0.01  # a policy that begins undecided, and values near zero
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        # From here on ranks differ: each draws actions and mini-batches of its own.
        self.dice = torch.Generator().manual_seed(1000 * seed + self.rank)

    def learn(self, batch: DataProto, loss: Callable[[dict[str, Tensor]], Tensor]) -> float:
        """Take EPOCHS * PARTS steps down the mean of ``loss``; return the mean on these rows."""
        samples = {key: value.flatten(0, 1) for key, value in batch.batch.items()}
        count = len(batch) * STEPS
        losses = []
        for _ in range(EPOCHS):
            for chosen in torch.randperm(count, generator=self.dice).chunk(PARTS):
                mean = loss({key: value[chosen] for key, value in samples.items()}).mean()
                self.optimizer.zero_grad()
                mean.backward()
                gradients = [p.grad for p in self.net.parameters()]
                flat = nn.utils.parameters_to_vector(gradients)  # one message for all of them
                dist.all_reduce(flat)
                # All ranks have as many rows, so the mean of their means is that of all rows.
                nn.utils.vector_to_parameters(flat / self.world_size, gradients)
                nn.utils.clip_grad_norm_(self.net.parameters(), MOST_GRADIENT)
                self.optimizer.step()
                losses.append(mean.item())
        return average(losses)


class Actor(Role):
    """The policy; it plays, and it learns to do what turned out better than expected."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, LR, seed)
        self.envs = environments(ENVS)
        self.observation, _ = self.envs.reset(seed=1000 * seed + ENVS * self.rank)
        self.score = np.zeros(ENVS)  # of the episodes under way

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def rollout(self) -> DataProto:
        """Play for STEPS steps. A row is what one environment went through."""
        steps, finished = [], []
        for _ in range(STEPS):
            observation = torch.from_numpy(self.observation)
            logits = self.net(observation)
            action = torch.multinomial(logits.softmax(-1), 1, generator=self.dice).squeeze(-1)
            self.observation, reward, terminated, truncated, info = self.envs.step(action.numpy())
            done = terminated | truncated
            after = self.observation.copy()
            if done.any():
                after[done] = np.stack(info["final_obs"][done])
            self.score += reward
            finished += self.score[done].tolist()
            self.score[done] = 0
            step = {
                "observation": observation, "action": action, "logits": logits,
                "reward": reward, "after": after, "terminated": terminated, "done": done,
            }  # fmt: skip
            steps.append({key: torch.as_tensor(value) for key, value in step.items()})
        rows = {key: torch.stack([step[key] for step in steps], dim=1) for key in steps[0]}
        rows["reward"] = rows["reward"].float()
        # Key "metrics" is gathered when the ranks' results are joined; other facts must be the same.
        return DataProto.from_dict(rows, meta_info={"metrics": {"returns": finished}})

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> float:
        """Learn from this rank's rows; return the mean loss."""

        def loss(sample: dict[str, Tensor]) -> Tensor:
            old = Categorical(logits=sample["logits"]).log_prob(sample["action"])
            policy = Categorical(logits=self.net(sample["observation"]))
            ratio = (policy.log_prob(sample["action"]) - old).exp()
            # The worse of both: there is nothing to gain from moving farther than CLIP.
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * sample["advantage"], clipped * sample["advantage"])
            return -gain - ENTROPY * policy.entropy()

        return self.learn(batch, loss)

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def evaluate(self, episodes: int, seed: int) -> list[float]:
        """Play whole episodes, always the likelier action, and return what each brought."""
        envs = environments(episodes)
        observation, _ = envs.reset(seed=seed + episodes * self.rank)
        returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
        for _ in range(LONGEST):
            action = self.net(torch.from_numpy(observation)).argmax(-1).numpy()
            observation, reward, terminated, truncated, _ = envs.step(action)
            # Only the first episode of each environment counts: short ones would come more often.
            returns += reward * running
            running &= ~(terminated | truncated)
        return returns.tolist()


class Critic(Role):
    """How much reward is still to come, from where the cart and the pole are."""

    def __init__(self, seed: int) -> None:
        super().__init__(1, CRITIC_LR, seed)

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def values(self, batch: DataProto) -> DataProto:
        here, after = (self.net(batch.batch[key]).squeeze(-1) for key in ("observation", "after"))
        return DataProto.from_dict({"value": here, "value_after": after})

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> float:
        def loss(sample: dict[str, Tensor]) -> Tensor:
            return 0.5 * (self.net(sample["observation"]).squeeze(-1) - sample["return"]) ** 2

        return self.learn(batch, loss)


class Reference(Role):
    """The policy as it was before training."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, 0.0, seed)  # the same seed as the actor, so the same weights

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def logits(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"reference": self.net(batch.batch["observation"])})


def add_advantages(batch: DataProto) -> None:
    """Say of each action how much more it brought than expected (GAE), and what states are worth."""
    data = batch.batch
    # An episode that was cut off at its longest would have gone on: only a fall is worth nothing.
    after = torch.where(data["terminated"], 0.0, data["value_after"])
    surprise = data["reward"] + GAMMA * after - data["value"]
    advantage, later = torch.empty_like(surprise), torch.zeros(len(batch))
    for t in reversed(range(STEPS)):
        later = surprise[:, t] + GAMMA * LAMBDA * torch.where(data["done"][:, t], 0.0, later)
        advantage[:, t] = later
    data["return"] = advantage + data["value"]
    data["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def divergence(batch: DataProto) -> float:
    """Say how far the policy has moved from the reference.

    With language models that is a cost. Here the reference knows nothing, so it is only shown.
    """
    policy, reference = (Categorical(logits=batch.batch[key]) for key in ("logits", "reference"))
    return kl_divergence(policy, reference).mean().item()


async def train(workers: int, updates: int, until: float, seed: int) -> float:
    """Train until episodes bring ``until`` on average; return what fresh ones bring."""
    roles = {
        "actor": ClassWithInitArgs(Actor, seed),
        "critic": ClassWithInitArgs(Critic, seed),
        "reference": ClassWithInitArgs(Reference, seed),
    }
    pool = ResourcePool([workers], use_gpu=False)  # nets of this size gain nothing from a GPU
    async with WorkerGroup(pool, create_colocated_worker_cls(roles), name="ppo") as wg:
        groups = wg.spawn(set(roles))  # three groups, and still one process for each rank
        await fit(groups["actor"], groups["critic"], groups["reference"], updates, until)
        return average(await groups["actor"].evaluate(EPISODES, seed=10**6 + seed))


async def fit(
    actor: WorkerGroup, critic: WorkerGroup, reference: WorkerGroup, updates: int, until: float
) -> None:
    recent: deque[float] = deque(maxlen=100)
    with progress() as bar:
        task = bar.add_task("", total=updates, returns=0.0, kl=0.0, policy=0.0, value=0.0)
        rollout = actor.rollout()  # on its way: a call is sent when it is made, not when awaited
        for update in range(updates):
            # Not awaited yet, it is an argument already: its rows go straight to who asks for them.
            values, logits = critic.values(rollout), reference.logits(rollout)
            batch = (await rollout).union(await values).union(await logits)
            add_advantages(batch)
            learning = asyncio.gather(actor.update(batch), critic.update(batch))
            # Behind the updates, so with the new policy: the workers go on while we look at numbers.
            rollout = actor.rollout()
            recent.extend(batch.meta_info["metrics"]["returns"])
            played, kl = average(recent), divergence(batch)
            policy, value = map(average, await learning)
            bar.update(task, advance=1, returns=played, kl=kl, policy=policy, value=value)
            # Those were played by policies of the past too, so the one of now is asked as well.
            if played >= until and len(recent) == recent.maxlen:
                trial = await actor.evaluate(EPISODES, seed=2 * 10**6 + 1000 * update)
                if average(trial) >= until:
                    break
        rollout.cancel()  # nobody needs the last one


def progress() -> Progress:
    numbers = (
        "return {task.fields[returns]:.0f}",
        "KL {task.fields[kl]:.3f}",
        "loss: policy {task.fields[policy]:.3f}",
        "value {task.fields[value]:.1f}",
    )
    return Progress(
        TextColumn("update"),
        MofNCompleteColumn(),
        BarColumn(8),
        *map(TextColumn, numbers),
        TimeElapsedColumn(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200, help="at most (default: 200)")
    parser.add_argument("--until", type=float, default=400.0, help="mean return (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = perf_counter()
    mean = asyncwg.run(train(args.workers, args.updates, args.until, args.seed))
    print(f"mean return {mean:.1f} over {args.workers * EPISODES} fresh episodes, ", end="")
    print(f"after {perf_counter() - start:.0f} s")
    if mean < args.until:
        raise SystemExit(f"expected at least {args.until:g}")


if __name__ == "__main__":
    main()
