"""How one model runs on many devices: the only room with process groups."""
