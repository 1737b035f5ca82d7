"""Workloads have the published lengths and arrivals, and the same ones for every run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from vmserve_bench.workloads import shapes as workloads
from vmserve_bench.workloads.distributions import (
    FloatArray,
    IntArray,
    LengthModel,
    LogNormal,
    PercentileTable,
    PiecewiseLogNormal,
    normal_cdf,
)
from vmserve_bench.workloads.shapes import RequestShape

LARGE = 1_000_000

#: (input, output) lengths and prompt ids that seed 0 gives on every machine.
SHAREGPT_SEED_0 = [(44, 249), (124, 328), (17, 326), (528, 719), (14, 37), (15, 250)]
PROMPT_SEED_0 = [16124, 28639, 30547, 27533, 22318, 10286]


@pytest.fixture(scope="module")
def sharegpt_lengths() -> tuple[IntArray, IntArray]:
    return workloads.SHAREGPT.sample(LARGE, np.random.default_rng(7))


def rank_correlation(x: IntArray, y: IntArray) -> float:
    """Spearman's, ties broken by position: fine where ties are few or independent."""
    ranks = [np.argsort(np.argsort(column, kind="stable")) for column in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def lengths_of(shapes: list[RequestShape]) -> list[tuple[int, int]]:
    return [(shape.num_input_tokens, shape.num_output_tokens) for shape in shapes]


class TestShareGPT:
    def test_means_are_the_papers_within_one_percent(
        self, sharegpt_lengths: tuple[IntArray, IntArray]
    ) -> None:
        inputs, outputs = sharegpt_lengths
        assert inputs.mean() == pytest.approx(161.31, rel=0.01)
        assert outputs.mean() == pytest.approx(337.99, rel=0.01)

    @pytest.mark.parametrize(
        ("percent", "num_in", "num_out"),
        [
            (5, 7, 22), (10, 9, 45), (25, 15, 128), (35, 21, 188), (50, 35, 271),
            (65, 71, 364), (75, 133, 458), (80, 203, 525), (90, 507, 754), (95, 864, 899),
            (99, 1464, 1280), (99.5, 1639, 1443), (99.9, 1873, 1706),
        ],
    )  # fmt: skip
    def test_listed_percentiles(
        self,
        sharegpt_lengths: tuple[IntArray, IntArray],
        percent: float,
        num_in: int,
        num_out: int,
    ) -> None:
        inputs, outputs = sharegpt_lengths
        # Rounding moves an input by up to one token, and fitting outputs into the context
        # takes up to 3 % off their upper percentiles.
        assert np.percentile(inputs, percent) == pytest.approx(num_in, rel=0.01, abs=1)
        assert np.percentile(outputs, percent) == pytest.approx(num_out, rel=0.03, abs=1)

    def test_every_request_fits_the_context(
        self, sharegpt_lengths: tuple[IntArray, IntArray]
    ) -> None:
        inputs, outputs = sharegpt_lengths
        assert inputs.min() >= 1
        assert inputs.max() <= 2028
        assert outputs.min() >= 1
        assert outputs.max() <= 2009
        assert (inputs + outputs).max() == 2048  # the cut happens, and at this length

    def test_longer_inputs_have_longer_outputs(
        self, sharegpt_lengths: tuple[IntArray, IntArray]
    ) -> None:
        # A Gaussian copula's rank correlation is 6/pi asin(rho/2) = 0.2105 at rho = 0.22;
        # the cut at 2,048 tokens takes a little of it away.
        inputs, outputs = (column[:200_000] for column in sharegpt_lengths)
        assert 0.185 < rank_correlation(inputs, outputs) < 0.2105

    def test_named_generator_draws_from_the_model(self) -> None:
        shapes = workloads.sharegpt(20_000, seed=3)
        inputs = np.array([shape.num_input_tokens for shape in shapes])
        outputs = np.array([shape.num_output_tokens for shape in shapes])
        assert np.median(inputs) == pytest.approx(35, abs=2)
        assert np.median(outputs) == pytest.approx(271, abs=6)

    def test_first_requests_of_seed_0_are_pinned(self) -> None:
        assert lengths_of(workloads.sharegpt(6, seed=0)) == SHAREGPT_SEED_0


class TestOtherLengths:
    def test_alpaca_means(self) -> None:
        inputs, outputs = workloads.ALPACA.sample(LARGE, np.random.default_rng(1))
        assert inputs.mean() == pytest.approx(19.31, rel=0.01)
        assert outputs.mean() == pytest.approx(58.45, rel=0.01)
        assert np.median(inputs) == pytest.approx(math.exp(2.80), abs=1)
        assert np.median(outputs) == pytest.approx(math.exp(3.776), abs=1)
        assert (inputs + outputs).max() <= 2048

    @pytest.mark.parametrize(
        ("model", "in_percentiles", "out_percentiles"),
        [
            (workloads.AZURE_CONVERSATION, (1020, 2734, 4142), (129, 424, 601)),
            (workloads.AZURE_CODE, (1469, 5188, 7436), (13, 55, 251)),
        ],
    )
    def test_azure_percentiles(
        self,
        model: LengthModel,
        in_percentiles: tuple[int, int, int],
        out_percentiles: tuple[int, int, int],
    ) -> None:
        inputs, outputs = model.sample(400_000, np.random.default_rng(2))
        levels = (50, 90, 99)
        assert np.percentile(inputs, levels) == pytest.approx(in_percentiles, rel=0.02)
        assert np.percentile(outputs, levels) == pytest.approx(out_percentiles, rel=0.03)
        assert min(inputs.min(), outputs.min()) >= 1

    def test_lognormal_has_the_means_asked_for(self) -> None:
        shapes = workloads.lognormal(40_000, seed=5, mean_in=160, mean_out=120)
        inputs, outputs = np.array(lengths_of(shapes)).T
        assert inputs.mean() == pytest.approx(160, rel=0.02)
        assert outputs.mean() == pytest.approx(120, rel=0.02)
        assert np.std(np.log(outputs)) == pytest.approx(0.8, rel=0.02)
        assert abs(rank_correlation(inputs, outputs)) < 0.02

    def test_lognormal_without_spread_is_constant(self) -> None:
        shapes = workloads.lognormal(5, mean_in=10, mean_out=3, sigma_in=0, sigma_out=0)
        assert lengths_of(shapes) == [(10, 3)] * 5

    def test_context_is_cut_from_the_output_first(self) -> None:
        shapes = workloads.lognormal(
            2, mean_in=10, mean_out=30, sigma_in=0, sigma_out=0, max_total_tokens=16
        )
        assert lengths_of(shapes) == [(10, 6)] * 2
        shapes = workloads.lognormal(
            1, mean_in=40, mean_out=30, sigma_in=0, sigma_out=0, max_total_tokens=16
        )
        assert lengths_of(shapes) == [(15, 1)]


class TestDistributions:
    def test_normal_cdf(self) -> None:
        z = np.array([[-1.959963984540054, 0.0], [1.0, 40.0]])
        expected = np.array([[0.025, 0.5], [0.8413447460685429, 1.0]])
        np.testing.assert_allclose(normal_cdf(z), expected, rtol=0, atol=1e-12)

    def test_percentile_table_is_exact_at_its_points_and_straight_between(self) -> None:
        table = PercentileTable((0, 50, 100), (1, 11, 111))
        u: FloatArray = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
        np.testing.assert_allclose(table.quantile(u), [1, 6, 11, 61, 111])
        np.testing.assert_allclose(table.from_normal(np.array([0.0])), [11])

    def test_piecewise_lognormal_at_its_percentiles(self) -> None:
        model = PiecewiseLogNormal(100, 200, 800)
        z90, z99 = 1.2815515655446008, 2.3263478740408408
        z = np.array([-z90, 0, z90, z99])
        np.testing.assert_allclose(model.from_normal(z), [50, 100, 200, 800])

    def test_lognormal_mean(self) -> None:
        assert LogNormal(3.776, 0.764).mean == pytest.approx(58.43, abs=0.01)
        assert LogNormal.from_mean(120, 0.8).mean == pytest.approx(120)

    def test_full_correlation_gives_equal_ranks(self) -> None:
        marginal = LogNormal(5, 1)
        inputs, outputs = LengthModel(marginal, marginal, rho=1.0).sample(
            100, np.random.default_rng(0)
        )
        np.testing.assert_array_equal(inputs, outputs)

    @pytest.mark.parametrize(
        ("percents", "lengths", "text"),
        [
            ((0, 100), (1,), "2 percentiles and 1 lengths"),
            ((100,), (1,), "two or more percentiles"),
            ((1, 100), (1, 2), "from 0 to 100, got 1 to 100"),
            ((0, 50, 50, 100), (1, 2, 3, 4), "must rise"),
            ((0, 50, 100), (1, 5, 4), "must not fall"),
        ],
    )
    def test_bad_tables(
        self, percents: tuple[float, ...], lengths: tuple[float, ...], text: str
    ) -> None:
        with pytest.raises(ValueError, match=text):
            PercentileTable(percents, lengths)

    def test_bad_models(self) -> None:
        with pytest.raises(ValueError, match="sigma"):
            LogNormal(1.0, -0.1)
        with pytest.raises(ValueError, match="mean length"):
            LogNormal.from_mean(0.5, 1.0)
        with pytest.raises(ValueError, match="p50=5, p90=4"):
            PiecewiseLogNormal(5, 4, 6)
        with pytest.raises(ValueError, match=r"from -1 to 1, got 1\.5"):
            LengthModel(LogNormal(1, 1), LogNormal(1, 1), rho=1.5)
        with pytest.raises(ValueError, match="got 1"):
            LengthModel(LogNormal(1, 1), LogNormal(1, 1), max_total_tokens=1)


class TestArrivals:
    @pytest.mark.parametrize("burstiness", [0.1, 1.0, 4.0])
    @pytest.mark.parametrize(("num_requests", "rate"), [(1, 3.0), (7, 0.3), (1000, 250.0)])
    def test_last_lands_at_n_over_rate(
        self, num_requests: int, rate: float, burstiness: float
    ) -> None:
        times = workloads.arrival_times(num_requests, rate, burstiness, seed=4)
        assert times.shape == (num_requests,)
        assert times[-1] == num_requests / rate
        assert times[0] >= 0
        assert np.all(np.diff(times) >= 0)

    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 1.09**-2, 9.0])
    def test_variation_of_the_gaps(self, burstiness: float) -> None:
        gaps = np.diff(workloads.arrival_times(200_000, 10.0, burstiness, seed=1))
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)

    def test_azure_code_comes_in_bursts(self) -> None:
        times = [shape.arrival_s for shape in workloads.azure_code(40_000, seed=0)]
        gaps = np.diff(times)
        assert times[-1] == 40_000 / 2.57
        assert gaps.std() / gaps.mean() == pytest.approx(13.2, rel=0.15)

    @pytest.mark.parametrize("rate", [None, math.inf])
    def test_closed_loop(self, rate: float | None) -> None:
        assert workloads.arrival_times(3, rate).tolist() == [0.0, 0.0, 0.0]

    def test_gaps_that_underflow_arrive_at_the_end(self) -> None:
        assert workloads.arrival_times(3, 2.0, 1e-9).tolist() == [1.5, 1.5, 1.5]

    def test_rate_does_not_change_lengths(self) -> None:
        slow = workloads.sharegpt(50, seed=2, request_rate=1.0, burstiness=0.5)
        closed = workloads.sharegpt(50, seed=2)
        assert lengths_of(slow) == lengths_of(closed)
        assert slow[-1].arrival_s == 50.0
        assert closed[-1].arrival_s == 0.0

    @pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
    def test_bad_rate(self, rate: float) -> None:
        with pytest.raises(ValueError, match="request_rate must be above 0"):
            workloads.arrival_times(3, rate)

    @pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan, math.inf])
    def test_bad_burstiness(self, burstiness: float) -> None:
        with pytest.raises(ValueError, match="burstiness must be finite and above 0"):
            workloads.arrival_times(3, 1.0, burstiness)


class TestSharedPrefix:
    def test_default_groups(self) -> None:
        shapes = workloads.shared_prefix()
        groups = [shape.prefix_group for shape in shapes]
        assert {groups.count(group) for group in range(64)} == {16}
        assert set(lengths_of(shapes)) == {(2048 + 128, 256)}
        assert groups != sorted(groups, key=lambda group: group or 0)

    def test_prompts_agree_in_the_prefix_alone(self) -> None:
        shapes = workloads.shared_prefix(
            6, seed=1, num_groups=2, num_prefix_tokens=40, num_question_tokens=24
        )
        ids = workloads.prompts(shapes, vocab_size=50_000, seed=9)
        prefixes = {
            (shape.prefix_group, tuple(p[:40])) for shape, p in zip(shapes, ids, strict=True)
        }
        assert len(prefixes) == 2
        assert len({prefix for _, prefix in prefixes}) == 2
        assert len({tuple(p[40:]) for p in ids}) == 6
        assert {len(p) for p in ids} == {64}

    def test_bad_groups(self) -> None:
        with pytest.raises(ValueError, match="from 1 to the 3 requests, got 4"):
            workloads.shared_prefix(3, num_groups=4)
        with pytest.raises(ValueError, match="at least 1 token each, got 0 and 128"):
            workloads.shared_prefix(64, num_prefix_tokens=0)


def test_hot_prefixes_come_again_and_cold_prompts_once() -> None:
    shapes = workloads.hot_cold(2500, seed=1)
    hot = [shape for shape in shapes if shape.prefix_group is not None]
    assert len(hot) / 2500 == pytest.approx(0.3, abs=0.02)
    assert {(s.num_input_tokens, s.num_prefix_tokens) for s in hot} == {(192, 128)}
    groups = [shape.prefix_group or 0 for shape in hot]
    assert set(groups) == set(range(16))
    assert all(group <= 16 * shape.index // 2499 for group, shape in zip(groups, hot, strict=True))
    cold = [s.num_input_tokens for s in shapes if s.prefix_group is None]
    assert (min(cold), max(cold)) == (192, 1024)
    outputs = [shape.num_output_tokens for shape in shapes]
    assert (min(outputs), max(outputs)) == (16, 256)


class TestPromptIds:
    def test_length_range_and_reserved(self) -> None:
        shape = RequestShape(20_000, 1)
        ids = workloads.prompt_token_ids(shape, 12, seed=0, reserved=[0, 1, 2, 7, 7, 11])
        assert len(ids) == 20_000
        assert all(type(token) is int for token in ids)
        counts = np.bincount(ids, minlength=12)
        assert np.flatnonzero(counts).tolist() == [3, 4, 5, 6, 8, 9, 10]
        assert counts[counts > 0] == pytest.approx([20_000 / 7] * 7, rel=0.06)

    def test_without_reserved_all_ids_occur(self) -> None:
        ids = workloads.prompt_token_ids(RequestShape(500, 1), 5)
        assert set(ids) == {0, 1, 2, 3, 4}

    def test_only_one_id_left(self) -> None:
        assert workloads.prompt_token_ids(RequestShape(3, 1), 4, reserved={0, 1, 3}) == [2, 2, 2]

    def test_seed_and_index_decide(self) -> None:
        first, second = workloads.sharegpt(2)
        same_length = [RequestShape(30, 1, index=0), RequestShape(30, 1, index=1)]
        assert workloads.prompt_token_ids(first, 100) == workloads.prompt_token_ids(first, 100)
        assert second.index == 1
        zero, one = workloads.prompts(same_length, 1000)
        assert zero != one
        assert workloads.prompt_token_ids(same_length[0], 1000, seed=1) != zero

    def test_pinned(self) -> None:
        ids = workloads.prompt_token_ids(RequestShape(6, 1), 32_000, seed=0, reserved=(0, 1, 2))
        assert ids == PROMPT_SEED_0

    @pytest.mark.parametrize("reserved", [[-1], [4]])
    def test_reserved_outside_the_vocabulary(self, reserved: list[int]) -> None:
        with pytest.raises(ValueError, match="reserved ids must be from 0 to 3"):
            workloads.prompt_token_ids(RequestShape(3, 1), 4, reserved=reserved)

    def test_nothing_left(self) -> None:
        with pytest.raises(ValueError, match="2 of a vocabulary of 2 are reserved"):
            workloads.prompt_token_ids(RequestShape(3, 1), 2, reserved=[0, 1])


class TestRegistry:
    @pytest.mark.parametrize("name", sorted(workloads.WORKLOADS))
    def test_every_workload_is_deterministic_and_complete(self, name: str) -> None:
        generate = workloads.get_workload(name)
        one = generate(80, 11, request_rate=4.0, burstiness=0.5)
        assert generate(80, 11, request_rate=4.0, burstiness=0.5) == one
        assert generate(80, 12, request_rate=4.0, burstiness=0.5) != one
        assert [shape.index for shape in one] == list(range(80))
        assert one[-1].arrival_s == 20.0
        assert generate(80, 11, request_rate=None)[-1].arrival_s == 0.0

    @pytest.mark.parametrize("name", sorted(workloads.WORKLOADS))
    def test_bad_counts_and_seeds(self, name: str) -> None:
        generate = workloads.get_workload(name)
        with pytest.raises(ValueError, match="num_requests must be at least 1, got 0"):
            generate(0)
        with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
            generate(70, -1)

    @pytest.mark.parametrize("name", sorted(set(workloads.WORKLOADS) - {"shared-prefix"}))
    def test_a_longer_workload_begins_with_the_shorter(self, name: str) -> None:
        generate = workloads.get_workload(name)
        assert lengths_of(generate(40, 6))[:15] == lengths_of(generate(15, 6))

    def test_names_match_functions(self) -> None:
        for name, generate in workloads.WORKLOADS.items():
            assert generate is getattr(workloads, name.replace("-", "_"))

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match="'sharegtp': choose from alpaca, azure-code"):
            workloads.get_workload("sharegtp")


class TestRequestShape:
    def test_is_frozen(self) -> None:
        shape = RequestShape(1, 2, 3.0)
        assert (shape.num_input_tokens, shape.num_output_tokens, shape.arrival_s) == (1, 2, 3.0)
        with pytest.raises(AttributeError):
            shape.arrival_s = 1.0  # type: ignore[misc]

    def test_bad_values(self) -> None:
        with pytest.raises(ValueError, match="at least 1 input and 1 output token, got 0 and 3"):
            RequestShape(0, 3)
        with pytest.raises(ValueError, match="at least 0, got -1"):
            RequestShape(1, 1, -1.0)
        with pytest.raises(ValueError, match="from 0 to the 4 input tokens, got 5"):
            RequestShape(4, 1, prefix_group=0, num_prefix_tokens=5)
        with pytest.raises(ValueError, match="needs a prefix_group"):
            RequestShape(4, 1, num_prefix_tokens=2)
