"""A plugin that exchanges every part: an LSTM language model on plain text files.

    ftk-train FOLDER --user-dir examples/plugin --dataset text_lines --tokenizer-folder DATA-BIN \\
        --arch lstm_tiny --criterion focal_loss --optimizer sign_sgd --lr-scheduler constant \\
        --lr 1e-3 --max-update 100 --save-dir run

FOLDER holds train.txt and valid.txt, one document per line. No file of ftk is touched.
"""

from plugin import criterion, dataset, language_model, optimizer

__all__ = ["criterion", "dataset", "language_model", "optimizer"]
