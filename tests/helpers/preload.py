"""What every rank starts with already imported; see ``ranks``.

Ranks are forked from the process that imports these. Threads and CUDA do not survive a fork. So no module
here may start a thread; torchtune initializes CUDA where there is a GPU, so ranks that use it are not forked.
And none may patch another (as ``loops`` does), or every rank would have the patch.
"""

import gc
import importlib
import importlib.util
import warnings

MODULES: tuple[str, ...] = (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "pytest",
    "tests.helpers.models",
    "tests.helpers.recipes",
    "torchdata.stateful_dataloader",
    "torchtune.datasets",
    "torchtune.recipe_interfaces",
    "torchtune_adaptive.recipe.launch",
    "torchtune_adaptive.recipe.run",
    "torchtune_adaptive.recipe.tracing.tracer",
    "torchtune_adaptive.recipe.versions",
)

if not importlib.util.find_spec("torchtune"):  # as where only the tests of ``core`` run
    MODULES = ("pytest", "tests.helpers.decoder")

gc.disable()  # collections while modules are imported find nothing
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in MODULES:
        importlib.import_module(module)
gc.freeze()  # nor do later ones, in what was imported
gc.enable()
