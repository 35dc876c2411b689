"""`.bin/.idx`: layout, reader and writer, the check before the first token, and the folder around them."""
