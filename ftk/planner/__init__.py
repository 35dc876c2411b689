"""ftk-plan: memory, messages and time of a parallel layout, estimated before it is run."""
