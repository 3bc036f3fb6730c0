"""A wrong configuration is refused by its full key, with what to set, and never taken for something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.errors import ConfigError

TYPOS = {
    "seedd": "seed",
    "model.hiden_size": "hidden_size",
    "data.global_batchsize": "global_batch_size",
    "strategy.tensor_paralel_size": "tensor_parallel_size",
    "optimizer.learning_rat": "learning_rate",
    "learning_rate.warmup_step": "warmup_steps",
    "precision.mod": "mode",
    "trainer.max_step": "max_steps",
    "callbacks.checkpoint.every_n_train_step": "every_n_train_steps",
    "logger.wandb.projct": "project",
    "cluster.device": "devices",
    "paths.output": "output_dir",
    "cluster.intra_node.bytes_per_secnd": "bytes_per_second",
}
WRONG_TYPES = {
    "seed=x": "a whole number",
    "model.hidden_size=big": "a whole number",
    "model.hidden_size=null": "a whole number",
    "data.files=3": "a list",
    "strategy.tensor_parallel_size=2.5": "a whole number or auto",
    "strategy.data_parallel_size=2.5": "a whole number or auto",
    "strategy.sequence_parallel=maybe": "true or false, or auto",
    "optimizer.learning_rate=fast": "a number",
    "optimizer.betas=[a,b]": "a number",
    "learning_rate.warmup_steps=1e3": "a whole number",
    "precision.mode=null": "text",
    "trainer.max_steps=null": "a whole number",
    "trainer.limit_val_batches=x": "a whole number or a number or null",
    "callbacks.checkpoint.save_top_k=all": "a whole number",
    "logger.wandb.finish_timeout=x": "a number",
    "cluster.num_nodes=x": "a whole number",
    "paths.output_dir=null": "text",
}


def _refusal(*overrides: str, config_dir: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(run_config(Source(overrides, config_dir)))
    return str(caught.value)


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("key", TYPOS)
def test_an_unknown_key_is_refused_by_its_full_key(key: str, plus: str):
    text = _refusal(f"{plus}{key}=3")
    assert text.startswith(f"{key} is ")
    assert "there is no such key" in text
    assert f"Did you mean '{TYPOS[key]}'?" in text


@pytest.mark.parametrize("override", WRONG_TYPES)
def test_a_wrong_type_is_refused_by_its_full_key(override: str):
    text = _refusal(override)
    assert text.startswith(override.partition("=")[0].partition("[")[0])
    assert f"it must be {WRONG_TYPES[override]}." in text
    assert "Traceback" not in text


@pytest.mark.parametrize("group", ["model", "strategy", "optimizer", "trainer", "logger", "experiment", "debug", "precision"])
def test_an_unknown_option_names_those_there_are(group: str):
    text = _refusal(f"{group}=nonsense")
    assert text.startswith(f"{group} is 'nonsense'")
    assert "Known: " in text
    assert "search path" not in text


def test_the_nearest_option_is_named():
    assert "Did you mean 'hybrid'?" in _refusal("strategy=hybird")


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("strategy.schedule=1F1C", "strategy.schedule is '1F1C'"),
        ("strategy.sharding=zero4", "strategy.sharding is 'zero4'"),
        ("strategy.activation_checkpoint=some", "strategy.activation_checkpoint is 'some'"),
        ("strategy.sequence_parallel=true", "strategy.sequence_parallel is True"),
        ("strategy.tensor_parallel_size=3", "strategy.tensor_parallel_size is 3: it must divide num_"),
        ("strategy.pipeline_parallel_size=9", "strategy.pipeline_parallel_size is 9"),
        ("strategy.tensor_parallel_size=0", "strategy.tensor_parallel_size is 0"),
        ("strategy.micro_batch_size=5", "strategy.micro_batch_size is 5"),
        ("precision.mode=bf16", "precision.mode is 'bf16'"),
        ("precision.float32_matmul=low", "precision.float32_matmul is 'low'"),
        ("optimizer.name=adam", "optimizer.name is 'adam'"),
        ("learning_rate.schedule=cosin", "learning_rate.schedule is 'cosin'"),
        ("learning_rate.scaling=sqrt", "learning_rate.base_batch_size is 0"),
        ("trainer.gradient_clip_algorithm=l2", "trainer.gradient_clip_algorithm is 'l2'"),
        ("trainer.accelerator=tpu9", "trainer.accelerator is 'tpu9'"),
        ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches is 0"),
        ("data.vocab_size=10000", "data.vocab_size is 10000: it may not exceed model.vocab_size"),
        ("data.sequence_length=1024", "data.sequence_length is 1024"),
        ("cluster.devices=many", "cluster.devices is 'many'"),
        ("trainer.devices=2", "trainer.devices is 2: there is no such key. Set cluster.devices."),
        ("ckpt_path=x", "ckpt_path is x: there is no such key. Set resume."),
        ("callbacks.mine=3", "callbacks.mine is 3: each entry of callbacks is a mapping with a _target_"),
        ("model=own", "model._target_ is missing"),
        ("model.hidden_size=???", "model.hidden_size is missing"),
        ("seed=${nope}", "seed is not resolved: Interpolation key 'nope' not found"),
        ("strategy=2", "strategy is 2: the option of a group is a name"),
        *(
            (f"{key}=null", f"{key} is null: the option of a group is a name. Set a name")
            for key in ("logger", "experiment", "hydra")
        ),
        ("strategy=[tp2,pp2]", "strategy is [tp2,pp2]: the options of this group set the same keys"),
        ("strategy", "strategy is given without a value"),
        ("~strategy", "strategy is deleted: every run has one"),
        ("~trainer.max_steps", "trainer.max_steps is deleted: another default than that of its option would stand there"),
        ("~trainer.nothing", "trainer.nothing is deleted: there is no such key"),
        ("~callbacks.nothing", "callbacks.nothing is deleted: there is no such key"),
        ("~model._target_", "model._target_ is missing: it names the class"),
        ("+strategy=tp2", "strategy is added: every group is there already, and has one option. Set strategy=tp2."),
        ("name=", "name is '': it names the folder of the run"),
        ("name=..", "name is '..': it names the folder of the run"),
        ("cluster.num_nodes=0", "cluster.num_nodes is 0: it must be a whole number of 1 or more. Set 1 or more."),
        ("trainer.deterministic=on-gpu", "trainer.deterministic is 'on-gpu'"),
        ("trainer.min_epochs=3", "trainer.min_epochs is 3: the run ends at max_epochs. trainer.max_epochs is 1. Set 1 or less"),
        (
            "trainer.check_val_every_n_epoch=null",
            "trainer.check_val_every_n_epoch is null: validation is then counted in batches",
        ),
        (
            "callbacks=[default,progres]",
            "callbacks is 'progres': there is no option of this name in the group callbacks. Did you",
        ),
        ("strategy.parallel_plan.tensor.a=colwis", "strategy.parallel_plan.tensor['a'] is 'colwis': there is no style of"),
        ("optimizer.momentum=0.9", "optimizer.momentum is 0.9: it would be ignored. adamw has none."),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_its_full_key(override: str, start: str):
    assert _refusal(override).startswith(start)


def test_sizes_that_do_not_multiply_to_the_world_name_those_that_do():
    text = _refusal("strategy.tensor_parallel_size=3", "cluster.devices=8")
    assert text == (
        "strategy.tensor_parallel_size is 3: the product of the sizes must divide the number of processes. "
        "3 (tensor) = 3 does not divide 8. Set 1 or 2."  # 4 does not divide the heads, 2 and 3 copies not the batch
    )
    text = _refusal("model=llama_tiny", "strategy.tensor_parallel_size=2", "cluster.devices=3")
    assert text.endswith("2 (tensor) = 2 does not divide 3. Set cluster.devices=2 or 4.")
    two_nodes = ("cluster.num_nodes=2", "cluster.name=other", "cluster.devices=3")
    text = _refusal("model=llama_tiny", "strategy.pipeline_parallel_size=4", *two_nodes)
    assert text.endswith("4 (pipeline) = 4 does not divide 6. Set 3, or cluster.devices=2 or 4.")


def test_a_batch_that_does_not_split_is_refused():
    assert _refusal("strategy=dp2", "data.global_batch_size=3").startswith("data.global_batch_size is 3")


def test_a_typo_in_a_file_names_the_file(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nstrategy:\n  tensor_paralel_size: 2\n")
    text = _refusal("experiment=mine", config_dir=str(tmp_path))
    assert text.startswith("strategy.tensor_paralel_size is set (in conf/experiment/mine.yaml): there is no such key")


@pytest.mark.parametrize(
    ("override", "quoted"),
    [
        ("resume=runs/epoch=3-step=10.ckpt", "'resume=\"runs/epoch=3-step=10.ckpt\"'"),
        ("name=run#1", "'name=\"run#1\"'"),
        ("name=~/x", "'name=\"~/x\"'"),
        ("name=a,b", "'name=\"a,b\"'"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_shown_as_it_must_be_typed(override: str, quoted: str):
    assert f"Quote it: {quoted}" in _refusal(override)
    name, _, value = override.partition("=")
    assert getattr(run_config(Source((quoted.strip("'"),))), name) == value


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (("data.max_bytes=-1",), "data.max_bytes is -1: it must be 1 or more"),
        (("data.validation_fraction=1.5",), "data.validation_fraction is 1.5: it must lie between 0 and 1"),
        (("strategy=cp2", "data.sequence_length=62"), "data.sequence_length is 62: context_parallel_size cuts it into two equal"),
        (
            ("trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=null"),
            "trainer.gradient_clip_algorithm is 'value'",
        ),
        (("model.vocab_size=100",), "model.vocab_size is 100: it must be 257 or more"),
        (("model.family=bert",), "model.family is 'bert': there is no model family of this name"),
        (("model.num_key_value_heads=4",), "model.num_key_value_heads is 4: it must divide num_attention_heads"),
        (("model.head_dim=7",), "model.head_dim is 7: rotary positions turn pairs of its dimensions. 7 is odd. Set 6 or 8"),
        (
            ("model=llama_tiny", "model.hidden_size=20"),
            "model.hidden_size is 20: rotary positions turn pairs of its dimensions. 20 / 4 heads = 5 is odd",
        ),
        (
            ("strategy.parallel_plan={unit:[a]}",),
            "strategy.parallel_plan.unit is ['a']: a plan has no such field. Did you mean 'units'?",
        ),
        (
            ("strategy.parallel_plan={units:a}",),
            "strategy.parallel_plan.units is 'a': it is a list of names. Set such as [layers.*]",
        ),
        (("strategy.parallel_plan={tensor:[a]}",), "strategy.parallel_plan.tensor is ['a']: it is a mapping"),
        (("strategy.parallel_plan={tied:[a.b]}",), "strategy.parallel_plan.tied is ['a.b']: it is a list of lists of names"),
        (
            ("strategy.data_parallel_size=many",),
            "strategy.data_parallel_size is 'many': it must be a whole number of 1 or more, or auto",
        ),
        (("model.bias=true",), "model.bias is True: the family llama has no biases"),
        (("model.gated_mlp=false",), "model.gated_mlp is False: the family llama has gated MLP"),
        (("model.options.rope_teta=5",), "model.options.rope_teta is 5: the family llama has no such option. Did you mean"),
        (("trainer.max_epochs=-1",), "learning_rate.total_steps is 0: the schedule cosine falls until then"),
        (("callbacks.checkpoint.save_top_k=3",), "callbacks.checkpoint.save_top_k is 3: the best are told by a metric"),
        (
            ("model._target_=my.Module", "data._target_=my.Data", "data.batch_size=0"),
            "data.batch_size is 0: it must be 1 or more",
        ),
    ],
)
def test_what_only_the_ranks_would_refuse_is_refused_before(overrides: tuple[str, ...], start: str):
    assert _refusal(*overrides).startswith(start)


def test_advice_is_not_bound_to_processes_that_follow_the_sizes():
    assert _refusal("strategy.tensor_parallel_size=3").endswith("Set 1 or 2.")
    assert _refusal("strategy.tensor_parallel_size=4", "cluster.devices=8").endswith(
        "Set 1 or 2 (8 processes, pipeline_parallel_size 1)."
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.files=abc", "data.files is abc: it must be a list. Set a list, such as [abc]."),
        ("tags=abc", "tags is abc: it must be a list. Set a list, such as [abc]."),
        ("strategy.stage_cuts=3", "strategy.stage_cuts is 3: it must be a list or null. Set a list or null, such as [3]."),
        ("strategy.compile=perhaps", "strategy.compile is perhaps: it must be true or false. Set true or false."),
        (
            "strategy=tp2,pp2",
            "strategy is tp2,pp2: a comma separates the values of a sweep. Set one of them, or -m to run one after the other.",
        ),
        ("=3", "An override is =3: it is key=value. Set <key>=3."),
    ],
)
def test_the_value_is_shown_as_it_was_given_and_the_advice_can_be_followed(override: str, text: str):
    assert _refusal(override) == text


def test_a_primary_configuration_or_folder_that_is_not_there_is_named(tmp_path: Path):
    for source, start in (
        (Source((), config_name="nothere"), "--config-name is 'nothere': there is no configuration of this name"),
        (Source((), config_dir=str(tmp_path / "x")), f"--config-dir is '{tmp_path}/x': there is no such folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            run_config(source)
        assert str(caught.value).startswith(start)
