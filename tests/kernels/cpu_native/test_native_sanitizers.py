"""Builds sanitize_driver.cc. For Arm, where a cross compiler and QEMU are: g++-aarch64-linux-gnu, qemu-user-static."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.build import SOURCES, UNITS, machine, unit_parts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native().isas, reason=native().reason)]

DRIVER = Path(__file__).parent / "sanitize_driver.cc"
SANITIZERS = {
    "address and undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
ARM_COMPILER, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")


def build(folder: Path, compiler: str | None, isa: str, unit_flags: tuple[str, ...], *flags: str) -> str:
    """The driver with one instruction set and its dot products of bytes."""
    assert compiler is not None
    common, driver = (compiler, "-std=c++17", f"-I{SOURCES}", *flags), str(folder / "driver")
    made = {name: str(folder / f"{name}.o") for _, name, _ in unit_parts(isa, unit_flags)}
    for source, name, extra in unit_parts(isa, unit_flags):
        subprocess.run([*common, f"-DTI_ISA={name}", *extra, "-c", SOURCES / source, "-o", made[name]], check=True)
    have = [f"-DTI_HAVE_{name}" for name in made]
    sources = (DRIVER, SOURCES / "select.cc", *made.values())
    subprocess.run([*common, *have, *sources, "-o", driver, "-lpthread"], check=True)
    return driver


def run(*command: str) -> str:
    """The checksum of a clean run."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" clean\n"), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("isa", native().isas)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_calls_are_clean(sanitizer: str, isa: str, tmp_path: Path):
    flags = ("-g", "-O1", *SANITIZERS[sanitizer])
    run(build(tmp_path, shutil.which("c++"), isa, UNITS[machine()][isa], *flags), isa, "1", "200")


@pytest.mark.skipif(ARM_COMPILER is None or QEMU is None, reason="no cross compiler or no QEMU for Arm")
def test_neon_is_clean_and_has_the_bits_of_this_machine(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    isa = native().isas[0]
    bits = run(build(here, shutil.which("c++"), isa, UNITS[machine()][isa], "-O2"), isa, "2", "60")
    driver = build(there, ARM_COMPILER, "neon", UNITS["aarch64"]["neon"], "-O2", "-static")
    for processor in ("cortex-a53", "max"):  # without dot products of bytes, and with them
        assert run(str(QEMU), "-cpu", processor, driver, "neon", "2", "60") == bits
