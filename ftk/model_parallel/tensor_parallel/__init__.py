"""Tensor and sequence parallel: layers whose matrices and sequences are shared by processes."""
