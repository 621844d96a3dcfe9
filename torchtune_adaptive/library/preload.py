"""Imports of the server that processes are forked from which trace steps of transformers' models, without the
messages of other packages."""

import logging
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from transformers import AutoModelForCausalLM  # noqa: E402, F401

import torchtune_adaptive.library.model_steps  # noqa: E402
import torchtune_adaptive.library.transformers_model  # noqa: E402, F401
