"""Types of transformers' models (5.23) whose layers are more than attention and linear ones.

transformers computes them by its own code where a package with kernels for them is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchtune_adaptive.common import NoPrediction

_MAMBA, _LINEAR = "mamba-ssm", "flash-linear-attention"
_TOKEN_BY_TOKEN = {
    "falcon_mamba": _MAMBA,
    "jamba": _MAMBA,
    "mamba": _MAMBA,
    "recurrent_gemma": None,
    "rwkv": "rwkv",
    "xlstm": "xlstm",
    "zamba": _MAMBA,
}
"""Types whose own code is a loop over tokens in Python, and the packages with kernels, if there are any."""
_IN_CHUNKS = {
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "kimi_linear": _LINEAR,
    "mamba2": _MAMBA,
    "nemotron_h": _MAMBA,
    "olmo_hybrid": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "zamba2": _MAMBA,
}
"""Types whose own code is planned, and the packages whose kernels take less memory."""


def refuse_loops(folder: str) -> None:
    """Refuse a model whose layers compute tokens one after the other.

    Raises:
        NoPrediction: it is one.
    """
    if (kind := type_of(folder)) in _TOKEN_BY_TOKEN:
        package = _TOKEN_BY_TOKEN[kind]
        kernels = (
            f", and the memory that the kernels of {package} take is not known" if package else ""
        )
        raise NoPrediction(
            f"{kind}: transformers computes its tokens one after the other, which would take hours to trace"
            f"{kernels}. No step of such a model can be planned."
        )


def about_kernels(folder: str) -> tuple[str, ...]:
    """The line about kernels that are not planned, if the model has any."""
    kind = type_of(folder)
    if kind not in _IN_CHUNKS:
        return ()
    package = _IN_CHUNKS[kind]
    return (f"kernels: none of {package}, with which {kind} takes less memory",)


def type_of(folder: str) -> str:
    """The type of a model, as its config says, or nothing."""
    try:
        about = json.loads((Path(folder) / "config.json").read_text())
        return str(about["model_type"])
    except (OSError, ValueError, KeyError, TypeError):  # transformers says what is wrong with it
        return ""
