"""Misspelt environment variables of the bash scripts are named, and those of other programs are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.checkout import ROOT

# What shells, CI services, schedulers, package managers and GPU images set.
COMMON = """
HOME PATH USER SHELL LANG LC_ALL TERM PWD OLDPWD SHLVL HOSTNAME LOGNAME EDITOR VISUAL DISPLAY PAGER LESS
LS_COLORS MAIL TMPDIR TEMP TMP XDG_RUNTIME_DIR SSH_AUTH_SOCK SSH_CONNECTION CI GITHUB_ACTIONS GITHUB_OUTPUT RUNNER_OS
CUDA_HOME CUDA_VISIBLE_DEVICES CUDA_VERSION NVIDIA_VISIBLE_DEVICES LD_LIBRARY_PATH LIBRARY_PATH HF_HOME HF_TOKEN
HF_HUB_OFFLINE TOKENIZERS_PARALLELISM OMP_NUM_THREADS MKL_NUM_THREADS PYTHONPATH PYTHONUNBUFFERED PYTHONHOME
PYTHONHASHSEED PYTHON_VERSION VIRTUAL_ENV CONDA_PREFIX SLURM_JOB_ID SLURM_NODELIST CC CXX CFLAGS LDFLAGS MAKEFLAGS
COLORTERM TERM_PROGRAM PIP_INDEX_URL GIT_PAGER BROWSER http_proxy https_proxy RANK WORLD_SIZE MASTER_ADDR
"""


MISSPELT = {
    "TOPK": "TOP_K",
    "MODELID": "MODEL_ID",
    "DATA_SET": "DATASET",
    "MAX_SAMPLE": "MAX_SAMPLES",
    "RESULT_DIR": "RESULTS_DIR",
    "BLEND_SELECTER": "BLEND_SELECTOR",
    "DATASET_STYL": "DATASET_STYLE",
}


def warnings(names: Iterable[str]) -> list[str]:
    """Return what the script says of an environment with these variables."""
    command = [sys.executable, "-I", "scripts/check_variables.py"]
    run = subprocess.run(command, cwd=ROOT, env=dict.fromkeys(names, "1"), capture_output=True, text=True, check=True)
    return run.stderr.splitlines()


def test_names_of_other_programs_and_of_the_scripts_are_left_alone() -> None:
    assert warnings([*COMMON.split(), *MISSPELT.values()]) == []


def test_misspelt_names_are_found() -> None:
    said = [f"warning: no script reads the variable {name}: did you mean {MISSPELT[name]}?" for name in MISSPELT]
    assert warnings(MISSPELT) == sorted(said)


@pytest.mark.parametrize("sourced", ["common.sh", "environment.sh; check_variables"])
def test_scripts_warn_once_and_go_on(sourced: str) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "TOPK": "8", "TOP_K": "4"}
    command = f"source scripts/{sourced}; bash -c 'source scripts/{sourced}'; echo done"
    run = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "done\n"
    assert run.stderr == "warning: no script reads the variable TOPK: did you mean TOP_K?\n"
