"""Let processes that tests start make a `Qwen2VLProcessor` where there is no torchvision.

Python imports a file of this name at its start if its folder is on PYTHONPATH, as it is for such
processes. The reason is in `tests/tiny_qwen_edit.py`.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

PROCESSOR = "transformers.models.qwen2_vl.processing_qwen2_vl"


class _Finder(MetaPathFinder):
    """Find the processor's module, once, to change the class after it is made."""

    def find_spec(self, name, path=None, target=None):
        if name != PROCESSOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            parts = classmethod(lambda cls: ["image_processor", "tokenizer"])
            module.Qwen2VLProcessor.get_attributes = parts

        spec.loader.exec_module = exec_module
        return spec


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.insert(0, _Finder())
