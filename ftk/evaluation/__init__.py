"""Scorers of generated answers against references; each is registered under a name (`scoring` NAME)."""
