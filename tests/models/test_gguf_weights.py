"""Blocks of every type against the ``gguf`` package's numbers."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.gguf_files import QUANTIZED, TYPES, random_blocks
from vmserve import _core
from vmserve.models.gguf.block_types import BLOCK_TYPES
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.repack import repack

_BY_NAME = {each.name: each for each in BLOCK_TYPES.values()}


def _blocks(name: str, seed: int) -> Any:
    return random_blocks(name, 37, 1024, np.random.default_rng(seed))


def test_types_are_those_of_the_format() -> None:
    for number, block in BLOCK_TYPES.items():
        assert (block.num_elements, block.num_bytes) == gguf.GGML_QUANT_SIZES[Kind(number)]
        assert Kind(number).name == block.name


@pytest.mark.parametrize("name", TYPES)
def test_float32_is_the_same(name: str) -> None:
    for seed in range(5):
        raw = _blocks(name, seed)
        expected = gguf.quants.dequantize(raw, Kind[name])
        assert expected.dtype == np.float32
        assert expected.shape == (37, 1024)
        np.testing.assert_array_equal(dequantize(_BY_NAME[name], raw), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_that_the_package_quantized(name: str) -> None:
    weights = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    raw = gguf.quants.quantize(weights, Kind[name])
    ours = dequantize(_BY_NAME[name], raw)
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, Kind[name]))
    assert np.abs(ours - weights).max() < 0.5  # and so they are the weights


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_of_the_stored_form(name: str) -> None:
    """In float64, sums of a group times its scale, and of its inputs times its minimum, are the
    product of the weights: how kernels compute it."""
    raw = _blocks(name, 1)
    grouped = repack(_BY_NAME[name], raw)
    inputs = np.random.default_rng(2).integers(-127, 128, 1024).astype(np.float64)
    by_group = inputs.reshape(-1, grouped.group)
    quants = grouped.codes.view(np.int8).reshape(37, -1, grouped.group).astype(np.float64)
    sums = (quants * by_group).sum(axis=2) * grouped.scale.expanded()
    if grouped.minimum is not None:
        sums += by_group.sum(axis=1) * grouped.minimum.expanded().astype(np.float64)
    weights = gguf.quants.dequantize(raw, Kind[name]).astype(np.float64)
    bound = np.abs(weights) @ np.abs(inputs) * 2.0**-24 + 1e-30  # of the package's float32
    exact = grouped.expand(np.float64)
    # The package rounds d * q + m: of a small weight between large ones much can be lost.
    lost = np.abs(weights - exact) @ np.abs(inputs)
    assert (np.abs(sums.sum(axis=1) - weights @ inputs) <= bound + lost).all()
    np.testing.assert_array_equal(exact.astype(np.float32), weights.astype(np.float32))


#: What a weight takes once it is packed for the kernels, in bits.
PACKED = {
    "Q4_0": 4 + 16 / 32,
    "Q4_1": 4 + 32 / 32,
    "Q4_K": 4 + 16 / 32 + 32 / 256,
    "Q5_0": 5 + 16 / 32,
    "Q5_1": 5 + 32 / 32,
    "Q5_K": 5 + 16 / 32 + 32 / 256,
    "Q6_K": 6 + 8 / 16 + 16 / 256,
    "Q8_0": 8 + 16 / 32,
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_are_no_larger_than_their_form(name: str) -> None:
    raw = random_blocks(name, 64, 1024, np.random.default_rng(3))
    linear = _core.CpuLinear(repack(_BY_NAME[name], raw).packable())
    assert linear.weight_bytes * 8 / (64 * 1024) == PACKED[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_are_those_of_the_dequantized_weights(name: str) -> None:
    """On the processor's own kernels, against float64."""
    raw = random_blocks(name, 64, 1024, np.random.default_rng(5))
    linear = _core.CpuLinear(repack(_BY_NAME[name], raw).packable())
    rows = np.random.default_rng(6).standard_normal((5, 1024)).astype(np.float32)
    weights = gguf.quants.dequantize(raw, Kind[name]).astype(np.float64)
    expected = rows @ weights.T
    scale = np.abs(rows.astype(np.float64)) @ np.abs(weights).T
    assert (np.abs(linear.multiply(rows) - expected) <= 2e-4 * scale).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_some_rows(name: str) -> None:
    """Of a matrix that holds several of the model's."""
    grouped = repack(_BY_NAME[name], _blocks(name, 7))
    part = slice(5, 20)
    np.testing.assert_array_equal(grouped.rows(part).expand(), grouped.expand()[part])


@pytest.mark.parametrize("name", QUANTIZED)
def test_factors_are_exact(name: str) -> None:
    grouped = repack(_BY_NAME[name], _blocks(name, 4))
    for factors in (grouped.scale, grouped.minimum):
        if factors is not None and factors.fine is not None:
            repeats = factors.fine.shape[1] // factors.coarse.shape[1]
            coarse = np.repeat(factors.coarse.astype(np.float64), repeats, axis=1)
            np.testing.assert_array_equal(factors.expanded(), coarse * factors.fine)
