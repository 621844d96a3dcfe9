"""Steps of a config, recorded for a plan without its device.

It may import the folders from ``settings`` to ``kinds``.
"""
