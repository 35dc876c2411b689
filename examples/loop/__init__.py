"""A plugin that changes the training loop: a hook that acts in every update, and a criterion of two forward passes.

    ftk-train DATA-BIN --user-dir examples/loop --hooks 'gradient_noise eta=0.01' \\
        --criterion r_drop --r-drop-weight 1 --arch glm_tiny --max-update 100 --save-dir run

DATA-BIN is a folder that ftk-preprocess wrote. No file of ftk is touched.
"""

from loop import gradient_noise, r_drop

__all__ = ["gradient_noise", "r_drop"]
