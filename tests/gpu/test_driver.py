"""The conformance suite over ``CudaDriver`` on the real library."""

from __future__ import annotations

import pytest

from tests.conformance.test_capabilities import *  # noqa: F403
from tests.conformance.test_mandatory_core import *  # noqa: F403
from vmserve import _core

pytestmark = pytest.mark.gpu


def test_the_least_page_is_2_mib() -> None:
    minimum, recommended = _core.cuda_granularity()
    assert minimum == 2 << 20
    assert recommended % minimum == 0
