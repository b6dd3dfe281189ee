"""The head of a response is sent together with its body, and nothing is kept back."""

import asyncio
import socket

from tiered_index.server.joined import JoinedTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what each system call would send."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self.ended = False

    def write(self, data):
        self.sent.append(bytes(data))

    def close(self):
        self.ended = True

    abort = write_eof = close

    def is_closing(self):
        return self.ended

    def get_write_buffer_size(self):
        return 7


def sent_by(act):
    """Return the pieces that `act` sends at once, and those of the following round of the loop."""

    async def run():
        transport = Transport()
        act(JoinedTransport(transport, asyncio.get_running_loop()))
        at_once = list(transport.sent)
        await asyncio.sleep(0)
        return at_once, transport.sent[len(at_once) :]

    return asyncio.run(run())


def writing(*pieces, then=lambda _: None):
    def act(joined):
        for piece in pieces:
            joined.write(piece)
        then(joined)

    return act


def test_a_head_and_the_first_piece_of_its_body_are_sent_at_once():
    large = b"x" * 100_000
    for body in (b"body", memoryview(large)):
        assert sent_by(writing(HEAD, body)) == ([HEAD + bytes(body)], [])
    assert sent_by(writing(HEAD, large, large)) == ([HEAD + large, large], [])
    assert sent_by(writing(large)) == ([large], [])


def test_a_head_without_a_body_is_sent_in_the_same_round():
    assert sent_by(writing(HEAD)) == ([], [HEAD])
    assert sent_by(writing(HEAD, b"body", HEAD)) == ([HEAD + b"body"], [HEAD])
    assert sent_by(writing(HEAD, b"")) == ([HEAD], [])


def test_a_close_sends_what_was_written_and_an_abort_does_not():
    for end in (JoinedTransport.close, JoinedTransport.write_eof):
        assert sent_by(writing(HEAD, then=end)) == ([HEAD], [])
    assert sent_by(writing(HEAD, then=lambda joined: joined.abort())) == ([], [])


def test_a_client_that_has_sent_all_gets_a_head_without_a_body(client):
    """The end of its stream arrives between the write of the head and the next round of the loop."""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(b"HEAD /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 200")


def test_the_buffer_has_the_bytes_that_wait():
    sizes = []
    sent_by(writing(HEAD, then=lambda joined: sizes.append(joined.get_write_buffer_size())))
    assert sizes == [7 + len(HEAD)]


def test_a_connection_that_has_ended_is_not_written_to():
    """uvloop raises then, which would be a traceback in the log for each client that leaves."""
    large = b"x" * 100_000
    for pieces in ((HEAD, b"body"), (large,), (HEAD,)):

        def act(joined, pieces=pieces):
            joined.abort()
            writing(*pieces)(joined)

        assert sent_by(act) == ([], [])
    assert sent_by(lambda joined: (joined.write(HEAD), joined.abort(), joined.write(b"body"))) == ([], [])
