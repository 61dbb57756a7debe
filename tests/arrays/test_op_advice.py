"""A function or another library's operation in a ReduceOp's place: the error names the ReduceOp."""

import operator
import subprocess
import sys
from functools import reduce

import numpy as np
import pytest

import nc10d as dist
from nc10d.api.functional import reduction
from nc10d.arrays.arguments import array, check_reducible
from nc10d.arrays.op_advice import advice_for

MEANT = {
    "SUM": [np.add, np.sum, sum, operator.add, "sum", "SUM", dist.ops.SUM.kind],
    "AVG": [np.mean, "avg"],
    "PRODUCT": [np.multiply, np.prod, operator.mul, "product"],
    "MIN": [np.minimum, np.min, min, "min"],
    "MAX": [np.maximum, np.fmax, max, "MAX"],
    "BAND": [np.bitwise_and, operator.and_],
    "BOR": [np.bitwise_or, operator.or_],
    "BXOR": [np.bitwise_xor, operator.xor],
}
NO_OPS = [None, 0, 1.5, "total", print, reduce, object()]
CASES = [(op, name) for name, ops in MEANT.items() for op in ops]


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{n}-{i}" for i, (_, n) in enumerate(CASES)])
def test_an_error_names_the_reduction_that_was_meant(op, name):
    x = array("all_reduce", "tensor", np.ones(3), written=True)
    with pytest.raises(TypeError, match=rf"must be a ReduceOp.*: use ReduceOp\.{name}$"):
        check_reducible(x, op)
    with pytest.raises(TypeError, match=rf"use ReduceOp\.{name}$"):
        dist.supports_complex(op)
    if not isinstance(op, str):  # the functional calls take names
        with pytest.raises(ValueError, match=rf"unknown reduction .*: use ReduceOp\.{name}$"):
            reduction(op)


@pytest.mark.parametrize("op", NO_OPS, ids=range(len(NO_OPS)))
def test_other_values_get_no_advice(op):
    assert advice_for(op) == ""


FUNCTIONS = {
    ": make it a reduction, by @nc10d.reduction(dtype)": lambda x, y: x + y,
    ": call it, nc10d.topk(...)": dist.topk,
    ": call it, nc10d.premul_sum(...)": dist.premul_sum,
}


@pytest.mark.parametrize("advice", FUNCTIONS)
def test_an_error_says_how_a_function_becomes_a_reduction(advice):
    assert advice_for(FUNCTIONS[advice]) == advice


@pytest.mark.parametrize("name", ["SUM", "MAX", "BAND"])
def test_torchs_reductions_are_known(name):
    c10d = pytest.importorskip("torch").distributed
    theirs = getattr(c10d.ReduceOp, name)
    for op in (theirs, c10d.ReduceOp(theirs)):
        assert advice_for(op) == f": use ReduceOp.{name}"


def test_mpis_operations_are_known():
    pytest.importorskip("mpi4py")
    code = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from nc10d.arrays.op_advice import advice_for
print([advice_for(op)[-4:] for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.BAND, MPI.LAND, MPI.MAXLOC)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "['.SUM', 'DUCT', '.MAX', 'BAND', '', '']\n", done.stderr
