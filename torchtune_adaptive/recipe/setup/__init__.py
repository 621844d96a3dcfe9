"""What a run is made of: process group, model, optimizer, meshes, memory of the host.

It may import ``settings`` and ``data``.
"""
