"""A fixture of the families' own tests: where the adapter of a policy lies."""

import families
import pytest
import torch


@pytest.fixture
def adapter_modules(tiny_dir):
    """Return the function (family) -> (modules with an adapter, those of them without gradient)."""
    from accelerate import Accelerator

    from flow_grpo.policy import Policy

    def modules(name: str) -> tuple[set[str], set[str]]:
        config = families.settings(name, tiny_dir(name))
        model = families.adapter(name).load(config, torch.device("cpu"))
        policy = Policy(model, config, Accelerator(cpu=True))
        adapters = [
            {key.partition(".lora_")[0] for key in names} for names in (policy.names, policy.frozen)
        ]
        return adapters[0] | adapters[1], adapters[1]

    return modules
