"""Span corruption: spans of a text are hidden, and an encoder-decoder model writes them one after the other."""
