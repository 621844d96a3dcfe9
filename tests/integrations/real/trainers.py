"""The trainers of transformers and TRL on a tiny Llama with random weights, plain or ours. No downloads."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import ranks as helper
from tests.helpers.fsdp2_on_cpu import fsdp2_on_cpu as fsdp2_on_cpu
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.transformers import adaptive

ON_GPU = torch.cuda.is_available()
"""Whether one process uses a GPU; several use the CPU, as NCCL wants a GPU for each."""
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": len(WORDS),
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "warmup_steps": 1,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "bf16": False,
    "dataloader_pin_memory": False,
    "ddp_timeout": 120,  # seconds that a rank waits for another, on a busy machine
}
GENERATION = {
    "num_generations": 4,
    "max_completion_length": 12,
    "beta": 0.0,
    "generation_kwargs": {"use_cache": True},
}
NAMES = {
    "sft": ("text",),
    "reward": ("chosen", "rejected"),
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion"),
}
"""The columns of rows of text, for a kind of trainer."""
SEARCHING = Adaptive(memory_limit=None if ON_GPU else "80MiB")
AS_CONFIGURED = Adaptive(search=False)
AS_ACCELERATE = Adaptive(search=False, sync_each_batch=False)
"""With FSDP2, gradients are added up in the order in which accelerate adds them up."""

helper._context.set_forkserver_preload(["tests.integrations.real.preload"])


@dataclass(frozen=True)
class Loss:
    """Where memory runs out: in a layer, on a rank, before a step, so many times."""

    step: int = 1
    rank: int = 0
    times: int = 2
    where: str = "policy"
    """In the model's second layer (where its adapter is on or, with ``no adapter``, off), in that of the
    ``reference`` or the ``reward model``, or in the ``loss``; of a model that generates, in ``generation`` or
    ``scoring``."""


@dataclass
class Result:
    logs: list[dict[str, float]]
    weights: torch.Tensor
    sizes: tuple[int, int] | None = None
    """The size at the beginning, and at the end."""
    more: dict[str, Any] = field(default_factory=dict)

    def without_times(self) -> list[dict[str, float]]:
        """All that was logged, but how long it took, and what only ours logs."""
        times = ("runtime", "per_second", "step_time")
        return [
            {
                name: value
                for name, value in entry.items()
                if not name.endswith(times) and not name.startswith("adaptive/")
            }
            for entry in self.logs
        ]

    def column(self, *names: str) -> list[list[float]]:
        return [[entry[name] for name in names] for entry in self.logs if names[0] in entry]


def on_ranks(
    function: Callable[..., Any], count: int, *arguments: Any, timeout: float = 300
) -> Any:
    """Call a function on one process, or on ranks."""
    return helper.run_ranks(
        _alone_or_not, count, function, *arguments, timeout=timeout, join=False, forked=not ON_GPU
    )


def _alone_or_not(function: Callable[..., Any], *arguments: Any) -> Any:
    alone = os.environ["WORLD_SIZE"] == "1"
    on_cpu = str(not (alone and ON_GPU)).lower()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", ACCELERATE_USE_CPU=on_cpu)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has workers
    warnings.simplefilter("ignore")
    from datasets import disable_progress_bars

    disable_progress_bars()
    if alone:
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(name)
    return function(*arguments)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def llama(kind: str = "LlamaForCausalLM", **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.LlamaConfig(**LLAMA | config))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(*names: str, count: int = 64) -> Any:
    """Rows of random words, of different lengths."""
    from datasets import Dataset

    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS[3:]) for _ in range(draw.randrange(3, 16)))

    return Dataset.from_list(
        [{name: " " * (name != "prompt") + text() for name in names} for _ in range(count)]
    )


def tokens(count: int = 64, ragged: bool = False) -> Any:
    """Rows of random tokens."""
    from datasets import Dataset

    draw = random.Random(0)
    rows = []
    for _ in range(count):
        length = draw.randrange(4, 24) if ragged else 16
        ids = [draw.randrange(3, len(WORDS)) for _ in range(length)]
        rows.append({"input_ids": ids, "labels": ids, "attention_mask": [1] * length})
    return Dataset.from_list(rows)


def lora(task: str = "CAUSAL_LM", **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task, **more)


def evenness(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward for words with even numbers."""
    return [sum(1.0 - number % 2 for number in ids) / len(ids) for ids in completion_ids]


class Padding:
    """A collate function for rows of different lengths."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        pads = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.tensor([row[name] + [pad] * (longest - len(row[name])) for row in rows])
            for name, pad in pads.items()
        }


def padding_of_transformers() -> Any:
    """The same of transformers, which makes a ``BatchEncoding``, no dictionary."""
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(tokenizer())


def make(kind: str, options: Adaptive | None, folder: str, **settings: Any) -> Any:
    """A trainer of a kind: ``trainer``, ``sft``, ``dpo``, ``kto``, ``reward``, ``grpo`` or ``rloo``; plain
    without options."""
    import transformers
    import trl

    classes = {
        "trainer": (transformers.Trainer, transformers.TrainingArguments),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }
    trainer_class, config_class = classes[kind]
    arguments: dict[str, Any] = {}
    passed = ("compute_loss_func", "peft_config", "callbacks", "eval_dataset")
    metrics = ("compute_metrics", "preprocess_logits_for_metrics")
    for name in (*passed, *metrics, "ref_model", "processing_class", "reward_processing_classes"):
        if name in settings:
            arguments[name] = settings.pop(name)
    model = settings.pop("model", None)
    config = settings.pop("config", {})
    ragged, data = settings.pop("ragged", False), settings.pop("data", None)
    if kind in ("grpo", "rloo"):
        arguments |= {"processing_class": tokenizer(), "train_dataset": data or texts("prompt")}
        arguments["reward_funcs"] = settings.pop("reward_funcs", evenness)
        settings = GENERATION | settings
        if settings.get("beta") or settings.get("use_vllm"):
            # The reference is loaded from where the policy is from, and vLLM's model is.
            model = saved(llama(**config), f"{folder}/policy")
    elif kind == "trainer":
        collate = settings.pop("data_collator", Padding)()
        arguments |= {"data_collator": collate, "train_dataset": data or tokens(ragged=ragged)}
    else:
        data = data or texts(*NAMES[kind])
        if kind == "kto":
            data = data.add_column("label", [number % 3 > 0 for number in range(len(data))])
            settings = {"loss_type": "apo_zero_unpaired"} | settings
        arguments = {"processing_class": tokenizer(), "train_dataset": data} | arguments
        settings = {"max_length": 64} | settings
    if kind == "reward" and model is None:
        model = llama("LlamaForSequenceClassification", num_labels=1, **config)
    elif (
        kind in ("dpo", "kto")
        and not {"peft_config", "ref_model"} & {*arguments}
        and (settings.get("fsdp") or not settings.get("precompute_ref_log_probs"))
    ):
        arguments["ref_model"] = llama(**config)
    if options is not None:
        trainer_class = adaptive(trainer_class, options)
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "true") == "true"
    arguments["args"] = config_class(folder, **{**SETTINGS, "use_cpu": on_cpu} | settings)
    return trainer_class(model=model or llama(**config), **arguments)


def saved(model: Any, folder: str, **settings: Any) -> Any:
    """The model, loaded with settings from a folder in which it is saved, by this rank."""
    from safetensors.torch import save_file

    os.environ.pop("ACCELERATE_USE_FSDP", None)  # of a training before: only rank 0 would load
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(folder, **settings)


def lose_memory(trainer: Any, lost: Loss) -> Callable[[], int]:
    """Lose memory in training; gives how many times are left."""
    left = lost.times if rank() == lost.rank else 0

    generates = hasattr(trainer, "num_generations")

    def elsewhere(cache: Any) -> bool:
        if not generates or lost.where in ("reference", "no adapter", "reward model"):
            return False
        where = "generation" if cache is not None else "scoring"
        return lost.where != ("policy" if torch.is_grad_enabled() else where)

    def hook(module: Any = None, inputs: Any = None, named: Any = {}) -> None:  # noqa: B006
        nonlocal left
        if elsewhere(named.get("past_key_values")):
            return
        projection = getattr(getattr(module, "self_attn", None), "q_proj", None)
        adapter_off = getattr(projection, "disable_adapters", False)
        if adapter_off != (lost.where == "no adapter"):
            return
        if trainer.model.training and trainer.state.global_step == lost.step and left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    if lost.where == "loss":  # not inside of compiled code
        compute_loss = trainer.compute_loss
        trainer.compute_loss = lambda *args, **named: (hook(), compute_loss(*args, **named))[1]
        return lambda: left
    model = trainer.ref_model if lost.where == "reference" else trainer.model
    if lost.where == "reward model":
        model = trainer.reward_funcs[0]
    last = ("layers.1", "layer.1", "block.1")
    layers = [module for name, module in model.named_modules() if name.endswith(last)]
    [*_, layer] = layers  # after those of a vision tower
    layer.register_forward_pre_hook(hook, with_kwargs=True)
    return lambda: left


def losses_in(places: Sequence[str], way: str) -> list[Loss]:
    """Memory that is lost twice in each of these places: alone at once, or once on each of two ranks.

    In the policy from the second step on; elsewhere from the third, before which completions are generated.
    """
    ranks = 2 if way else 1
    return [
        Loss((1 if where == "policy" else 2) + on, on, 2 // ranks, where)
        for on in range(ranks)
        for where in places
    ]


def trained(
    kind: str,
    options: Adaptive | None,
    lost: Loss | Sequence[Loss] = (),
    resume: Any = None,
    **settings: Any,
) -> Result:
    """The result of a training."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(kind, options, settings.pop("folder", folder), **settings)
        losses = [lost] if isinstance(lost, Loss) else lost
        left = [lose_memory(trainer, one) for one in losses]
        trainer.train(resume_from_checkpoint=resume)
        assert not any(each() for each in left), (
            "memory was not lost as often as it should have been"
        )
        return result(trainer)


def result(trainer: Any) -> Result:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in trainer.model.parameters()]
    weights = torch.cat([p.detach().float().cpu().flatten() for p in whole])
    steps = getattr(trainer, "_adaptive_step", None)
    sizes = (steps._size, steps._step._runner.size) if steps else None
    return Result(trainer.state.log_history[:-1], weights, sizes)


LOGGED = ("loss", "grad_norm", "learning_rate")


def distance(one: Result, other: Result, *names: str) -> float:
    """The largest relative difference of what was logged."""
    a = torch.tensor(one.column(*(names or LOGGED)), dtype=torch.float64)
    b = torch.tensor(other.column(*(names or LOGGED)), dtype=torch.float64)
    assert a.shape == b.shape and len(a)
    return float(((a - b).abs() / b.abs().clamp(min=1e-12)).max())


def apart(one: Result, other: Result) -> dict[str, float]:
    """The largest difference of what was logged: of losses, which may cancel to zero, absolute."""
    a, b = (torch.tensor(each.column("loss"), dtype=torch.float64) for each in (one, other))
    assert a.shape == b.shape and len(a)
    names = ("grad_norm", "learning_rate")
    return {"loss": float((a - b).abs().max())} | {n: distance(one, other, n) for n in names}


def assert_near(distances: dict[str, float]) -> None:
    """Two trainings in float32 differ by rounding only; see ``apart``.

    Of gradient norms, that depends on the CPU: where it is 1.7e-6, it is 1.6e-7 with a model in float64.
    """
    assert distances["loss"] <= 1e-6 and distances["learning_rate"] <= 1e-6, distances
    assert distances["grad_norm"] <= 5e-6, distances
