"""Translation: a text is written for another; data are pairs of texts."""
