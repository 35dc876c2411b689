"""The curve of a learning rate range test as SVG, without a drawing library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ftk.report.scales import Axis, axis_for, short

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 56, 48


def chart(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], marks: Sequence[tuple[str, float]]
) -> str:
    """Loss over the learning rate, the rate on a logarithmic axis.

    Args:
        rates, losses, smoothed: of the updates; at least two, rates rising.
        marks: names and rates of upright lines.

    Returns:
        A whole SVG document. An explosion at the end goes out of the picture.
    """
    x_axis = Axis(rates[0], rates[-1], LEFT, WIDTH - RIGHT, log=True)
    top = smoothed[0] + 0.5 * max(smoothed[0] - min(smoothed), 0.05 * abs(smoothed[0]))
    y_axis = axis_for([min(smoothed), min(top, max(smoothed))], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<title>Learning rate range test</title><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
    ]
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" dy=".35em" text-anchor="end">{short(tick)}</text>')
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM + 4}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">learning rate</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">loss</text>')
    for values, colour, width in ((losses, "#bbb", 1), (smoothed, "#0072b2", 2.5)):
        points = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in zip(rates, values, strict=True))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" clip-path="url(#plot)"/>'
        )
    # The leftmost line is the highest, so that no line goes through another's name.
    for row, (name, rate) in enumerate(sorted(marks, key=lambda mark: -mark[1])):
        x, y = x_axis.place(min(max(rate, rates[0]), rates[-1])), TOP - 6 - 14 * row
        anchor, shift = ("end", -4) if x > 0.8 * WIDTH else ("start", 4)
        parts.append(f'<path d="M{x:.1f} {y - 8}V{HEIGHT - BOTTOM}" stroke="#d55e00" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}">{escape(name)} {rate:.1e}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
