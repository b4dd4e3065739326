"""What a step's packed array says of each row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.request import Request
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.engine.batch import ON_DEVICE, BatchLayout, pack_rows
from trillion_infer.engine.buckets import Bucket
from trillion_infer.sample import PACKED_FIELDS, unpack
from trillion_infer.sample.host import sequence_sampling
from trillion_infer.sample.table import RowTable
from trillion_infer.schedule.plan import Row

SLOTS, WIDTH = 6, 4


def request(slot: int, prompt: list[int], output: list[int], temperature: float) -> Request:
    params = SamplingParams(temperature=temperature, top_k=slot + 1, seed=slot, max_tokens=100)
    (sampling,) = sequence_sampling(params, vocab_size=1000, eos_ids=[], encode=None, entropy=np.random.default_rng(0))
    made = Request(str(slot), prompt, params, 100, sampling=sampling)
    made.slot, made.output_ids = slot, output
    return made


@st.composite
def rows(draw) -> list[Row]:
    """Rows as a scheduler plans them: decodes (token known or in flight), verifications, then prompt chunks."""
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(0, SLOTS))]
    found = []
    for slot in slots:
        prompt = draw(st.lists(st.integers(1, 999), min_size=1, max_size=9))
        kind = draw(st.sampled_from(["known", "in flight", "drafts", "chunk"]))
        output = draw(st.lists(st.integers(1, 999), min_size=1, max_size=5)) if kind != "chunk" else []
        made = request(slot, prompt, output, draw(st.sampled_from([0.0, 0.7])))
        start = len(prompt) + len(output) - 1
        if kind == "known":
            row = Row(made, start, 1, True)
            made.num_in_flight = 1
        elif kind == "in flight":
            row = Row(made, start + 1, 1, True)
            made.num_in_flight = 2
        elif kind == "drafts":
            drafts = tuple(draw(st.lists(st.integers(1, 999), min_size=1, max_size=WIDTH - 1)))
            row = Row(made, start, 1 + len(drafts), True, drafts)
            made.num_in_flight = 1
        else:
            first = draw(st.integers(0, len(prompt) - 1))
            length = draw(st.integers(1, len(prompt) - first))
            row = Row(made, first, length, first + length == len(prompt))
            made.num_in_flight = int(row.samples)
        found.append(row)
    return sorted(found, key=lambda row: row.length > 1)


def expected_tokens(row: Row) -> list[int]:
    text = row.request.prompt_ids + row.request.output_ids
    if row.draft_ids:
        return [text[row.start], *row.draft_ids]
    return [text[i] if i < len(text) else ON_DEVICE for i in range(row.start, row.start + row.length)]


@given(planned=rows(), verifies=st.booleans())
def test_every_row_is_as_planned(planned, verifies):
    if any(row.draft_ids for row in planned):
        verifies = True
    layout = BatchLayout(Bucket(64, SLOTS + 1, WIDTH if verifies else 1))
    table = RowTable(SLOTS)
    for row in planned:
        table.enter(row.request.slot, row.request.sampling)
    packed = np.zeros(layout.size, np.int32)
    decodes = sum(row.length == 1 for row in planned)
    pack_rows(layout, planned, decodes, table, packed)
    views = layout.views(packed)
    assert views["num_seqs"].tolist() == [decodes, len(planned)]
    fields = views["row_params"].reshape(layout.row_fields, layout.bucket.sequences)
    params = unpack(fields[:PACKED_FIELDS])
    cu, end = views["cu_q_lens"], sum(row.length for row in planned)
    for i, row in enumerate(planned):
        made, at = row.request, int(cu[i])
        assert views["tokens"][at : cu[i + 1]].tolist() == expected_tokens(row)
        assert views["kv_lens"][i] == row.start + row.length
        assert views["slots"][i] == made.slot
        assert views["prompt_lens"][i] == len(made.prompt_ids)
        assert bool(params.active[i]) == row.samples
        if row.samples:
            assert int(params.slot[i]) == made.slot
            assert int(params.index[i]) == made.num_output - 1
            assert float(params.temperature[i]) == np.float32(made.params.temperature)
            assert int(params.top_k[i]) == made.params.top_k
            assert params.seed[i].tolist() == made.sampling.seed.tolist()
        places = views["sample_rows"][i * layout.bucket.width : (i + 1) * layout.bucket.width].tolist()
        count, last = len(row.draft_ids), int(cu[i + 1]) - 1
        assert places == [*range(last - count, last), *[last] * (layout.bucket.width - count)]
        if verifies:
            drafts = fields[PACKED_FIELDS:, i].tolist()
            assert drafts[-1] == count
            assert tuple(drafts[:count]) == row.draft_ids
    assert cu[len(planned) :].tolist() == [end] * (len(cu) - len(planned))
    assert not np.asarray(params.active[len(planned) :]).any()
    assert not views["tokens"][end:].any()


def test_a_slot_that_changes_hands_has_its_new_owners_parameters():
    table = RowTable(2)
    table.enter(1, request(1, [5], [], 0.7).sampling)
    table.enter(1, request(3, [5], [], 0.0).sampling)
    out = np.zeros((PACKED_FIELDS, 1), np.int32)
    table.gather(np.array([1]), np.array([4]), np.array([True]), out)
    params = unpack(out)
    assert (float(params.temperature[0]), int(params.top_k[0]), int(params.index[0])) == (0.0, 4, 4)
