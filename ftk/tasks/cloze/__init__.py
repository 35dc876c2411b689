"""Cloze tasks: a model learns to choose the right candidate for the gap of a pattern."""
