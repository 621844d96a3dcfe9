"""The keys of accelerate's configuration, which says how many GPUs there are and how they share a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_adaptive.cli.other_trainers.keys import FileReading, Joint, Keys, Refused, names
from torchtune_adaptive.cli.other_trainers.sharding import read_sharding
from torchtune_adaptive.cli.other_trainers.training_arguments import (
    COMPILED,
    DEEPSPEED,
    FP16,
    IN_ONE_GPU,
    PARALLEL,
)

KEYS: Keys = {
    "num_processes": Joint("ranks", 1),
    "distributed_type": Joint(
        "fsdp, or DDP", "NO", ("NO", "MULTI_GPU", "FSDP"), "is a strategy that is not planned"
    ),
    "mixed_precision": Joint("bf16", "no", ("no", "bf16"), FP16),
    "fsdp_config": Joint("fsdp: see the table of its keys"),
    "deepspeed_config": Refused(DEEPSPEED, "Plan distributed_type: FSDP in its place", (None, {})),
    "parallelism_config": Joint("sizes of 1"),
    "megatron_lm_config": Refused(PARALLEL, IN_ONE_GPU, (None, {})),
    "fp8_config": Refused("is mixed precision in 8 bits, which is not planned", off=(None, {})),
    "dynamo_config": Refused(COMPILED, off=(None, {})),
    "use_cpu": Refused("trains on a CPU, and GPUs are planned"),
    "kt_config": Refused("trains by another engine, which is not planned", off=(None, {})),
}
IGNORED = names(
    """
    compute_environment debug machine_rank num_machines gpu_ids main_process_ip main_process_port
    rdzv_backend same_network main_training_function enable_cpu_affinity downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env mpirun_config
    """
)


def read_launch(given: Mapping[str, Any], reading: FileReading) -> int:
    """Add what a configuration says to a reading; returns the number of ranks."""
    reading.change = "write {}: {} in the accelerate file"
    values = reading.read(given, KEYS, IGNORED)
    sizes = values["parallelism_config"]
    sizes = sizes if isinstance(sizes, Mapping) else {"parallelism_config_size": sizes}
    divided = {
        key: size for key, size in sizes.items() if key.endswith("_size") and size not in (None, 1)
    }
    divided.pop("parallelism_config_dp_shard_size", None)  # FSDP over that many
    if divided:
        reading.refuse("parallelism_config", divided, PARALLEL, "Plan sizes of 1")
    if values.get("mixed_precision") == "bf16":
        reading.settings["bf16"] = True
    if values.get("distributed_type") == "FSDP":
        reading.settings["fsdp"] = read_sharding(
            True, values["fsdp_config"], 1, reading, "fsdp_config.fsdp_version"
        )
    return int(values["num_processes"]) if isinstance(values["num_processes"], int) else 1
