"""Causal language modeling: each token is foretold by those before it."""
