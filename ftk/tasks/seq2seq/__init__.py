"""A text written for another: summaries, questions, answers; for models of every family."""
