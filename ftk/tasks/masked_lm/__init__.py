"""Masked language modeling: hidden tokens of a text are predicted from all others."""
