"""Heat maps as files: SVG by hand, PNG by Pillow, from the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infllm_cli.errors import CapacityError, UsageError
from infllm_cli.evaluate.chart import Box, Drawing, Label, Sheet, in_words, lay_out
from infllm_cli.heatmap import as_xml

WANTED = 'pip install "infllm-cli[eval]"'
PNG_SCALE = 2  # pixels of the file for one of the layout
STYLE = """
.chart{color:#1f2328;background:#fff;font-family:system-ui,sans-serif}
.chart text{fill:currentColor}.chart .paper{fill:#fff}.chart .none{fill:#eceef1}
.chart .dim{opacity:.72}
@media(prefers-color-scheme:dark){.chart{color:#e6e6e6;background:#16181d}
.chart .paper{fill:#16181d}.chart .none{fill:#2a2e35}}
"""
TEXT, DIM, NONE, PAPER = (31, 35, 40), (98, 103, 110), (236, 238, 241), (255, 255, 255)


def check_files(paths: Sequence[Path]) -> None:
    """Refuse, before anything is measured, what cannot be drawn at its end.

    Raises:
        UsageError: another kind of file, no such folder, no Pillow for PNG.
    """
    for path in paths:
        if path.suffix.lower() not in (".svg", ".png"):
            raise UsageError(f"--heatmap {path}: its name must end in .svg or .png.")
        if not path.parent.is_dir():
            raise UsageError(f"--heatmap {path}: there is no folder {path.parent}.")
        if path.suffix.lower() == ".png":
            try:
                import PIL  # noqa: F401
            except ModuleNotFoundError:
                raise UsageError(
                    f"--heatmap {path}: PNG is drawn by the package pillow: {WANTED}; or name an "
                    ".svg file."
                ) from None


def write(sheet: Sheet, path: Path) -> None:
    """Draw a sheet into a file of the kind that its name says.

    Raises:
        CapacityError: it cannot be written.
    """
    drawing = lay_out(sheet)
    try:
        if path.suffix.lower() == ".png":
            _png(drawing, path)
        else:
            path.write_text(svg(drawing, sheet.title, in_words(sheet)), encoding="utf-8")
    except OSError as error:
        raise CapacityError(f"{path}: {error.strerror or error}.") from None


def svg(drawing: Drawing, title: str, told: str) -> str:
    """One file that fetches nothing, for light and dark ground."""
    size = f'width="{drawing.width}" height="{drawing.height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" '
        f'aria-labelledby="name told" {size} viewBox="0 0 {drawing.width} {drawing.height}">'
        f'<title id="name">{as_xml(title)}</title><desc id="told">{as_xml(told)}</desc>'
        f'<style>{STYLE}</style><rect class="paper" {size}/>'
    ]
    parts += [_box(mark) if isinstance(mark, Box) else _label(mark) for mark in drawing.marks]
    return "".join(parts) + "</svg>\n"


def _box(box: Box) -> str:
    fill = 'class="none"' if box.colour is None else f'fill="{_hex(box.colour)}"'
    told = f"<title>{as_xml(box.told)}</title>" if box.told else ""
    return (
        f'<rect {fill} x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}">{told}</rect>'
    )


def _label(label: Label) -> str:
    style = f' style="fill:{_hex(label.colour)}"' if label.colour is not None else ""
    style += ' font-weight="600"' if label.bold else ""
    style += ' class="dim"' if label.dim else ""
    # The middle of small letters and digits lies about a third of the size above the baseline.
    return (
        f'<text x="{label.x:.1f}" y="{label.y + 0.35 * label.size:.1f}" '
        f'font-size="{label.size}" text-anchor="{label.anchor}" pointer-events="none"{style}>'
        f"{as_xml(label.text)}</text>"
    )


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _png(drawing: Drawing, path: Path) -> None:
    from PIL import Image, ImageDraw, ImageFont

    scale = PNG_SCALE
    image = Image.new("RGB", (drawing.width * scale, drawing.height * scale), PAPER)
    pen = ImageDraw.Draw(image)
    fonts = {
        size: ImageFont.load_default(size * scale)
        for size in {mark.size for mark in drawing.marks if isinstance(mark, Label)}
    }
    for mark in drawing.marks:
        if isinstance(mark, Box):
            corners = [mark.x, mark.y, mark.x + mark.width, mark.y + mark.height]
            box = [round(scale * corner) for corner in corners]
            pen.rectangle([*box[:2], box[2] - 1, box[3] - 1], fill=mark.colour or NONE)
            continue
        font = fonts[mark.size]
        anchor = {"start": "l", "middle": "m", "end": "r"}[mark.anchor] + "m"
        ink = mark.colour or (DIM if mark.dim else TEXT)
        place = (scale * mark.x, scale * mark.y)
        bold = scale * 0.35 if mark.bold else 0  # the built-in font has one weight
        pen.text(place, mark.text, fill=ink, font=font, anchor=anchor, stroke_width=bold)
    image.save(path)
