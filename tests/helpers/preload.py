"""What the processes of tests start with; see ``ranks``."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchtune.datasets
    import torchtune.models.llama2
    import torchtune.training  # noqa: F401
