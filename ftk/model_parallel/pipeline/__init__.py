"""Pipeline parallel: processes that each hold a stretch of the layers, and hand on what lies between them."""
