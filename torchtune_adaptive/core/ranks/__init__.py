"""Ranks that stay together: what they exchange, who of them is lost, collectives that are completed.

It may import no other folder of ``core``.
"""
