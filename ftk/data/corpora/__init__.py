"""Where documents come from: a folder, blends, shards, splits, plain files; and how they are packed."""
