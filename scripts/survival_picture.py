"""Draw docs/images/survival.svg, and print its table: goodput of 16,384 devices over the interval of checkpoints.

python scripts/survival_picture.py [OUT.svg]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

from goodput import HERD_DEATHS_PER_DEVICE_HOUR, Mortal, goodput, replaced, stopped

DEVICES = 16_384
SAVE_S = 5.0
"""For which training stands still for a copy of its state."""
MINUTES = (2, 5, 10, 20, 30, 60, 120)

CASES: tuple[tuple[str, str, tuple[Mortal, ...]], ...] = (
    (
        "replaced in the run",
        "#1a7f5a",
        replaced(
            DEVICES,
            trainer_share=0.5,
            trainer_back_s=600.0,
            other_back_s=180.0,
            tick_s=60.0,
            deaths_per_device_hour=HERD_DEATHS_PER_DEVICE_HOUR,
        ),
    ),
    (
        "stop and resume, back in 10 min",
        "#c2571a",
        stopped(DEVICES, back_s=600.0, deaths_per_device_hour=HERD_DEATHS_PER_DEVICE_HOUR),
    ),
    (
        "stop and resume, back in 30 min",
        "#8a1c4a",
        stopped(DEVICES, back_s=1800.0, deaths_per_device_hour=HERD_DEATHS_PER_DEVICE_HOUR),
    ),
)

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 52
LOWEST = 0.5


def x_of(minutes: float) -> float:
    share = math.log(minutes / MINUTES[0]) / math.log(MINUTES[-1] / MINUTES[0])
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def y_of(value: float) -> float:
    return TOP + (1 - value) / (1 - LOWEST) * (HEIGHT - TOP - BOTTOM)


def picture() -> str:
    """The whole file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#444") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>')

    for tenth in range(5, 11):
        y = y_of(tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        text(LEFT - 8, y + 4, f"{tenth * 10} %", "end")
    for minutes in MINUTES:
        x = x_of(minutes)
        parts.append(f'<path d="M{x:.1f} {HEIGHT - BOTTOM}v5" stroke="#888"/>')
        text(x, HEIGHT - BOTTOM + 20, str(minutes))
    text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "minutes of progress from one checkpoint to the next")
    for number, (name, colour, mortals) in enumerate(CASES):
        line = curve(lambda seconds, mortals=mortals: goodput(mortals, every_s=seconds, save_s=SAVE_S))
        parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        y = HEIGHT - BOTTOM - 50 + 18 * number
        parts.append(f'<path d="M{LEFT + 16} {y - 4}h28" stroke="{colour}" stroke-width="2.5"/>')
        text(LEFT + 52, y, name, "start", colour)
    return "\n".join([*parts, "</svg>"]) + "\n"


def curve(value: Callable[[float], float], points: int = 80) -> str:
    first, last = MINUTES[0], MINUTES[-1]
    minutes = [first * (last / first) ** (i / (points - 1)) for i in range(points)]
    return "M" + "L".join(f"{x_of(m):.1f} {y_of(value(60 * m)):.1f}" for m in minutes)


def table() -> str:
    """Of the same numbers, as the page shows it."""
    lines = ["| checkpoint every | " + " | ".join(name for name, _, _ in CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    for minutes in MINUTES:
        cells = (f"{goodput(mortals, every_s=60 * minutes, save_s=SAVE_S):.1%}" for _, _, mortals in CASES)
        lines.append(f"| {minutes} min | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    default = Path(__file__).resolve().parents[1] / "docs" / "images" / "survival.svg"
    Path(sys.argv[1] if len(sys.argv) > 1 else default).write_text(picture(), encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
