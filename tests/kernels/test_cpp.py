"""Compile-on-first-use: cache, lock, OpenMP sharing, and what happens without a compiler."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.kernels import _cpp

FRESH = "from trainer.kernels import _cpp; print(_cpp.load('codebook4') is not None)"


@pytest.fixture
def compiler() -> None:
    if _cpp.load("codebook4") is None:
        pytest.skip("no C++ compiler here")


def run_python(code: str, **environment: str) -> subprocess.Popen:
    variables = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_share_one_private_build(compiler: None, tmp_path: Path) -> None:
    processes = [run_python(FRESH, LOWBIT_CACHE=str(tmp_path)) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [out for out, _ in outputs] == ["True\n", "True\n"], outputs
    folder = tmp_path / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # code is loaded from here: nobody else may write
    # One library and its lock: the second process waited, and no temporary folder stays.
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


def test_flags_and_source_choose_the_file(compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    first = _cpp._build(source, ())
    assert _cpp._build(source, ()) == first
    assert _cpp._build(source, ("-DOTHER",)) != first
    source.write_text('extern "C" int one() { return 2; }')
    assert _cpp._build(source, ()) != first


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_one_openmp_runtime_in_the_process(compiler: None) -> None:
    code = """
import torch
from trainer.kernels import nf4
torch.randn(512, 512) @ torch.randn(512, 512)
nf4.nf4_quantize(torch.randn(1024, 1024), block_size=64)
files = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
print(len({file for file in files if file.startswith("/") and ("gomp" in file or "omp5" in file or "libomp" in file)}))
"""
    out, err = run_python(code).communicate()
    assert out == "1\n", err


def test_without_a_compiler_the_reference_runs_and_one_line_says_so(tmp_path: Path) -> None:
    code = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
import torch
from trainer.kernels import nf4
for _ in range(3):
    packed, absmax = nf4.nf4_quantize(torch.ones(1, 64), block_size=64)
    sizes = {"out_features": 1, "in_features": 64, "block_size": 64}
    nf4.nf4_dequantize(packed, absmax, **sizes, dtype=torch.float32)
print(packed.tolist() == [255] * 32)  # 1.0 is code 15
"""
    out, err = run_python(code, CXX="/nowhere/g++", LOWBIT_CACHE=str(tmp_path)).communicate()
    log, result = out.splitlines()
    assert result == "True", err
    assert "CXX=/nowhere/g++ is not a program" in log and "torch reference runs" in log and "LOWBIT_CACHE" in log


def test_failed_build_is_none_and_says_the_compilers_error(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(_cpp, "SOURCE_DIR", tmp_path)
    (tmp_path / "broken.cpp").write_text("int f( {")
    with caplog.at_level(logging.WARNING):
        assert _cpp.load("broken") is None
        assert _cpp.load("broken") is None
    assert len(caplog.records) == 1
    assert "error: expected" in caplog.text


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        _cpp.cache_dir()


@pytest.mark.parametrize(
    ("forced", "device", "message"),
    [
        ("fast", "cpu", "LOWBIT_KERNELS=fast is unknown; use one of auto, reference, cpu, triton"),
        ("cpu", "cuda", "LOWBIT_KERNELS=cpu cannot run on a cuda tensor; use auto, triton or reference"),
        ("triton", "cpu", "LOWBIT_KERNELS=triton cannot run on a cpu tensor; set TRITON_INTERPRET=1, or use auto"),
    ],
)
def test_choose_refuses(forced: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("LOWBIT_KERNELS", forced)
    with pytest.raises(ValueError, match=message):
        _cpp.choose("codebook4", device)


def test_choose(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWBIT_KERNELS", raising=False)
    assert _cpp.choose("codebook4", "cpu") == "cpu"
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    assert _cpp.choose("codebook4", "cpu") == _cpp.choose("codebook4", "cuda") == "reference"
    monkeypatch.setenv("LOWBIT_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _cpp.choose("codebook4", "cpu") == "triton"
