"""What the examples of trainers share: a tiny Llama with random weights, its tokenizer, and sums to learn."""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BYTES = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same on all ranks
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "vocab_size": len(BYTES)}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, pad_token_id=0, eos_token_id=1))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    made = Tokenizer(models.BPE({byte: number for number, byte in enumerate(BYTES)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def sums(count: int, *, answered: bool = True) -> Dataset:
    """Prompts like ``13 + 4 =``, with completions or without."""
    pairs = [(number * 7 % 50, number * 11 % 40) for number in range(count)]
    columns = {"prompt": [f"{a} + {b} =" for a, b in pairs]}
    if answered:
        columns["completion"] = [f" {a + b}, because {b} + {a} is {a + b}." for a, b in pairs]
    return Dataset.from_dict(columns)
