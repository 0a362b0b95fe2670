"""The schemes that polymux itself resolves."""

from polymux.core.models.source import ModelSource
from polymux.core.models.sources.folder import FolderSource
from polymux.core.models.sources.hub import HubSource
from polymux.core.models.sources.wheel import WheelSource

BUILT_IN_SOURCES: tuple[ModelSource, ...] = (FolderSource(), HubSource(), WheelSource())

__all__ = ["BUILT_IN_SOURCES", "FolderSource", "HubSource", "WheelSource"]
