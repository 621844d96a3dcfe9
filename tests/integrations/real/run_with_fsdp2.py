"""Run a script on a CPU with FSDP2, which accelerate otherwise gives to accelerators only.

accelerate launch --config_file examples/accelerate_fsdp2.yaml \
    tests/integrations/real/run_with_fsdp2.py examples/trl_sft.py
"""

import runpy
import sys
from pathlib import Path

from tests.integrations.real.trainers import fsdp2_on_cpu

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    fsdp2_on_cpu()
    runpy.run_path(sys.argv[0], run_name="__main__")
