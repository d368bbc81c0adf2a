"""Pictures of pages, as PNG with at most 256 colours: `python docs/screens.py RUNS`, with these in RUNS.

llmgeom scan --out RUNS/demo
llmgeom evidence --model pocket:llama --out RUNS/evidence
llmgeom ablate --out RUNS/ablate
llmgeom train bijection --width 32 --layers 1 --lr 1e-2 --out runs/bijection
llmgeom grade --model runs/bijection --out RUNS/grade
llmgeom export RUNS/grade live
llmgeom dynamics --task bijection --quick --out RUNS/dynamics
llmgeom scan --model pocket:llama --prompts-from RUNS/demo/math --out RUNS/llama
llmgeom report RUNS/demo/math RUNS/llama --out RUNS/compared.html
"""

import base64
import shutil
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, sync_playwright
from sklearn.cluster import KMeans

OUT = Path(__file__).parent
PINNED = "#s=mixed-value_manifold--scores&prompt=0.8"
SCREENS: dict[str, tuple[str, int, dict[str, Any]]] = {  # picture: page, width, further settings of the window
    "page.png": ("demo/report.html", 1440, {}),
    "page-linked.png": (f"demo/report.html{PINNED}", 1440, {}),
    "page-evidence.png": ("evidence/report.html", 1440, {}),
    "page-ablate.png": ("ablate/report.html", 1440, {}),
    "page-grade.png": ("grade/report.html", 1440, {}),
    "page-dynamics.png": ("dynamics/report.html", 1440, {}),
    "page-compared.png": ("compared.html", 1440, {}),
    "page-live.png": ("grade/live.html#s=live", 1440, {}),
}
# The bytes of a picture, four a pixel, as a browser decodes it.
PIXELS = """async (data) => {
  const image = new Image(); image.src = 'data:image/png;base64,' + data; await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const { data: bytes } = context.getImageData(0, 0, image.width, image.height);
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return [image.width, btoa(text)];
}"""


def reduced(view: Page, png: bytes) -> bytes:
    """The picture with 256 colours: the most frequent half, and means of the others; each becomes the nearest."""
    width, text = view.evaluate(PIXELS, base64.b64encode(png).decode())
    pixels = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 4)[:, :3]
    colours, place, count = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    ranked = colours[np.argsort(-count, kind="stable")]
    palette = ranked[:256]
    if len(ranked) > 256:
        rare = KMeans(128, n_init=1, max_iter=20, random_state=0).fit(ranked[128:])
        palette = np.concatenate([ranked[:128], rare.cluster_centers_.round().astype(np.uint8)])
    apart = ((colours[:, None].astype(np.int32) - palette.astype(np.int32)) ** 2).sum(-1)
    cells = apart.argmin(1).astype(np.uint8)[place.ravel()].reshape(-1, width)
    rows = np.pad(cells, ((0, 0), (1, 0)))  # each row opens with its filter: none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, len(cells), 8, 3, 0, 0, 0)
    parts = [(b"IHDR", head), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def main(runs: Path) -> None:
    """Take every picture whose page is there."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path)
        blank = browser.new_page()
        for name, (page, width, settings) in SCREENS.items():
            path, _, hash = page.partition("#")
            if not (runs / path).exists():
                print(f"{name}: no {runs / path}")
                continue
            view = browser.new_page(viewport={"width": width, "height": 900}, **settings)
            view.goto(f"{(runs / path).resolve().as_uri()}#{hash}")
            view.wait_for_timeout(4000)  # until what is in view is drawn
            (OUT / name).write_bytes(reduced(blank, view.screenshot()))
            view.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
