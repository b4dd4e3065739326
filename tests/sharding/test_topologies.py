"""Topologies of devices that are not here."""

import pytest

from sharding.topologies import KINDS, kind_of, topology


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v4:2x2", "use one of v5e"),
        ("v5e", "is no shape"),
        ("v5e:2y2", "is no shape"),
        ("h100:0", "h100:8"),
        ("v6e:4x8x2", "2 numbers"),
    ],
)
def test_a_bad_name_is_refused_with_what_is_allowed(name, words):
    with pytest.raises(ValueError, match=words):
        topology(name)


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_devices_are_known_by_the_names_that_jax_gives(device_kind, name):
    assert kind_of(device_kind) is KINDS[name]


def test_an_unknown_device_has_no_kind():
    assert kind_of("cpu") is None


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "devices"),
    [("v5e:2x4", 8), ("v5p:2x2x2", 8), ("v6e:2x2", 4), ("tpu7x:2x2x1", 8), ("h100:8", 8), ("h200:2x8", 16)],
)
def test_a_topology_has_its_devices_of_its_kind(name, devices):
    found = topology(name)
    assert len(found) == devices
    assert kind_of(found[0].device_kind) is KINDS[name.partition(":")[0]]
