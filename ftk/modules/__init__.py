"""Building blocks of models, each usable alone; nothing here knows of parallelism, precision or caching."""
