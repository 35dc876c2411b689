"""Tasks: what is learned. A task builds datasets, model, criterion and generator, and says what a step is."""
