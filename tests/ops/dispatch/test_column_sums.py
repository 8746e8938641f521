"""Column sums of the rows that programs have written, against fp64, for any number of rows."""

import pytest
import torch


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (131, 33), (264, 40), (1100, 17)])
def test_column_sums_equal_those_in_fp64(rows: int, width: int):
    from megalin._triton.dispatch.column_sums import column_sums

    x = torch.randn(rows, width)
    torch.testing.assert_close(column_sums(x, torch.float32).double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
    assert column_sums(x, torch.bfloat16).dtype == torch.bfloat16
