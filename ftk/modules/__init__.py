"""Building blocks of models, each usable alone: layers and heads, masks and caches, initial values, rounded weights.

Nothing here knows a model family, a process group or a file.
"""
