"""What looks at a run's numbers: skipped updates, inspection, profile, anomalies, rate of tokens."""
