"""Copies of a pool are found in a program's text, and what only looks like one is not."""

import pytest

from pallas_kernels.common.pool_copies import pool_copies

IN_PLACE = """
%copy_fusion (input: s8[4,8,128,640]) -> s8[4,8,128,640] {
  ROOT %copy.1 = s8[4,8,128,640]{3,2,1,0:T(8,128)(4,1)} copy(%input)
}

%write (pool: s8[4,8,128,640], page: s8[1,1,128,640]) -> s8[4,8,128,640] {
  %relaid = s8[4,8,128,640] fusion(%pool), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%copy_fusion
  ROOT %update = s8[4,8,128,640] dynamic-update-slice(%relaid, %page, %zero, %zero, %zero, %zero)
}
"""
ENTRY = """
ENTRY %main (pool: s8[4,8,128,640]) -> s8[4,8,128,640] {
"""


def test_a_page_written_in_place_is_no_copy():
    assert pool_copies(IN_PLACE, [(4, 8, 128, 640)]) == []


@pytest.mark.parametrize(
    "line",
    ["  %c = s8[4,8,128,640] copy(%pool)", "  %c = (s8[4096,640], u32[]) copy-start(%flat)"],
    ids=["whole", "flat"],
)
def test_a_copy_is_found(line):
    assert pool_copies(IN_PLACE + ENTRY + line + "\n}\n", [(4, 8, 128, 640)]) == [line]


def test_copies_of_other_arrays_do_not_count():
    assert pool_copies(ENTRY + "  %c = s8[4,8,128,64] copy(%other)\n}\n", [(4, 8, 128, 640)]) == []
