import subprocess
import sys

import pytest

import helios


def test_every_public_name_is_there():
    for name in helios.__all__:
        assert getattr(helios, name) is not None


def test_an_unknown_name_lists_the_known():
    with pytest.raises(AttributeError, match="SamplingParams"):
        helios.Nothing  # noqa: B018


def test_importing_it_loads_neither_torch_nor_ray():
    check = "import sys, helios; helios.SamplingParams; sys.exit(any(n in sys.modules for n in ('torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
