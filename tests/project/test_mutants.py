"""The tests of the model are themselves tested: nearly every small change of the model must make one fail."""

import ast
import subprocess
import sys

import pytest

from tests.mutation import mutants


def test_every_mutant_differs_from_the_model_and_from_the_others() -> None:
    made = mutants.mutants("model.methods.stages")
    original = ast.unparse(ast.parse(mutants._file("model.methods.stages").read_text(encoding="utf-8")))
    assert len({mutant.source for mutant in made} - {original}) == len({mutant.change for mutant in made}) == len(made) > 100


@pytest.mark.slow
@pytest.mark.parametrize("module", mutants.TESTS)
def test_95_percent_of_the_mutants_are_killed_and_the_others_listed(module: str) -> None:
    command = [sys.executable, "-m", "tests.mutation.mutants", module]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
