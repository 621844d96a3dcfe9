"""The time of a step, computed: its operations, with the figures of a device.

It needs no torch, and may import no other folder of ``planner``.
"""
