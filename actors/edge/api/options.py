"""What an operator sets of an edge's API."""

from typing import NamedTuple

from headwater.actors.edge.history.settings import HistorySettings
from headwater.actors.edge.limits.settings import UNLIMITED_SERVICE, ServiceLimits
from headwater.actors.edge.request.settings import ClientLimits, HostedTools, ReasoningField
from headwater.actors.edge.videos.settings import VideoSettings
from headwater.actors.http.limits import BodyLimits
from headwater.schemas.events.request import PayloadKind


class EdgeOptions(NamedTuple):
    """The API of an edge: what it takes, keeps and records. The flags of the same names describe each."""

    payload: PayloadKind = "off"
    limits: ClientLimits = ClientLimits()
    bodies: BodyLimits = BodyLimits()
    service: ServiceLimits = UNLIMITED_SERVICE
    history: HistorySettings = HistorySettings()
    videos: VideoSettings = VideoSettings()
    special_tokens_in_text: bool = False
    reasoning_field: ReasoningField = "both"
    hosted_tools: HostedTools = "omit"
    keep_billing_line: bool = False
    probes: bool = True
    """Serve /metrics, /health and /live, too."""
