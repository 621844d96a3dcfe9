"""Modules at the paths that users' files name; they stay importable from the first level of the package.

Recipes that were copied with ``tune cp`` import ``torchtune_adaptive.launch`` and ``.versions``; configs name
``torchtune_adaptive.tiny``. The package looks for its modules in this folder, too.
"""
