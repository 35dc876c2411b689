"""ftk-plan: what a way of spreading a model over processes takes in memory, messages and time, before it is run."""
