"""No key or secret in any file: what is written down is refused, what a variable holds stays a name until a rank reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.config.build import build_all
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.secret_words import is_secret_name
from hybrid_strategy.config.secrets import holds_secret
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.storage import as_values, read_config, write_config
from hybrid_strategy.errors import ConfigError

SECRET = "s3cr3t-value"
OWN = "+logger.mine._target_=builtins.dict"
KEY = "+logger.mine.api_key=${oc.env:MINE_API_KEY}"

WRITTEN_DOWN = {
    "a key of W&B": ("logger.wandb.api_key=s3cr3t-value",),
    "with a plus": ("+logger.wandb.api_key=s3cr3t-value",),
    "a logger of the user's own": (OWN, "+logger.mine.token=s3cr3t-value"),
    "in camel case": (OWN, "+logger.mine.apiKey=s3cr3t-value"),
    "a number": (OWN, "+logger.mine.password=314159265"),
    "deep in a mapping": (OWN, "+logger.mine.options={headers: {Authorization: 'Bearer s3cr3t-value'}}"),
    "in a mapping of a whole entry": ("+logger.mine={_target_: builtins.dict, client_secret: s3cr3t-value}",),
    "in a list": (OWN, "+logger.mine.arguments=['--api-key=s3cr3t-value']"),
    "in two words of a list": (OWN, "+logger.mine.arguments=['--api-key', 's3cr3t-value']"),
    "in two words of a list in a list": (OWN, "+logger.mine.arguments=[['--verbose', '--password', 's3cr3t-value']]"),
    "in two words of a text": (OWN, "+logger.mine.arguments='run --api-key s3cr3t-value --fast'"),
    "in two words of a list of Lightning's": ("tags=['--token', 's3cr3t-value']",),
    "in a pair of a list": (OWN, "+logger.mine.headers=[[Authorization, 's3cr3t-value']]"),
    "in a name and its value": (OWN, "+logger.mine.variables=[{name: MY_SECRET, value: s3cr3t-value}]"),
    "in a header": (OWN, "+logger.mine.headers=['X-Api-Key: s3cr3t-value']"),
    "in JSON": (OWN, '+logger.mine.body=\'{"access_token": "s3cr3t-value"}\''),
    "below its name": (OWN, "+logger.mine.api_keys={theirs: s3cr3t-value}"),
    "in a list of several": (OWN, "+logger.mine.api_keys=[s3cr3t-value]"),
    "of a name that only sounds like one": (OWN, "+logger.mine.my_token=s3cr3t-value"),
    "a key for access": (OWN, "+logger.mine.key=0f3c9a1b77d2e4c8"),
    "in the signature of a URL": (OWN, "+logger.mine.url='https://host/c?sv=1&sig=s3cr3t-value'"),
    "in a key of a URL": (OWN, "+logger.mine.url='https://host/c?v=1&key=a8f3k29dk1x7'"),
    "a word for a cache that is no hash": (OWN, "+logger.mine.cache_key=s3cr3t-v4lue-x9z"),
    "a token beside a label": (OWN, "+logger.mine.text='token=bpe token=s3cr3t-value'"),
    "after a question": (OWN, "+logger.mine.text='What is the password? password: s3cr3t-value'"),
    "a private key": (OWN, "+logger.mine.text='-----BEGIN RSA PRIVATE KEY-----'"),
    "in two arguments of srun": ("hydra/launcher=slurm", "hydra.launcher.srun=['--api-key', 's3cr3t-value']"),
    "in a line of the script": ("hydra/launcher=slurm", "hydra.launcher.setup=['curl -u user:s3cr3t-value https://host']"),
    "in a script, by another key": ("hydra/launcher=slurm", KEY, "hydra.launcher.setup=['login ${logger.mine.api_key}']"),
    "in a script, by a resolver": ("hydra/launcher=slurm", KEY, "hydra.launcher.srun=['${oc.select:logger.mine.api_key}']"),
    "in a variable of points, by another key": (KEY, "+hydra.launcher.environment.MINE=${logger.mine.api_key}"),
    "in a sweep, by another key": (KEY, "+hydra.sweeper.params.name=${logger.mine.api_key}"),
    "in the folder of a run, by another key": (KEY, "hydra.run.dir='/tmp/${logger.mine.api_key}'"),
    "in the folder of a sweep, by another key": (KEY, "hydra.sweep.dir='/tmp/${logger.mine.api_key}'"),
    "where the name of its variable says nothing": (
        "+logger.mine.password=${oc.env:PLAIN_WORD}",
        "hydra/launcher=slurm",
        "hydra.launcher.account=${oc.env:PLAIN_WORD}",
    ),
    "in a mapping of a list": (OWN, "+logger.mine.parts=[{api_key: s3cr3t-value}]"),
    "of a bot": (OWN, "+logger.mine.bot_token=s3cr3t-value"),
    "a URI with a password": ("logger=mlflow", "logger.mlflow.tracking_uri='http://user:s3cr3t-value@host:5000'"),
    "a URI with a token": (OWN, "+logger.mine.url='https://s3cr3t-value@host/api'"),
    "in a query": (OWN, "+logger.mine.url='https://host/api?access_token=s3cr3t-value'"),
    "in the data's arguments": ("data=own", "data._target_=builtins.dict", "+data.hf_token=s3cr3t-value"),
    "in the name": ("name='ftp://user:s3cr3t-value@host'",),
    "one value of a sweep": (OWN, "+logger.mine.secret=null,s3cr3t-value"),
    "a variable of Hydra's": ("+hydra.job.env_set.WANDB_API_KEY=s3cr3t-value",),
    "an argument of srun": ("hydra/launcher=slurm", "hydra.launcher.srun=['--export=ALL,MY_KEY=s3cr3t-value']"),
    "behind another name": (OWN, "+model.options={a: s3cr3t-value}", "+logger.mine.api_key=${model.options.a}"),
    "beside a variable": (OWN, "+logger.mine.url='http://${oc.env:MINE_URI}:s3cr3t-value@host'"),
    "in a script, by its variable": ("hydra/launcher=slurm", "hydra.launcher.setup=['login ${oc.env:MINE_API_KEY}']"),
    "in a variable of another name": ("+hydra.launcher.environment.MINE='${oc.env:MINE_API_KEY,none}'",),
    "where no rank makes an object of what another reads": (
        OWN,
        "+logger.mine.a=${oc.env:MINE_API_KEY}",
        "name=x-${logger.mine.a}",
    ),
    "where no rank makes an object of it": ("name=${oc.env:MINE_API_KEY}",),
    "behind a resolver": (OWN, '+logger.mine.api_key="${oc.decode:${oc.env:MINE_API_KEY}}"'),
}
NO_SECRETS = (
    "+model.options={pad_token: eos, eos_token: '</s>', max_tokens: 3, text_key: content, token: 7}",
    "+model.options={url: 'http://host:8080/a@b', git: 'git@host:x', secret: null, api_key: '', use_auth_token: true}",
    "name=tokenizer_of_a_key",
    "+model.options={pattern: 'token=(.+)', name: 'step={step}-token={tokens}', files: 'parts/token=*/a.txt', proxy: 'http://host:3128?to=a@b'}",
    "+model.options={url: 'https://user@host/x', git: 'https://git@github.com/x/y', mail: 'http://first.last@host', other: 'http://u2@h'}",
    "+model.options={columns: [password, email], arguments: ['--max-tokens', '3', '--token-file', 'a.txt', '--password']}",
    "+model.options={arguments: 'run --tokens 3 --no-token-cache --key text', note: 'each token: a word'}",
    "+model.options={client: {private_key: '~/.ssh/a.pem'}}",
    "+model.options={a: 'Password: what is it?', b: 'Explain the --token option of gh', c: 'Authorization: how OAuth works'}",
    "+model.options={a: 'password=.+', b: '^Password: .*$', c: 'token=%s', d: 'Bearer authentication is a scheme'}",
    "+model.options={a: 'https://h/d?key=train_set', b: 'https://h/d?code=genomics_v2', c: 'hive/token=llama/part-0'}",
    "+model.options={cache_key: 0f3c9a1b77d2e4c8, data_key: 'md5:0f3c9a1b77d2e4c8', state_dict_key: a1b2c3d4e5f6}",
    "tags=['token=bpe', 'secrets']",
    "+model.options={image_key: cam0_view1_depth2_v3, sort_key: length, stop_token: '###', credentials: default, key: llama3_8b}",
    "+hydra.launcher.environment.IMAGE='docker://host:5000#image@sha256:abc'",
)


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE_API_KEY", SECRET)
    monkeypatch.setenv("MINE_URI", f"http://user:{SECRET}@host")
    monkeypatch.setenv("PLAIN", "plain")
    monkeypatch.setenv("PLAIN_WORD", SECRET)


def _config(*overrides: str, folder: str | None = None) -> RunConfig:
    return run_config(Source(("model=llama_tiny", *overrides), folder))


@pytest.mark.parametrize("overrides", WRITTEN_DOWN.values(), ids=WRITTEN_DOWN)
def test_a_secret_that_is_written_down_is_refused_by_key(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"is set to a secret: a secret would stand in the files of the run.*Export") as error:
        _config(*overrides)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("logger=csv", "logger.csv.name=${oc.env:MINE_API_KEY}"),
        ("data.files=['${oc.env:MINE_API_KEY}']",),
        ("data.files=['s3://me:s3cr3t-value@bucket/a']",),
    ],
)
def test_where_files_are_named_after_it_no_variable_helps(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"is set to a secret: .* Set what may be shown there\.$"):
        _config(*overrides)


def test_an_item_of_a_list_is_no_key_to_set() -> None:
    with pytest.raises(
        ConfigError, match=r"arguments\[1\] is .* Export MINE_ARGUMENTS_1 and write '\$\{oc.env:MINE_ARGUMENTS_1\}' in its"
    ):
        _config(*WRITTEN_DOWN["in two words of a list"])


def test_the_refusal_names_the_variable_to_set() -> None:
    for overrides, advice in (
        (WRITTEN_DOWN["a key of W&B"], "logger.wandb.api_key is .* Export WANDB_API_KEY"),
        (
            WRITTEN_DOWN["a URI with a password"],
            "logger.mlflow.tracking_uri is .* MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASS",
        ),
        (("logger.wandb.group='token=s3cr3t-value'",), "group is .* Set what may be shown there, and export WANDB_API_KEY"),
        (WRITTEN_DOWN["in camel case"], r"Export MINE_APIKEY and set 'logger.mine.apiKey=\$\{oc.env:MINE_APIKEY\}'"),
    ):
        with pytest.raises(ConfigError, match=advice):
            _config(*overrides)


@pytest.mark.parametrize("overrides", NO_SECRETS)
def test_what_only_sounds_like_one_is_taken(overrides: str) -> None:
    _config(overrides)


@pytest.mark.parametrize(
    "text",
    [
        "logger: {mine: {_target_: builtins.dict, api_key: s3cr3t-value}}",
        "hydra: {job: {env_set: {WANDB_API_KEY: s3cr3t-value}}}",
        "hydra: {sweeper: {params: {logger.mine.api_key: s3cr3t-value}}}",
        "hydra: {sweeper: {points: [{+logger.mine.api_key: s3cr3t-value}]}}",
        "hydra: {sweeper: {params: {+logger.mine.header: '${oc.env:MINE_API_KEY}'}}}",
    ],
)
def test_a_file_of_the_users_is_no_place_for_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError, match="is set to a secret") as error:
        _config("experiment=mine", folder=str(tmp_path))
    assert SECRET not in str(error.value)


def test_what_a_variable_holds_is_a_name_in_every_file_and_a_value_in_the_object(tmp_path: Path) -> None:
    config = _config(
        OWN,
        "+logger.mine.api_key=${oc.env:MINE_API_KEY}",
        "+logger.mine.uri=${oc.env:MINE_URI}",
        "+logger.mine.header='Bearer ${oc.env:MINE_API_KEY}'",
        "+logger.mine.url='http://u:${oc.env:MINE_API_KEY}@host'",
        "+logger.mine.again=${logger.mine.api_key}",
        "+logger.mine.token=${oc.env:NOT_SET,null}",
        "+logger.mine.plain=${oc.env:PLAIN}",
        "+logger.mine.parts=[{key: '${oc.env:MINE_API_KEY}'}]",
        "+logger.mine.arguments=['--api-key', '${oc.env:PLAIN_WORD}']",
        "+logger.mine.line='run --api-key ${oc.env:PLAIN_WORD} --fast'",
        "+logger.mine.other=${oc.env:PLAIN_WORD}",
    )
    assert SECRET not in str(as_values(config))  # what W&B, MLflow and TensorBoard are given
    assert SECRET not in write_config(config, tmp_path).read_text()
    assert read_config(tmp_path) == config
    assert config.logger["mine"]["plain"] == "plain"
    made = build_all({"mine": read_config(tmp_path).logger["mine"]}, "logger")["mine"]
    assert made == {
        "api_key": SECRET,
        "uri": f"http://user:{SECRET}@host",
        "header": f"Bearer {SECRET}",
        "url": f"http://u:{SECRET}@host",
        "again": SECRET,
        "token": None,
        "plain": "plain",
        "parts": [{"key": SECRET}],
        "arguments": ["--api-key", SECRET],
        "line": f"run --api-key {SECRET} --fast",
        "other": SECRET,
    }


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("${logger.mine.api_key}", SECRET),
        ("${.api_key}", SECRET),
        ("'Token ${.api_key}'", f"Token {SECRET}"),
        ("${oc.select:logger.mine.api_key}", SECRET),
        ("'${oc.env:MINE_API_KEY,none}'", SECRET),
        ("${logger.mine.parts.0}", SECRET),
        ("${oc.dict.values:logger.mine.one}", [SECRET]),
    ],
)
def test_in_whatever_way_a_secret_comes_it_stays_a_name(text: str, made: object, tmp_path: Path) -> None:
    key = "+logger.mine.api_key=${oc.env:MINE_API_KEY}"
    further = ("+logger.mine.parts=['${oc.env:MINE_API_KEY}']", "+logger.mine.one={a: '${oc.env:MINE_API_KEY}'}")
    config = _config(OWN, key, *further, f"+logger.mine.header={text}")
    assert SECRET not in write_config(config, tmp_path).read_text()
    assert build_all({"mine": read_config(tmp_path).logger["mine"]}, "logger")["mine"]["header"] == made


def test_what_is_no_secret_is_resolved_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE_KEY", "1")  # in every other text
    config = _config(OWN, "+logger.mine.key=${oc.env:MINE_KEY}", "name=run-1", "+logger.mine.lr='${optimizer.learning_rate}1'")
    assert config.name == "run-1"
    assert config.logger["mine"]["lr"] == f"{config.optimizer.learning_rate}1"


def test_a_secret_of_a_sweep_is_said_outside_of_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "hydra: {sweeper: {points: [{+logger.mine.api_key: '${oc.env:MINE_API_KEY}'}]}}"
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    advice = r"^logger.mine.api_key is .* set 'logger.mine.api_key=\$\{oc.env:MINE_API_KEY\}' outside of hydra.sweeper\.$"
    with pytest.raises(ConfigError, match=advice):
        _config("experiment=mine", folder=str(tmp_path))


def test_a_variable_that_is_not_set_is_refused_here_and_on_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(OWN, "+logger.mine.api_key=${oc.env:MINE_API_KEY}")
    monkeypatch.delenv("MINE_API_KEY")
    with pytest.raises(ConfigError, match=r"logger.mine.api_key is \$\{oc.env:MINE_API_KEY\}: there is no variable MINE_API_KEY"):
        build_all({"mine": config.logger["mine"]}, "logger")
    with pytest.raises(ConfigError, match=r"logger.mine.api_key is not resolved.*MINE_API_KEY"):
        _config(OWN, "+logger.mine.api_key=${oc.env:MINE_API_KEY}")


def test_names_and_values() -> None:
    assert not any(map(is_secret_name, ("key", "monkey", "pad_token", "tokens", "secretary", "tokenizer", "keyword", "author")))
    assert holds_secret("x", "hf_" + "a" * 34)
    assert not holds_secret("token", "<mask>")
