"""What the processes of tests start with; see ``ranks``."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torchtune.datasets
    import torchtune.models.llama2
    import torchtune.training  # noqa: F401
