"""The GRPO example trains any language model from a folder, and finds what is wrong with a path."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.leaks import bounded
from tests.process.test_examples import run
from tests.process.test_flagship import PROGRAM

modes: Any = importlib.import_module("grpo.modes")
policy: Any = importlib.import_module("grpo.policy")
record: Any = importlib.import_module("grpo.record")
runs: Any = importlib.import_module("grpo.run")
settings: Any = importlib.import_module("grpo.settings")

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for said in messages %}{{ said['role'] }}: {{ said['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that knows nothing, whose tokens are characters, and a tokenizer with a chat template."""
    made = tmp_path_factory.mktemp("model")
    names = ["<pad>", "<end>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped: Any = transformers.PreTrainedTokenizerFast
    wrapped(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(made)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=9,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    return made


def small(folder: Path, **changes: Any) -> Any:
    """Settings under which what knows nothing is right now and then: any digit may be an answer."""
    asked = {**settings.LANGUAGE_MODEL.options, "max_digits": 1}
    return replace(
        settings.LANGUAGE_MODEL,
        path=str(folder),
        options=asked,
        answer=r"\d",
        held_out=8,
        bf16=False,
        trained_layers=1,
        steps=3,
        lr=1e-2,
        **changes,
    )


def test_a_question_is_put_as_the_chat_template_has_it(folder: Path) -> None:
    chat = policy.text_of(small(folder, instruction="Be brief."))
    asked = "user: 1 + 2 =\nBe brief.\nassistant: "
    assert chat.text(chat.prompt("1 + 2 =")) == asked
    plain = policy.text_of(small(folder, instruction=""))
    assert plain.text(plain.prompt("1 + 2 =")) == "user: 1 + 2 =\nassistant: "


@pytest.mark.parametrize(
    ("said", "answer"), [("5 - 9 = -4", "-4"), ("4, or rather 17.", "17"), ("I don't know", "")]
)
def test_the_last_number_is_the_answer(folder: Path, said: str, answer: str) -> None:
    chat = policy.text_of(replace(small(folder), answer=settings.LANGUAGE_MODEL.answer))
    assert chat.answer(said) == answer


def test_probabilities_from_some_column_on_are_the_last_of_all(folder: Path) -> None:
    model = policy.build(small(folder), CPU)
    tokens = torch.arange(20).reshape(2, 10) + 3
    mask = torch.ones_like(tokens)
    every = policy.log_probabilities(model, tokens, mask)
    assert every.shape == (2, 9)
    found = policy.log_probabilities(model, tokens, mask, 7)
    torch.testing.assert_close(found, every[:, 6:])


def test_only_the_last_layers_learn(folder: Path) -> None:
    chosen = policy.trained(policy.build(small(folder), CPU), 1)
    assert {name.rpartition("layers.")[2][0] for name in chosen if "layers." in name} == {"8"}
    assert "model.norm.weight" in chosen
    assert "model.embed_tokens.weight" not in chosen


@pytest.mark.parametrize("path", ["no such folder", "no_such_package", "json"])
def test_a_path_without_a_model_is_an_error_that_says_what_one_is(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no language model at '{path}': give the folder"):
        policy.build(replace(settings.LANGUAGE_MODEL, path=path), CPU)


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        policy.build(replace(settings.LANGUAGE_MODEL, path=str(tmp_path)), CPU)


async def test_answers_are_sampled_by_the_weights_that_were_learnt(
    folder: Path, tmp_path: Path
) -> None:
    """Also those that stand for embeddings and logits at a time, and are sent once."""
    chosen = replace(small(folder), trained_layers=None)
    log = record.Record("test", tmp_path / "log", record.bars(Console()), chosen.steps)
    with log:
        async with runs.start(chosen, log, None, runs.Cores()) as started:
            before = await bounded(started.trainer.weights(), 60)
            await bounded(modes.synchronous(started), 120)
            after = await bounded(started.trainer.weights(), 60)
    assert "lm_head.weight" not in after
    assert "model.embed_tokens.weight" in after
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == len(after)
    # By other weights than the trainer's, they would be more or less probable than it finds them.
    assert max(abs(line["divergence"]) for line in log.lines) < 1e-5


def test_what_changed_is_shown_and_written_down(folder: Path, tmp_path: Path) -> None:
    few = ["--steps", "3", "--held-out", "8", "--path", str(folder), "--out", str(tmp_path)]
    said = run(["-", "language-model", *few], code=PROGRAM, seconds=170.0)
    assert "before: " in said
    assert "brought to an end" in said
    log = (tmp_path / "grpo-language-model.jsonl").read_text()
    lines = [json.loads(each) for each in log.splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "held_out_reward" in line] == [0, 3]
    assert (tmp_path / "grpo-language-model.png").read_bytes().startswith(b"\x89PNG")
