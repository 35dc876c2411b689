"""Encoder-decoders, as families share them: two stacks of layers, of which the second reads the first."""
