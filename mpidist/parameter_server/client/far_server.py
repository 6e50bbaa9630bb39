"""`FarServer`: a server on another node."""

from __future__ import annotations

from typing import Any

from mpidist.parameter_server import protocol
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.layout import Key, Layout, VariableSpec
from mpidist.parameter_server.protocol import Kind
from mpidist.transports.connections.base import Message


class FarServer(ServerEnd):
    """A server on another node, or one whose memory cannot be seen.

    A snapshot lies where the connection has received it, in memory that the connection uses for the next one.
    """

    _layout: Layout | None = None
    _layout_number = -1
    _versions: dict[Key, int] = {}
    _kept: Message | None = None  # the present snapshot's
    _views: dict[Key, Any] = {}
    _viewed: tuple[Any, ...] = ()  # what the views are of: memory and layout

    def pull(self) -> dict[Key, Any]:
        self.give_back()
        message = self._answered("pull")
        content = protocol.unpack(message.header)
        if message.header[0] == Kind.FAILURE or self._failures or self.connection.is_shared:
            content, memory = self._answer(message)  # memory of the server is not to be kept from it
        else:
            self._kept, memory = message, message.payload
        if content["layout"] != self._layout_number or self._layout is None:
            self._find_layout()
            return self.pull()
        self._versions = dict(zip(self._layout.index, content["versions"], strict=True))
        memory.flags.writeable = False
        viewed = memory.ctypes.data, self._layout
        if viewed != self._viewed:
            self._views, self._viewed = self._layout.views(memory), viewed
        return self._views

    def leave(self) -> None:
        self.give_back()
        super().leave()

    def give_back(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    def look_for(self, key: Key) -> bool:
        found = key in self._find_layout().index
        if found:  # another pull follows within this snapshot, whose views are in use: their memory is left to them
            self._kept = None
        return found

    def version(self, key: Key) -> int:
        return self._versions[key]

    def _find_layout(self) -> Layout:
        answer, _ = self.ask("layout", maps=False)
        if self._layout is None or answer["number"] != self._layout_number:
            self._layout = Layout(map(VariableSpec.from_description, answer["specs"]))
            self._layout_number = answer["number"]
        return self._layout
