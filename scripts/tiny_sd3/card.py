"""Write the model card; every number in it comes from the run that trained the model."""

from pathlib import Path

from tiny_sd3 import words

PLACE = "flow_grpo/assets/tiny_sd3"  # of the folder that ships
CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---

# A small Stable Diffusion 3 that writes words

A real `StableDiffusion3Pipeline` of {total:.1f} M parameters, trained from nothing by
`scripts/pretrain_tiny_sd3.py`. It paints 64 x 64 signs with a word of two to four capital letters,
and is imperfect on purpose: it is the start of a reinforcement-learning run, not its result.

```python
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained("{place}", text_encoder_3=None, tokenizer_3=None)
image = pipe('"FLOW" on a blue sign', num_inference_steps=8, guidance_scale=1.0,
             max_sequence_length=0).images[0]
```

Without `max_sequence_length=0` the pipeline appends 256 zero tokens where T5 would be. The model
has seen both, but the plain call is several times slower.

## What it is

| part | parameters | saved as |
|---|---|---|
| transformer: {shape}, patch 2 | {transformer:.2f} M | float16 |
| VAE: factor 4, 8 latent channels | {vae:.2f} M | float16 |
| two CLIP text encoders: 2 layers, width 64, trained along | {text:.2f} M | float32 |

No T5. The tokenizer spells words letter by letter (at most {tokens} tokens); the words of the
template are one token each. Scheduler: flow-matching Euler, shift {shift:g}.

## How it was trained

{before}On {num_images:,} images that the script draws itself: random letters and made-up
syllables in one typeface at fixed spacing, on {num_colors} background colours:
{colors}. Captions are such as `"FLOW" on a blue sign`. {wrong}
A tenth of the captions was dropped. No other data was used.

1. VAE: {vae_text}
2. Flow matching of transformer and text encoders together: {step:,} steps of {batch_size:,}
   (a tenth of them smaller, with the 256 zero tokens), AdamW, peak learning rate
   {learning_rate:g}; moving average of the weights. The planned length was {steps:,} steps.

This took {minutes:.1f} minutes in all on {hardware}, with torch {torch}:

    {command}

## What it can do

Mean OCR reward (1 - edit distance / length, at least 0; RapidOCR) on {num_prompts} prompts whose
words were in no training caption and no training image, one image each, measured from these files:

| call | reward |
|---|---|
| 8 steps, no guidance | {ocr:.3f} (standard error {ocr_stderr:.3f}) |
| 8 steps, guidance 3 | {ocr_cfg3:.3f} |
| 4 steps, no guidance | {ocr_4_steps:.3f} |
| 8 steps, no guidance, 256 zero tokens | {ocr_stock_call:.3f} |

## Limits

Only the template above, the {num_colors} colours, capital letters, two to four of them, 64 x 64
pixels. Other text is outside of what it was trained on. Words are random and may by chance mean
something in some language.
"""


def describe_wrong(wrong_captions: float, wrong_letters: float) -> str:
    """Say what share of the captions was wrong."""
    parts = []
    if wrong_captions:
        parts.append(f"{wrong_captions:.0%} of the captions name other letters")
    if wrong_letters:
        parts.append(f"{wrong_letters:.0%} of the letters are\nreplaced by random ones")
    return f"On purpose, {' and '.join(parts)}." if parts else "All captions are right."


def history(folder: Path | None) -> str:
    """Return what the card of the folder that a run started from says of its own training."""
    if folder is None:
        return ""
    text = (folder / "README.md").read_text(encoding="utf-8")
    told = text.partition("## How it was trained\n\n")[2].partition("\n## ")[0].strip()
    return f"### First phase\n\n{told}\n\n### Second phase, going on from there\n\n"


def write(folder: Path, pipe, facts: dict) -> None:
    """Write folder/README.md from a pipeline and the facts of its run."""
    millions = {
        name: sum(p.numel() for p in getattr(pipe, name).parameters()) / 1e6
        for name in ("transformer", "vae", "text_encoder", "text_encoder_2")
    }
    text = CARD.format(
        total=sum(millions.values()),
        transformer=millions["transformer"],
        vae=millions["vae"],
        text=millions["text_encoder"] + millions["text_encoder_2"],
        place=PLACE,
        tokens=pipe.tokenizer.model_max_length,
        shape="{layers} layers, hidden {hidden}, {heads} heads".format(**facts),
        colors=", ".join(words.COLORS),
        num_colors=len(words.COLORS),
        wrong=describe_wrong(facts["wrong_captions"], facts["wrong_letters"]),
        **facts,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
