"""The training loop: the Trainer, its options, progress, metrics and signals."""
