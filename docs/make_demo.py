"""Write demo.png, the figure of `ppl-bandit demo`, and demo-dark.png, the same for dark pages of GitHub.

python docs/make_demo.py [PNG]

Without a figure that was made before, the demo runs. GitHub does not apply site.css, so its filter is applied here.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from ppl_bandit.commands.cli import main as ppl_bandit

HERE = Path(__file__).parent
# hue-rotate(180deg) of CSS, on (red, green, blue)
_HUE_ROTATION = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
_DARK_PAGE = np.array([0x0D, 0x11, 0x17]) / 255


def write(pixels: np.ndarray, name: str) -> None:
    """Write (H, W, 3) pixels in [0, 1] as a PNG file of 256 colours."""
    picture = Image.fromarray((255 * pixels).round().astype(np.uint8), "RGB")
    picture.quantize(256, kmeans=2).save(HERE / name, optimize=True)


def main(source: Path) -> None:
    """Write both figures from one."""
    light = np.asarray(Image.open(source).convert("RGB")) / 255
    dark = np.clip((1 - light) @ _HUE_ROTATION.T, 0, 1)
    write(light, "demo.png")
    write(1 - (1 - dark) * (1 - _DARK_PAGE), "demo-dark.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) == 1:
            ppl_bandit(["demo", "--out", folder])
        main(Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/demo.png"))
