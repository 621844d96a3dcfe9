"""Trials of a step, and the strategies that choose the sizes to try.

It may import every other folder of ``core``.
"""
