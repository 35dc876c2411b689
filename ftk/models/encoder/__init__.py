"""Encoders, as families share them: BERT and RoBERTa differ by their options and the count of positions alone,
Longformer by its attention too."""
