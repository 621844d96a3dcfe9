"""Plans of a config: what fits, how much memory it takes, and how long.

It may import ``tracing`` and what that may.
"""
