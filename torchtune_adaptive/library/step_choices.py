"""What settings of a trainer's step may be, without torch: a remembered answer does not import it."""

from __future__ import annotations

SFT, DPO, PLAIN = "SFTTrainer", "DPOTrainer", "Trainer"
SDPA, FLASH = "sdpa", "flash_attention_2"
EVEN, WORST = "even", "worst"
"""Routings: all experts get as many rows, or all tokens go to the same experts, each with all tokens. All
ranks but those of expert parallelism compute all experts for their own rows, so no routing gives one more.
Which of the two takes more memory depends on what an expert that gets rows allocates."""
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
"""Ways in which transformers computes experts without other packages."""
ALL_LINEAR, LINEAR_LAYERS = "all-linear", "linear-layers"
"""What stands for all linear layers but the head: for PEFT, those of transformers 4 are among them."""
TILE_TOKENS, TILE_COLUMNS = 4096, 32768
"""Tokens and logits of each in a tile of TRL's head."""
BITSANDBYTES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", *BITSANDBYTES, "adafactor", "sgd")
"""The names of optimizers that can be planned; the first is what transformers takes with torch 2.8 and
newer."""
UNSHARDED = ("adafactor", *BITSANDBYTES)
"""Those that fail with the sharded parameters of FSDP2: they mix them with tensors of their own."""


def about_optimizer(name: str) -> str:
    """What is assumed about an optimizer, for people."""
    if name not in BITSANDBYTES:
        return name
    bits = "8 bits, and 32 for embeddings" if "8bit" in name else "32 bits"
    paged = (
        "; managed memory, which may move to the host, is not in the peak"
        if "paged" in name
        else ""
    )
    return f"{name} as of bitsandbytes 0.50, moments of {bits}{paged}"
