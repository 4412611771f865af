"""What the workers do, in every library the same."""

from __future__ import annotations

import os

import torch


def nothing() -> None:
    """Answer, that is all."""


def ready() -> int:
    """Answer with the process id. It needs torch, so nobody can answer before having loaded it."""
    return os.getpid() if torch.ones(1).item() == 1 else 0


def last(tensor: torch.Tensor) -> float:
    return tensor[-1].item()


def times_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1


def ones(numel: int) -> torch.Tensor:
    return torch.ones(numel)
