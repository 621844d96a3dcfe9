"""``python -m torchtune_adaptive``."""

from torchtune_adaptive.cli import main

if __name__ == "__main__":
    main()
