"""Denoising: a text is made worse in several ways, and an encoder-decoder model writes it as it was."""
