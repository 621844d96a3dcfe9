"""The memory of a device: an accelerator's, or a simulated one on a CPU.

The only folder that names accelerators. It may import no other folder of ``core``.
"""
