"""The engine: requests in, events out. It knows rows, frames, caches and searches, and nothing of any task."""
