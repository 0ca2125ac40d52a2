"""[5] Comments on a stream that waits for its answer, so that no load balancer between takes the connection for dead.

With the first one the head of the reply goes out, with status 200 and without the decision, which may still change.
What fails later is told by an event. A comment is no part of the answer, so that further attempts are still allowed
(I7). Source: the HTML standard, section 9.2.7, advises a comment every 15 seconds.
"""

from pdrouter.proxy.client import Client
from pdrouter.proxy.replies import STREAM_HEADERS, own_lines

_COMMENT = b": keep-alive\n\n"


def keep_alive(client: Client, request_id: str, due_s: float, interval_s: float, now_s: float) -> float:
    """Send a comment if it is ``due_s`` (0: the first), and the client isn't behind; return when the next is due."""
    due_s = due_s or client.began_s + interval_s
    if now_s < due_s:
        return due_s
    if not client.is_started:
        client.start(200, STREAM_HEADERS, own_lines(request_id, None))
    if not client.is_full:
        client.write(_COMMENT)
    return now_s + interval_s
