"""Data sets and their rows: loading, lengths, collating, splitting.

It may import ``settings``.
"""
