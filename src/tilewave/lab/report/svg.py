"""Pictures as SVG: a small drawing board, colours for light and dark, and PNG from the same drawings.

A drawing holds no colours, only class names: on the page a style sheet gives them colours for light and dark,
and a picture of its own carries the light ones. All drawings have a width of 360 units, so that one fits a
telephone at its natural size and several stand beside each other on a desk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree as Xml

WIDTH = 360
MARGIN = 10
"""Paper around a picture in a file of its own."""
CHARACTER = 6.3
"""An upper estimate of the mean width of a character of small text."""

LIGHT = {
    "paper": "#ffffff", "panel": "#f5f7f9", "ink": "#1b1f24", "muted": "#57606a", "rule": "#d3dae1",
    "blue": "#0f6cbd", "sky": "#4099d8", "orange": "#c4500a", "green": "#0a7d5c", "purple": "#8a4a9e",
    "yellow": "#8a6500", "hot": "#d1461c", "pale": "#dcebf8", "onfill": "#ffffff", "onpale": "#10263a",
    "ember": "#a3300d", "mist": "#7fbce9",
}  # fmt: skip
DARK = {
    "paper": "#10151b", "panel": "#171e26", "ink": "#e8eef4", "muted": "#a3b1be", "rule": "#34404c",
    "blue": "#58a9f0", "sky": "#2b659b", "orange": "#f08c4a", "green": "#3fc796", "purple": "#c58bdb",
    "yellow": "#e0b544", "hot": "#ff7a50", "pale": "#213a52", "onfill": "#0b1016", "onpale": "#dcebf8",
    "ember": "#ffa585", "mist": "#21507a",
}  # fmt: skip


@dataclass
class Drawing:
    """One picture. ``name`` is its file's stem, ``title`` a line, ``about`` what a listener should hear.

    In an ``explorable`` picture marks can be focused; it is a group for assistive technology, not an image.
    """

    name: str
    title: str
    about: str
    height: float
    width: float = WIDTH
    explorable: bool = False
    marks: list[Xml.Element] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, tip: str = "", **more: str
    ) -> Xml.Element:
        """A rectangle; ``style`` names its classes, ``tip`` is what hovering tells."""
        return self._add(
            "rect", style, tip, x=number(x), y=number(y), width=number(width), height=number(height), **more
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "rule", tip: str = "") -> None:
        """A straight line."""
        self._add("line", style, tip, x1=number(x1), y1=number(y1), x2=number(x2), y2=number(y2))

    def path(self, points: Iterable[tuple[float, float]], style: str) -> None:
        """A line through points."""
        steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", f"line {style}", "", d=f"M{steps}")

    def dot(self, x: float, y: float, radius: float, style: str, tip: str = "") -> None:
        """A disc."""
        self._add("circle", style, tip, cx=number(x), cy=number(y), r=number(radius))

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Text whose baseline is at y."""
        more = {} if anchor == "start" else {"text-anchor": anchor}
        self._add("text", style, "", x=number(x), y=number(y), **more).text = text

    def _add(self, tag: str, style: str, tip: str, **attributes: str) -> Xml.Element:
        if style:
            attributes["class"] = style
        element = Xml.Element(tag, attributes)
        if tip:
            Xml.SubElement(element, "title").text = tip
        self.marks.append(element)
        return element

    def markup(self) -> str:
        """The picture for the page, which gives it its colours."""
        return _serialise(self._root())

    def standalone(self) -> str:
        """The picture for a file of its own: in light colours, on paper."""
        root = self._root()
        width, height = (number(extent + 2 * MARGIN) for extent in (self.width, self.height))
        root.set("viewBox", f"{-MARGIN} {-MARGIN} {width} {height}")
        root.set("width", width)
        root.set("height", height)
        style = Xml.Element("style")
        style.text = with_colours(picture_style(), LIGHT)
        root.insert(2, style)
        paper = {"x": f"{-MARGIN}", "y": f"{-MARGIN}", "width": width, "height": height, "class": "f-paper"}
        root.insert(3, Xml.Element("rect", paper))
        return _serialise(root)

    def _root(self) -> Xml.Element:
        root = Xml.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {number(self.width)} {number(self.height)}",
                "role": "group" if self.explorable else "img",
                "aria-labelledby": f"{self.name}-title {self.name}-about",
            },
        )
        Xml.SubElement(root, "title", {"id": f"{self.name}-title"}).text = self.title
        Xml.SubElement(root, "desc", {"id": f"{self.name}-about"}).text = self.about
        root.extend(self.marks)
        return root


def _serialise(root: Xml.Element) -> str:
    return Xml.tostring(root, encoding="unicode", short_empty_elements=True)


def number(value: float) -> str:
    """A coordinate with as few digits as a screen needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def picture_style() -> str:
    """The style sheet of the pictures, with names of colours as custom properties."""
    return resources.files(__package__).joinpath("pictures.css").read_text(encoding="utf-8")


def with_colours(style: str, colours: dict[str, str]) -> str:
    """A style sheet whose custom properties are replaced by colours, for readers that know none."""
    return re.sub(r"var\(--(\w+)\)", lambda match: colours[match.group(1)], style)


def colour_properties(colours: dict[str, str]) -> str:
    """Colours as declarations of custom properties."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def round_ticks(largest: float, most: int = 6) -> list[float]:
    """At most ``most`` round values from 0 up to ``largest``."""
    if not largest > 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(largest / most))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10, 20) if largest / (step * factor) <= most)
    return [index * step for index in range(int(largest / step + 1e-9) + 1)]


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions in the order of ``wanted``, at least ``gap`` apart, near to it and within low to high.

    If there is no room for such gaps, they shrink alike.
    """
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = []
    for rank, index in enumerate(order):
        most = high - gap * (len(order) - 1 - rank)
        least = placed[-1] + gap if placed else low
        placed.append(min(max(wanted[index], least), most))
    # Going back up lets a crowd grow to both sides of where it wants to be.
    for rank in range(len(order) - 2, -1, -1):
        room = placed[rank - 1] + gap if rank else low
        centre = (placed[rank] + max(room, min(wanted[order[rank]], placed[rank]))) / 2
        placed[rank] = min(max(centre, room), placed[rank + 1] - gap)
    result = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        result[index] = placed[rank]
    return result


def write_pictures(drawings: Iterable[Drawing], folder: Path, scale: float = 3.0) -> list[Path]:
    """Each drawing as SVG and as PNG of ``scale`` pixels a unit; returns the PNGs."""
    import resvg_py
    from matplotlib import get_data_path

    # Matplotlib brings the typeface along, so a machine without any draws the same letters.
    fonts = [str(path) for path in sorted(Path(get_data_path(), "fonts", "ttf").glob("DejaVuSans*.ttf"))]
    written = []
    for drawing in drawings:
        text = drawing.standalone()
        folder.joinpath(f"{drawing.name}.svg").write_text(text + "\n", encoding="utf-8")
        path = folder / f"{drawing.name}.png"
        path.write_bytes(
            resvg_py.svg_to_bytes(
                svg_string=text,
                zoom=scale,
                skip_system_fonts=True,
                font_files=fonts,
                sans_serif_family="DejaVu Sans",
            )
        )
        written.append(path)
    return written
