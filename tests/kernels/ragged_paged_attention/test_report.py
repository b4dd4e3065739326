"""The table of the kernel report."""

from pallas_kernels.common.report import Cost, Row, table


def row(spec, pool_bytes):
    cost, fewest = Cost(3_000_000, 2 * 10**9), Cost(2_000_000, 10**9)
    return Row("op", spec, "decode", "v5e", 1.25, 2**20, 512, pool_bytes, cost, fewest)


def test_rows_are_sorted_and_ratios_are_over_the_fewest():
    lines = table([row("b", 0), row("a", 51200)]).splitlines()
    assert lines[2] == "| a | decode | v5e | 1.2 | 1.00 | 1.00% | 3.0 | 1.50x | 2.00 | 2.00x |"
    assert lines[3] == "| b | decode | v5e | 1.2 | 1.00 | - | 3.0 | 1.50x | 2.00 | 2.00x |"
