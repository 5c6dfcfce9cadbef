"""Write what others load: an adapter folder (or the full transformer) with its model card."""

import json
from pathlib import Path

from huggingface_hub import ModelCardData, save_torch_state_dict
from torch import Tensor

from flow_grpo.run_folder import commit
from flow_grpo.settings import image_size

FULL_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"  # the name that diffusers reads
CARD = """\
Trained with flow_grpo by online reinforcement learning ({algorithm}), {epoch} epochs,
{update} optimizer steps, from `{base}`.

Rewards (weight): {rewards}. Prompts: `{dataset}`. {weights}

```python
{imports}from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{base}"{absent})
{setup}{load}
{kind} = pipe(
    prompt="{prompt}",{edited} num_inference_steps={num_steps}, {guidance},
    height={height}, width={width}, max_sequence_length={tokens},
).{output}[0]
```

These are the settings of the evaluations.{alpha}
Source commit: {commit}.
"""


def write_weights(run, weights: dict[str, Tensor], path: Path) -> None:
    """Write `lora/` (or `transformer/`) below `path` of what `Policy.exported` returned."""
    if run.config.use_lora:
        folder = path / "lora"
        run.model.pipeline.save_lora_weights(str(folder), transformer_lora_layers=weights)
    else:
        folder = path / "transformer"
        run.model.transformer.save_config(str(folder))
        save_torch_state_dict(weights, str(folder), filename_pattern=FULL_PATTERN)
    (folder / "README.md").write_text(_card(run))


def _card(run) -> str:
    """Return a model card with the metadata that model hubs read."""
    config = run.config
    data = ModelCardData(
        base_model=config.pretrained.model,
        base_model_relation="adapter" if config.use_lora else "finetune",
        library_name="diffusers",
        pipeline_tag=run.model.task,
        tags=["diffusers", "flow-grpo", run.model.family, *(["lora"] if config.use_lora else [])],
    )
    size = image_size(config)
    stock = run.model.stock_settings(config.eval.guidance_scale)
    references = run.model.stock_reference_code(size) if run.model.max_images else ""
    without_t5 = getattr(run.model.pipeline, "text_encoder_3", 0) is None
    text = CARD.format(
        algorithm=config.algorithm,
        epoch=run.state.epoch,
        update=run.state.update,
        base=config.pretrained.model,
        rewards=", ".join(f"{name} ({weight})" for name, weight in run.rewards.weights.items()),
        dataset=config.dataset,
        weights="Moving average of the weights." if run.policy.ema else "",
        imports="import PIL.Image\n" if run.model.max_images else "",
        pipeline=run.model.pipeline_class,
        absent=", text_encoder_3=None, tokenizer_3=None" if without_t5 else "",
        setup=run.model.stock_setup(),
        output=run.model.output,
        kind=run.model.task.rpartition("-")[2],
        load='pipe.load_lora_weights("THIS FOLDER")'
        if config.use_lora
        else 'pipe.transformer = type(pipe.transformer).from_pretrained("THIS FOLDER")',
        alpha=" alpha is folded into the weights: do not scale them again."
        if config.use_lora
        else "",
        edited=f"\n    {references}\n   " if references else "",
        prompt=run.eval_prompts[0].prompt.replace('"', '\\"'),
        tokens=config.sample.max_sequence_length,
        num_steps=config.eval.num_steps,
        guidance=", ".join(f"{name}={json.dumps(value)}" for name, value in stock.items()),
        height=size[0],
        width=size[1],
        commit=commit(),
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {config.run_name}\n\n{text}"
