"""Instructions and conversations: the answers of an assistant are learned, behind all that was said before them."""
