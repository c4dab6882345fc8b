#!/usr/bin/python3
"""Turns a screen as `tmux capture-pane -e -p` prints it into an SVG: stdin to stdout."""

import re
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 8, 17, 10
FOREGROUND, BACKGROUND = "#d8d8d8", "#1c1c1c"


def colour(number):
    """An entry of xterm's palette of 256."""
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    if number >= 16:
        number -= 16
        parts = (number // 36, number // 6 % 6, number % 6)
        return "#" + "".join(f"{55 + 40 * part if part else 0:02x}" for part in parts)
    return FOREGROUND


def runs(line):
    """The line's parts of one style: (column, text, style)."""
    style, column = {}, 0
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        found = re.fullmatch(r"\x1b\[([0-9;]*)m", part)
        if not found:
            if part:
                yield column, part, dict(style)
            column += len(part)
            continue
        codes = [int(code or 0) for code in found[1].split(";")]
        while codes:
            code = codes.pop(0)
            if code == 0:
                style = {}
            elif code in (1, 7):
                style[code] = True
            elif code in (38, 48) and len(codes) >= 2:
                style[code], codes = colour(codes[1]), codes[2:]
            elif code in (39, 49):
                style.pop(code - 1, None)
            elif code in (22, 27):
                style.pop(1 if code == 22 else 7, None)


def picture(lines):
    columns = max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines)
    width, height = columns * WIDTH + 2 * MARGIN, len(lines) * HEIGHT + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    yield f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>'
    yield f'<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13" fill="{FOREGROUND}">'
    for row, line in enumerate(lines):
        y = MARGIN + row * HEIGHT
        for column, text, style in runs(line):
            front, back = style.get(38, FOREGROUND), style.get(48)
            if style.get(7):
                front, back = BACKGROUND, front
            x, length = MARGIN + column * WIDTH, len(text) * WIDTH
            if back:
                yield f'<rect x="{x}" y="{y}" width="{length}" height="{HEIGHT}" fill="{back}"/>'
            weight = ' font-weight="bold"' if style.get(1) else ""
            fill = f' fill="{front}"' if front != FOREGROUND else ""
            # Word by word, as spaces side by side would be one.
            for word in re.finditer(r"\S+", text):
                at, long = x + word.start() * WIDTH, len(word[0]) * WIDTH
                yield f'<text x="{at}" y="{y + 13}" textLength="{long}"{fill}{weight}>{escape(word[0])}</text>'
    yield "</g>"
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(picture(sys.stdin.read().rstrip("\n").split("\n"))))
