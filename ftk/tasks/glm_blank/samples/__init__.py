"""From documents to GLM's samples: spans, blanks, layout, and a look at them."""
