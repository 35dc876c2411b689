"""A plugin that adds contrastive search, which compares the hidden states of the tokens that it might take.

    echo "Ng is an adjunct professor at [MASK] ." | ftk-generate --path run --input - \\
        --user-dir examples/contrastive_search --search 'contrastive candidates=4 alpha=0.6'

No file of ftk is touched: the search names what looks at hidden states for it (`Search.observer`).
"""

from contrastive_search import search

__all__ = ["search"]
