"""One training step: gradients, recovery from running out of memory, snapshots.

It may import ``device``, ``ranks``, ``rows`` and ``sizes``.
"""
