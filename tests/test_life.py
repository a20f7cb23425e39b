"""The life of a connection: its tables, and the guide's, say what the code does."""

from __future__ import annotations

import itertools
import re

import pytest
from test_end_states import documented

from trio_ucx import PeerState, UCXError
from trio_ucx._rules import life as _life
from trio_ucx._rules.life import ANSWERS, NEXT, Answer, Life, Peer, PeerEvent
from trio_ucx.ucp import Status
from trio_ucx.ucp._engine.ending import CloseState, Ending

#: How the tables call what calls get: receives, sends.
WORDS = (
    {"wait": Answer.GOES_ON, "EndOfChannel": Answer.END, "PeerLost": Answer.LOST},
    {"are sent": Answer.GOES_ON, "PeerClosed": Answer.PEER_CLOSED, "PeerLost": Answer.LOST},
)


def rows(title: str) -> list[list[str]]:
    """A table of the module's docstring: the cells of its rows."""
    assert _life.__doc__ is not None
    text = _life.__doc__.partition(f"\n{title} ")[2]
    lines = text.split("\n")[2:]
    return [re.split(r" {2,}", line) for line in itertools.takewhile(lambda line: not line.startswith("=="), lines)]


def test_the_table_of_what_calls_get() -> None:
    table = {}
    for name, *cells in rows("the peer"):
        table[Peer[name]] = tuple(words[cell.partition(":")[0]] for words, cell in zip(WORDS, cells, strict=True))
    assert table == ANSWERS


def test_the_table_of_events() -> None:
    table = {}
    for name, _, change in rows("event"):
        for part in change.split("; "):
            before, _, after = part.partition(" -> ")
            if after:
                last = Peer[after]
                table |= {(PeerEvent[name], Peer[one]): last for one in before.split(", ")}
            else:
                rest = [peer for peer in Peer if (PeerEvent[name], peer) not in table and peer not in (Peer.LOST, last)]
                table |= {(PeerEvent[name], peer): Peer[part.removeprefix("else ")] for peer in rest}
    assert {key: peer for key, peer in table.items() if peer is not key[1]} == NEXT


#: The rows of the guide's table: what has happened, what this side has done, and whether the connection has failed.
HAPPENED: dict[str, tuple[list[PeerEvent], CloseState, bool]] = {
    "nothing": ([], CloseState.OPEN, False),
    "the peer closes": ([PeerEvent.GOODBYE, PeerEvent.ACK_SENT, PeerEvent.DONE], CloseState.OPEN, True),
    "the peer is closing, and waits for us to receive a large message": ([PeerEvent.STOP], CloseState.OPEN, False),
    "the peer's close gives up after `close_timeout`": ([PeerEvent.STOP, PeerEvent.GONE], CloseState.OPEN, True),
    "the peer aborts": ([PeerEvent.GONE], CloseState.OPEN, True),
    "its process is killed": ([PeerEvent.GONE], CloseState.OPEN, True),
    "its host vanishes": ([PeerEvent.GONE], CloseState.OPEN, True),
    "we abort": ([], CloseState.CLOSED, False),
}
SEND = {Answer.GOES_ON: "returns", Answer.PEER_CLOSED: "`PeerClosed`", Answer.LOST: "`PeerLost`"}
RECEIVE = {Answer.GOES_ON: "waits", Answer.END: "`EndOfChannel`", Answer.LOST: "`PeerLost`"}


@pytest.mark.parametrize("happened", HAPPENED)
def test_the_table_of_the_guide(happened: str) -> None:
    """What :class:`Life` answers in the states that test_end_states.py brings about."""
    events, state, failed = HAPPENED[happened]
    life = Life(Ending())
    for event in events:
        life.happened(event)
    life.ending.state = state
    if failed:
        life.ending.error = UCXError(Status.CONNECTION_RESET, "gone")
    closed, peer_state, wait_closed, send, receive, _ = documented()[happened]
    assert closed == str(not life.open)
    assert peer_state == life.peer_state.name
    assert (wait_closed != "waits") == life.over
    assert send == (SEND[life.sends] if life.open else "`ClosedResourceError`")
    assert receive.removeprefix("the message, then ") == (
        RECEIVE[life.receives] if life.open else "`ClosedResourceError`"
    )


def test_an_end_after_a_goodbye_is_no_loss() -> None:
    """Whichever side has said it, and whatever UCX says later."""
    ours, theirs = Life(Ending()), Life(Ending())
    ours.acknowledged = True
    theirs.happened(PeerEvent.GOODBYE)
    for life in (ours, theirs):
        life.ending.error = UCXError(Status.CONNECTION_RESET, "gone")
        life.happened(PeerEvent.GONE)
        assert life.peer_state is PeerState.FINISHED and not life.broke
    assert (ours.peer, theirs.peer) == (Peer.LOST, Peer.CLOSED)


def test_events_that_come_late_change_nothing() -> None:
    """A peer that says more after its end, or twice, cannot bring it back."""
    for peer in (Peer.CLOSED, Peer.LOST):
        for event in PeerEvent:
            assert (event, peer) not in NEXT
    life = Life(Ending())
    for event in (PeerEvent.DONE, PeerEvent.ACK_SENT):
        life.happened(event)
        assert life.peer is Peer.OPEN
