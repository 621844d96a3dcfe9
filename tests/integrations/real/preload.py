"""What every rank of these tests starts with already imported; see ``tests.helpers.ranks``."""

import contextlib
import importlib
import warnings
from importlib.metadata import version

from tests.helpers.stand_ins import stand_in

if version("trl").startswith("1."):  # which looks for it when it is imported
    stand_in("vllm")
with contextlib.suppress(ImportError):  # by which TRL 0.24 finds that others are not installed
    importlib.import_module("llamafactory.extras.packages")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in ("datasets", "peft", "transformers.trainer", "torchtune_adaptive.library.search"):
        importlib.import_module(module)
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer  # noqa: F401

    with contextlib.suppress(ImportError):
        importlib.import_module("lightning.pytorch")
