"""From a data set to micro-batches: the order of samples, and the loader with its workers.

It may import ``sizes``.
"""
