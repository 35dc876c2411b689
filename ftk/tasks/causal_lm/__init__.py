"""Causal language modeling: each token is predicted from those before it."""
