"""GLM's task, autoregressive blank infilling: options, samples, collating."""
