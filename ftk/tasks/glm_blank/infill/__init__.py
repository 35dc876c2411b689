"""Generation of blank infilling: prompts with blanks in, the answers and the filled texts out."""
