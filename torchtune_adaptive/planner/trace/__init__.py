"""A step recorded on a fake device: what it allocates, and which operations it runs.

It may import ``memory`` and ``speed``, for which it records.
"""
