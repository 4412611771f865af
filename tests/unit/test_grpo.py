"""The GRPO example samples what it says it samples, and learns from what was sampled."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Imported by name: the examples are not typed for strict readers.
imitation: Any = importlib.import_module("grpo.imitation")
policy: Any = importlib.import_module("grpo.policy")
questions: Any = importlib.import_module("grpo.questions")
run: Any = importlib.import_module("grpo.run")
sampler: Any = importlib.import_module("grpo.sampler")
settings: Any = importlib.import_module("grpo.settings")

SETTINGS: Any = replace(settings.SMALL, width=32, layers=2, held_out=32, longest=9, lessons=2)
TEXT: Any = importlib.import_module("grpo.text").Digits()


@pytest.fixture(scope="module")
def supply() -> Any:
    """Questions, some of which are held out."""
    return questions.Questions(SETTINGS, TEXT)


@pytest.fixture(scope="module")
def model() -> Any:
    """A policy that knows nothing, and is not undecided either."""
    made = policy.build(SETTINGS, torch.device("cpu")).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 3
    return made


def sampler_of(model: Any, slots: int) -> Any:
    return sampler.Sampler(
        model, end=TEXT.end, padding=TEXT.padding, longest=SETTINGS.longest, slots=slots, seed=7
    )


def groups_of(supply: Any, count: int, *, answers: int = 2, greedy: bool = False) -> list[Any]:
    return [
        sampler.Group(
            number, supply.prompt(number), [sampler.Answer() for _ in range(answers)], greedy
        )
        for number in range(count)
    ]


def finish(made: Any, groups: list[Any]) -> list[list[list[int]]]:
    for group in groups:
        made.add(group)
    # Whoever has a place is done after `longest` steps, and then it is the next one's turn.
    for _ in range(SETTINGS.longest * (len(made) + 1)):
        made.step()
    assert all(group.finished for group in groups)
    assert len(made) == 0
    return [[answer.tokens for answer in group.answers] for group in groups]


@torch.no_grad()
def alone(model: Any, prompt: list[int], luck: Tensor | None) -> list[int]:
    """Sample an answer without a cache, a batch or padding."""
    tokens = list(prompt)
    for i in range(SETTINGS.longest):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        if luck is None:
            token = int(logits.argmax())
        else:
            total = logits.softmax(-1).cumsum(-1)
            token = int((total < luck[i] * total[-1]).sum())
        tokens.append(token)
        if token == TEXT.end:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("slots", [3, 64])
def test_answers_in_a_batch_are_what_each_would_be_alone(
    model: Any, supply: Any, slots: int
) -> None:
    groups = groups_of(supply, 6)
    assert len({len(group.prompt) for group in groups}) > 1
    together = finish(sampler_of(model, slots), groups)
    for group, answers in zip(groups, together, strict=True):
        for number, tokens in enumerate(answers):
            dice = np.random.default_rng([7, group.number, number])
            luck = torch.from_numpy(dice.random(SETTINGS.longest, np.float32))
            assert tokens == alone(model, group.prompt, luck)
    lengths = {len(tokens) for answers in together for tokens in answers}
    assert len(lengths) > 1  # rows left while others went on


def test_a_greedy_answer_takes_the_most_probable_tokens(model: Any, supply: Any) -> None:
    groups = groups_of(supply, 4, answers=1, greedy=True)
    for group, [tokens] in zip(groups, finish(sampler_of(model, 64), groups), strict=True):
        assert tokens == alone(model, group.prompt, None)


def test_what_was_sampled_is_as_probable_as_the_trainer_finds(model: Any, supply: Any) -> None:
    groups = groups_of(supply, 5)
    finish(sampler_of(model, 4), groups)
    rewards = [[1.0, 0.0] for _ in groups]
    batch, tokens = run.batch_of(groups, rewards, TEXT.padding)
    data = batch.batch
    with torch.no_grad():
        found = policy.log_probabilities(model, data["tokens"], data["mask"])
    answer = data["answer"][:, 1:]
    assert answer.sum() == tokens
    torch.testing.assert_close(
        found * answer, data["log_probabilities"][:, 1:], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("steps", [1, 4])
def test_an_interrupted_answer_goes_on_where_it_was(model: Any, supply: Any, steps: int) -> None:
    whole = finish(sampler_of(model, 64), groups_of(supply, 6))
    groups = groups_of(supply, 6)
    first, second = sampler_of(model, 5), sampler_of(model, 64)
    for group in groups:
        first.add(group)
    for _ in range(steps):
        first.step()
    first.remove(groups)
    assert len(first) == 0
    second.version = 1
    assert finish(second, groups) == whole
    versions = [answer.versions for group in groups for answer in group.answers]
    assert all(each == sorted(each) for each in versions)
    assert set(itertools.chain(*versions)) == {0, 1}


def test_removing_a_group_leaves_the_others_as_they_are(model: Any, supply: Any) -> None:
    whole = finish(sampler_of(model, 64), groups_of(supply, 4))
    groups = groups_of(supply, 4)
    made = sampler_of(model, 64)
    made.add(groups[1])
    made.step()
    made.add(groups[0])
    made.step()
    made.remove([groups[1]])
    finish(made, groups[2:])
    found = [[answer.tokens for answer in group.answers] for group in groups]
    assert found[0] == whole[0]
    assert found[2:] == whole[2:]
    assert not groups[1].finished


def test_no_question_of_the_training_is_held_out(supply: Any) -> None:
    held_out = {supply.entry(number)["question"] for number in supply.held_out}
    asked = {supply.entry(number)["question"] for number in supply.take(500)}
    assert not held_out & asked


def test_a_teacher_that_never_slips_is_always_right(supply: Any) -> None:
    teacher = imitation.Teacher(supply, TEXT, 0.0, 0)
    for number in range(50):
        prompt, answer = teacher.demonstrate(number)
        assert prompt == supply.prompt(number)
        assert answer[-1] == TEXT.end
        assert supply.reward(number, answer) == 1


def test_a_sloppy_teacher_is_often_wrong(supply: Any) -> None:
    teacher = imitation.Teacher(supply, TEXT, 0.5, 0)
    right = [supply.reward(number, teacher.demonstrate(number)[1]) for number in range(200)]
    assert 0.1 < sum(right) / 200 < 0.5


def test_an_advantage_is_relative_to_the_group(model: Any, supply: Any) -> None:
    groups = groups_of(supply, 2)
    finish(sampler_of(model, 64), groups)
    batch, _ = run.batch_of(groups, [[1.0, 0.0], [1.0, 1.0]], TEXT.padding)
    better, worse, *same = batch.batch["advantage"].tolist()
    assert better > 0.5
    assert worse == pytest.approx(-better)
    assert same == [0, 0]
