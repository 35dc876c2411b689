"""Preferences: a model learns which of two answers to the same question is the better one."""
