"""Write train.txt and test.txt, one prompt a line: words that the embedded pipeline has not seen.

    python dataset/tiny_ocr/generate.py

The words come from scripts/tiny_sd3/words.py; pretraining, training and test words are disjoint.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

from tiny_sd3 import words  # noqa: E402

NUM_PROMPTS = {"train": 1000, "test": 128}


def main() -> None:
    """Write both files into --out, by default beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out
    for split, num in NUM_PROMPTS.items():
        text = "".join(f"{line}\n" for line in words.prompts(split, num))
        (out / f"{split}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
