"""Decoders of Llama's shape that torchtune 0.6.1 has no builder for, from its own modules: for plans.

Qwen3 normalizes queries and keys; Qwen3, Mistral Nemo and others have heads whose width is not the model's
divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import LoRALinear

Linear = Callable[[int, int], nn.Module]
_plain: Linear = partial(nn.Linear, bias=False)


def decoder(**shape: int | bool) -> TransformerDecoder:
    """A decoder that is trained as a whole; for the arguments see ``lora_decoder``."""
    return _built({}, **shape)  # type: ignore[arg-type]


def lora_decoder(
    lora_attn_modules: Sequence[str],
    apply_lora_to_mlp: bool,
    lora_rank: int,
    lora_alpha: float,
    quantize_base: bool = False,
    **shape: int | bool,
) -> TransformerDecoder:
    """A decoder with adapters.

    Args:
        lora_attn_modules: the projections of attention that get them: ``q_proj`` and so on.
        apply_lora_to_mlp: whether those of the MLP do.
        lora_rank: the adapters' rank.
        lora_alpha: their scale, times the rank.
        quantize_base: whether the weights that they adapt are kept in 4 bits.
        shape: the decoder's arguments, as of torchtune's builders; ``head_dim``, ``qk_norm`` and
            ``tie_word_embeddings`` as well.
    """
    adapted: Linear = partial(
        LoRALinear, rank=lora_rank, alpha=lora_alpha, quantize_base=quantize_base
    )
    names = [*lora_attn_modules, *(["mlp"] if apply_lora_to_mlp else [])]
    return _built(dict.fromkeys(names, adapted), **shape)  # type: ignore[arg-type]


def _built(
    linear: dict[str, Linear],
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    head_dim: int,
    qk_norm: bool = False,
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """A decoder; ``linear`` makes the linear layers that are not plain, by name."""
    positions = RotaryPositionalEmbeddings(dim=head_dim, max_seq_len=max_seq_len)

    def projection(name: str, inputs: int, outputs: int) -> nn.Module:
        return linear.get(name, _plain)(inputs, outputs)

    def layer() -> TransformerSelfAttentionLayer:
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        attention = MultiHeadAttention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_proj=projection("q_proj", embed_dim, queries),
            k_proj=projection("k_proj", embed_dim, keys),
            v_proj=projection("v_proj", embed_dim, keys),
            output_proj=projection("output_proj", queries, embed_dim),
            pos_embeddings=positions,
            q_norm=RMSNorm(head_dim) if qk_norm else None,
            k_norm=RMSNorm(head_dim) if qk_norm else None,
            max_seq_len=max_seq_len,
        )
        mlp = FeedForward(
            gate_proj=projection("mlp", embed_dim, intermediate_dim),
            down_proj=projection("mlp", intermediate_dim, embed_dim),
            up_proj=projection("mlp", embed_dim, intermediate_dim),
        )
        norms = RMSNorm(embed_dim), RMSNorm(embed_dim)
        return TransformerSelfAttentionLayer(attention, mlp, sa_norm=norms[0], mlp_norm=norms[1])

    embeddings = nn.Embedding(vocab_size, embed_dim)
    return TransformerDecoder(
        tok_embeddings=embeddings,
        layers=[layer() for _ in range(num_layers)],
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=RMSNorm(embed_dim),
        output=TiedLinear(embeddings) if tie_word_embeddings else _plain(embed_dim, vocab_size),
    )
