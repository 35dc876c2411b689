"""Shortens prompts that are longer than the model's positions, around their blanks."""

from __future__ import annotations

from collections.abc import Sequence

from ftk.errors import UserError
from ftk.tasks.glm_blank.infill.blanks import find_blanks


def truncate(
    context: Sequence[int], masks: Sequence[int], limit: int, side: str, frame: Sequence[int | None] = (None, None)
) -> list[int]:
    """The part of a context that is left when it must not be longer than `limit`: one piece that holds every blank.

    Args:
        context: token ids.
        masks: the ids that stand for a blank.
        limit: most tokens, the frame's counted.
        side: "left" and "right": tokens are cut off there, and on the other side only when a blank is reached;
            "middle": on both sides, so that as much is left before the first blank as behind the last one.
        frame: ids that stay at the first and at the last place, if they stand there.

    Returns:
        the context itself where it is short enough.

    Raises:
        UserError: the blanks are too far apart.
    """
    ids = list(context)
    if len(ids) <= limit:
        return ids
    head = ids[:1] if ids[0] == frame[0] else []
    tail = ids[-1:] if ids[-1] == frame[1] else []
    text = ids[len(head) : len(ids) - len(tail)]
    room = limit - len(head) - len(tail)
    blanks = find_blanks(text, masks)
    first, end = (blanks[0], blanks[-1] + 1) if blanks else (0, 0)
    if end - first > room:
        raise UserError(
            f"there are {end - first} tokens from the first to the last blank, but the model has positions for {room}; "
            "bring the blanks closer together, or ask for fewer at once"
        )
    spare, before, behind = room - (end - first), first, len(text) - end  # to be divided between the two sides
    if side == "left":
        kept = max(spare - behind, 0)
    elif side == "right":
        kept = min(spare, before)
    else:
        kept = min(max(spare // 2, spare - behind), before)
    return head + text[first - kept : first - kept + room] + tail
