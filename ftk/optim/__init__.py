"""Optimizers, parameter groups, gradient clipping, loss scaling and learning rate schedules."""
