"""What is saved and resumed: folders that exist whole or not at all, and the state in them.

It may import ``settings`` and ``setup``.
"""
