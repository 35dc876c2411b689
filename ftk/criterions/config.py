"""Options of the cross entropy, which other losses of logits share."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.config.options import option


@dataclass(kw_only=True)
class CrossEntropyConfig:
    """Options of the cross entropy."""

    label_smoothing: float = option(0.0, "share of the target mass spread evenly over the vocabulary", "[0, 1)")
    loss_form: str = option(
        "auto",
        "how logits and loss are made: plain (all logits of the batch's targets at once), chunked (some at "
        "a time, gradients made along), linear (torch's linear_cross_entropy), auto (plain for few, else chunked)",
        resume="free",
        choices=("auto", "plain", "chunked", "linear"),
    )
    loss_chunk_tokens: int | None = option(
        None,
        "targets whose logits exist at a time in the forms chunked and linear; default: 256 on a CPU, 1024 elsewhere",
        needs={"loss_form": ("auto", "chunked", "linear")},
        resume="free",
        unit="tokens",
        min=1,
    )

    def chunk_tokens(self, device_type: str) -> int:
        """Targets whose logits exist at a time on a device, such as "cpu".

        Each chunk adds to the whole gradient of the output layer. On a CPU that costs little compared with the products
        of 256 targets, while the logits of 1024 would be the peak of a step.
        """
        if self.loss_chunk_tokens is not None:
            return self.loss_chunk_tokens
        return 256 if device_type == "cpu" else 1024
