"""What a run writes: records, figures, progress, lines."""
