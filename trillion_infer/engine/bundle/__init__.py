"""Executable bundles: the compiled programs of a deployment on disk, loaded without tracing where everything fits."""

from trillion_infer.engine.bundle.source import BundleSource, open_bundle

__all__ = ["BundleSource", "open_bundle"]
