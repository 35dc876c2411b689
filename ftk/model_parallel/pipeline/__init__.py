"""Pipeline parallel: processes that each hold consecutive layers and send hidden states to the next."""
