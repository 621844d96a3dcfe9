"""The kinds of fine-tuning: what is built, trained, collated and saved.

It may import the folders from ``settings`` to ``checkpoints``.
"""
