"""The scripts of examples/ run as they are and say what they should."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAID = {
    "engine_loop.py": "0 of 10 blocks reused\n6 of 11 blocks reused\n10 of 10 blocks reused\n"
    "6 of 13 blocks reused\n",
    "async_engine.py": "80 blocks came back byte for byte\n",
}


@pytest.mark.parametrize("script", SAID)
def test_example_runs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert capsys.readouterr().out.endswith(SAID[script])


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)
