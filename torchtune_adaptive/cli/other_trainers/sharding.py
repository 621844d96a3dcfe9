"""FSDP's options, which all these trainers hand to accelerate: ``fsdp`` and ``fsdp_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_adaptive.cli.other_trainers.keys import FileReading, Joint, Keys, Refused, names

_FSDP1 = "is FSDP1, whose flat parameters are not planned"
_WHOLE = "shards less than weights, gradients and optimizer's state, which is not planned"
KEYS: Keys = {
    "version": Joint("2 is planned", values=(2, "2"), why=_FSDP1),
    "reshard_after_forward": Joint("true is planned", True, (True, "FULL_SHARD"), _WHOLE),
    "sharding_strategy": Joint(
        "FULL_SHARD is planned", "FULL_SHARD", ("FULL_SHARD", 1, "1"), _WHOLE
    ),
    "activation_checkpointing": Joint("gradient_checkpointing", False, (True, False)),
    "auto_wrap_policy": Joint(
        *(
            "TRANSFORMER_BASED_WRAP is planned",
            "TRANSFORMER_BASED_WRAP",
            ("TRANSFORMER_BASED_WRAP",),
        ),
        "gathers other groups of weights than layers",
    ),
    "offload_params": Refused("keeps weights on the host, which is not planned"),
    "cpu_offload": Refused("keeps weights on the host, which is not planned"),
    "mixed_precision_policy": Refused("is a policy of its own, which is not planned"),
    "xla": Refused("is for TPUs"),
}
"""The keys of ``fsdp_config`` that decide memory, without the prefix ``fsdp_`` that some files give them."""
IGNORED = names(
    "backward_prefetch forward_prefetch state_dict_type final_state_dict_type cpu_ram_efficient_loading "
    "sync_module_states use_orig_params limit_all_gathers transformer_layer_cls_to_wrap min_num_params "
    "cpu_offload_pin_memory xla_fsdp_settings xla_fsdp_grad_ckpt"
)
_PARTS = ("full_shard", "auto_wrap")


def read_sharding(
    fsdp: Any,
    config: Any,
    version: int,
    reading: FileReading,
    version_key: str = "fsdp_config.version",
) -> bool:
    """Read FSDP's options, if they are used; returns whether ranks share the weights.

    Args:
        fsdp: a flag, or the words of transformers' ``fsdp``; none if the configuration is enough.
        config: its ``fsdp_config``.
        version: of FSDP, where the configuration has none.
        reading: gets what is refused.
        version_key: the key by which the file says the version.
    """
    if not fsdp and not config:
        return False
    words = fsdp if isinstance(fsdp, list) else str(fsdp).split() if isinstance(fsdp, str) else []
    if other := [word for word in words if word not in _PARTS]:
        reading.refuse("fsdp", " ".join(other), _WHOLE, f"What can be planned: {' '.join(_PARTS)}")
    if config and not isinstance(config, Mapping):
        reason = "is no block of keys, and a file is not read"
        reading.refuse("fsdp_config", config, reason, "Write the keys in its place")
        return True
    given = {str(key).removeprefix("fsdp_"): value for key, value in (config or {}).items()}
    given["version"] = given.get("version") or version
    if given["version"] not in (2, "2"):
        remedy = f"To plan FSDP2, {reading.to_change(version_key, 2)}"
        reading.refuse(version_key, given["version"], _FSDP1, remedy)
        given["version"] = 2
    values = reading.read(given, KEYS, IGNORED, "fsdp_config.")
    if values["activation_checkpointing"]:
        reading.settings["gradient_checkpointing"] = True
    return True
