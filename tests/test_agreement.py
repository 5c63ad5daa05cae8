"""Two outputs are compared leaf by leaf, and nothing that differs is overlooked."""

from __future__ import annotations

import math

import pytest
import torch

from cp_compile.agreement import digest, relative_error

pytestmark = pytest.mark.fast


def test_the_error_is_relative_to_each_tensors_largest_number() -> None:
    expected = (torch.tensor([100.0, 1.0]), [torch.tensor([2.0])])
    actual = (torch.tensor([100.0, 2.0]), [torch.tensor([2.5])])
    assert relative_error(actual, expected) == pytest.approx(0.25)
    assert relative_error(expected, expected) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([math.nan])),
        (torch.tensor([math.inf]), torch.tensor([-math.inf])),
        (torch.tensor([1e-30]), torch.tensor([0.0])),
        (torch.tensor([1]), torch.tensor([2])),
        (True, False),
        (None, 1),
    ],
)
def test_what_must_be_equal_and_is_not_is_an_infinite_error(actual: object, expected: object) -> None:
    assert relative_error(actual, expected) == math.inf


def test_the_same_numbers_that_are_not_finite_are_no_error() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3.0])
    assert relative_error(x.clone(), x) == 0.0
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0


@pytest.mark.parametrize("actual", [(torch.zeros(2),), torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_outputs_of_another_form_cannot_be_compared(actual: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        relative_error(actual, torch.zeros(2))


def test_a_digest_tells_bits_shapes_and_dtypes_apart() -> None:
    x = torch.randn(4, 6)
    others = [x.clone().view(6, 4), x.view(torch.int32), -x, torch.cat([x, x]), (x,)]
    nearly = x.clone()
    nearly[0, 0] = torch.nextafter(nearly[0, 0], torch.tensor(9.0))
    assert len({digest(o) for o in [x, nearly, *others]}) == 7
    assert digest({"a": x.t()}) == digest({"a": x.t().contiguous()})
    assert digest(x.bfloat16()) == digest(x.bfloat16())
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
