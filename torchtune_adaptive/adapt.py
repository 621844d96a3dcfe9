"""``python -m torchtune_adaptive.adapt``."""

from torchtune_adaptive.integrations import run_script

if __name__ == "__main__":
    run_script()
