import shutil
import subprocess
from pathlib import Path

import pytest

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.build import SOURCES, UNITS, machine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native().isas, reason=native().reason)]

DRIVER = Path(__file__).parent / "sanitize_driver.cc"
SANITIZERS = {
    "address and undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@pytest.mark.parametrize("isa", native().isas)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_calls_are_clean(sanitizer: str, isa: str, tmp_path: Path):
    compiler = shutil.which("c++")
    assert compiler is not None
    common = (compiler, "-std=c++17", "-g", "-O1", *SANITIZERS[sanitizer], f"-I{SOURCES}")
    unit, driver = str(tmp_path / "unit.o"), str(tmp_path / "driver")
    flags = UNITS[machine()][isa]
    subprocess.run([*common, f"-DTI_ISA={isa}", *flags, "-c", SOURCES / "isa_unit.cc", "-o", unit], check=True)
    sources = (DRIVER, SOURCES / "select.cc", unit)
    subprocess.run([*common, f"-DTI_HAVE_{isa}", *sources, "-o", driver, "-lpthread"], check=True)
    done = subprocess.run([driver, isa, "1", "200"], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stdout + done.stderr
