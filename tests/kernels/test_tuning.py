"""The table of tiles: what is in it, what a launch gets from it; and what compiling ahead of time reports."""

import json
import re
from pathlib import Path

import pytest
import torch

from trainer.kernels import _tuning

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
DEFAULT = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of two entries, as if this CPU were an sm_90."""
    path = tmp_path / "tuned.json"
    entries = {
        "product": {"source": _tuning.NOT_TIMED},
        "scan itemsize=2": {"tiles": {"BLOCK_N": 128, "num_stages": 4}, "source": "a test"},
    }
    path.write_text(json.dumps({"sm_90": entries, "sm_80": {"scan": {"source": _tuning.NOT_TIMED}}}))
    monkeypatch.setattr(_tuning, "TABLE_PATH", path)
    monkeypatch.setattr(_tuning, "architecture", lambda device: "sm_90")
    _tuning.table.cache_clear()
    _tuning._measured.cache_clear()
    yield path
    _tuning.table.cache_clear()
    _tuning._measured.cache_clear()


class TestCheckedIn:
    def test_entries_say_where_they_come_from(self) -> None:
        assert set(_tuning.table()) >= set(_tuning.ARCHITECTURES)
        for architecture, entries in _tuning.table().items():
            for name, entry in entries.items():
                place = f"{architecture} {name}"
                assert set(entry) <= {"tiles", "source"} and entry["source"], place
                if "tiles" not in entry:
                    assert entry["source"] == _tuning.NOT_TIMED or entry["source"].startswith("default is best: "), (
                        place
                    )
                    continue
                assert re.search(r"\d{4}-\d\d-\d\d.*torch .*triton .* us, default .* us", entry["source"]), place
                for tile, size in entry["tiles"].items():
                    assert tile in ("num_warps", "num_stages") or tile.isupper(), (place, tile)
                    assert isinstance(size, int) and size > 0, (place, tile)

    def test_ops_that_ask_are_in_it(self) -> None:
        """On every architecture, timed or marked as not timed: nobody has to guess what was tuned."""
        sources = [path.read_text() for path in ROOT.glob("kernels/*.py") if path.name != "_tuning.py"]
        asked = {name for source in sources for name in re.findall(r"(?<!_)\btiles\(\s*\"(\w+)\"", source)}
        for architecture in _tuning.ARCHITECTURES:
            assert asked <= {name.partition(" ")[0] for name in _tuning.table()[architecture]}, architecture

    def test_is_written_as_the_tuner_writes_it(self, tmp_path: Path) -> None:
        copy = tmp_path / "tuned.json"
        copy.write_text(_tuning.TABLE_PATH.read_text())
        _tuning.store("sm_90", {}, copy)
        assert copy.read_text() == _tuning.TABLE_PATH.read_text()


class TestTiles:
    def test_default_on_a_cpu(self) -> None:
        assert _tuning.architecture(CPU) == "cpu"
        assert _tuning.tiles("codebook_linear", CPU, DEFAULT, itemsize=2) is DEFAULT

    def test_measured_replace_the_default(self, table: Path) -> None:
        got = _tuning.tiles("scan", CPU, DEFAULT, itemsize=2)
        assert got == {"BLOCK_M": 16, "BLOCK_N": 128, "num_warps": 4, "num_stages": 4}
        assert DEFAULT == {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4}

    def test_default_where_nothing_was_measured(self, table: Path) -> None:
        assert _tuning.tiles("scan", CPU, DEFAULT, itemsize=4) is DEFAULT
        assert _tuning.tiles("product", CPU, DEFAULT, itemsize=2) is DEFAULT
        assert _tuning.tiles("unheard", CPU, DEFAULT) is DEFAULT

    def test_key_does_not_depend_on_the_order_of_a_bucket(self) -> None:
        assert _tuning.key("scan", {"itemsize": 2, "head_dim": 64}) == "scan head_dim=64 itemsize=2"
        assert _tuning.key("scan", {"head_dim": 64, "itemsize": 2}) == "scan head_dim=64 itemsize=2"


class TestForced:
    def test_wins_over_the_table_and_notes_who_asked(self, table: Path) -> None:
        with _tuning.forced("scan", {"BLOCK_M": 64}) as forced:
            assert _tuning.tiles("scan", CPU, DEFAULT, itemsize=2) == {**DEFAULT, "BLOCK_M": 64}
            assert _tuning.tiles("product", CPU, DEFAULT, itemsize=2) is DEFAULT
        assert forced.asked == {"scan itemsize=2"}
        assert _tuning.tiles("scan", CPU, DEFAULT, itemsize=2)["BLOCK_N"] == 128

    def test_ends_with_an_error(self, table: Path) -> None:
        with pytest.raises(RuntimeError), _tuning.forced("scan", {"BLOCK_M": 64}):
            raise RuntimeError("out of shared memory")
        assert _tuning.tiles("scan", CPU, DEFAULT, itemsize=2)["BLOCK_M"] == 16


class TestStore:
    def test_is_read_at_once_and_leaves_the_rest(self, table: Path) -> None:
        assert _tuning.tiles("product", CPU, DEFAULT, itemsize=2) is DEFAULT
        entry = {"tiles": {"BLOCK_M": 32}, "source": "another test"}
        _tuning.store("sm_90", {"product itemsize=2": entry}, table)
        assert _tuning.tiles("product", CPU, DEFAULT, itemsize=2) == {**DEFAULT, "BLOCK_M": 32}
        stored = json.loads(table.read_text())
        assert set(stored["sm_90"]) == {"product itemsize=2", "scan itemsize=2"}  # "not timed" has gone
        assert stored["sm_80"] == {"scan": {"source": _tuning.NOT_TIMED}}

    def test_new_file_and_architecture(self, tmp_path: Path) -> None:
        path = tmp_path / "new.json"
        _tuning.store("gfx942", {"scan": {"source": "x"}}, path)
        assert json.loads(path.read_text()) == {"gfx942": {"scan": {"source": "x"}}}


class TestAheadOfTime:
    def test_report_has_a_line_for_each_kernel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        aot = pytest.importorskip("tests.kernels.aot")
        from trainer.kernels import embedding

        path = tmp_path / "report.jsonl"
        monkeypatch.setenv("LOWBIT_AOT_REPORT", str(path))
        sizes = dict.fromkeys(("num_rows", "size", "stride_weight_row", "stride_out_row"), "i32")
        types = {"token_ids_ptr": "*i64", "weight_ptr": "*bf16", "out_ptr": "*bf16", **sizes}
        for target in aot.TARGETS:
            aot.compile_kernel(embedding._embed_tokens_kernel, types, {"BLOCK_H": 256}, target, num_warps=2)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["target"] for line in lines] == ["sm_80", "sm_90", "sm_100", "gfx942"]
        for line in lines:
            assert (line["file"], line["kernel"]) == ("embedding.py", "_embed_tokens_kernel")
            assert line["types"] == ["bf16", "i64"] and line["constants"] == {"BLOCK_H": 256}
            assert line["num_warps"] == 2 and line["spills"] == line["scalar_spills"] == line["shared"] == 0
            assert 0 < line["registers"] <= 255  # what an instruction can name

    def test_a_kernel_that_spills_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        aot = pytest.importorskip("tests.kernels.aot")
        monkeypatch.delenv("LOWBIT_AOT_REPORT", raising=False)  # no kernel of ours
        types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
        target = aot.TARGETS[1]
        # One warp that holds 2^13 values needs 256 registers a thread for them; an instruction can name 255.
        compiled = aot.compile_kernel(_holds_much, types, {"BLOCK_N": 8192}, target, num_warps=1)
        assert aot.spilled_registers(compiled, target) > 0
        compiled = aot.compile_kernel(_holds_much, types, {"BLOCK_N": 512}, target, num_warps=1)
        assert aot.spilled_registers(compiled, target) == 0


try:
    import triton
    import triton.language as tl

    @triton.jit
    def _holds_much(x_ptr, out_ptr, count, BLOCK_N: tl.constexpr):
        """All of x is used in every turn, so all of it must stay."""
        column = tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + column)
        for i in range(0, count):
            x += tl.sum(x, axis=0) * i
        tl.store(out_ptr + column, x)
except ImportError:
    pass
