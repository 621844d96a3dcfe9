"""A stand-in for vLLM on a CPU: what TRL calls of it, answered by a small model of transformers.

Nothing of vLLM is in it but names. It refuses what vLLM could not do either: to generate while it sleeps, or
before weights that it has discarded are back.
"""

from vllm.engine import LLM, Call, CompletionOutput, Logprob, RequestOutput, SamplingParams, calls

__version__ = "0.31.0"
__all__ = [
    "LLM",
    "Call",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "calls",
]
