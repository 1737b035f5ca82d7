"""Products with grouped integers against float64, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vmserve import _core
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import array_tuple, rounded

ISAS = _core.cpu_isas()
EPS = 2.0**-24  # of a float32's rounding


@dataclass(frozen=True)
class Format:
    """How a file type stores weights: Q4_0 and the like."""

    name: str
    bits: int
    group: int
    scales: str  # "half", "float" or "steps" of 8 groups
    minima: bool
    stored: int = 0  # bits of the packed codes, where it is not `bits`: all codes are so short
    table: tuple[int, ...] = ()  # all codes, where a packed one is a place in a table

    @property
    def packed_bits(self) -> int:
        return self.stored or self.bits

    @property
    def codes(self) -> Sequence[int]:
        if self.table:
            return self.table
        if self.bits == 4 or (self.minima and self.stored):
            return range(1 << self.packed_bits)
        return range(-(1 << (self.packed_bits - 1)), 1 << (self.packed_bits - 1))

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.int64]:
        codes: NDArray[np.int64] = np.array(self.codes)[rng.integers(len(self.codes), size=shape)]
        return codes

    @property
    def bits_per_weight(self) -> float:
        numbers = 2 if self.minima else 1
        size = {"half": 16.0, "float": 32.0, "steps": 8 + 16 / (256 // self.group)}[self.scales]
        return self.packed_bits + numbers * size / min(self.group, 32)


MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12)
FORMATS = [
    Format("q4_0", 4, 32, "half", minima=False),
    Format("q4_1", 4, 32, "half", minima=True),
    Format("q4_k", 4, 32, "steps", minima=True),
    Format("q4_float", 4, 32, "float", minima=True),
    Format("q4_by_128", 4, 128, "half", minima=False),
    Format("q8_0", 8, 32, "half", minima=False),
    Format("q8_1", 8, 32, "half", minima=True),
    Format("mxfp4", 8, 32, "half", minima=False, stored=4, table=MXFP4),
    Format("q5_0", 8, 32, "half", minima=False, stored=5),
    Format("q5_k", 8, 32, "steps", minima=True, stored=5),
    Format("q6_k", 8, 16, "steps", minima=False, stored=6),
    Format("q6_float_by_16", 8, 16, "float", minima=True, stored=6),
    Format("q8_float_by_16", 8, 16, "float", minima=True),
]
SHORT = [form for form in FORMATS if form.stored]
ODD = [form for form in FORMATS if form.scales == "half" and form.group <= 32]
ODD += [Format("q5_1", 8, 32, "half", minima=True, stored=5)]
ODD += [Format(f"q6_by_16_{minima}", 8, 16, "half", minima, 6) for minima in (False, True)]


@dataclass
class Matrix:
    weights: _core.GroupedWeights
    exact: NDArray[np.float64]  # [outputs, inputs]
    magnitudes: NDArray[np.float64]  # of scale * code (less its zero) and the minimum, added


def half(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float16).astype(np.float32)


def scales_of(
    rng: np.random.Generator, form: Format, outputs: int, groups: int, largest: int
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    if form.scales == "half":
        return half(rng.uniform(0.001, 0.02, (outputs, groups))), None
    if form.scales == "float":
        return rng.uniform(0.001, 0.02, (outputs, groups)).astype(np.float32), None
    per_step = 256 // form.group
    steps = half(rng.uniform(1e-5, 3e-4, (outputs, groups // per_step)))
    factors = rng.integers(-largest, largest + 1, (outputs, groups)).astype(np.float32)
    return np.repeat(steps, per_step, axis=1) * factors, steps


def matrix_of(form: Format, outputs: int, inputs: int, seed: int = 0) -> Matrix:
    rng = np.random.default_rng(seed)
    groups = -(-inputs // form.group)
    codes = form.draw(rng, (outputs, inputs))
    scales, steps = scales_of(rng, form, outputs, groups, 63 if form.bits == 4 else 127)
    minima, minimum_steps = None, None
    if form.minima:
        minima, minimum_steps = scales_of(rng, form, outputs, groups, 63)
        minima = -minima
        minimum_steps = None if minimum_steps is None else -minimum_steps
    spread = np.repeat(np.arange(groups), form.group)[:inputs]
    low_ends = (-8.0 if form.bits == 4 else 0.0) * scales if minima is None else minima
    exact = scales[:, spread].astype(np.float64) * codes + low_ends[:, spread].astype(np.float64)
    # Without minima, the zero is subtracted from the codes exactly.
    zero = 8 if form.bits == 4 and minima is None else 0
    magnitudes = np.abs(scales[:, spread].astype(np.float64) * (codes - zero))
    if minima is not None:
        magnitudes += np.abs(minima[:, spread].astype(np.float64))
    weights = _core.GroupedWeights(
        codes=codes.astype(np.int8).view(np.uint8),
        bits=form.bits,
        group=form.group,
        scales=scales,
        minima=minima,
        scale_steps=steps,
        minimum_steps=minimum_steps,
    )
    return Matrix(weights, exact, magnitudes)


def rows_of(num_rows: int, inputs: int, seed: int = 1) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_rows, inputs)).astype(np.float32)
    rows[:, :: max(1, inputs // 5)] *= 8  # outliers
    return rows


def rounded_rows(rows: NDArray[np.float32], most: int, group: int) -> NDArray[np.float64]:
    """Rows rounded to integers as the kernels do it: `most` is a group's largest magnitude."""
    result = np.zeros(rows.shape)
    for first in range(0, rows.shape[1], group):
        part = rows[:, first : first + group]
        highest = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.where(highest > 1e-30, np.float32(most) / highest, np.float32(0))
        whole = np.rint(part * inverse)
        result[:, first : first + group] = whole * (highest / np.float32(most)).astype(np.float64)
    return result


def bound(rows: NDArray[np.float64], matrix: Matrix, form: Format) -> NDArray[np.float64]:
    """Largest error of the float32 sums, given the rounded rows.

    A group adds two terms, of code products and of the minimum; each is rounded at most five times
    (also its scales' product), and once more whenever another term is added. None of them, and no
    partial sum, exceeds the sum of the magnitudes of all terms.
    """
    groups = -(-rows.shape[1] // min(form.group, 32))
    magnitudes = np.abs(rows) @ matrix.magnitudes.T
    return np.asarray((2 * groups + 10) * EPS * magnitudes)


def linears(matrix: Matrix, isa: str, num_threads: int = 1) -> list[tuple[_core.CpuLinear, int]]:
    """One with rows of 16 bits and one of 8, where there are such; and the steps of a row's group
    from zero to its largest element."""
    made = [
        _core.CpuLinear(matrix.weights, quantization=each, num_threads=num_threads, isa=isa)
        for each in ("none", "int8-dynamic")
    ]
    return [(linear, 127 if linear.row_type == "int8" else 32767) for linear in made]


SIZES = [(5, 256), (97, 512), (160, 768)]
ODD_SIZES = [(35, inputs) for inputs in (16, 54, 83, 288, 1000)]


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *(pytest.param(form, size, id=f"{form.name}-{size}") for form in FORMATS for size in SIZES),
        *(pytest.param(form, size, id=f"{form.name}-{size}") for form in ODD for size in ODD_SIZES),
    ],
)
def test_products_are_those_of_the_rounded_rows(
    form: Format, size: tuple[int, int], isa: str
) -> None:
    """And rounding costs half a step of a group's largest magnitude an element."""
    matrix, inputs = matrix_of(form, *size), size[1]
    group = 16 if form.group == 16 else 32
    for linear, most in linears(matrix, isa):
        for num_rows in (1, 2, 13):
            rows = rows_of(num_rows, inputs)
            out = linear.multiply(rows)
            rounded = rounded_rows(rows, most, group)
            error = np.abs(out - rounded @ matrix.exact.T)
            assert np.all(error <= bound(rounded, matrix, form))
            exact = rows.astype(np.float64)
            allowed = rounding(exact, most, group) @ np.abs(matrix.exact).T
            allowed += bound(exact, matrix, form)
            assert np.all(np.abs(out - exact @ matrix.exact.T) <= allowed)


def rounding(rows: NDArray[np.float64], most: int, group: int) -> NDArray[np.float64]:
    """The most that each element moves."""
    padded = np.pad(np.abs(rows), ((0, 0), (0, -rows.shape[1] % group)))
    largest = padded.reshape(len(rows), -1, group).max(axis=2)
    step = np.repeat(largest, group, axis=1)[:, : rows.shape[1]] / most
    return np.asarray(0.5 * step * (1 + 1e-3))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_row_has_the_same_bits_in_every_batch(form: Format, isa: str) -> None:
    matrix, rows = matrix_of(form, 200, 512), rows_of(27, 512)
    alone = []
    for linear, _ in linears(matrix, isa):
        alone.append(np.concatenate([linear.multiply(rows[i : i + 1]) for i in range(len(rows))]))
        for num_rows in (*range(2, 14), 24, 27):
            assert np.array_equal(linear.multiply(rows[:num_rows]), alone[-1][:num_rows])
    for num_threads in (2, 7):  # with and without panels for each of them
        for (linear, _), expected in zip(linears(matrix, isa, num_threads), alone, strict=True):
            for num_rows in (1, 2, 9, 27):
                assert np.array_equal(linear.multiply(rows[:num_rows]), expected[:num_rows])


@pytest.mark.parametrize("quantization", ["none", "int8-dynamic"])
@pytest.mark.parametrize("form", SHORT, ids=lambda form: form.name)
def test_short_codes_have_the_bits_of_long_ones(form: Format, quantization: str, isa: str) -> None:
    """One output with a code of 8 bits has the others stored in 8 bits too."""
    rng = np.random.default_rng(3)
    groups = 512 // form.group
    codes = form.draw(rng, (97, 512)).astype(np.int8)
    scales, steps = scales_of(rng, form, 97, groups, 63)
    minima, minimum_steps = scales_of(rng, form, 97, groups, 63) if form.minima else (None, None)
    outs, sizes = [], []
    for last in (codes[-1, -1], 127):
        codes[-1, -1] = last
        weights = _core.GroupedWeights(
            codes=codes.view(np.uint8), bits=8, group=form.group, scales=scales, minima=minima,
            scale_steps=steps, minimum_steps=minimum_steps,
        )  # fmt: skip
        linear = _core.CpuLinear(weights, quantization=quantization, isa=isa)
        sizes.append(linear.weight_bytes)
        outs.append([linear.multiply(rows_of(rows, 512))[:, :-1] for rows in (1, 5, 17)])
    assert sizes[0] < sizes[1]
    for short, long in zip(*outs, strict=True):
        assert short.tobytes() == long.tobytes()


@pytest.mark.parametrize(("bits", "code"), [(4, 15), (4, 0), (8, 127), (8, -128)])
def test_the_largest_codes_and_elements_do_not_overflow(bits: int, code: int, isa: str) -> None:
    codes = np.full((40, 64), code, np.int8).view(np.uint8)
    for minima in (None, np.zeros((40, 2), np.float32)):
        zero = 8 if bits == 4 and minima is None else 0
        for quantization in ("none", "int8-dynamic"):
            weights = _core.GroupedWeights(
                codes=codes, bits=bits, group=32, scales=np.ones((40, 2), np.float32), minima=minima
            )
            linear = _core.CpuLinear(weights, quantization=quantization, isa=isa)
            for sign in (1, -1):
                out = linear.multiply(np.full((2, 64), sign, np.float32))
                np.testing.assert_allclose(out, 64.0 * sign * (code - zero), rtol=1e-6)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_bits_of_a_packed_weight(form: Format, isa: str) -> None:
    matrix = matrix_of(form, 256, 1024)
    linear = _core.CpuLinear(matrix.weights, isa=isa)
    assert linear.weight_bytes * 8 / (256 * 1024) == form.bits_per_weight


def test_minima_of_minus_eight_scales_are_not_stored() -> None:
    codes = np.zeros((32, 64), np.uint8)
    scales = half(np.random.default_rng(0).uniform(0.1, 1.0, (32, 2)))
    linear = _core.CpuLinear(
        _core.GroupedWeights(codes=codes, bits=4, group=32, scales=scales, minima=-8 * scales),
        isa="generic",
    )
    assert linear.weight_bytes * 8 == 4.5 * codes.size
    out = linear.multiply(np.ones((1, 64), np.float32))
    np.testing.assert_allclose(out[0], -8 * 32 * scales.sum(axis=1), rtol=1e-6)


def test_every_half_is_kept_exactly() -> None:
    """Subnormal ones too, and a float that no half equals is stored as a float."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    scales = halves.reshape(-1, 1)
    codes = np.zeros((len(scales), 32), np.uint8)
    codes[:, 0] = 1
    row = np.zeros((1, 32), np.float32)
    row[0, 0] = 1.0
    for isa in ISAS:
        for largest, bits in ((1.0, 16), (1.0000001, 32)):
            own = scales.copy()
            own[0x3C00] = largest
            weights = _core.GroupedWeights(codes=codes, bits=8, group=32, scales=own)
            linear = _core.CpuLinear(weights, isa=isa)
            assert linear.weight_bytes * 8 == codes.size * 4 + scales.size * bits
            np.testing.assert_allclose(linear.multiply(row)[0], own[:, 0], rtol=2e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "codes of 5 bits: 4 and 8 are supported"),
        ({"group": 24}, "groups of 24: multiples of 32 are supported"),
        ({"scales": np.ones((8, 3), np.float32)}, "scales of 3 groups of 32 for 64 inputs"),
        ({"scales": np.ones((7, 2), np.float32)}, r"scales are not \[8, 2\]"),
        ({"minima": np.ones((8, 3), np.float32)}, r"minima are not \[8, 2\]"),
        ({"codes": np.full((8, 64), 16, np.uint8)}, "a code of 4 bits above 15"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {
        "codes": np.zeros((8, 64), np.uint8), "bits": 4, "group": 32,
        "scales": np.ones((8, 2), np.float32),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        _core.CpuLinear(_core.GroupedWeights(**{**parts, **change}))


def test_nan_in_a_row_stays_in_it(isa: str) -> None:
    matrix = matrix_of(FORMATS[1], 40, 256)
    rows = rows_of(3, 256)
    rows[1, 100] = np.nan
    for linear, _ in linears(matrix, isa):
        out = linear.multiply(rows)
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


#: Outputs and inputs of a layer's matrices.
MATRICES = {
    "q": (64, 64), "k": (32, 64), "v": (32, 64), "output": (64, 64),
    "gate": (96, 64), "up": (96, 64), "down": (64, 96),
}  # fmt: skip


_ONES = np.ones(64, np.float32)  # stays: a tuple has its address alone
ONES = array_tuple(_ONES)


def decoder(quantization: str, isa: str | None, row_dtype: DType = DType.FLOAT32) -> Any:
    return _core.CpuDecoder(
        vocab_size=7, hidden_size=64, q_heads=2, kv_heads=1, head_dim=32, norm_eps=1e-5,
        row_dtype=row_dtype, quantization=quantization, num_threads=1, isa=isa,
    )  # fmt: skip


def add_layer(core: Any, weights: Callable[[str], Any], **biases: Any) -> None:
    core.add_layer(
        attention_norm=ONES, mlp_norm=ONES, q_norm=None, k_norm=None, head_dim=32, rotation=0,
        scale=32**-0.5, window=0, softcap=0.0,
        **{name: weights(name) for name in ("q", "k", "v", "output")},
        **{"q_bias": None, "k_bias": None, "v_bias": None, **biases},
    )  # fmt: skip


def logits_of(
    matrices: dict[str, Matrix],
    quantized: bool,
    quantization: str,
    isa: str,
    kv_dtype: DType = DType.FLOAT32,
) -> tuple[NDArray[np.float32], int]:
    """Of a decoder of one layer, for the prompt 0 .. 6; and the bytes of its weights."""
    kept: list[NDArray[np.float32]] = []

    def keep(array: NDArray[np.float32]) -> Any:
        kept.append(array)
        return array_tuple(array)

    def as_weights(name: str) -> Any:
        if quantized:
            return matrices[name].weights
        return keep(matrices[name].exact.astype(np.float32))

    core = decoder(quantization, isa, row_dtype=kv_dtype)
    biases = {
        f"{name}_bias": keep(np.linspace(first, 1, len(matrices[name].exact), dtype="f4"))
        for name, first in (("q", -1), ("k", 0), ("v", -2))
    }
    add_layer(core, as_weights, **biases)
    core.add_mlp(**{name: as_weights(name) for name in ("gate", "up", "down")})
    core.set_ends(None, ONES, as_weights("table"))
    angles = np.arange(8)[:, None, None] * np.linspace(0.1, 1, 32)
    cos, sin = (rounded(f(angles).astype(np.float32), kv_dtype) for f in (np.cos, np.sin))
    core.set_rotations([(array_tuple(cos, kv_dtype), array_tuple(sin, kv_dtype))])
    cache = rounded(np.zeros((2, 1, 8, 1, 32), np.float32), kv_dtype)
    view = _core.CpuKvView([array_tuple(cache[0], kv_dtype)], [array_tuple(cache[1], kv_dtype)])
    embedded = matrices["table"].exact.astype(np.float32)
    batches = [_core.CpuBatch(view, [0], [0], [7])]
    return core.forward(np.arange(7), batches, None, 0, embedded)[0], core.weight_bytes


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
def test_a_decoder_takes_grouped_weights(mixed: bool, isa: str) -> None:
    """Everywhere, in the head too. Mixed: a file may have values of 6 bits in groups of 16
    beside queries and keys of 4 bits."""
    form = Format("q4_1", 4, 32, "half", minima=True)
    matrices = {
        name: matrix_of(
            Format("q6_k", 8, 16, "half", minima=False, stored=6)
            if mixed and name in ("v", "down")
            else form,
            *shape,
            seed=index,
        )
        for index, (name, shape) in enumerate([*MATRICES.items(), ("table", (7, 64))])
    }
    expected, _ = logits_of(matrices, quantized=False, quantization="none", isa=isa)
    alone = sum(_core.CpuLinear(each.weights, isa=isa).weight_bytes for each in matrices.values())
    spread = np.abs(expected).max()
    for quantization, allowed in (("none", 1e-4), ("int8-dynamic", 3e-2)):
        out, num_bytes = logits_of(matrices, quantized=True, quantization=quantization, isa=isa)
        assert np.abs(out - expected).max() <= allowed * spread
        assert num_bytes == alone  # queries and keys are not widened for the values
    narrow, _ = logits_of(matrices, True, "none", isa, DType.BFLOAT16)
    assert np.abs(narrow - expected).max() <= 3e-2 * spread


def test_a_layer_is_not_partly_quantized() -> None:
    matrices = {name: matrix_of(FORMATS[0], *shape) for name, shape in MATRICES.items()}
    weights: dict[str, Any] = {name: matrix.weights for name, matrix in matrices.items()}
    core = decoder("none", ISAS[0])
    add_layer(core, weights.__getitem__)
    plain = array_tuple(matrices["up"].exact.astype(np.float32))
    with pytest.raises(ValueError, match="the weights of a layer are partly quantized"):
        core.add_mlp(gate=weights["gate"], up=plain, down=weights["down"])
