"""A plugin that adds a search strategy: mirostat, sampling that keeps the surprise of its text near a target.

    echo "Ng is an adjunct professor at [MASK] ." | ftk-generate --path run --input - \\
        --user-dir examples/search_plugin --search 'mirostat target=3 rate=0.1' --nbest 4

No file of ftk is touched.
"""

from search_plugin import mirostat

__all__ = ["mirostat"]
