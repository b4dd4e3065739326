"""Bundles for devices that are not here: built, whole, and named for those devices."""

import pytest

from tests.plan.test_compile_report import TINY
from trillion_infer.engine.bundle import store
from trillion_infer.plan.compile_report import compile_deployment


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "kind", "compiler"),
    [("v5e:2x2", "TPU v5 lite", "libtpu"), ("h100:2", "NVIDIA H100", "jax-cuda13-pjrt")],
)
def test_a_bundle_holds_what_was_compiled(tmp_path, topology, kind, compiler):
    report = compile_deployment(TINY, topology, only_largest=True, bundle=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    bundle = store.read(folder)
    assert bundle.identity["mesh"]["device_kind"].startswith(kind)
    assert bundle.identity["host"] is None
    assert bundle.identity["versions"][compiler]
    assert bundle.pages == report.pages
    assert set(bundle.programs) == {program.name for program in report.programs}
    sizes = {name: len(bundle.payload(name)) for name in bundle.programs}
    assert sum(sizes.values()) == report.bundle_bytes
    assert {program.name: program.temp_bytes for program in report.programs} == {
        name: stored.temp_bytes for name, stored in bundle.programs.items()
    }
