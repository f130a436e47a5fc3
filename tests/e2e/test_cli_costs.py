"""What steps cost, measured by the command and read by an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deepinfer import ConfigError, Engine, SamplingParams
from deepinfer.cli import app
from deepinfer.costs import CostFile, CostTable
from doubles.command import run_command

pytestmark = pytest.mark.usefixtures("runtime_home")

FAKE = ["fake", "--set", "fake_num_drafts=3", "--set", "max_num_seqs=16", "--set", "fake_step_s=0.001"]


def measure(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["costs", *FAKE, *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("no_tasks_left")
async def test_an_engine_starts_with_the_file_that_the_command_wrote(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    written = run_command("costs", *FAKE, "--out", str(path))
    assert written.returncode == 0 and str(path) in written.stderr, written.stderr
    file = msgspec.json.decode(path.read_bytes(), type=CostFile)
    assert (file.accelerator, file.model) == ("cpu", "fake") and file.device
    assert file.positions and file.draft_rows
    settings: dict[str, Any] = {"fake_num_drafts": 3, "scheduled_drafts": True, "cost_table": str(path)}
    async with Engine("fake", **settings) as engine:
        assert isinstance(engine.costs, CostTable) and engine.costs.forward_points[0][0] == file.positions[0]
        done = await engine.generate([1, 2, 3], SamplingParams(max_tokens=30, temperature=0.0))
        assert done.num_generated_tokens == 30 and done.drafts.num_tokens >= 29
    with pytest.raises(ConfigError, match="accelerator: measured on 'cpu', this is 'nvidia'"):
        CostTable.read(path, "nvidia")


def test_without_a_file_it_is_a_table() -> None:
    shown = measure()
    assert all(column in shown for column in ("positions", "ms a step", "rows", "ms to draft"))


def test_a_table_in_the_environment_is_not_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_COST_TABLE", str(tmp_path / "absent.json"))
    assert "positions" in measure()


def test_a_model_that_does_not_draft_has_no_use_for_it() -> None:
    done = CliRunner().invoke(app, ["costs", "fake"])
    assert done.exit_code == 2 and "deepinfer costs: num_drafts: this engine makes no drafts" in done.output
