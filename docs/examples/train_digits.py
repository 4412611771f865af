"""Train a small convolutional net on handwritten digits, data-parallel.

Each rank gets its rows of every batch, and the gradients are added up over the ranks: the result is
that of one process with whole batches. Runs on all visible GPUs, or else in two processes.
"""

import argparse
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import asyncwg
from asyncwg import ClassWithInitArgs, DataProto, Dispatch, ResourcePool, Worker, WorkerGroup

EPOCHS, BATCH, TRAIN_ROWS, LEAST_ACCURACY = 20, 128, 11 * 128, 0.97
PICTURE = Path(__file__).parent / "out" / "train_digits.png"


class Trainer(Worker):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.init_process_group()  # NCCL on GPUs, gloo on CPUs
        torch.manual_seed(0)  # the same weights on every rank, without a broadcast
        self.model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
        ).to(self.device)  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="allow")
    def train_step(self, batch: DataProto, rows: int) -> dict[str, float]:
        """Take a step on this rank's shard of a batch that has ``rows`` rows on all ranks."""
        start = perf_counter()
        data = batch.to(self.device).batch
        scores = self.model(data["pixels"])
        # Over the rows of all ranks: the sum over the ranks is then the mean of the whole batch, also
        # where shards differ in length. DistributedDataParallel takes the mean of the ranks' means.
        loss = nn.functional.cross_entropy(scores, data["digit"], reduction="sum") / rows
        self.optimizer.zero_grad()
        loss.backward()
        own_loss = loss.item()  # waits for the GPU too, so the time is true
        computed = perf_counter()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)  # one message for all of them
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, gradients)
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {"loss": own_loss, "compute": computed - start, "reduce": perf_counter() - computed}

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, uneven="allow")
    @torch.no_grad()
    def count_correct(self, batch: DataProto) -> int:
        data = batch.to(self.device).batch
        return int((self.model(data["pixels"]).argmax(1) == data["digit"]).sum())


async def train(workers: int, steps: list[DataProto], test: DataProto) -> tuple[Tensor, float]:
    history = []  # of each step: the loss, then the seconds of each part
    async with WorkerGroup(ResourcePool([workers]), ClassWithInitArgs(Trainer, lr=0.1)) as wg:
        for batch in track(steps, f"workers: {workers}"):
            start = perf_counter()
            call = wg.train_step(batch, rows=len(batch))  # goes off here: each rank gets a shard
            sent = perf_counter() - start
            out = await call  # the loop is free meanwhile; a number comes back as a list by rank
            total = perf_counter() - start
            parts = [sent, sum(out["compute"]) / workers, sum(out["reduce"]) / workers]
            history.append([sum(out["loss"]), *parts, total - sum(parts)])
        return torch.tensor(history), sum(await wg.count_correct(test)) / len(test)


def draw(history: Tensor) -> None:
    loss, *seconds = history.T
    figure = Figure(figsize=(10, 3.6), layout="constrained")  # without pyplot, so without a screen
    left, right = figure.subplots(1, 2)
    left.semilogy(loss, linewidth=0.8)
    left.set(title="Loss", xlabel="step")
    right.stackplot(range(len(loss)), 1e3 * torch.stack(seconds))
    right.set(title="Where the time of a call went", xlabel="step", ylabel="ms")
    right.set_ylim(0, 3.5e3 * sum(seconds).median())  # cuts off what other programs cause
    right.legend(["split and send", "compute", "all-reduce", "the rest"], loc=2, framealpha=1)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=80)
    print(f"picture: {PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--workers", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--compare", action="store_true", help="with one worker too")
    args = parser.parse_args()
    pixels, digit = map(torch.tensor, load_digits(return_X_y=True))
    digits = DataProto.from_dict({"pixels": pixels.float().view(-1, 1, 8, 8) / 16, "digit": digit})
    digits = digits[torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))]
    data, test = digits[:TRAIN_ROWS], digits[TRAIN_ROWS:]
    steps = list(data.make_iterator(BATCH, args.epochs, 0, {"shuffle": True}))
    history, accuracy = asyncwg.run(train(args.workers, steps, test))
    rate = BATCH * len(steps) / history[:, 1:].sum()
    print(f"test accuracy {accuracy:.1%}, {rate:,.0f} rows per second")
    if args.compare:
        _, alone = asyncwg.run(train(1, steps, test))
        print(f"test accuracy with one worker {alone:.1%}")
    if not args.no_plot:
        draw(history)
    if args.epochs >= EPOCHS and accuracy < LEAST_ACCURACY:
        raise SystemExit(f"expected at least {LEAST_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
