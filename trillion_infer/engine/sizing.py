"""How many pages an engine gets and whose programs it runs: those of a bundle that fits, or its own."""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from trillion_infer.config.cache import CacheGroup
from trillion_infer.engine.compile_cache import FreshCompiles
from trillion_infer.engine.memory import give_back_freed_memory
from trillion_infer.engine.ops import platform_of
from trillion_infer.engine.programs import Programs, Progress, compile_program

if TYPE_CHECKING:
    from trillion_infer.engine.build import Blueprint
    from trillion_infer.engine.bundle import BundleSource

_LOG = logging.getLogger(__name__)


def size_pools(blueprint: "Blueprint", agree: Callable[[int], int] | None = None) -> tuple[list[CacheGroup], Programs]:
    """Pages of each pool, and the programs for them with their bundle as `source`; nothing is compiled or loaded yet.

    agree: makes a budget the same in all processes, where there are several; they use no bundle, since a program in it
    is one process's.

    On CPU the pages are part of what names a bundle. Elsewhere a bundle brings its own, which must fit: finding out
    without one what temporaries leave costs a compilation.
    """
    if agree is not None:
        if blueprint.config.bundle:
            _LOG.warning("bundle=%r is not used: a bundle serves one process.", blueprint.config.bundle)
        on_cpu = platform_of(blueprint.mesh) == "cpu"
        groups = blueprint.groups(0 if on_cpu else _hungriest_temp(blueprint), agree)
        return groups, blueprint.programs(tuple(group.num_pages for group in groups))
    if platform_of(blueprint.mesh) == "cpu":
        groups = blueprint.groups(0)
        return groups, _with_bundle(blueprint, groups)
    source = open_source(blueprint)
    if source is not None and source.pages is not None:
        groups = blueprint.groups(source.temp_bytes)
        if all(group.num_pages >= pages for group, pages in zip(groups, source.pages, strict=True)):
            groups = [dataclasses.replace(g, num_pages=n) for g, n in zip(groups, source.pages, strict=True)]
        else:
            source.drop(f"the bundle's pools of {source.pages} pages do not fit into what is free")
            groups = blueprint.groups(_hungriest_temp(blueprint))
    else:
        groups = blueprint.groups(_hungriest_temp(blueprint))
    programs = blueprint.programs(tuple(group.num_pages for group in groups))
    programs.source = source
    return groups, programs


def open_source(blueprint: "Blueprint", pages: tuple[int, ...] | None = None) -> "BundleSource | None":
    """The place of this engine's bundle; None where bundles are off."""
    config, platform = blueprint.config, platform_of(blueprint.mesh)
    root = config.bundle_folder(platform)
    if root is None:
        return None
    from trillion_infer.engine.bundle import open_bundle

    programs = blueprint.programs(pages or tuple(1 for _ in blueprint.layouts))
    sized = {"pages": list(pages)} if pages else {"kv_memory": config.kv_memory}
    return open_bundle(root, {**programs.facts(), **sized}, blueprint.mesh, bounded=not config.bundle)


def prepare(programs: Programs, pages: tuple[int, ...], progress: Progress | None, behind: bool) -> None:
    """Has every program ready, or on its way out of a bundle that has them all whole; what is missing is compiled, and
    then in the bundle for the next time.

    behind: what a first request does not take is compiled while the engine answers already. Compiling for an
    accelerator tries kernels out in device memory, which an engine that is ready has none of to spare.
    A folder that cannot be written is no error.
    """
    source: BundleSource | None = programs.source  # pyright: ignore[reportAssignmentType]
    if source is not None and source.is_whole(programs.names()):
        programs.load_behind()
        return
    if source is not None:
        for reason in source.reasons:
            source.tell(reason)
        programs.load_all(progress)
    if not programs.missing():
        return
    programs.model()  # what tracing takes is imported here, not in a thread that compiles
    with ExitStack() as stack:
        fresh = None if source is None else stack.enter_context(FreshCompiles())
        if behind:
            programs.compile_first(progress)
        else:
            programs.compile_all(progress)
        rest = stack.pop_all()

    def finish() -> None:
        rest.close()
        give_back_freed_memory()
        if source is not None and fresh is not None and not fresh.cached:
            _write(source, programs, pages)

    if programs.missing():
        programs.compile_behind(finish)
    else:
        finish()


def _write(source: "BundleSource", programs: Programs, pages: tuple[int, ...]) -> None:
    try:
        source.save([(program, programs.arguments(program.name)[0]) for program in programs.all], pages)
    except OSError as error:
        _LOG.warning("The bundle %s is not written: %s", source.folder, error)


def _with_bundle(blueprint: "Blueprint", groups: list[CacheGroup]) -> Programs:
    pages = tuple(group.num_pages for group in groups)
    programs = blueprint.programs(pages)
    programs.source = open_source(blueprint, pages)
    return programs


def _hungriest_temp(blueprint: "Blueprint") -> int:
    """Temporaries of the largest step, from the compiler: they hardly depend on the number of pages."""
    programs = blueprint.programs(tuple(1 for _ in blueprint.layouts))
    largest = max(programs.buckets.all)
    return compile_program(largest.name, *programs.build(largest.name)).temp_bytes
