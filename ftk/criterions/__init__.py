"""Losses as sums with counts. Importing a criterion imports no torch; calling one does."""
