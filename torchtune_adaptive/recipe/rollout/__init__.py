"""The parts of a rollout: generating, scoring, advantages and losses.

It may import ``settings``, ``data`` and ``setup``.
"""
