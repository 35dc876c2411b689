"""What steers a search; one subject a file. Order and meaning: docs/generation.md, "Steering"."""
