"""What the server imports that tracing processes are forked from, without the messages of other packages."""

import logging
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import torchtune_adaptive.plan.limits  # noqa: E402
import torchtune_adaptive.trace.self_check  # noqa: E402, F401
