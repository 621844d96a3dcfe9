"""The keys of a config: which there are, what they may hold, and what follows from them.

It may import no other folder of ``recipe``.
"""
