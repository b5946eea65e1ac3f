"""What a rank says to its leader, over the control tree: as little of it as `protocol.together` says is needed."""

from keepstep.protocol import together
from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.messages import Said, Upward
from keepstep.runtime.tree import ControlTree
from keepstep.runtime.wire import encode_frame


def send_up(tree: ControlTree, message: Said) -> None:
    """On the control loop."""
    alike = together.merged(message)
    if alike is not None:
        tree.say_together(*alike, rank=message.rank)
        return
    key, frame = together.enough_once(message), encode_frame(message)
    if key is None:
        tree.send_up(frame, rank=message.rank)
    else:
        tree.send_once(key, frame, rank=message.rank)


def said_together(topic: int, number: int, agreed: bool) -> Upward:
    """What all ranks have said. Raises RemoteProtocolError."""
    message = together.said_by_all(topic, number, agreed)
    if message is None:
        raise RemoteProtocolError(f"malformed control message: all ranks have said something unknown ({topic})")
    return message
