"""Answers over HTTP: ftk-serve."""
