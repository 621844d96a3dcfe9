"""GRPO of a transformers model: generating, scoring and training have a size each. Run it with

torchrun --nproc_per_node 2 examples/grpo.py
"""

import torch
import torch.distributed as dist
from common import LLAMA, VOCABULARY, compare, less_memory
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate as collate
from transformers import LlamaConfig, LlamaForCausalLM

from torchtune_adaptive import AdaptiveStep, find_batch_size

ROWS, SAMPLES = 32, 8  # responses in a rollout on each rank, and to each prompt
PROMPT, NEW = 8, 24  # tokens of a prompt, and of a response


def prompts(first: int) -> list[dict]:
    """Rows to generate: what a row draws follows from its seed, not from the rows beside it."""
    at = [torch.Generator().manual_seed((first + n) // SAMPLES) for n in range(ROWS)]
    made = [torch.randint(VOCABULARY, (PROMPT,), generator=each) for each in at]
    return [{"tokens": tokens, "seed": first + n} for n, tokens in enumerate(made)]


def train(disturbed: bool, known: list[int] | None = None) -> tuple[list[int], list[float]]:
    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(**LLAMA | {"use_cache": True}))
    for part in (*policy.model.layers, policy):
        fully_shard(part)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    def answer(batch: dict) -> torch.Tensor:
        def sampled(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # Gumbel's trick
            seeds = (int(seed) * NEW + tokens.size(1) for seed in batch["seed"])
            at = [torch.Generator().manual_seed(seed) for seed in seeds]
            uniform = torch.stack([torch.rand(VOCABULARY, generator=each) for each in at])
            return scores - uniform.log().neg().log().to(scores)

        own = {"min_new_tokens": NEW, "max_new_tokens": NEW, "logits_processor": [sampled]}
        return policy.generate(batch["tokens"], **own, pad_token_id=VOCABULARY, do_sample=False)

    def scoring(tokens: torch.Tensor) -> torch.Tensor:  # the log-probability of each new token
        logits = policy(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]

    def forward(batch: dict) -> tuple[torch.Tensor, int]:
        advantage = batch["advantage"][:, None]
        ratio = (scoring(batch["tokens"]) - batch["old"]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -gain.sum(), gain.numel()

    def worst(rows: int) -> dict:
        tokens, zeros = torch.zeros(rows, PROMPT + NEW, dtype=torch.long), torch.zeros(rows, NEW)
        return {"tokens": tokens, "old": zeros, "advantage": zeros[:, 0]}

    step = AdaptiveStep(policy, optimizer, forward, memory_limit="8MiB", max_grad_norm=1.0)
    generate = step.forward_only(answer, worst_case=lambda n: collate(prompts(0)[:n]), gathers=True)
    score = step.forward_only(scoring, worst_case=lambda n: worst(n)["tokens"])
    phases = (generate, score, None)  # None is training
    sizes = known or [find_batch_size(step, worst, phase=p, ceiling=ROWS) for p in phases]
    norms = []
    for rollout in range(3):
        with less_memory(step, 5 << 19, disturbed and (rollout, dist.get_rank()) == (1, 0)):
            asked = prompts((2 * rollout + dist.get_rank()) * ROWS)
            rows = generate(asked, collate, sizes[0])
            old = score(rows, torch.stack, sizes[1])
            even = (torch.stack(rows)[:, PROMPT:] % 2 == 0).float().mean(1).view(-1, SAMPLES)
            batch = zip(rows, old, (even - even.mean(1, True)).flatten(), strict=True)
            named = [{"tokens": r, "old": o, "advantage": a} for r, o, a in batch]
            norms.append(step(named, collate, sizes[2]).gradient_norm)
    return [*map(int, sizes)], norms


if __name__ == "__main__":
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    found, norms = train(disturbed=True)
    compare(norms, train(disturbed=False, known=found)[1], dist.get_rank())
    dist.destroy_process_group()
