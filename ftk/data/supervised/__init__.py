"""Supervised data, read as it is: a row is a JSON object of a line, or a line of each of two files."""
