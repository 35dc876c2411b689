"""The forms of attention of whole sequences: which one "auto" takes, and a batch's `Attend` in a form."""

from __future__ import annotations

import torch
from torch import Tensor

from ftk.modules.attention import Attend
from ftk.modules.flex_attention import FLEX_MIN_HEAD_SIZE, HAS_TRITON, FlexPrograms
from ftk.modules.masked_attention import HALF
from ftk.modules.masks import Visibility
from ftk.modules.varlen_attention import VARLEN_MAX_HEAD_SIZE, has_flash
from ftk.registry import ATTENTIONS

EAGER_MAX_TOKENS = 1024
"""The longest sequence for which "auto" keeps attention weights, A T^2 numbers a layer and sample."""

BANDED_MIN_WINDOWS = 4
"""The shortest sequence, in windows, for which "auto" on a CPU makes the scores of a band alone."""


def attention_form(
    form: str,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    head_size: int,
    dropout: float,
    window: int | None = None,
    *,
    has_bias: bool = False,
    in_runs: bool = True,
    is_slow_behind_prefix: bool = False,
) -> str:
    """The registered form that computes attention where `form` is configured.

    - "flex": "sdpa" on the meta device, outside of CUDA without gradients, and where its programs were too many. So a
      model trained by flex is scored on a laptop, too: torch 2.13's compiled flex kernel for CPUs has no backward and
      gives NaN in about one process of three.
    - "varlen": "sdpa" where it has no kernel.
    - "auto" on CUDA: "sdpa" in float32, in which flex is slow, and with a bias of positions. Else "varlen", whose
      kernels need no mask and have dropout; but "flex", unless there is dropout, behind a prefix, where varlen takes
      two calls (unless passes are replayed, which was measured with heads of 64), within a window, and where varlen
      has no kernel. SDPA by cuDNN is faster than varlen for short texts with dropout (docs/performance.md), but
      needs more than half a second for each new shape of a batch.
    - "auto" on a CPU: "banded" within a window that is a small part of the text; "eager" in bfloat16 and with dropout,
      where it takes a third to two thirds of SDPA's time, as long as the [T, T] weights that it keeps are small.

    Args:
        form: "auto" or the name of a registered form.
        dtype: of the scores.
        num_tokens: T.
        head_size: D.
        dropout: of attention weights as configured for training, so that validation takes the same form.
        window: as of `Visibility`.
        has_bias: whether the model adds a bias to the scores (`Backbone.ADDS_BIAS`).
        in_runs: `Visibility.in_runs`, without the window.
        is_slow_behind_prefix: `varlen_attention.is_slow_behind_prefix`.
    """
    if form == "flex" and (
        FlexPrograms.are_too_many or device.type == "meta" or (device.type != "cuda" and not torch.is_grad_enabled())
    ):
        return "sdpa"
    exports = torch.compiler.is_exporting()  # a program that takes any number of tokens
    in_runs = in_runs and (window is None or (not exports and num_tokens <= window))
    fits = dtype in HALF and head_size % 8 == 0 and head_size <= VARLEN_MAX_HEAD_SIZE
    takes_varlen = in_runs and fits and has_flash(device)
    if form == "varlen" and not takes_varlen:
        return "sdpa"
    if form != "auto":
        return form
    if device.type == "cuda":
        if has_bias or dtype not in HALF:
            return "sdpa"
        takes_flex = HAS_TRITON and dropout == 0.0 and head_size >= FLEX_MIN_HEAD_SIZE
        if takes_flex and not FlexPrograms.are_too_many and (is_slow_behind_prefix or not takes_varlen):
            return "flex"
        return "varlen" if takes_varlen else "sdpa"
    if window is not None and not exports and num_tokens >= BANDED_MIN_WINDOWS * window:
        return "banded"
    eager_is_faster = device.type == "cpu" and (dtype == torch.bfloat16 or dropout > 0.0)
    return "eager" if eager_is_faster and num_tokens <= EAGER_MAX_TOKENS else "sdpa"


def sequence_attention(
    form: str,
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    num_keys: int | None = None,
) -> Attend:
    """The `Attend` of a batch in a registered form; its mask is built here, once for all layers.

    Args:
        form: its name; see `attention_form` for "auto".
        visibility: which tokens see which.
        num_tokens: T.
        dropout: of attention weights, 0 outside training and for "flex".
        dtype: of the scores.
        num_keys: S, where the keys are those of another sequence; None: T.
    """
    # An exported program takes any number of tokens: there the window always counts.
    if visibility.window is not None and not torch.compiler.is_exporting() and num_tokens <= visibility.window:
        visibility = visibility._replace(window=None)
    if visibility.length is not None and _all_at_least(visibility.length, num_tokens if num_keys is None else num_keys):
        visibility = visibility._replace(length=None)
    build = ATTENTIONS.get(form).target
    # A form of a plugin's may know of no other keys.
    attend: Attend = (
        build(visibility, num_tokens, device, dropout, dtype)
        if num_keys is None
        else build(visibility, num_tokens, device, dropout, dtype, num_keys)
    )
    return attend


def _all_at_least(length: Tensor, num_tokens: int) -> bool:
    """Whether no key is masked by its length, as far as that is known without waiting for a device; a compiled program
    is for any lengths."""
    if length.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((length >= num_tokens).all())
