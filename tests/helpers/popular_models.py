"""Models of the Hub that many people train, as tiny copies, and what ``plan --trainer SFTTrainer`` says.

Their page is ``docs/models.md``: ``python -m tests.helpers.popular_models`` prints its table.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Settings for whichever types have them."""
TIED = {"tie_word_embeddings": True}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

FITS = "planned"
UNBALANCED = "planned with `router_aux_loss_coef=0`; else TRL fails: `num_experts` is missing"
PLAIN = "planned with `gradient_checkpointing=false`"
TRAINER = "planned with `--trainer Trainer`; TRL fails: `last_hidden_state` is missing"
WORDS: dict[str, Sequence[str]] = {
    FITS: (),
    UNBALANCED: ("router_aux_loss_coef=0",),
    PLAIN: ("gradient_checkpointing=false",),
    TRAINER: ("--trainer", "Trainer", "dtype=bfloat16", "bf16=true"),
}
"""What the command needs to plan a model with that answer."""
REFUSALS = {
    UNBALANCED: "has no attribute 'num_experts'",
    PLAIN: "does not support activation checkpointing",
    TRAINER: "has no attribute 'last_hidden_state'",
}
"""What the command says without these words."""


class Popular(NamedTuple):
    name: str
    model_type: str
    answer: str = FITS
    settings: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


POPULAR = [
    Popular("meta-llama/Llama-2-7b-hf", "llama", FITS, {"num_key_value_heads": 4}),
    Popular("meta-llama/Llama-3.1-8B", "llama"),
    Popular("meta-llama/Llama-3.2-1B", "llama", FITS, TIED),
    Popular("meta-llama/Llama-4-Scout-17B-16E", "llama4_text", TRAINER),
    Popular("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama"),
    Popular("HuggingFaceTB/SmolLM2-135M", "llama", FITS, TIED),
    Popular("HuggingFaceTB/SmolLM3-3B", "smollm3", FITS, TIED),
    Popular("Qwen/Qwen2.5-0.5B", "qwen2", FITS, TIED),
    Popular("Qwen/Qwen2.5-7B-Instruct", "qwen2"),
    Popular("Qwen/Qwen3-0.6B", "qwen3", FITS, TIED),
    Popular("Qwen/Qwen3-8B", "qwen3"),
    Popular("Qwen/Qwen1.5-MoE-A2.7B", "qwen2_moe"),
    Popular("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
    Popular("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
    Popular("Qwen/Qwen3.5-27B", "qwen3_5_text"),
    Popular("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
    Popular("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama"),
    Popular("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", FITS, {**LATENT, "q_lora_rank": None}),
    Popular(
        "deepseek-ai/DeepSeek-V3",
        "deepseek_v3",
        FITS,
        {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    Popular("mistralai/Mistral-7B-v0.1", "mistral", FITS, {"sliding_window": 16}),
    Popular("mistralai/Mistral-Nemo-Base-2407", "mistral", FITS, {"head_dim": 32}),
    Popular("mistralai/Ministral-8B-Instruct-2410", "ministral"),
    Popular("mistralai/Mixtral-8x7B-v0.1", "mixtral"),
    Popular("mistralai/Mamba-Codestral-7B-v0.1", "mamba2", FITS, {"num_heads": 8, "n_groups": 1}),
    Popular("google/gemma-2b", "gemma"),
    Popular("google/gemma-2-2b", "gemma2"),
    Popular("google/gemma-3-1b-it", "gemma3_text", FITS, {"sliding_window": 16}),
    Popular(
        "google/gemma-3-4b-it", "gemma3", FITS, {"text_config": SMALL, "vision_config": VISION}
    ),
    Popular("google/recurrentgemma-2b", "recurrent_gemma"),
    Popular("microsoft/phi-2", "phi"),
    Popular("microsoft/Phi-3-mini-4k-instruct", "phi3"),
    Popular("microsoft/Phi-3.5-MoE-instruct", "phimoe", UNBALANCED),
    Popular("microsoft/phi-4", "phi3"),
    Popular("microsoft/Phi-4-mini-instruct", "phi3", FITS, {**TIED, "partial_rotary_factor": 0.75}),
    Popular("zai-org/glm-4-9b-chat-hf", "glm"),
    Popular("zai-org/GLM-4-9B-0414", "glm4"),
    Popular("zai-org/GLM-4.5-Air", "glm4_moe"),
    Popular("allenai/OLMo-1B-hf", "olmo"),
    Popular("allenai/OLMo-2-1124-7B", "olmo2"),
    Popular("allenai/Olmo-3-7B-Instruct", "olmo3"),
    Popular("allenai/OLMoE-1B-7B-0924", "olmoe"),
    Popular("openai/gpt-oss-20b", "gpt_oss"),
    Popular("openai-community/gpt2", "gpt2"),
    Popular("openai-community/openai-gpt", "openai-gpt", PLAIN),
    Popular(
        "EleutherAI/gpt-neo-1.3B", "gpt_neo", FITS, {"attention_types": [[["global", "local"], 1]]}
    ),
    Popular("EleutherAI/gpt-j-6b", "gptj", FITS, {"rotary_dim": 8}),
    Popular("EleutherAI/pythia-1.4b", "gpt_neox"),
    Popular("tiiuae/falcon-7b", "falcon"),
    Popular("tiiuae/Falcon3-7B-Base", "llama", FITS, {"head_dim": 32}),
    Popular("tiiuae/Falcon-H1-1.5B-Deep-Instruct", "falcon_h1"),
    Popular("tiiuae/falcon-mamba-7b", "falcon_mamba"),
    Popular("bigcode/starcoderbase", "gpt_bigcode"),
    Popular("bigcode/starcoder2-3b", "starcoder2"),
    Popular("Salesforce/codegen-350M-mono", "codegen", FITS, {"rotary_dim": 8}),
    Popular("ibm-granite/granite-3.0-8b-base", "granite"),
    Popular("ibm-granite/granite-3.0-1b-a400m-base", "granitemoe", UNBALANCED),
    Popular("ibm-granite/granite-4.0-h-tiny", "granitemoehybrid", UNBALANCED),
    Popular("CohereForAI/c4ai-command-r-v01", "cohere"),
    Popular("CohereLabs/c4ai-command-r7b-12-2024", "cohere2"),
    Popular("stabilityai/stablelm-3b-4e1t", "stablelm"),
    Popular("bigscience/bloom-560m", "bloom"),
    Popular("facebook/opt-125m", "opt", FITS, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Popular("facebook/xglm-564M", "xglm", FITS, {"ffn_dim": 96}),
    Popular("mosaicml/mpt-7b", "mpt"),
    Popular("state-spaces/mamba-130m-hf", "mamba"),
    Popular("ai21labs/Jamba-v0.1", "jamba"),
    Popular("RWKV/rwkv-4-169m-pile", "rwkv"),
    Popular("nvidia/Minitron-4B-Base", "nemotron"),
    Popular("LGAI-EXAONE/EXAONE-4.0-1.2B", "exaone4", FITS, TIED),
    Popular("baidu/ERNIE-4.5-0.3B-PT", "ernie4_5"),
    Popular("LiquidAI/LFM2-1.2B", "lfm2"),
    Popular("tencent/Hunyuan-7B-Instruct", "hunyuan_v1_dense"),
    Popular("ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss"),
    Popular("swiss-ai/Apertus-8B-Instruct-2509", "apertus"),
    Popular("arcee-ai/AFM-4.5B", "arcee"),
    Popular("MiniMaxAI/MiniMax-M2", "minimax_m2"),
]


def write_tiny(folder: Path, model: Popular) -> None:
    """Write the ``config.json`` of a tiny copy."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    kind = CONFIG_MAPPING[model.model_type]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    settings = {key: value for key, value in SMALL.items() if key in known} | model.settings
    written = kind(**settings, architectures=[KINDS[model.model_type]]).to_dict()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))


def as_table() -> str:
    """The table of the page."""
    lines = ["| model | `model_type` | SFTTrainer's step |", "|---|---|---|"]
    ordered = sorted(POPULAR, key=lambda one: one.name.lower())
    lines += [f"| {one.name} | `{one.model_type}` | {one.answer} |" for one in ordered]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_table(), end="")
