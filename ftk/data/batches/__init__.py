"""From samples to batches: padding, order of an epoch, grouping, the stateful iterator."""
