"""Every family says what is wrong with a setting or a path that it cannot do, in one line."""

import re

import families
import pytest
import torch
from families import FAMILIES

every_family = pytest.mark.parametrize("name", FAMILIES)


def _check(name: str, **changes) -> None:
    families.adapter(name).check_config(families.settings(name, "owner/model", **changes))


def _arguments(name: str, folder: str, runs, **changes) -> list[str]:
    values = {**families.values(name, folder), "logdir": runs, "run_name": "run", **changes}
    preset = "--config=config/grpo.py:tiny_flow_sde"
    return [preset, *(f"--config.{key}={value}" for key, value in values.items())]


@every_family
def test_a_prompt_has_a_length_that_the_pipeline_takes(name):
    adapter = families.adapter(name)
    _check(name)
    for length in (adapter.min_tokens - 1, adapter.max_tokens + 1):
        message = (
            rf"sample.max_sequence_length \({length}\) must be in "
            rf"\[{adapter.min_tokens}, {adapter.max_tokens}\]"
        )
        with pytest.raises(ValueError, match=message):
            _check(name, **{"sample.max_sequence_length": length})


@every_family
@pytest.mark.parametrize("more", [(), ("--dry_run",)], ids=["run", "dry_run"])
def test_fp16_is_refused_with_the_reason_where_a_family_cannot_do_it(name, more, train, tmp_path):
    adapter = families.adapter(name)
    if not adapter.no_fp16:
        _check(name, mixed_precision="fp16")
        return
    arguments = _arguments(name, str(tmp_path / "nothing"), tmp_path, mixed_precision="fp16")
    outcome = train(*arguments, *more, adapter=adapter)
    reason = f"mixed_precision ('fp16') must be one of no, bf16: {adapter.no_fp16}"
    assert outcome.error == f"error: {reason}"
    assert "bf16" in adapter.no_fp16
    assert list(tmp_path.iterdir()) == []


@every_family
def test_another_familys_pipeline_is_told_apart(name, tiny_dir):
    other = "flux" if families.adapter(name).pipeline_class != "FluxPipeline" else "sd3"
    found, wanted = (families.adapter(key).pipeline_class for key in (other, name))
    script = FAMILIES[other].script
    config = families.settings(name, tiny_dir(other))
    with pytest.raises(
        ValueError, match=f"holds a {found}, not a {wanted}; use scripts/{script}.py"
    ):
        families.adapter(name).load(config, torch.device("cpu"))


@every_family
def test_an_invalid_size_names_the_nearest_valid_one(name, tiny_dir):
    config = families.settings(name, tiny_dir(name))
    model = families.adapter(name).load(config, torch.device("cpu"))
    unit, largest = model.size_unit, model.largest_size or 10**6
    model.check_size((4 * unit, 3 * unit))
    for length in (0, 1, unit - 1, unit + 1, 4 * unit - 2, 100 * unit + 1):
        for key, size in (("resolution", (length, length)), ("width", (4 * unit, length))):
            with pytest.raises(ValueError, match=rf"^{key} \({length}\) must be") as caught:
                model.check_size(size)
            nearest = int(re.search(r"nearest valid: (\d+)$", str(caught.value))[1])
            assert nearest % unit == 0
            assert 0 < nearest <= largest
            model.check_size((nearest, nearest))
            assert abs(nearest - length) <= unit / 2 or nearest in (unit, largest)


@every_family
def test_an_invalid_resolution_on_the_command_line_is_one_clear_line(
    name, train, tiny_dir, edit_set, fresh_accelerator, tmp_path
):
    more = {"resolution": 30, "reward_fn": "odd_rewards:Contrast:1.0"}
    if FAMILIES[name].references:
        more |= {"dataset": edit_set, "prompt_fn": "geneval"}
    outcome = train(
        *_arguments(name, tiny_dir(name), tmp_path, **more), adapter=families.adapter(name)
    )
    assert "resolution (30) must be a multiple of 8" in outcome.error
    assert outcome.error.endswith("nearest valid: 32")
