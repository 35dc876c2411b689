"""Reports about runs: the environment, and the figures as one page."""
