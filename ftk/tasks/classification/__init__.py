"""Classification: a head of its own on a model of any family, over labels, numbers, choices or words' labels."""
