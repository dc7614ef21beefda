"""A user's mistake is one sentence and exit code 2, whichever command it is made at."""
import subprocess
import sys

import pytest
from conftest import ROOT

from oar.errors import UserError, exit_cleanly


def test_a_user_error_is_one_line(capsys):
    def main():
        raise UserError("--lr must be positive, got -1")
    with pytest.raises(SystemExit) as done:
        exit_cleanly(main)
    assert done.value.code == 2 and capsys.readouterr().err == "error: --lr must be positive, got -1\n"


@pytest.mark.parametrize("command", [["train.py"], ["evaluate.py"], ["attribute.py"], ["-m", "benchmarks.recall"]])
def test_an_unknown_flag_is_named(command):
    done = subprocess.run([sys.executable, *command, "--bogus", "1"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr == "error: unknown argument --bogus (see --help)\n"
