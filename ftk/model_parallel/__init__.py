"""How one model runs on many devices: the only room that knows process groups."""
