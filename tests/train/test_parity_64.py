"""One device against folds with every dtype float64: what is wrong shows above 1e-10."""

import jax
import pytest

from tests.train.folds import COVERING_64, FOLDS, errors, misses, oracle_of, tiny_run


@pytest.mark.parametrize("name", COVERING_64)
def test_a_fold_trains_as_one_device_does_in_float64(name):
    case = FOLDS[name]
    with jax.enable_x64(True):
        found = errors(tiny_run(case, "float64"), tiny_run(oracle_of(case), "float64"))
    assert not misses(found, "float64"), found
