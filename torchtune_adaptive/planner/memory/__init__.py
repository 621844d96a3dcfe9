"""The memory of a step, computed: its allocations, replayed in an allocator like torch's.

It needs no torch, and may import ``speed``.
"""
