"""Masked language modeling: masked tokens of a text are predicted from all others."""
