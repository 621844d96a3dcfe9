"""The training loop, and what it reports.

It may import the folders from ``settings`` to ``checkpoints``.
"""
