"""What this machine and folder do not have is refused before anything starts, and nothing of the user's is imported for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid_strategy.cli.main import main
from hybrid_strategy.config import here as here_module
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.here import check_folders, check_here, check_unused
from hybrid_strategy.config.named_target import check_target
from hybrid_strategy.config.text import check_length, check_validation_interval
from hybrid_strategy.config.world import World, world_of
from hybrid_strategy.errors import ConfigError

MODULE = """
import os
from json import decoder as read
raise SystemExit("this must not be imported")
if os:
    Chosen = 3
class Mine: ...
def make(): hidden = 3
class Sized:
    def __init__(self, size, *, heads, rate=0.1): ...
class Open(Sized):
    def __init__(self, size, **others): ...
class Inherits(Sized): ...
@decorated
class Decorated:
    def __init__(self, size): ...
class Wrapped:
    def __init__(self, size): ...
Wrapped = read(Wrapped)
"""
INIT = "    def __init__(self): ...\n"
SECRETIVE = {
    "metaclass": f"class Meta(type): ...\nclass Above(metaclass=Meta): ...\nclass Mine(Above):\n{INIT}",
    "subclass": f"class Above:\n    def __init_subclass__(cls): ...\nclass Mine(Above):\n{INIT}",
    "elsewhere": f"from package.inner import Mine as Above\nclass Mine(Above):\n{INIT}",
    "nested": f"class Outer:\n    class Above: ...\nclass Mine(Outer.Above):\n{INIT}",
    "sought": f"class Mine:\n{INIT}try: from package.inner import Mine\nexcept ImportError: ...",
    "patched": f"class Mine:\n{INIT}Mine.__init__ = print",
    "function": f"def later():\n    global Mine\n    class Mine:\n    {INIT}later()",
}
"""Modules whose source does not tell what a call of `Mine` takes."""
OTHERS = {
    "broken.py": "class Mine(:",
    "dynamic.py": "globals()['Mine'] = 3",
    "star.py": "from json import *",
    "lazy.py": "def __getattr__(name): ...",
    "package/__init__.py": "",
    "package/inner.py": "class Mine: ...",
    "without/any/init_file.py": "class Mine: ...",
}
CPU = World(1, 1, "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"mine_of_a_user.py": MODULE, **OTHERS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _refusal(*overrides: str, world: World | None = None) -> str:
    config = run_config(Source(("model=llama_tiny", "logger=csv", *overrides)))
    with pytest.raises(ConfigError) as caught:
        check_here(config, world or world_of(config))
    return str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        *(f"mine_of_a_user.{name}" for name in ("Mine", "make", "Chosen", "read", "os.path.join", "Mine.of_its_own")),
        *("dynamic.Mine", "star.Mine", "lazy.Mine", "package.inner.Mine", "without.any.init_file.Mine"),
        *("torch.nn.Linear", "os.path.join", "builtins.dict", "json.JSONDecoder", "math.sqrt", "email.message.Message"),
        "lightning.pytorch.callbacks.Timer",
    ],
)
def test_what_can_be_found_passes(target: str, here: Path) -> None:
    check_target("model", {"_target_": target})


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "mine_of_a_user.Min",
            "there is no Min in {here}/mine_of_a_user.py. Did you mean 'Mine'? Known: Mine, Sized, Open, Inherits, Decorated.",
        ),
        ("mine_of_a_user.hidden", "there is no hidden in"),
        ("package.inner.mine", "there is no mine in {here}/package/inner.py. Did you mean 'Mine'?"),
        ("package.iner.Mine", "there is no iner in {here}/package/__init__.py"),
        ("without.any.init_file.mine", "there is no mine in {here}/without/any/init_file.py"),
        ("package.inner", "it is a module, and a class is wanted. Set package.inner.<class>."),
        ("broken.Mine", "its module cannot be read. {here}/broken.py: invalid syntax"),
        *((name, "it must be module.Class of a module") for name in ("Mine", "", ".", "no.such.Module", "a..b", "mine-x.Mine")),
    ],
)
def test_what_is_not_there_is_named(target: str, words: str, here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_target("model", {"_target_": target})
    assert str(caught.value).startswith(f"model._target_ is {target!r}: {words.format(here=here)}")


@pytest.mark.parametrize(
    ("name", "values", "refusal"),
    [
        ("Sized", {"size": 3, "heads": 2}, ""),
        (
            "Sized",
            {"size": 3, "heads": 2, "rte": 0.2},
            "model.rte is 0.2: mine_of_a_user.Sized takes no such argument. Did you mean",
        ),
        ("Sized", {}, "model is 'given without arguments': mine_of_a_user.Sized cannot be called without size, heads. Set"),
        (
            "Sized",
            {"rate": 0.2, "size": 3},
            "model is 'given with rate, size': mine_of_a_user.Sized cannot be called without heads.",
        ),
        ("Sized", {"_args_": [3, 2]}, ""),
        ("Sized", {"_partial_": True, "rate": 3}, ""),
        ("Sized", {"_partial_": True, "rates": 3}, "model.rates is 3: mine_of_a_user.Sized takes no such argument."),
        ("Open", {"size": 3, "any": 4}, ""),
        ("Open", {"any": 4}, "model is 'given with any': mine_of_a_user.Open cannot be called without size."),
        *((name, {"any": 3}, "") for name in ("Mine", "Inherits", "Decorated", "Wrapped", "Sized.inner", "Chosen")),
        ("make", {"any": 3}, "model.any is 3: mine_of_a_user.make takes no such argument."),
    ],
)
def test_arguments_are_those_of_the_source(name: str, values: dict[str, object], refusal: str, here: Path) -> None:
    asked = {"_target_": f"mine_of_a_user.{name}", **values}
    if not refusal:
        check_target("model", asked)
        return
    with pytest.raises(ConfigError) as caught:
        check_target("model", asked)
    assert str(caught.value).startswith(refusal)


@pytest.mark.parametrize("source", SECRETIVE.values(), ids=SECRETIVE)
def test_what_a_call_takes_and_the_source_does_not_tell_passes(source: str, here: Path) -> None:
    (here / "secretive.py").write_text(source)
    check_target("model", {"_target_": "secretive.Mine", "any": 3})


@pytest.mark.parametrize("above", ["", "(object)", "(pl.LightningModule)", "(Above[int])", "(Above, pl.LightningModule)"])
def test_what_a_call_takes_is_told_by_classes_above_that_are_known(above: str, here: Path) -> None:
    (here / "open.py").write_text(
        f"import lightning.pytorch as pl\nclass Above(pl.LightningModule): ...\nclass Mine{above}:\n{INIT}"
    )
    with pytest.raises(ConfigError, match="takes no such argument"):
        check_target("model", {"_target_": "open.Mine", "any": 3})


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model={_target_: json.JSONDecoder, inner: [{_target_: json.Nothing}]}", "model.inner[0]._target_"),
        ("data._target_=json.Nothing", "data._target_"),
        ("+callbacks.mine._target_=no.Such", "callbacks.mine._target_"),
        ("+logger.mine._target_=json.Nothing", "logger.mine._target_"),
    ],
)
def test_every_target_is_looked_at(override: str, key: str) -> None:
    assert _refusal(override).startswith(f"{key} is ")


@pytest.mark.parametrize(
    "override",
    [
        "strategy.module=nothere",
        "strategy.module=",
        "strategy.initial_weights=/there/is/nothing",
        "strategy.initial_weights=",
        f"strategy.initial_weights={__file__}",
        "strategy.process_group_backend=nccl",
        "strategy.process_group_backend=mpi",
        "data.files=[nothere/*.txt]",
    ],
)
def test_what_every_rank_would_refuse(override: str) -> None:
    assert _refusal(override, world=CPU).startswith(f"{override.partition('=')[0]} is ")


def test_text_of_one_document_leaves_none_for_validation(here: Path) -> None:
    (here / "short.txt").write_text("A line.\n" * 300)
    assert _refusal("data.files=[short.txt]", world=CPU).startswith(
        "data.files is ['short.txt']: there must be a document to train"
    )


def test_text_that_fills_no_sequence_is_refused_before_anything_starts(here: Path) -> None:
    (here / "one_letter.txt").write_text("a" * 300_000)  # some 40 tokens
    given = ("model=llama_tiny", "data.files=[one_letter.txt]", f"paths.cache_dir={here}/cache")
    for more, key in (((), "model.sequence_length is 64"), (("data.sequence_length=48",), "data.sequence_length is 48")):
        with pytest.raises(ConfigError, match=rf"^{key}: the text that is kept for training .*Give more text, or data"):
            check_length(run_config(Source((*given, *more))))
    short = (*given, "data.sequence_length=1", "trainer.val_check_interval=12")
    check_length(run_config(Source(short)))
    with pytest.raises(ConfigError, match=r"^trainer.val_check_interval is 12: validation would come after .*It has \d\. Set"):
        check_validation_interval(run_config(Source(short)), rows=8)
    check_validation_interval(run_config(Source((*short, "trainer.check_val_every_n_epoch=null"))), rows=8)
    check_validation_interval(run_config(Source(short)), rows=1)


def test_gpus_of_a_described_cluster_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here_module, "visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"^cluster\.devices is 2: each needs a GPU\. torch sees 1 here"):
        check_here(run_config(Source(())), World(1, 2, "cuda"))


def test_more_processes_than_a_machine_bears_are_refused() -> None:
    most = max(64, 8 * (os.cpu_count() or 1))
    assert _refusal(world=World(1, most + 1, "cpu")).startswith(f"cluster.devices is {most + 1}: so many processes")
    check_here(run_config(Source(("strategy.module=model.layers", "strategy.process_group_backend=gloo"))), World(1, most, "cpu"))


def test_folders_that_cannot_be_made_are_refused_and_nothing_is_left(here: Path) -> None:
    before = sorted(here.iterdir())
    check_folders(run_config(Source(("paths.cache_dir=deep/er", "paths.output_dir=o"))))
    for override in (
        "paths.output_dir=/proc/x/y",
        "paths.run_dir=/dev/null/x",
        "paths.cache_dir=/proc/x",
        "paths.output_dir=star.py",
    ):
        with pytest.raises(ConfigError, match="no folder can be made and filled there") as caught:
            check_folders(run_config(Source((override,))))
        assert str(caught.value).startswith(f"{override.partition('=')[0]} is ")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("left", ["metrics.csv", "status.json", "checkpoints/step000002.ckpt/manifest.json"])
def test_a_folder_with_the_results_of_another_run_is_refused(left: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("")  # a run that came to nothing
    check_unused(tmp_path)
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("")
    with pytest.raises(ConfigError, match=f"^paths.run_dir is '{tmp_path}': the folder holds the results of another run"):
        check_unused(tmp_path)


def test_commands_that_build_the_model_here_find_it_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found_in_the_folder.py").write_text(
        "import lightning.pytorch as pl\nfrom torch import nn\n"
        "class Mine(pl.LightningModule):\n    def __init__(self):\n        super().__init__()\n"
        "        self.model = nn.Linear(3, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [each for each in __import__("sys").path if each])  # as of an installed script
    own = ["model=own", "model._target_=found_in_the_folder.Mine", "data=own", "data._target_=json.X", "data.batch_size=4"]
    assert main(["plan", *own]) == 0
    assert "Mine has 16 parameters" in capsys.readouterr().out


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow"])
def test_a_logger_without_its_package_is_refused_with_what_to_install(logger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = here_module._PACKAGES
    monkeypatch.setattr(here_module, "_PACKAGES", dict.fromkeys(found, ("no_such_package",)))
    text = _refusal(f"logger={logger}", "strategy=single", world=CPU)
    assert text.startswith(f"logger.{logger} is ")
    assert "it needs the package no_such_package" in text
    assert "pip install no_such_package" in text
    monkeypatch.setattr(here_module, "_PACKAGES", dict.fromkeys(found, ("no_such_package", "json")))
    check_here(run_config(Source(("model=llama_tiny", f"logger={logger}", "strategy=single"))), CPU)
