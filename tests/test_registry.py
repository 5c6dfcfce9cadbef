"""The folder is the registry, and a wrong name says what exists."""

import subprocess
import sys
from pathlib import Path

import pytest

from flow_grpo import registry

REWARDS = "flow_grpo.rewards"
FAKES = Path(__file__).parent / "rewards" / "fakes"


def test_every_file_but_the_infrastructure_is_listed():
    files = {path.stem for path in Path(registry.__file__).parent.glob("rewards/*.py")}
    expected = {name for name in files - {"base", "client"} if not name.startswith("_")}
    assert set(registry.names(REWARDS)) == expected
    assert {"ocr", "jpeg_compressibility", "jpeg_incompressibility"} <= expected


def test_a_file_and_a_folder_added_to_a_package_are_found(tmp_path, monkeypatch):
    package = tmp_path / "plugins_of_a_test"
    (package / "deep_gen").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "base.py").write_text("class Base: pass")
    (package / "_shared.py").touch()
    (package / "wan2_1.py").write_text(
        "from plugins_of_a_test.base import Base\nclass WAN21(Base): pass"
    )
    (package / "deep_gen" / "__init__.py").write_text("class DeepGen: pass")
    (package / "shared.py").write_text("class Loader: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.names("plugins_of_a_test") == ["deep_gen", "wan2_1"]
    assert registry.load("plugins_of_a_test", "wan2_1").__name__ == "WAN21"
    assert registry.load("plugins_of_a_test", "deep_gen").__name__ == "DeepGen"
    with pytest.raises(ValueError, match="shared has no class named after its file, Shared"):
        registry.load("plugins_of_a_test", "shared")


def test_listing_imports_no_entry():
    code = f"from flow_grpo import registry; registry.names({REWARDS!r}); import sys; " + (
        "print([m for m in sys.modules if m.startswith('flow_grpo.rewards.')])"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("orc", "ocr"), ("jpeg_compresibility", "jpeg_compressibility"), ("OCR", None)],
)
def test_an_unknown_name_says_what_exists_and_what_is_nearest(name, nearest):
    with pytest.raises(ValueError) as caught:
        registry.load(REWARDS, name)
    text = str(caught.value)
    assert text.startswith(f"unknown reward {name!r}; there are: ")
    assert all(existing in text for existing in registry.names(REWARDS))
    assert text.endswith(f"; did you mean {nearest!r}?") == (nearest is not None)


def test_a_class_outside_the_package_is_loaded_by_its_dotted_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKES))
    assert registry.load(REWARDS, "misbehaving:Threaded").__name__ == "Threaded"
    with pytest.raises(ValueError, match=r"unknown class of misbehaving 'Tread'.*'Threaded'\?"):
        registry.load(REWARDS, "misbehaving:Tread")
    with pytest.raises(ValueError, match="'no_such_module:A' cannot be imported: No module named"):
        registry.load(REWARDS, "no_such_module:A")


def test_a_package_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"'flow_grpo.prizes' is no importable package"):
        registry.names("flow_grpo.prizes")


def test_rewards_are_logged_under_their_file_name():
    assert registry.metric_name("ocr") == "ocr"
    assert registry.metric_name("my_pkg.sub.my_reward:MyReward") == "my_reward"


def test_weights_are_parsed_from_one_string():
    assert registry.parse_reward_fn("ocr:0.8,jpeg_compressibility:0.2") == {
        "ocr": 0.8,
        "jpeg_compressibility": 0.2,
    }
    assert registry.parse_reward_fn(" ocr : -1e-1 ") == {"ocr": -0.1}
    assert registry.parse_reward_fn("my.pkg.r:R:2") == {"my.pkg.r:R": 2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not name:weight; e.g. ocr:1.0"),
        ("ocr", "'ocr' is not name:weight"),
        ("ocr:1,", "'' is not name:weight"),
        (":1", "':1' is not name:weight"),
        ("ocr:a lot", "the weight 'a lot' of 'ocr' is no number; e.g. ocr:0.8"),
        ("my.pkg.r:R", "the weight 'R' of 'my.pkg.r' is no number"),
        ("ocr:nan", "the weight of 'ocr' must be finite"),
        ("ocr:1,ocr:2", "'ocr' is given twice"),
    ],
)
def test_what_is_wrong_with_a_reward_fn_is_said(text, message):
    with pytest.raises(ValueError, match="reward_fn") as caught:
        registry.parse_reward_fn(text)
    assert message in str(caught.value)
