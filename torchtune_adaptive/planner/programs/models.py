"""Models as a program gets them: with the shapes that a config says, and without weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.device import is_on_device
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.known import is_ours
from torchtune_adaptive.planner.programs.private import (
    let_make,
    of_configs,
    of_modules,
    swap_tensors,
    with_cuda,
)
from torchtune_adaptive.planner.programs.quantized import Quantizer, quantizer_of
from torchtune_adaptive.planner.told import tell
from torchtune_adaptive.planner.trace.alike_layers import Shortening
from torchtune_adaptive.planner.trace.step_tracer import StepTracer
from torchtune_adaptive.planner.trace.weights import fill

_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


class Models:
    """Makes the models of a program. The first time, it calls ``begin``, which gives what shortens them."""

    def __init__(
        self, tracer: StepTracer, begin: Callable[[], Callable[[nn.Module], None]]
    ) -> None:
        self._tracer, self._begin = tracer, begin
        self._shorten: Callable[[nn.Module], None] | None = None
        self._made: set[int] = set()
        """Modules that have been shortened, which live as long as this."""
        self._alive: list[nn.Module] = []
        self.quantized = False
        """Whether a model has weights of few bits."""
        self.holders = 1
        """Ranks that hold parts of one model, and so have the same rows."""

    def alike(self, shortening: Shortening) -> bool:
        """Whether the layers of all models are still alike, so that few may stand for them."""
        return all(map(shortening.still_repeats, self._alive))

    def config(self) -> Any:
        """The config of the first model that generates."""
        made: list[Any] = [*self._alive]
        may = (one for one in made if hasattr(one, "can_generate") and one.can_generate())
        return next(may).config

    def follow(self, imports: WhenImported) -> None:
        """Make models from now on, those of transformers once that is imported."""
        # So that parameters stay the same objects when they become fake.
        torch.__future__.set_swap_module_params_on_conversion(True)
        put(torch.utils, "swap_tensors", partial(swap_tensors, torch.utils.swap_tensors))
        of_modules(self._applied)
        register_module_parameter_registration_hook(self._registered)
        imports.call("transformers.modeling_utils", self._of_transformers)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """A model may be made on the device. It is not complete yet, so it keeps all its layers."""
        if self._shorten is None and parameter is not None and is_on_device(parameter):
            self._shorten = self._begin()

    def _applied(self, module: nn.Module, function: Any, apply: Callable[[], Any]) -> Any:
        """Convert or move the tensors of a module."""
        if is_ours(function(torch.empty(0)).device):
            self._shortened(module)
        return apply()

    def _shortened(self, model: nn.Module) -> None:
        if self._shorten is None:
            self._shorten = self._begin()
        if self._made.isdisjoint(map(id, model.modules())):
            self._shorten(model)
            self._alive.append(model)
        self._made.update(map(id, model.modules()))

    def _of_transformers(self, modeling: Any) -> None:
        of_config = of_configs(modeling.PreTrainedModel)

        def without_weights(
            kind: Any,
            config: Any,
            quantizer: Quantizer | None = None,
            over_ranks: Callable[[Any], Any] | None = None,
            **options: Any,
        ) -> Any:
            """A model without weights, in the host's memory as after reading these, or quantized or
            distributed over ranks on the device."""
            if torch.get_default_device().type == "meta":  # a part of a model that is made
                return of_config(kind, config, **options)
            tell(f"making {kind.__name__}")
            with torch.device("meta"):
                model = of_config(kind, config, **options)
            if quantizer is not None:
                self.quantized = True
                quantizer.replace_layers(model, options["dtype"])
                self._shortened(model)
                quantizer.load(model, self._tracer.device)
                return model
            with self._tracer.fake_mode:
                if over_ranks is None:
                    fill(model, torch.device("cpu"))
                else:  # FSDP2 wants the parameters to stay the same objects
                    over_ranks(model).to_empty(device=self._tracer.device)
            self._shortened(model)
            return model

        def from_pretrained(
            kind: Any, /, path: Any = None, *arguments: Any, config: Any = None, **options: Any
        ) -> Any:
            """What reads a model's weights, and here only its config."""
            if config is None or not hasattr(config, "to_dict"):
                config, options = kind.config_class.from_pretrained(
                    config or path, return_unused_kwargs=True, **options
                )
            else:
                config = copy.deepcopy(config)
            dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
            if isinstance(dtype, str):
                dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
                dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            quantizer = quantizer_of(modeling, config, options)
            known = ("attn_implementation", "experts_implementation")
            how = {name: options[name] for name in known if options.get(name)}
            dtype = dtype or torch.float32
            over_ranks = self._over_ranks(modeling, kind, options)
            model = without_weights(kind, config, quantizer, over_ranks, dtype=dtype, **how)
            model.config.name_or_path = model.name_or_path = str(path)
            model.eval()
            where = _device_of(options.get("device_map"))
            if where is not None and quantizer is None:
                model.to(where)
            if options.get("output_loading_info"):
                return model, dict.fromkeys(_LOADING_INFO, ())
            return model

        resize = modeling.PreTrainedModel.resize_token_embeddings

        def resized(model: Any, *arguments: Any, **options: Any) -> Any:
            """What is added to embeddings, not drawn by the mean of the others."""
            return resize(model, *arguments[:2], **{**options, "mean_resizing": False})

        put(modeling.PreTrainedModel, "resize_token_embeddings", resized)
        let_make(modeling.PreTrainedModel, without_weights)
        modeling.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def _over_ranks(
        self, modeling: Any, kind: Any, options: dict[str, Any]
    ) -> Callable[[Any], Any] | None:
        """What distributes a model over ranks, as options ask for it; None if each has it as a whole."""
        named = {name: options.pop(name, None) for name in ("tp_plan", "tp_size")}
        asked = options.pop("distributed_config", None)
        if any(value is not None for value in named.values()):
            asked = modeling.DistributedConfig(**named)
        if asked is None:
            return None
        with with_cuda():
            asked, _, mesh = kind.prepare_distribute_model(asked)
        if asked.pp_size > 1:
            raise NoPrediction(
                f"pp_size: {asked.pp_size}, but a model whose layers are on several ranks is not planned. "
                "Use tp_size or fsdp_size."
            )
        self.holders = max(self.holders, asked.tp_size)
        return mesh and (lambda model: kind.maybe_distribute_model(model, asked, mesh))


def _device_of(device_map: Any) -> Any:
    """The one device of a map; None if the model stays on the host."""
    if device_map is None:
        return None
    if isinstance(device_map, dict):
        places = {str(one) for one in device_map.values()}
        if len(places) > 1:
            raise NoPrediction(
                f"device_map: a model on {', '.join(sorted(places))} is not planned. Put it on one device."
            )
        device_map = next(iter(device_map.values()))
    if device_map in ("auto", "balanced", "sequential") or isinstance(device_map, int):
        return "cuda"
    return device_map
