"""What is refused before a healthy engine is touched, and what is said of tensors and parameters without each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from engines import Engine, python_path, serving
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from world import attached, live, must_be, report, training

import weightcast as wc
from weightcast.errors import UsageError

SLOW = "WEIGHTCAST_TEST_SLOW"  # as in site/faults.py
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def weightcast(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightcast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def channel_of(folder: Path, channel: Path, more: dict[str, str] | None = None) -> str:
    """A channel whose version 0 is a checkpoint; ``more`` are tensors that it has copies of under another name."""
    with wc.Checkpoint(folder) as files:
        specs = {spec.name: spec for spec in files.table}
        arrays = {name: files.read(name).reshape(spec.shape).copy() for name, spec in specs.items()}
    dtypes = {name: spec.dtype for name, spec in specs.items()}
    for copy, name in (more or {}).items():
        arrays[copy], dtypes[copy] = arrays[name].copy(), dtypes[name]
    wc.init(str(channel), wc.Arrays(arrays, dtypes=dtypes))
    return str(channel)


def must_refuse(engine: Engine, channel: str, mirror: Path, *texts: str) -> None:
    """`attach` says so in one line and ends; the engine answers as before, and is not paused."""
    before = engine.generate([1, 2, 3], 6)
    refused = weightcast("attach", channel, "--engine", engine.url, "--mirror", str(mirror))  # not --once: no retry
    assert refused.returncode == 12, refused
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    for text in texts:
        assert text in refused.stderr, refused.stderr
    assert not report(engine).paused
    assert engine.generate([1, 2, 3], 6) == before


# -- nothing is touched ------------------------------------------------------------------------------------------------


def test_entry_point_names_the_backend_and_touches_nothing() -> None:
    script = Path(__file__).with_name("untouched.py")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"changed": [], "imported": [], "registered": ["weightcast"]}


# -- engines that do not start -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def configured(model: Callable[[str], Path]) -> Callable[..., Any]:
    """vLLM's own configuration for some options."""
    return lambda **options: EngineArgs(str(model("qwen3")), dtype="bfloat16", **options).create_engine_config()


@pytest.mark.parametrize(
    ("part", "option", "value", "text"),
    [
        ("parallel_config", "data_parallel_size", 2, "data parallelism.*one server for each replica"),
        ("parallel_config", "data_parallel_index", 1, "data parallelism.*one server for each replica"),
        ("parallel_config", "elastic_ep_max_dp_size", 2, "data parallelism.*one server for each replica"),
        ("parallel_config", "enable_eplb", True, "expert load balancing.*without --enable-eplb"),
        ("model_config", "enable_sleep_mode", True, "sleep mode.*without --enable-sleep-mode"),
        ("model_config", "enable_cumem_allocator", True, "sleep mode.*and --enable-cumem-allocator"),
    ],
)
def test_what_hides_weights_from_the_backend_is_refused_at_start(
    part: str, option: str, value: object, text: str, configured: Callable[..., Any]
) -> None:
    """Set after vLLM has checked its options, as it does itself: on a CPU it refuses some of them."""
    from weightcast.engine.vllm.backend import refuse_unseen

    config = configured()
    refuse_unseen(config)
    assert hasattr(getattr(config, part), option)
    setattr(getattr(config, part), option, value)
    with pytest.raises(UsageError, match=text):
        refuse_unseen(config)


def test_drafts_are_refused_if_they_have_weights(configured: Callable[..., Any], model: Callable[[str], Path]) -> None:
    from weightcast.engine.vllm.backend import refuse_unseen

    refuse_unseen(configured(speculative_config={"method": "ngram", "num_speculative_tokens": 2}))
    drafts = {"model": str(model("qwen3")), "num_speculative_tokens": 2}
    with pytest.raises(UsageError, match=r"drafts of draft_model.*ngram"):
        refuse_unseen(configured(speculative_config=drafts))


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_vllm_has_no_sleep_mode_on_a_cpu(option: str, configured: Callable[..., Any]) -> None:
    """If it gets one, the refusal has to be looked at again."""
    with pytest.raises(ValueError, match="not supported on current platform"):
        configured(**{option: True})


@pytest.mark.parametrize("rank", [0, 1])
def test_dense_model_with_data_parallelism_is_refused_in_every_core(rank: int) -> None:
    """What a core of vLLM does to the configuration of a dense model before it starts its workers."""
    from weightcast.engine.vllm.backend import refuse_unseen

    parallel = ParallelConfig(data_parallel_size=2)
    parallel.data_parallel_index = rank
    parallel.reconfigure_for_independent_dp_rank()
    assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (1, 0)
    with pytest.raises(UsageError, match="does not work with data parallelism"):
        refuse_unseen(SimpleNamespace(parallel_config=parallel, model_config=None))


@pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="vLLM 0.31 does not start with it and the backend")
def test_packed_convolution_on_a_cpu_is_refused_before_the_engine_is_paused(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    channel = channel_of(model("qwen3-next"), tmp_path / "channel")
    with serving(model("qwen3-next")) as engine:
        texts = ("can neither place nor reload 1 tensor", "linear_attn.conv1d.weight", "Restart vLLM from the mirror")
        must_refuse(engine, channel, tmp_path / "mirror", *texts)


# -- one engine for all the rest ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writing it makes updates slow."""
    return tmp_path_factory.mktemp("switch") / "slow"


@pytest.fixture(scope="module")
def engine(model: Callable[[str], Path], slow: Path) -> Iterator[Engine]:
    with serving(model("qwen3"), env={SLOW: str(slow)}) as running:
        yield running


def test_channels_of_other_models_are_refused(engine: Engine, model: Callable[[str], Path], tmp_path: Path) -> None:
    for kind, texts in {
        "llama": ("covers 4 parameters", "model.layers.0.self_attn.k_norm.weight"),
        "moe": ("does not fit the engine", "mlp.experts"),
    }.items():
        channel = channel_of(model(kind), tmp_path / kind)
        must_refuse(engine, channel, tmp_path / f"mirror-{kind}", "Name the channel of the model", *texts)
        checked = weightcast("verify", "--engine", engine.url, channel)
        assert (checked.returncode, "Traceback" in checked.stderr) == (12, False)
        assert texts[0] in checked.stderr


def test_tensors_without_a_counterpart_are_named_and_not_counted_as_verified(
    engine: Engine, model: Callable[[str], Path], tmp_path: Path
) -> None:
    channel = channel_of(model("qwen3"), tmp_path / "channel", {HEAD: EMBEDDING})
    asked = ["attach", channel, "--engine", engine.url, "--mirror", str(tmp_path / "mirror"), "--once"]
    assert weightcast(*asked).returncode == 12
    done = weightcast(*asked, "--allow-partial")
    assert done.returncode == 0, done.stderr
    assert f"the engine has no place for 1 tensor of the channel: {HEAD}" in done.stderr
    proof = live(engine, channel)
    assert (proof.holds, proof.absent, dict(proof.uncovered)) == (True, (HEAD,), {})
    told = weightcast("verify", "--engine", engine.url, channel)
    assert told.returncode == 0
    text = " ".join(told.stdout.split())
    assert (
        f"tensors of the channel that have a place in the engine, live on all workers; 1 tensor has no place: {HEAD}"
        in text
    )
    assert "to the last bit" not in text
    said = json.loads(weightcast("verify", "--engine", engine.url, channel, "--json").stdout)
    assert (said["version"], said["absent"], said["uncovered"]) == (0, [HEAD], {})


def test_channel_is_followed_with_a_trusted_key_and_not_as_a_strangers(
    engine: Engine, model: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    from weightcast.channel.key_file import write_private
    from weightcast.channel.signing import PrivateKey

    keys = {name: PrivateKey.new() for name in ("root", "stranger")}
    for name, key in keys.items():
        write_private(tmp_path / name, key)
    root, stranger = (str(key.public) for key in keys.values())
    with wc.Checkpoint(model("qwen3")) as files:
        wc.init(str(tmp_path / "channel"), files, sign=tmp_path / "root")
        arrays = {spec.name: files.read(spec.name).reshape(spec.shape).copy() for spec in files.table}
        weights = wc.Arrays(arrays, dtypes={spec.name: spec.dtype for spec in files.table})
    asked = ["attach", str(tmp_path / "channel"), "--engine", engine.url, "--once", "--mirror"]
    with wc.Publisher(str(tmp_path / "channel"), weights, sign=tmp_path / "root", trust=root) as publisher:
        for version in (1, 2):
            weights.read("model.norm.weight")[...] ^= version
            publisher.publish().result(60)
            done = weightcast(*asked, str(tmp_path / "mirror"), "--trust", root)
            assert done.returncode == 0, done.stderr
            proof = live(engine, str(tmp_path / "channel"), root)
            assert (proof.holds, proof.version, report(engine).served) == (True, version, str(version))
    refused = weightcast(*asked, str(tmp_path / "other"), "--trust", stranger)
    assert refused.returncode == 15, refused
    assert (report(engine).served, report(engine).paused) == ("2", False)


def test_agent_interrupted_while_workers_write_leaves_the_engine_running(
    engine: Engine, model: Callable[[str], Path], slow: Path, tmp_path: Path
) -> None:
    with training(model("qwen3"), tmp_path / "channel") as trainer:
        trainer.step()
        with attached(trainer.channel, engine, tmp_path / "mirror") as agent:
            agent.wait(1)
            slow.write_text("0.1")
            try:
                version, end = trainer.step(), time.monotonic() + 60
                while not slow.with_name("slow.begun").exists():
                    assert time.monotonic() < end
                    time.sleep(0.01)
                agent.process.send_signal(signal.SIGINT)
                agent.process.wait(60)
            finally:
                slow.unlink()
        must_be(engine, trainer.channel, version)
