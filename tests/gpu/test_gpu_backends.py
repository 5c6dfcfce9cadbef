"""FSDP 2 and ZeRO on two GPUs: the numbers of one, at every precision they can do."""

import sys

import pytest
import torch
from test_backends import (
    CASES,
    FAR,
    FAR_BF16_ZERO3,
    FILES,
    assert_learnt_the_same,
    dumped,
    launcher,
    state,
    told,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
# One precision a launch: accelerate cannot change FSDP's within a process.
PRECISIONS = {
    "no": {case: CASES[case] for case in ("lora", "full")},
    "bf16": {"bf16": CASES["bf16"]},
    "fp16": {"fp16": ["--config.mixed_precision=fp16"]},
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_gpus_learn_what_one_learns_and_resume_exactly(file, precision, tiny_sd3_dir, tmp_path):
    if precision == "fp16" and file.startswith("deepspeed"):
        pytest.skip("refused, see test_backends.py")
    cases = PRECISIONS[precision]
    alone = dumped(
        tmp_path / "alone", tiny_sd3_dir, cases, [sys.executable], CUDA_VISIBLE_DEVICES="0"
    )
    two = dumped(tmp_path / file, tiny_sd3_dir, cases, launcher(file, 0), alone)
    for case in cases:
        assert_learnt_the_same(two, alone, case, FAR if precision == "no" else FAR_BF16_ZERO3)
        for kind in ("parameters", "ema", "optimizer"):
            end, resumed = (state(two, case, when, kind) for when in ("end", "resumed"))
            assert all(torch.equal(end[name], resumed[name]) for name in end)
        assert told(two, case)["metrics"][1] == told(two, case)["metrics"][2]
