"""Batches as arithmetic: which sizes there are, how samples are split into them, what follows for a run.

It imports no torch and nothing of ours but ``common``.
"""
