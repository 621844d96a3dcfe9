"""The search for the sizes of a run, by trials of its own step, and the reports of it.

It may import ``plan`` and what that may, but not ``train``.
"""
