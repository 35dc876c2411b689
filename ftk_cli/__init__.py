"""The commands: each file parses, builds and runs, and nothing else."""
