"""Files of other trainers, read into settings of the transformers step: a table of keys for each trainer.

Nothing here imports torch. Begin with ``files.py``, which recognizes a file and reads it; ``keys.py`` has the
kinds of keys. A new setting of the step is one line in a trainer's table.
"""
